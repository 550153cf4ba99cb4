"""Steps on a GPU: captured cycles over state that stays there, and prompts before them.

- `worker` launches steps and reads each one step behind; `flight` is one that is under way, `rows`
  what is known of each request on either side.
- The cycle: `cycle`, `tree_cycle` (whose drafts branch), `texts` (in which drafts are looked up),
  captured by `graphs`.
- Prompts: `prefill`, with `prompt_graphs` where they are short and `prompt_attention` where not.
"""
