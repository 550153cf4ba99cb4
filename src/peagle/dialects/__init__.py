"""How model families write thoughts and tool calls: read as they come, and kept to by grammars.

| module | what it holds |
|---|---|
| `dialect` | `Dialect`: markers, a parser and a grammar for each answer |
| `detection` | `find_dialect`: by tokenizer and chat template, or by vLLM's names; `told_dialect` |
| `reader` | `Reader`: token ids -> events, with stop strings |
| `events`, `parser` | what is said of an answer, and what finds it |
| `markers`, `tools` | the tokens between its parts, and the functions it may call |
| `section_dialect`, `sections` | thoughts between two markers, then content and calls |
| `json_calls`, `qwen3_coder`, `pythonic`, `gemma4` | formats of calls; JSON's are of two families |
| `held_calls`, `object_calls` | what readers of calls, and of objects in them, have in common |
| `argument_schema` | tools' schemas: references resolved, types of values |
| `arguments` | arguments as models write them -> JSON of those types |
| `value_rules` | rules of arguments that are written without JSON's quotes |
| `harmony` | GPT-OSS's channels |
| `response_template` | checkpoints that say themselves how they are read |
"""
