"""Tokens that are ruled out: greedy decoding against one token at a time in numpy."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import tiny
import torch
from chat_templates import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.token_rules import NOTHING_LEFT, TokenRules, endings_of

PROMPT = [(5 + 3 * i) % tiny.MASK for i in range(8)]
LENGTH = 14


def follows(output: Sequence[int], ending: Sequence[int]) -> bool:
    """Whether the last token of an ending would complete it."""
    before = list(ending[:-1])
    return not before or list(output[-len(before) :]) == before


def reference(peer, allowed: set[int] | None, endings: list[list[int]]) -> list[int]:
    output: list[int] = []
    while len(output) < LENGTH:
        logits = tiny.peer_logits(peer, [*PROMPT, *output])[-1].numpy()
        for token in range(tiny.VOCAB):
            if allowed is not None and token not in allowed:
                logits[token] = -np.inf
        for ending in endings:
            if follows(output, ending):
                logits[ending[-1]] = -np.inf
        output.append(int(np.argmax(logits)))
    return output


def written(engine: Engine, rules: TokenRules) -> list[int]:
    how = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    request = engine.add("r", PROMPT, how, rules)
    tiny.finish(engine)
    return request.output


@settings(max_examples=25)
@given(
    allowed=st.none() | st.sets(st.integers(0, tiny.VOCAB - 1), min_size=20),
    lengths=st.lists(st.integers(1, 3), max_size=4),
    method=st.sampled_from(["none", "peagle", "eagle3"]),
    on_device=st.booleans(),
)
def test_only_what_the_rules_leave_is_written(
    targets, trained, allowed: set[int] | None, lengths: list[int], method: str, on_device: bool
):
    """The endings are from what would be written without them, drafted or not."""
    peer, k = targets["easy"].peer, 0 if method == "none" else 4
    drafter = trained[method].drafter if k else None
    endings: list[list[int]] = []
    for at, length in enumerate(lengths):
        plain = reference(peer, allowed, endings)
        endings.append(plain[2 * at : 2 * at + length])
    engine = tiny.engine(targets["easy"].decoder, drafter, k, on_device, tiny.engine_config())
    rules = TokenRules(allowed, endings, tiny.VOCAB)
    assert written(engine, rules) == reference(peer, allowed, endings)


def test_rows_follow_the_drafts():
    rules = TokenRules([1, 2, 3], [[3], [1, 2]], 8)
    assert rules.allowed([1, 2]).tolist() == [[1 << 1 | 1 << 2], [1 << 1], [1 << 1 | 1 << 2]]
    rules.advance([1])
    assert rules.allowed([]).tolist() == [[1 << 1]]


class Form:
    """A constraint that allows one token after another."""

    failure: str | None = None

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.taken = list(tokens), 0

    def allowed(self, drafts: Sequence[int]) -> torch.Tensor:
        places = range(self.taken, self.taken + len(drafts) + 1)
        return torch.tensor([[1 << self.tokens[place]] for place in places], dtype=torch.uint8)

    def advance(self, tokens: Sequence[int]) -> None:
        self.taken += len(tokens)


def test_a_form_and_rules_hold_together():
    form = Form([1, 2, 5, 1])
    rules = TokenRules([1, 2, 3], [], 8, form)
    assert rules.allowed([1]).tolist() == [[1 << 1], [1 << 2]]
    rules.advance([1, 2])
    assert (form.taken, rules.failure) == (2, None)


def test_a_row_that_leaves_nothing_is_a_failure_only_if_it_is_reached():
    rules = TokenRules([1, 2, 3], [], 8, Form([1, 5, 1]))
    assert rules.allowed([1, 5]).tolist()[0] == [1 << 1]
    rules.advance([1])
    assert rules.failure is None
    assert rules.allowed([]).tolist() == [[255]]
    rules.advance([7])
    assert rules.failure == NOTHING_LEFT


def test_a_failure_of_the_form_is_told():
    form = Form([1])
    form.failure = "too complex"
    assert TokenRules(None, [[1]], 8, form).failure == "too complex"


@pytest.mark.parametrize("word", ["hi", " hi", "  hi"])
def test_a_word_is_ruled_out_with_and_without_a_space_before_it(word: str):
    tokenizer = byte_tokenizer(None)
    size = len(tokenizer)
    rules = TokenRules(None, endings_of((word,), tokenizer, size), size)
    bits = np.unpackbits(rules.allowed([]).numpy(), axis=1, bitorder="little")[0][:size]
    out = [tokenizer.decode([token]) for token in itertools.compress(range(size), bits == 0)]
    assert sorted(out) == [" hi", "hi"]


def test_a_word_of_tokens_that_the_target_lacks_rules_nothing_out():
    assert endings_of(("hi",), byte_tokenizer(None), 16) == ()


def test_an_empty_word_rules_nothing_out():
    assert endings_of(("", " "), byte_tokenizer(None), 16) == ()
