"""Tensor operations in plain torch, one file each; on a GPU most hand over to `triton`.

Products and norms: `linear`, `norm`, `rope`, `swiglu`, `moe`, and `residual`, which fuses them.
Attention: `attention` (gathered), `cached_attention` (over slots). Choosing tokens: `argmax`,
`sampling`, `penalties`, `acceptance`. Choosing drafts: `candidates`, `race`, `drafts`. A cycle on
the device: `resident`, `draft_rows`. Training: `divergence`, `rows`. Weights laid out for
inference: `packing`.
"""
