"""Drafters: what proposes the tokens that the target verifies.

- `proposer` is what every way of drafting is to the engine. Each is one class: `peagle` (K tokens
  in one pass), `dflash` (a block in one pass), `sequential` (K passes), `lookup` (drafts from a
  request's own text), `outside` (another package's). A drafter is one that is a network, of a
  `kind`; `methods` says which one a configuration asks for.
- A `network` is a `model` (P-EAGLE's and EAGLE-3's, with `DrafterConfig`), that of `dflash`, or
  `mtp`, the head in a target's own files. Around it are `fused` (its fast twin), `vocabulary` (the
  reduced draft vocabulary), `readout` (its output to drafts), `selector` (corrects a draft by the
  one before).
- Its directory: `checkpoint` (in vLLM's layout, read and written), `config_file`, `correction` (the
  selector's part of it), `dflash_checkpoint` (others' layouts of such heads), `diagnosis` (what
  `peagle check` finds).
"""
