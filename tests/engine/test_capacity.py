"""How many requests run at once where nobody says it."""

import pytest
import torch

from peagle.config import EngineConfig
from peagle.drafters.proposer import Needs
from peagle.engine import capacity
from peagle.engine.capacity import capacity_of
from peagle.engine.kv_cache import kv_bytes_per_token
from peagle.errors import MemoryShortageError


def seqs(target, tokens: int, **sizes: int) -> int:
    """Requests at once of an engine whose cache holds so many tokens."""
    decoder = target.decoder
    memory = tokens * kv_bytes_per_token(decoder.spec, decoder.embed.weight.dtype)
    config = EngineConfig(kv_cache_memory=memory, **sizes)
    return capacity_of(decoder, Needs(), 0, config).num_seqs


def test_a_cpu_runs_64_requests_at_once(target):
    assert seqs(target, 1 << 20) == 64
    assert seqs(target, 1 << 20, max_num_seqs=7) == 7


@pytest.mark.parametrize(
    ("tokens", "longest", "expected"),
    [
        (512 * 128, 256, 512),
        (512 * 128 - 16, 256, 256),
        (64 * 128, 256, 64),
        (256, 256, 64),
        (512 * 64, 64, 512),
    ],
)
def test_where_more_are_of_use_memory_decides(
    target, monkeypatch: pytest.MonkeyPatch, tokens: int, longest: int, expected: int
):
    """As many as it holds so many tokens of each, or whole sequences where these are short."""
    monkeypatch.setitem(capacity.MOST_SEQS, "cpu", 512)
    monkeypatch.setattr(capacity, "SEQ_TOKENS", 128)
    assert seqs(target, tokens, max_model_len=longest) == expected


def test_a_number_whose_steps_leave_no_memory_is_not_chosen(
    target, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def left(config: EngineConfig, device: torch.device, workspace: int) -> int:
        asked.append(workspace)
        if len(asked) < 3:
            raise MemoryShortageError("nothing is left")
        return 256 << 20

    monkeypatch.setitem(capacity.MOST_SEQS, "cpu", 512)
    monkeypatch.setattr(capacity, "kv_cache_memory", left)
    assert seqs(target, 1) == 128
    assert asked[0] > asked[1] > asked[2] == asked[3]
