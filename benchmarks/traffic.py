"""The bytes that a cycle must read in any implementation: a lower bound of its time."""

import torch
from torch import nn

from peagle.drafters.kind import DFLASH, MTP, PEAGLE
from peagle.drafters.network import Network
from peagle.engine.kv_cache import kv_bytes_per_token
from peagle.models.decoder import Decoder
from peagle.ops.moe import RoutedExperts
from peagle.ops.weight import weights_of

PARTS = (
    "target weights",
    "target keys and values",
    "drafter weights",
    "drafter keys and values",
)
"""What a cycle reads."""


def cycle_bytes(
    target: Decoder,
    drafter: Network | None,
    k: int,
    requests: int,
    positions: int,
    kv: torch.dtype | None = None,
) -> dict[str, int]:
    """Bytes of one cycle of `requests` that together hold `positions` cached tokens.

    Weights once per pass, and the keys and values of every position; without activations, the few
    rows read of the embeddings, and writes. kv: the type of the caches; None: the target's.
    """
    dtype = kv or target.embed.weight.dtype
    each = {"target weights": target_bytes(target, requests * (k + 1))}
    each["target keys and values"] = positions * kv_bytes_per_token(target.spec, dtype)
    if drafter is None:
        return each
    passes = 1 if drafter.config.kind in (PEAGLE, DFLASH) else k
    again = bytes_of(*drafter.blocks, drafter.readout.norm, drafter.readout.head)
    once = bytes_of(drafter.fc) * (passes if drafter.config.kind is MTP else 1)
    shape = drafter.config.transformer
    each["drafter weights"] = once + passes * again
    each["drafter keys and values"] = passes * positions * kv_bytes_per_token(shape, dtype)
    return each


def target_bytes(target: Decoder, rows: int) -> int:
    """Bytes of weights that a pass over `rows` reads: all but those of experts that no row chooses.

    Rows are assumed to choose experts uniformly and independently, as with random weights.
    """
    whole = bytes_of(target.layers, target.norm, target.head)
    for module in target.layers.modules():
        if isinstance(module, RoutedExperts):
            count = len(module.gate_up)
            idle = 1 - experts_met(count, module.top_k, rows) / count
            whole -= round(idle * (module.gate_up.nbytes + module.down.nbytes))
    return whole


def experts_met(experts: int, top_k: int, rows: int) -> float:
    """Mean number of experts that at least one row chooses."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def bytes_of(*modules: nn.Module) -> int:
    """Bytes of all weights."""
    return sum(weight.nbytes for weight in weights_of(*modules))
