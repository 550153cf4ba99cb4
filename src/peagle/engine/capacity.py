"""What an engine can hold: its memory, divided once at the start."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from peagle.config import EngineConfig
from peagle.device import batched_tokens, kv_cache_memory, prompt_tokens
from peagle.drafters.proposer import Needs
from peagle.engine.block_groups import BlockGroups
from peagle.engine.block_pool import BlockPool
from peagle.engine.cache_shape import SEQ_TOKENS, CacheShape
from peagle.engine.kv_cache import kv_dtype
from peagle.engine.recurrent_states import state_bytes
from peagle.engine.step import MOST_UNSEEN
from peagle.errors import MemoryShortageError
from peagle.models.decoder import Decoder
from peagle.models.loading import check_length

MOST_SEQS = {"cpu": 64, "cuda": 512}
"""Requests at once, at most, where no number was asked for."""
FEWEST_SEQS = 64
STATES_SHARE, STATES_PER_SEQ = 5, 2
"""States of prefixes take at most one part in `STATES_SHARE` of the memory that the longest request
leaves, and there are at most `STATES_PER_SEQ` of them for each request."""
PROMPT_SIZES = (16, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Rows of prompts that a GPU captures. With more, it is busy longer than the host."""
SMALLEST_CONTEXT = 256
"""Tokens that the KV cache must hold when no context length was asked for."""


@dataclass(frozen=True)
class Capacity:
    """Sizes that follow from the models, the configuration and the free memory."""

    num_seqs: int
    """Most requests that run at once."""
    num_blocks: int
    """Blocks of whole contexts."""
    windows: dict[int, int]
    """Blocks of the layers with each window."""
    block_size: int
    max_length: int
    """Longest prompt + output in tokens."""
    batched_tokens: int
    """Most target rows in one pass."""
    prompt_tokens: int
    """Most of those rows that may go to prompts."""
    states: int | None = None
    """Prefixes of which the state of recurrent layers is kept; None: no layer is one."""
    kv_dtype: torch.dtype | None = None
    """The type in which keys and values are kept; None: that of the models."""

    @property
    def slots(self) -> int:
        """Positions of whole contexts that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def window_slots(self) -> dict[int, int]:
        """Positions that it holds for the layers with each window."""
        return {window: count * self.block_size for window, count in self.windows.items()}

    def groups(self) -> BlockGroups:
        """The pools of its blocks, all free."""
        pools: dict[int | None, BlockPool] = {None: BlockPool(self.num_blocks)}
        pools |= {window: BlockPool(count) for window, count in self.windows.items()}
        states = None if self.states is None else BlockPool(self.states)
        return BlockGroups(pools, self.block_size, states)


def capacity_of(target: Decoder, needs: Needs, k: int, config: EngineConfig) -> Capacity:
    """Divide the memory. Raises `MemoryShortageError` when it cannot hold one sequence."""
    device = target.embed.weight.device
    rows, shape = batched_tokens(config, device), cache_shape(target, needs, k, config)
    unseen = _unseen_bytes(target, needs) if config.draft_length == "auto" else 0
    state_size = state_bytes(target.spec, k, target.embed.weight.dtype)

    def memory(num_seqs: int) -> int:
        """Bytes of the KV cache beside what so many requests need in a step."""
        needed = _workspace(target, needs, rows, num_seqs, k) + num_seqs * (unseen + state_size)
        return kv_cache_memory(config, device, needed)

    num_seqs = config.max_num_seqs or _num_seqs(shape, memory, MOST_SEQS[device.type])
    left, states = memory(num_seqs), None
    if state_size:
        room = max(left - shape.needed(1, shape.longest), 0)
        states = min(room // STATES_SHARE // state_size, STATES_PER_SEQ * num_seqs)
        left -= states * state_size
    (whole, *windows), most_prompts = shape.divided(left, num_seqs)
    prompts = prompt_tokens(config, device)
    return Capacity(
        num_seqs=num_seqs,
        num_blocks=whole,
        windows=dict(zip(shape.windows, windows, strict=True)),
        block_size=config.block_size,
        max_length=_max_length(target, config, whole, left),
        batched_tokens=rows,
        prompt_tokens=min(prompts, most_prompts or prompts),
        states=states,
        kv_dtype=kv_dtype(config.kv_cache_dtype, target.embed.weight.dtype),
    )


def cache_shape(target: Decoder, needs: Needs, k: int, config: EngineConfig) -> CacheShape:
    """The shape of both models' cache."""
    weight = target.embed.weight
    prompts = prompt_tokens(config, weight.device)
    dtype = kv_dtype(config.kv_cache_dtype, weight.dtype)
    return CacheShape(target.spec, needs.cache, dtype, k, prompts, config)


def _num_seqs(shape: CacheShape, memory: Callable[[int], int], most: int) -> int:
    """Requests at once where no number was given: halved until the cache holds enough of each."""
    num_seqs = most
    while num_seqs > FEWEST_SEQS:
        with contextlib.suppress(MemoryShortageError):  # no memory is left besides the workspace
            if memory(num_seqs) >= shape.needed(num_seqs, min(SEQ_TOKENS, shape.longest)):
                break
        num_seqs //= 2
    return num_seqs


def _workspace(target: Decoder, needs: Needs, rows: int, requests: int, k: int) -> int:
    """Bytes of a step's largest tensors: layer products, drafter features, logits, token counts.

    Captured prompts have theirs apart from those of prompts launched kernel by kernel. Logits exist
    up to three times: in a graph, where the host edits them, and as log-probabilities want them.
    """
    spec = target.spec
    inner = max(layer.width for layer in spec.layers)
    features = 0 if needs.network is None else needs.network.config.feature_size
    width = 3 * inner + 8 * spec.hidden_size + 2 * features
    captured = min(rows, PROMPT_SIZES[-1])
    logits = 3 * requests * (k + 1) * spec.vocab_size
    counts = requests * spec.vocab_size * torch.int32.itemsize
    return ((rows + captured) * width + logits) * target.embed.weight.dtype.itemsize + counts


def _unseen_bytes(target: Decoder, needs: Needs) -> int:
    """Bytes of a request's projected features that wait for the drafter, at most."""
    hidden = 0 if needs.cache is None else needs.cache.hidden_size
    return MOST_UNSEEN * hidden * target.embed.weight.dtype.itemsize


def _max_length(target: Decoder, config: EngineConfig, num_blocks: int, memory: int) -> int:
    held = num_blocks * config.block_size
    wanted = config.max_model_len or min(target.max_length, max(held, SMALLEST_CONTEXT))
    check_length(target.spec, wanted)
    if wanted > held:
        needed = -(-wanted // config.block_size) * (memory / max(num_blocks, 1))
        about = f" (about {needed / 2**20:.0f} MiB)" if num_blocks else ""
        raise MemoryShortageError(
            f"the KV cache holds {held} tokens, one sequence needs {wanted}{about}; raise "
            "kv_cache_memory or lower max_model_len"
        )
    return wanted
