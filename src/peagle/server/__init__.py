"""An OpenAI-compatible HTTP server over one engine.

```
 connection ──> middleware ──> a route ──> Service ──> AsyncLLM       tokens
                                  │           │
                body, protocol ───┘           └──> delivery ──> answer, anthropic, responses
```

- Its life: `run` (listen, serve, drain, end; also by several processes, which know each other by
  `siblings`), `settings`, `app` (the routes), `sagemaker` and `vllm` (other ways to start).
- Around routes: `connection` and `middleware` (bounds, keys, the log), `errors`, `metrics`,
  `spans` (traces).
- Bodies: `body` (strict objects), `body_route` (read in one pass), `protocol` (fields), `variants`,
  `messages`, `tool_body` and `tools`, `sampling` (fields to `SamplingParams`).
- Routes: `completions`, `chat`, `anthropic` (Messages), `responses`, `tokens`, over `service`,
  which admits, counts and drains; `auditor` checks what it has served.
- Answers: `delivery` (whole or as events), `answer` (as choices), `parts` (as newer APIs tell it),
  `trace` (tokens and scores).
"""
