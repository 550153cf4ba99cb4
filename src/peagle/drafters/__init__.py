"""Drafters: what proposes the tokens that the target verifies.

model (the network, and `DrafterConfig`), readout (its output to drafts), selector (a correction
by the draft before), drafter (the protocol that the engine's cycle needs), peagle (K tokens in
one pass), eagle3 (K passes), methods (which of the two a model is), resident (what the forms of
both for a captured cycle share), vocabulary (the reduced draft vocabulary), checkpoint (a
directory in vLLM's layout, read and written), correction (the selector's part of it), diagnosis
(what `peagle check` finds).
"""
