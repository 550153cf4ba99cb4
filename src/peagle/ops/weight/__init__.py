"""A weight has a format: a tensor of numbers, or numbers of few bits that share scales.

`quantized`: a weight in few bits, whatever its format. A file for each kind of codes: `fp8`, `fp4`
(MXFP4 and NVFP4), `integers`. To add one, write a `Format` here, what of a file is read as one in
`peagle.models.formats`, and how kernels widen it in `peagle.ops.triton` (`docs/formats.md`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.ops.weight.fp4 import MXFP4 as MXFP4
from peagle.ops.weight.fp4 import NVFP4 as NVFP4
from peagle.ops.weight.fp8 import E4M3 as E4M3
from peagle.ops.weight.fp8 import FP8 as FP8
from peagle.ops.weight.fp8 import LARGEST_E4M3 as LARGEST_E4M3
from peagle.ops.weight.fp8 import LEAST_AMAX as LEAST_AMAX
from peagle.ops.weight.fp8 import fp8 as fp8
from peagle.ops.weight.integers import INT4 as INT4
from peagle.ops.weight.integers import INT8 as INT8
from peagle.ops.weight.quantized import Format as Format
from peagle.ops.weight.quantized import QuantizedWeight as QuantizedWeight

Weight = Tensor | QuantizedWeight


def format_of(weight: Weight) -> str:
    """The name of a weight's format: of a tensor, its dtype's."""
    if isinstance(weight, QuantizedWeight):
        return weight.format.name
    return str(weight.dtype).removeprefix("torch.")


def dense(weight: Weight) -> Tensor:
    """The numbers of a weight; of one that is quantized in float32."""
    return weight.dense() if isinstance(weight, QuantizedWeight) else weight


def multiply(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, in float32 where the weight is quantized: it loses nothing there. A
    GPU, which multiplies float32 ten times as slowly, rounds it to x's type."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    kind = x.dtype if x.is_cuda else torch.float32
    wide = None if bias is None else bias.to(kind)
    return F.linear(x.to(kind), weight.dense(kind), wide).to(x.dtype)


def replace_weight(module: nn.Module, name: str, weight: nn.Parameter | QuantizedWeight) -> None:
    """Put a weight in the place of a parameter, `name` within the module."""
    owner, _, own = name.rpartition(".")
    part = module.get_submodule(owner)
    delattr(part, own)
    setattr(part, own, weight)


def widen(module: nn.Module, dtype: torch.dtype) -> None:
    """Put tensors in the place of a module's weights of few bits, rounded to a dtype."""
    for name, part in [*module.named_modules()]:
        if isinstance(part, QuantizedWeight):
            replace_weight(module, name, nn.Parameter(part.dense(dtype)))


def weight_at(module: nn.Module, name: str) -> Weight:
    """The weight that a module has under a name."""
    owner, _, own = name.rpartition(".")
    weight = getattr(module.get_submodule(owner), own)
    assert isinstance(weight, Weight)
    return weight


def keep_activations(module: nn.Module) -> None:
    """Let no product of a module round its inputs, whatever its weights are made for."""
    for weight in weights_of(module):
        if isinstance(weight, QuantizedWeight):
            weight.dynamic_activations = False


def weights_of(*modules: nn.Module) -> Iterator[Weight]:
    """All parameters and quantized weights of some modules."""
    for module in modules:
        yield from module.parameters()
        yield from (part for part in module.modules() if isinstance(part, QuantizedWeight))
