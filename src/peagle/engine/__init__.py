"""The engine: requests in, tokens out; everything here is token ids.

What `LLM` has of it, in this process or another, is `peagle.engine_client`.

```
 add, abort ──> Engine ──────────────────────────────> RequestOutput
                  │                                        ^
                  v                                        │
   Request <── Scheduler ── plan ──> launch             commit
   Holdings       (reads)            (blocks, rows)        ^   lengths, tokens, ends
                                        │                  │
                                        v                  │
                                       Step             Outcome        plain values
                                        │                  ^
 ───────────────────────────────────────┼──────────────────┼──── no request below, no tensor above
                                        v                  │
   LogitsProcessor <── logits ──  Worker.exchange ─────────┘
   (bias, forms)   ── edited ──>    HostWorker: the step's own outcome
                                    DeviceWorker: that of the step before
```

- What is next, and what came of it: `engine` drives, `scheduler` decides by `plan`, over `request`,
  `holdings` (of `block_groups` and `block_pool`s), `pace` (of `draft_length`, by
  `cycle_times`, and `repeats`) and `capacity` (of a `cache_shape`).
- One `cycle`: draft, verify, accept, commit, the same on the host and on the device. `drafting`
  says what drafts, `branching` which cycles have trees.
- What passes between: `step`. A worker keeps what a request needs from step to step by its table
  row, and nobody else knows that.
- What carries it out: `worker`, of which there are two, `host` and `device`, over a
  `request_memory` (of `request_table`, `kv_cache`, `recurrent_states`, `history`), `spans` and
  `logprobs`; `thread_count` says on how many of a CPU's threads.
- What the host decides within a step: `logits_processor`, which asks a request's `constraint`.
"""
