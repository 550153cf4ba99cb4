"""Tensor operations in plain torch, one file each; on a GPU most hand over to `triton`.

- Products and what stands between them: `weight` (numbers of some format), `products` (of few
  rows), `linear`, `packing` (weights laid out for inference), `quantized_activations`, `norm`,
  `rope`, `swiglu` (and GEGLU), `moe`, `residual` and `sandwich`, which fuse them.
- Mixing positions: `attention` (gathered), `cached_attention` (over slots), `kv_dtype` (what a
  narrower cache keeps), `delta_net` (a recurrence).
- Choosing tokens: `argmax`, `sampling`, `penalties`, `softcap`, `acceptance`.
- Choosing drafts: `candidates`, `race`, `draft` (a chain or a tree), `tree`, `lookup`.
- A cycle's rows on the device: `cycle_state`.
- Training: `divergence`, `rows`.
"""
