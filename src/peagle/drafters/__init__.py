"""Drafters: what proposes the tokens that the target verifies.

- The network: `model` (and `DrafterConfig`), `vocabulary` (the reduced draft vocabulary), `readout`
  (its output to drafts), `selector` (a correction by the draft before).
- How it drafts: `drafter` (the protocol that the engine's cycle needs), `peagle` (K tokens in one
  pass), `eagle3` (K passes), `methods` (which of the two a model is), `resident` (what the forms of
  both for a captured cycle share), `lookup` (drafts from a request's own text).
- Its directory: `checkpoint` (in vLLM's layout, read and written), `config_file`, `correction` (the
  selector's part of it), `quantization` (to FP8, while it is loaded), `diagnosis` (what `peagle
  check` finds).
"""
