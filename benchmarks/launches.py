"""The purpose of each kernel of a cycle, by its name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

GROUPS = {
    "products with weights": (
        r"_(product|chain|gate|quantize|widen)$|_(gate_up|down)_k|gemm|gemv|nvjet|cutlass|splitK"
    ),
    "attention": r"^_attend|^_divide$|flash|fmha|attention",
    "recurrences": r"^_(bring|recur)$",
    "keys and values stored": r"^_store",
    "routing": r"^_route|^_layout_kernel|softmax|sort",
    "choice, inputs, commit": (
        r"^_(part|merge|sample|draw|penalize|count_emitted|commit)$|_inputs$|argmax|arg_max"
        r"|^_(write_newest|search|follow|weigh|log_share|unbranched|grow|walk|compact|advance)$"
    ),
    "copies": r"Memcpy|Memset|copy|index|gather|CatArray|scatter",
    "norms, elementwise": r"^_add_kernel|norm|glu$|silu|elementwise|reduce",
}
"""In order: a kernel belongs to the first group whose pattern its name contains."""
OTHER = "other"


@dataclass(frozen=True)
class Kernel:
    """One kernel's time and launches per cycle, from a profile."""

    name: str
    microseconds: float
    launches: float


def group_of(name: str) -> str:
    """The group that a kernel belongs to."""
    return next((group for group, names in GROUPS.items() if re.search(names, name)), OTHER)


def grouped(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Each group's sum under its name, longest first."""
    sums: dict[str, tuple[float, float]] = {}
    for kernel in kernels:
        time, launches = sums.get(group_of(kernel.name), (0.0, 0.0))
        sums[group_of(kernel.name)] = (time + kernel.microseconds, launches + kernel.launches)
    found = (Kernel(name, *both) for name, both in sums.items())
    return sorted(found, key=lambda group: -group.microseconds)
