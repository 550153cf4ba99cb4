"""The engine: requests in, tokens out; everything here is token ids.

Requests and memory: `request`, `scheduler`, `block_pool`, `request_table`, `capacity`, `batch`.
`engine` drives them, and `executor` runs what they schedule, one of two ways over one KV cache:

- `runner`, step by step on the host, as on a CPU: `cycle` (verify, accept), `sampler`,
  `constraint`, `kv_cache`.
- `resident_runner`, whole cycles on the device: `resident_cycle` captured by `graph`, as long as
  `draft_length` says, on the state of `resident_requests`; prompts by `prefill`, `prompt_graphs`
  and `prompt_attention`.
"""
