"""Steps on a GPU: captured cycles over state that stays there, and prompts before them.

- `worker` launches steps and reads each one step behind; `flight` is one that is under way, `rows`
  what is known of each request on either side.
- `cycle` is the cycle on that state, captured by `graphs`, over `models`: target and drafter with
  their caches.
- Prompts: `prefill`, captured where they are short, and with `prompt_attention` where not.
"""
