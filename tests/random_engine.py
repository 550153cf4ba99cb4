"""An engine over a shape with random weights."""

from collections.abc import Sequence

from peagle.bench.random_weights import random_target
from peagle.bench.shapes import random_drafter, shape_of
from peagle.config import EngineConfig
from peagle.device import resolve_device, resolve_dtype
from peagle.engine.engine import Engine
from peagle.set_acceptance import SetAcceptance


def random_engine(
    name: str,
    method: str,
    k: int,
    rates: Sequence[float] | None,
    config: EngineConfig,
) -> Engine:
    """`method` is none, eagle3 or peagle; rates: as of `SetAcceptance`."""
    device, shape = resolve_device(config.device), shape_of(name)
    dtype = resolve_dtype(config.dtype, device)
    target = random_target(shape.target, device, dtype, shape.weights)
    if method == "none":
        return Engine(target, None, 0, config)
    drafter = random_drafter(shape, method, device, dtype)
    acceptance = None if rates is None else SetAcceptance(rates)
    return Engine(target, drafter, k, config, acceptance=acceptance)
