"""What an engine can hold: its memory, divided once at the start."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from peagle.config import EngineConfig
from peagle.device import batched_tokens, kv_cache_memory, prompt_tokens
from peagle.drafters.drafter import Drafter
from peagle.engine.device.prompt_graphs import SIZES
from peagle.engine.kv_cache import kv_bytes_per_token
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.loading import check_length

MOST_SEQS = {"cpu": 64, "cuda": 512}
"""Requests at once, at most, where no number was asked for."""
FEWEST_SEQS = 64
SEQ_TOKENS = 1024
"""Tokens of each that the KV cache must hold, where more than the fewest are to run."""
SMALLEST_CONTEXT = 256
"""Tokens that the KV cache must hold when no context length was asked for."""


@dataclass(frozen=True)
class Capacity:
    """Sizes that follow from the models, the configuration and the free memory."""

    num_seqs: int
    """Most requests that run at once."""
    num_blocks: int
    block_size: int
    max_length: int
    """Longest prompt + output in tokens."""
    batched_tokens: int
    """Most target rows in one pass."""
    prompt_tokens: int
    """Of those, rows that may go to prompts."""

    @property
    def slots(self) -> int:
        """Positions that the KV cache holds."""
        return self.num_blocks * self.block_size


def capacity_of(target: Decoder, drafter: Drafter | None, k: int, config: EngineConfig) -> Capacity:
    """Divide the memory. Raises `InputError` when it cannot hold one sequence."""
    device = target.embed.weight.device
    rows = batched_tokens(config, device)

    def divided(num_seqs: int) -> tuple[int, int]:
        """Blocks of the KV cache for so many requests, and bytes for them."""
        workspace = _workspace(target, drafter, rows, num_seqs, k)
        memory = kv_cache_memory(config, device, workspace)
        return _num_blocks(target, drafter, config, num_seqs, memory), memory

    num_seqs = config.max_num_seqs or _num_seqs(target, config, divided)
    num_blocks, memory = divided(num_seqs)
    max_length = _max_length(target, config, num_blocks, memory)
    prompts = prompt_tokens(config, device)
    return Capacity(num_seqs, num_blocks, config.block_size, max_length, rows, prompts)


def _num_seqs(
    target: Decoder, config: EngineConfig, divided: Callable[[int], tuple[int, int]]
) -> int:
    """Requests at once where no number was given: halved until the cache holds enough of each."""
    longest = config.max_model_len or target.max_length
    num_seqs = MOST_SEQS[target.embed.weight.device.type]
    while num_seqs > FEWEST_SEQS:
        with contextlib.suppress(InputError):  # no memory is left besides the workspace
            held = divided(num_seqs)[0] * config.block_size
            if held >= num_seqs * min(SEQ_TOKENS, longest):
                break
        num_seqs //= 2
    return num_seqs


def _workspace(target: Decoder, drafter: Drafter | None, rows: int, requests: int, k: int) -> int:
    """Bytes of a step's largest tensors: layer products, drafter features, logits, token counts.

    Captured prompts have theirs apart from those of prompts launched kernel by kernel. Logits exist
    up to four times: in a graph, where the host edits them, and twice for log-probabilities.
    """
    spec = target.spec
    inner = max(layer.width for layer in spec.layers)
    features = 0 if drafter is None else drafter.model.config.feature_size
    width = 3 * inner + 8 * spec.hidden_size + 2 * features
    captured = min(rows, SIZES[-1])
    logits = 4 * requests * (k + 1) * spec.vocab_size
    counts = requests * spec.vocab_size * torch.int32.itemsize
    return ((rows + captured) * width + logits) * target.embed.weight.dtype.itemsize + counts


def _num_blocks(
    target: Decoder, drafter: Drafter | None, config: EngineConfig, num_seqs: int, memory: int
) -> int:
    dtype = target.embed.weight.dtype
    specs = [target.spec] + ([drafter.model.config.transformer] if drafter else [])
    per_token = sum(kv_bytes_per_token(spec, dtype) for spec in specs)
    affordable = memory // (per_token * config.block_size)
    longest = config.max_model_len or target.max_length
    return min(affordable, num_seqs * -(-longest // config.block_size))


def _max_length(target: Decoder, config: EngineConfig, num_blocks: int, memory: int) -> int:
    held = num_blocks * config.block_size
    limit = target.max_length
    wanted = config.max_model_len or min(limit, max(held, SMALLEST_CONTEXT))
    check_length(target.spec, wanted)
    if wanted > held:
        needed = -(-wanted // config.block_size) * (memory / max(num_blocks, 1))
        raise InputError(
            f"the KV cache holds {held} tokens, one sequence needs {wanted} "
            f"(about {needed / 2**20:.0f} MiB); raise kv_cache_memory or lower max_model_len"
        )
    return wanted
