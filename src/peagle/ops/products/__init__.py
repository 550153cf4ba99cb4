"""Products with few rows, the shape of decoding: what one is, and the kernels that compute it.

`product`: the key by which a kernel is chosen and a tile remembered; `normed`: what enters one;
`choice`: the kernels in order. Kernels: `few_rows`, `quantized_activations`, `widened`, `cublas`,
and `plain`, the reference of all. `packed`: weights laid out once for a CPU.

A kernel is a subclass of `plain.Plain`, listed in `choice.KERNELS`; what it launches is in
`peagle.ops.triton`.
"""
