"""Invariant 2: sampled output has the target's distribution, with speculation and without.

Thousands of requests differ in nothing but their seed. Their tokens are compared, by a chi-square
test, with probabilities computed in numpy from transformers' logits.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sweeps import at_night

from peagle.config import SamplingParams
from peagle.drafters.lookup import Lookup
from peagle.drafters.selector import SelectorConfig
from peagle.engine.engine import Engine

VOCAB, PROMPT, NEW, DRAWS, K = 8, (3, 1, 4), 3, 2000, 2
THRESHOLD = 1e-3
PARAMS = {
    "temperature": SamplingParams(temperature=1.3, max_tokens=NEW),
    "cold": SamplingParams(temperature=0.6, max_tokens=NEW),
    "top-k": SamplingParams(temperature=1.0, top_k=3, max_tokens=NEW),
    "top-p": SamplingParams(temperature=1.5, top_p=0.7, max_tokens=NEW),
    "min-p": SamplingParams(temperature=1.5, min_p=0.15, max_tokens=NEW),
    "all": SamplingParams(temperature=2.0, top_k=5, top_p=0.9, min_p=0.05, max_tokens=NEW),
    "penalties": SamplingParams(
        temperature=1.2,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=-0.5,
        max_tokens=NEW,
    ),
}
DRAFTING = ("peagle", "selector", "eagle3", "ngram")
METHODS = ("none", *DRAFTING)
FEW = ["none", "peagle", *at_night(["selector", "eagle3", "ngram"])]
EVEN = 0b01010101
"""Ids of the vocabulary, a bit each."""
Tokens = tuple[int, ...]


class EvenThenOdd:
    """A grammar in whose texts even and odd ids take turns, from an even one on."""

    failure = None

    def __init__(self) -> None:
        self._length = 0

    def allowed(self, drafts: Sequence[int]) -> torch.Tensor:
        rows = [EVEN << place % 2 for place in range(self._length, self._length + len(drafts) + 1)]
        return torch.tensor(rows, dtype=torch.uint8)[:, None]

    def advance(self, tokens: Sequence[int]) -> None:
        self._length += len(tokens)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """A target of eight tokens, transformers' view of it, and a drafter of each method."""
    return pair_in(tmp_path_factory.mktemp("distribution"))


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory):
    """The same with a target whose logits are capped: most are above the cap."""
    return pair_in(tmp_path_factory.mktemp("capped"), family="gemma4", final_logit_softcapping=0.7)


def pair_in(root: Path, **changes: Any):
    directory = tiny.save_target(root / "target", vocab_size=VOCAB, **changes)
    decoder = tiny.load_target(directory)
    drafters = {"none": None}
    for method in ("peagle", "selector", "eagle3"):
        mask = None if method == "eagle3" else VOCAB - 1
        selector = SelectorConfig(rank=4, candidates=5) if method == "selector" else None
        config = tiny.drafter_config(
            method != "eagle3",
            vocab_size=VOCAB,
            draft_vocab=VOCAB,
            mask_token_id=mask,
            selector=selector,
        )
        drafters[method] = tiny.random_drafter_for(decoder, root / method, config)
    return decoder, tiny.load_peer(directory), drafters


def engine_of(pair, method: str) -> Engine:
    decoder, _, drafters = pair
    config = tiny.engine_config(
        max_num_seqs=1000, max_num_batched_tokens=8192, kv_cache_memory=1 << 26
    )
    proposer = Lookup(1, 1, tiny.CPU) if method == "ngram" else drafters[method]
    return Engine(decoder, proposer, K if method != "none" else 0, config)


def samples(
    pair, method: str, how: SamplingParams, grammar: bool = False, preempt: bool = False
) -> list[Tokens]:
    """What requests wrote that differ in their seeds; `preempt` a third of them in every step."""
    engine = engine_of(pair, method)
    requests = [
        engine.add(
            str(seed),
            PROMPT,
            how.model_copy(update={"seed": seed}),
            EvenThenOdd() if grammar else None,
        )
        for seed in range(DRAWS)
    ]
    for _ in range(100 if preempt else 0):
        tiny.step(engine)
        for request in engine.scheduler.running[::3]:
            if request.output_length:
                engine.scheduler.preempt(request)
    assert (engine.scheduler.preemptions > DRAWS / 4) == preempt
    tiny.finish(engine)
    return [tuple(request.output) for request in requests]


def penalized(logits: np.ndarray, tokens: Tokens, how: SamplingParams) -> np.ndarray:
    """Logits behind the prompt and some tokens, as penalties change them."""
    known, counts = {*PROMPT, *tokens}, Counter(tokens)
    changed = logits.copy()
    for token in known:
        rate = how.repetition_penalty
        changed[token] = changed[token] / rate if changed[token] > 0 else changed[token] * rate
    for token, count in counts.items():
        changed[token] -= how.presence_penalty + count * how.frequency_penalty
    return changed


def processed(logits: np.ndarray, how: SamplingParams) -> np.ndarray:
    """Temperature, then min-p, top-k and top-p, one token at a time."""
    p = np.exp((logits - logits.max()) / how.temperature)
    p /= p.sum()
    p[p < how.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if how.top_k > 0:
        p[order[how.top_k :]] = 0
    p /= p.sum()
    kept, reached = set(), 0.0
    for token in order:
        if reached < how.top_p:
            kept.add(token)
        reached += p[token]
    p[[token for token in order if token not in kept]] = 0
    return p / p.sum()


@functools.cache
def logits_after(peer, tokens: Tokens) -> np.ndarray:
    """The target's logits behind the prompt and some tokens, which all parameters share."""
    return tiny.peer_logits(peer, (*PROMPT, *tokens))[-1].double().numpy()


def exact(peer, how: SamplingParams, grammar: bool = False) -> dict[Tokens, float]:
    """The probability of every possible output."""
    known: dict[Tokens, float] = {(): 1.0}
    for place in range(NEW):
        longer = {}
        for tokens, chance in known.items():
            logits = penalized(logits_after(peer, tokens), tokens, how)
            if grammar:
                logits[1 - place % 2 :: 2] = -np.inf
            for token, p in enumerate(processed(logits, how)):
                if p > 0:
                    longer[*tokens, token] = chance * p
        known = longer
    return known


def p_value(drawn: list[Tokens], expected: dict[Tokens, float]) -> float:
    """Chi-square goodness of fit; outcomes expected fewer than five times are pooled."""
    counts = Counter(drawn)
    if counts.keys() - expected.keys():
        return 0.0  # something impossible was drawn
    frequent = [tokens for tokens, p in expected.items() if p * len(drawn) >= 5]
    seen = [counts[tokens] for tokens in frequent]
    wanted = [expected[tokens] * len(drawn) for tokens in frequent]
    rest = len(drawn) - sum(wanted)
    if rest >= 5:
        seen, wanted = [*seen, len(drawn) - sum(seen)], [*wanted, rest]
    assert len(wanted) > 3, "too few outcomes to test"
    scaled = np.array(wanted) * sum(seen) / sum(wanted)
    return float(stats.chisquare(seen, scaled).pvalue)


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PARAMS)
def test_samples_have_the_target_distribution(pair, method: str, name: str):
    assert p_value(samples(pair, method, PARAMS[name]), exact(pair[1], PARAMS[name])) > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("method", FEW)
def test_a_grammar_leaves_the_distribution_of_what_it_allows(pair, method: str):
    how = PARAMS["temperature"]
    drawn = samples(pair, method, how, grammar=True)
    assert p_value(drawn, exact(pair[1], how, grammar=True)) > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("method", FEW)
def test_preempted_requests_have_the_target_distribution(pair, method: str):
    drawn = samples(pair, method, PARAMS["penalties"], preempt=True)
    assert p_value(drawn, exact(pair[1], PARAMS["penalties"])) > THRESHOLD


@pytest.mark.parametrize("method", ["peagle", *at_night(["none"])])
def test_logits_are_capped_before_all_else(capped, method: str):
    """Greedy text would not tell: the cap leaves their order."""
    how = SamplingParams(temperature=0.4, top_p=0.9, min_p=0.05, max_tokens=NEW)
    assert p_value(samples(capped, method, how), exact(capped[1], how)) > THRESHOLD


@pytest.mark.parametrize(("drawn", "assumed"), [("cold", "temperature"), ("top-k", "cold")])
def test_a_wrong_distribution_is_rejected(pair, drawn: str, assumed: str):
    """The test above has the power to fail."""
    assert p_value(samples(pair, "peagle", PARAMS[drawn]), exact(pair[1], PARAMS[assumed])) < 1e-6


def test_a_slightly_wrong_distribution_is_rejected(pair):
    """So would be a sampler whose temperature is off by a fifth."""
    how = PARAMS["temperature"]
    assumed = exact(pair[1], how.model_copy(update={"temperature": how.temperature * 1.2}))
    assert p_value(samples(pair, "none", how), assumed) < THRESHOLD


@pytest.mark.parametrize("method", DRAFTING)
def test_drafts_are_accepted_and_rejected_while_sampling(pair, method: str):
    how = SamplingParams(temperature=1.0, max_tokens=40, seed=1)
    (request,) = tiny.run(engine_of(pair, method), [PROMPT], how)
    assert 0 < request.speculation.accepted < request.speculation.drafted


sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([0.6, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {5: 3.0, 9: -100.0}]),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.integers(1, 14),
    logprobs=st.sampled_from([None, 2]),
)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    family=st.sampled_from(["easy", "gemma4"]),
    params=st.lists(sampling, min_size=1, max_size=4),
    method=st.sampled_from(["peagle", "eagle3", "ngram"]),
    k=st.integers(1, 6),
    budget=st.sampled_from([4, 2048]),
)
def test_a_seed_decides_the_tokens(
    targets, trained, family: str, params, method: str, k: int, budget: int
):
    """The same with and without speculation, alone or in a batch, in chunks or not."""
    target = targets[family].decoder
    prompts = [[(5 * i + j) % tiny.MASK for j in range(9)] for i in range(len(params))]
    alone = [
        tiny.run(Engine(target, None, 0, tiny.engine_config()), [prompt], how)[0].output
        for prompt, how in zip(prompts, params, strict=True)
    ]
    proposer = Lookup(1, 2, tiny.CPU) if method == "ngram" else trained[method].drafter
    config = tiny.engine_config(max_num_batched_tokens=budget)
    engine = Engine(target, proposer, k, config)
    assert tiny.outputs(tiny.run(engine, prompts, params)) == alone
