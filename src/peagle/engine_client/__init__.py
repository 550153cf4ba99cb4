"""The engine as `LLM` has it: in this process, or in one of its own.

```
 LLM ──> EngineClient: compile, add, abort, step            plain data only
            │        │
   LocalEngine    EngineProcess                             in front
            │        │  Channel: an inherited socket pair   messages
 ───────────┼────────┼───────────────────────────────────── the other process
            │     EngineLoop ──> Engine.step, again and again
            │        │
            └────────┴──> Engine, Constraints               one of each, made by EngineSource
```

- `client` is the interface, `local` and `process` its two forms, `source` what makes an engine.
  `replicas` are several processes as one engine, and `prefix_owners` says which of them knows a
  prompt's beginning.
- `process` also has the engine as forks of the process in front see it, each over a socket pair of
  its own; it is then theirs alone.
- What a request brings: `form`, the source of its grammar; `constraints` compiles it beside the
  engine.
- What is sent: `messages`. Nothing in them is code, and nobody else can send any.
- The other process: `child` is its beginning, `loop` its work. It runs steps without being asked,
  and ends when the one in front does. `watchdog` notices a step that does not end, there or here.
"""
