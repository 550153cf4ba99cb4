"""Other engines beside ours: what they are asked to do, and the processes that do it.

`trials` says what both sides run, `job` what vLLM gets of it, `vllm_side` does that in vLLM's own
environment, `processes` starts both sides and waits for them, `card` reads the graphics card, and
`config_json` writes a shape's configuration as published ones are. `turns` holds the engines that
take turns with ours on a CPU, which `turns_side` runs.
"""
