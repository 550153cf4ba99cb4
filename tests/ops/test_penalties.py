"""Penalties against their definition, token by token."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peagle.ops.penalties import Penalties, count_emitted, penalize

VOCAB = 6
CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, -1.0, 0.5, -0.2, 3.0, 0.0])
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
RATES = st.tuples(
    st.sampled_from([0.5, 1.0, 1.4]),
    st.sampled_from([-1.0, 0.0, 0.7]),
    st.sampled_from([-0.3, 0.0, 1.1]),
)


def defined(prompt: list[int], output: list[int], rates: tuple[float, ...]) -> np.ndarray:
    wanted, (repetition, presence, frequency) = LOGITS.numpy().copy(), rates
    for token in set(prompt) | set(output):
        wanted[token] *= repetition if wanted[token] < 0 else 1 / repetition
    for token in output:
        wanted[token] -= frequency
    for token in set(output):
        wanted[token] -= presence
    return wanted


def begun(
    prompt: list[int], output: list[int], rates: tuple[float, ...], row: int = 1
) -> Penalties:
    """A table of three requests of which one has penalties."""
    penalties = Penalties.none(3, VOCAB, CPU)
    penalties.rates[row] = torch.tensor(rates)
    penalties.begin(row, tokens(prompt), tokens(output))
    return penalties


def tokens(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@given(rates=RATES, prompt=TOKENS, output=TOKENS, drafts=TOKENS)
def test_every_row_sees_the_drafts_before_it(rates, prompt, output, drafts):
    penalties = begun(prompt, output, rates)
    logits = LOGITS.repeat(2 * (len(drafts) + 1), 1)
    penalize(logits, tokens(drafts).repeat(2, 1), penalties, torch.tensor([0, 1]))
    others, rows = logits.split(len(drafts) + 1)
    assert torch.equal(others, LOGITS.expand_as(others)), "a request without penalties"
    for place, row in enumerate(rows):
        wanted = defined(prompt, [*output, *drafts[:place]], rates)
        np.testing.assert_allclose(row.numpy(), wanted, atol=1e-6)


@given(prompt=TOKENS, output=TOKENS, emitted=st.lists(st.integers(0, VOCAB - 1), min_size=4))
def test_emitted_tokens_are_counted_as_output(prompt, output, emitted):
    rates = (1.3, 0.5, 0.25)
    penalties, expected = begun(prompt, output, rates), begun(prompt, output + emitted[:3], rates)
    table = torch.zeros(3, len(emitted), dtype=torch.int64)
    table[1] = tokens(emitted)
    count_emitted(penalties, torch.tensor([1, 0]), table, torch.tensor([1, 3, 1]))
    assert torch.equal(penalties.counts, expected.counts)


def test_a_row_forgets_the_request_before():
    penalties = begun([0, 1], [2, 2], (1.3, 0.0, 0.0))
    penalties.begin(1, tokens([3]), tokens([]))
    assert (penalties.counts[1] > 0).tolist() == [False, False, False, True, False, False]
