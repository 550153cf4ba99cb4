"""The command line.

- A file per command, over `app`: `demo`, `generate`, `serve`, `bench`, `check`, `regenerate`,
  `train`.
- Their flags: `options` and `groups`, `bench_flags`; `unknown_flags`, those that they do not have;
  `vllm_command` and `vllm_flags`, vLLM's command lines for `serve`.
- Models as commands have them: `loading`, `engine_length`.
- What is shown: `stdout`, `tables`, `progress`, `measurement`, `verdict`; of training `dry_run`,
  `training_log`, `curves`.
- `interrupts` is Ctrl-C, `script` the same for the scripts of benchmarks/.
"""
