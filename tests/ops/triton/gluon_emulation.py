"""Gluon on torch tensors, as far as the kernels need it that only a Hopper GPU can run.

A program is a thread, and so is each partition of its warps. Copies arrive late, shared memory that
nobody wrote is NaN, and no access may leave its tensor. Layouts mean nothing here, and the warps of
a partition are one: what these alone could get wrong only a GPU finds.
"""

import functools
import inspect
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language
from triton.runtime.jit import JITFunction

LIMIT = 240
"""Seconds that a program waits for another."""
program = threading.local()
"""Of this thread: its place in the grid, and the copies that it waits for by groups."""


def install(patch: pytest.MonkeyPatch, modules: Iterable[ModuleType], processors: int) -> None:
    """Let modules find this in place of Gluon, and a GPU of so many multiprocessors."""
    counts = functools.cache(lambda device, count: torch.zeros(count, dtype=torch.int32))
    device = {"multiprocessors": lambda x: processors, "shared_memory": lambda x: 227 << 10}
    names = {**REPLACEMENTS, **device, "counters": counts}
    for module in modules:
        for name, value in list(vars(module).items()):
            if name in names:
                patch.setattr(module, name, names[name])
            elif isinstance(value, JITFunction):
                patch.setattr(module, name, Kernel(value.fn))
            elif isinstance(value, language.constexpr):
                patch.setattr(module, name, constant(value.value))


def constant(value: Any) -> Any:
    """A number as kernels and their hosts both read it."""
    if type(value) not in (int, float):
        return value
    return type("Constant", (type(value),), {"value": value})(value)


class Kernel:
    """A jitted function: called by others as it is, launched with a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._function(*args, **named)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            parameters = inspect.signature(self._function).parameters
            given = dict(zip(parameters, args, strict=False)) | named
            taken = {n: _argument(v) for n, v in given.items() if n in parameters}
            places = [
                (x, y, z) for x in range(grid[0]) for y in _along(grid, 1) for z in _along(grid, 2)
            ]
            random.shuffle(places)
            together([functools.partial(_run, place, self._function, taken) for place in places])

        return launch


def _along(grid: Sequence[int], axis: int) -> range:
    return range(grid[axis] if axis < len(grid) else 1)


def _argument(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # arguments that belong together
        return type(value)(*map(_argument, value))
    return Pointer(value.view(-1)) if isinstance(value, Tensor) else value


def _run(place: tuple[int, int, int], function: Callable[..., None], args: dict[str, Any]) -> None:
    program.place, program.asked, program.groups, program.written = place, [], [], []
    function(**args)
    assert not any(program.groups), "copies are under way at the end"


def together(runs: Sequence[Callable[[], None]]) -> None:
    """Run all at once; raises what the first of them raised."""
    failures: list[str] = []

    def guarded(run: Callable[[], None]) -> None:
        try:
            with torch.inference_mode():
                run()
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def wait_until(ready: Callable[[], bool]) -> None:
    """Wait for another thread."""
    end = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < end, "programs wait for each other"
        time.sleep(0.0002)


@dataclass(frozen=True)
class Pointer:
    """Places in a tensor."""

    tensor: Tensor
    at: Tensor = field(default_factory=lambda: torch.tensor(0))

    @property
    def dtype(self) -> SimpleNamespace:
        """As a pointer's."""
        return SimpleNamespace(element_ty=self.tensor.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.tensor, self.at + offset)

    def __getitem__(self, index: Any) -> "Pointer":
        return Pointer(self.tensor, self.at[index])

    def checked(self, at: Tensor) -> Tensor:
        """at, none of which is outside."""
        inside = (at >= 0) & (at < len(self.tensor))
        assert bool(inside.all()), "a place outside of its tensor"
        return at


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, **_: Any) -> Tensor:
    if mask is None:
        return pointer.tensor[pointer.checked(pointer.at)].clone()
    at, mask = torch.broadcast_tensors(pointer.at, torch.as_tensor(mask))
    found = torch.full(at.shape, other, dtype=pointer.tensor.dtype)
    found[mask] = pointer.tensor[pointer.checked(at[mask])]
    return found


def store(pointer: Pointer, value: Any, mask: Any = True, **_: Any) -> None:
    values = torch.as_tensor(value)
    at, values, mask = torch.broadcast_tensors(pointer.at, values, torch.as_tensor(mask))
    pointer.tensor[pointer.checked(at[mask])] = values[mask].to(pointer.tensor.dtype)


counting = threading.Lock()


def atomic_add(pointer: Pointer, value: int, sem: str = "") -> int:
    with counting:
        before = int(load(pointer))
        store(pointer, before + value)
    return before


def wait_for(pointer: Pointer, count: Any) -> None:
    wait_until(lambda: int(load(pointer)) >= int(count))


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    def index(self, place: Any) -> "Shared":
        assert 0 <= int(place) < len(self.tensor)
        return Shared(self.tensor[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.tensor.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return self.tensor.clone()

    def store(self, value: Tensor) -> None:
        assert (self.tensor.shape, self.dtype) == (value.shape, value.dtype)
        self.tensor.copy_(value)

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> "Shared":
        assert dtype == self.dtype
        return Shared(self.tensor.view(*shape))


class Barrier:
    """One that counts arrivals and bytes; its phase goes on when none is missing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.phase = self._count = self._missing = self._bytes = 0

    def begin(self, count: int) -> None:
        self._count = self._missing = count

    def change(self, arrivals: int, bytes_more: int) -> None:
        with self._lock:
            self._missing -= arrivals
            self._bytes += bytes_more
            assert self._missing >= 0
            if (self._missing, self._bytes) == (0, 0):
                self.phase += 1
                self._missing = self._count


class Barriers(list[Barrier]):
    def index(self, place: Any) -> Barrier:  # type: ignore[override]
        return self[int(place)]


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: Barriers,
    init=lambda barrier, count: barrier.begin(count),
    wait=lambda barrier, parity: wait_until(lambda: (barrier.phase - 1) % 2 == int(parity)),
    expect=lambda barrier, count: barrier.change(1, int(count)),
    arrive=lambda barrier, count: barrier.change(count, 0),
)


def _unwritten(dtype: torch.dtype) -> float:
    """NaN, also of two E4M3 numbers in 16 bits."""
    return torch.nan if dtype.is_floating_point else 0x7F7F


def bfloat16_of(codes: Tensor) -> tuple[Tensor, Tensor]:
    numbers = codes.contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)
    return numbers[..., 0::2], numbers[..., 1::2]


def codes_of(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int16)


def bytes_of(codes: Tensor) -> tuple[Tensor, Tensor]:
    numbers = codes.contiguous().view(torch.int8).to(torch.bfloat16)
    return numbers[..., 0::2], numbers[..., 1::2]


def integers_of(codes: Tensor, less: Tensor) -> list[Tensor]:
    return [((codes >> 4 * n & 15) + 128 + less.float()).to(torch.bfloat16) for n in range(4)]


def less_of(zeros: Tensor) -> Tensor:
    """In bfloat16, as the instructions compute it."""
    return (-128.0 - zeros).to(torch.bfloat16)


def e2m1_of(codes: Tensor, *scales: Tensor) -> list[Tensor]:
    bits = codes.int() & 0xFFFF
    last = (bits << 1) & 0x8000 | (bits >> 3) & 0x0180 | (bits >> 7) & 0x0040
    moved = (bits, bits << 3, bits << 6, last)
    found = [((x & 0x81C0) << 16).view(torch.float32) for x in moved]
    return [(x * y.float()).to(torch.bfloat16) for x, y in zip(found, scales, strict=True)]


def scales_of(codes: Tensor) -> Tensor:
    return (codes.view(torch.float8_e4m3fn).float() * 2.0**63).to(torch.bfloat16)


def pairs_of_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    pairs = scales_of(words.contiguous().view(torch.uint8)).view(torch.int32)
    return pairs[..., 0::2], pairs[..., 1::2]


def two_of(pairs: Tensor) -> tuple[Tensor, Tensor]:
    numbers = pairs.contiguous().view(torch.bfloat16)
    return numbers[..., 0::2], numbers[..., 1::2]


def of_quad(x: Tensor, lane: int) -> Tensor:
    """Where the last axis lies across four threads."""
    return x[..., lane : lane + 1].expand_as(x)


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any, value: Any = None) -> Any:
    if layout is Barriers:
        return Barriers(Barrier() for _ in range(shape[0]))
    memory = Shared(torch.full(tuple(shape), _unwritten(dtype), dtype=dtype))
    if value is not None:
        memory.store(value)
    return memory


@dataclass(frozen=True)
class Descriptor:
    """How boxes are copied from a tensor; what lies outside of it is zero."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: Any

    def box(self, place: Sequence[Any]) -> Tensor:
        inside, at = self._places(place)
        return torch.where(inside, self.base.view(-1)[at.clamp(0, self.base.numel() - 1)], 0)

    def put(self, place: Sequence[Any], values: Tensor) -> None:
        inside, at = self._places(place)
        self.base.view(-1)[at[inside]] = values[inside]

    def _places(self, place: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Which of a box's numbers lie in the tensor, and where."""
        inside, at = torch.tensor(True), torch.tensor(0)
        axes = zip(place, self.block_shape, self.shape, self.strides, strict=True)
        for start, length, size, stride in axes:
            index = int(start) + torch.arange(length)
            inside = inside[..., None] & (index >= 0) & (index < size)
            at = at[..., None] + index * stride
        return inside, at


def copy_box(source: Descriptor, place: Sequence[Any], barrier: Barrier, into: Shared) -> None:
    assert into.shape == list(source.block_shape)
    into.tensor.fill_(_unwritten(into.dtype))

    @torch.inference_mode()
    def arrive() -> None:
        into.store(source.box(place))
        barrier.change(0, -into.tensor.numel() * into.tensor.element_size())

    threading.Timer(random.random() * 0.003, arrive).start()


def write_box(target: Descriptor, place: Sequence[Any], source: Shared) -> None:
    """Late, when `wait_written` asks for it: who changes the source before that is found out."""
    assert source.shape == list(target.block_shape)
    program.written.append(lambda: target.put(place, source.tensor))


def wait_written(left: int) -> None:
    assert left == 0
    while program.written:
        program.written.pop()()


def copy_rows(into: Shared, source: Pointer, mask: Any = None) -> None:
    assert into.shape == list(source.at.shape)
    into.tensor.fill_(_unwritten(into.dtype))
    program.asked.append(lambda: into.store(load(source, mask)))


def commit() -> None:
    program.groups.append(program.asked)
    program.asked = []


def wait_groups(left: int) -> None:
    while len(program.groups) > left:
        for arrive in program.groups.pop(0):
            arrive()


def multiply(a: Shared | Tensor, b: Shared, total: Tensor, is_async: bool) -> Tensor:
    left = a.tensor if isinstance(a, Shared) else a
    return total + left.float() @ b.tensor.float()


def multiply_few(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    return total + a.float() @ b.float()


def specialize(partitions: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
    place = program.place

    def run(function: Callable[..., None], args: Any) -> None:
        program.place, program.written = place, []
        function(*args)
        assert not program.written, "shared memory ends before it is written"

    together([functools.partial(run, function, args) for function, args in partitions])


def _numbers(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: operation(*torch.broadcast_tensors(torch.as_tensor(a), torch.as_tensor(b)))


def nothing(*_: Any) -> None:
    """What has no meaning here: fences, and warps that meet."""


gl = SimpleNamespace(
    **{n: getattr(torch, n) for n in ("float32", "uint8", "int16", "int32", "int64", "bfloat16")},
    **{n: getattr(torch, n) for n in ("ceil", "exp", "exp2", "rsqrt")},
    constexpr=language.constexpr,
    load=load,
    store=store,
    atomic_add=atomic_add,
    allocate_shared_memory=allocate,
    warp_specialize=specialize,
    program_id=lambda axis: torch.tensor(program.place[axis], dtype=torch.int32),
    static_range=range,
    arange=lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
    zeros=lambda shape, dtype, layout: torch.zeros(*shape, dtype=dtype),
    full=lambda shape, value, dtype, layout: torch.full(tuple(shape), value, dtype=dtype),
    where=lambda seen, a, b: torch.where(torch.as_tensor(seen), a, b),
    maximum=_numbers(torch.fmax),
    minimum=_numbers(torch.fmin),
    max=lambda x, axis: x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis),
    sum=lambda x, axis: x.sum(axis),
    permute=lambda x, order: x.permute(*order),
    reshape=lambda x, shape: x.reshape(*shape),
    split=lambda x: x.unbind(-1),
    join=lambda a, b: torch.stack((a, b), -1),
    convert_layout=lambda x, layout, assert_trivial=False: x,
    BlockedLayout=nothing,
    NVMMASharedLayout=lambda *_, **named: None,
    SliceLayout=nothing,
    DotOperandLayout=nothing,
    NVMMADistributedLayout=nothing,
)
REPLACEMENTS = {
    "gl": gl,
    "mbarrier": mbarrier,
    "tma": SimpleNamespace(
        async_copy_global_to_shared=copy_box,
        async_copy_shared_to_global=write_box,
        store_wait=wait_written,
    ),
    "async_copy": SimpleNamespace(
        async_copy_global_to_shared=copy_rows, commit_group=commit, wait_group=wait_groups
    ),
    "TensorDescriptor": Descriptor,
    "mma_v2": multiply_few,
    "warpgroup_mma": multiply,
    "warpgroup_mma_wait": lambda left, deps: deps[0] if len(deps) == 1 else deps,
    "wait_for": wait_for,
    "bfloat16_of": bfloat16_of,
    "bytes_of": bytes_of,
    "codes_of": codes_of,
    "integers_of": integers_of,
    "less_of": less_of,
    "e2m1_of": e2m1_of,
    "scales_of": scales_of,
    "pairs_of_scales": pairs_of_scales,
    "two_of": two_of,
    "of_quad": of_quad,
    **dict.fromkeys(("meet", "publish", "fence_async_shared", "gdc_wait"), nothing),
    "gdc_launch_dependents": nothing,
}
