"""Audits judge answers: healthy ones are the target's own, damaged ones are not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peagle.audit import EXACT_BOUND, AuditCase, Finding
from peagle.config import EngineConfig, SamplingParams
from peagle.engine.kv_cache import KVCache
from peagle.errors import InputError
from peagle.live_request import Prepared
from peagle.llm import LLM
from peagle.pair import bundled
from peagle.speculative_config import SpeculativeConfig

PROMPTS = [
    "def fibonacci(n):\n    ",
    "import os\n\ndef walk(",
    "class Stack:\n    def push(self, item):\n",
    "for line in open(path):\n    if ",
]
SHAPES = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.9},
)
ALL = [(prompt, shape) for shape in SHAPES for prompt in PROMPTS]
TOKENS, BEFORE = 48, 20
DRAFTER = {"model": str(bundled("peagle"))}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(bundled("target"), SpeculativeConfig(**DRAFTER))


def served(
    llm: LLM, damage: Callable[[], None] = lambda: None, count: int = len(ALL)
) -> list[AuditCase]:
    """Answers to many requests at once, `damage` done when each has some tokens."""
    waiting: dict[str, Prepared] = {}
    for seed, (prompt, shape) in enumerate(ALL[:count]):
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed, **shape)
        request = llm.prepare(prompt, params)
        waiting[llm.submit(request)] = request
    counts, cases, done = dict.fromkeys(waiting, 0), [], False
    while waiting:
        for chunk in llm.step():
            counts[chunk.request_id] += len(chunk.token_ids)
            if chunk.completion is not None:
                case = AuditCase.of(waiting.pop(chunk.request_id), chunk.completion)
                assert case is not None
                cases.append(case)
        if not done and min(counts.values()) >= BEFORE:
            damage()
            done = True
    return sorted(cases, key=lambda case: case.seed)


def audited(llm: LLM, *cases: AuditCase) -> list[Finding]:
    """Verdicts, of prefills that run together."""
    done, ids = {}, [llm.submit(case.scoring, followed=False) for case in cases]
    while len(done) < len(cases):
        done |= {chunk.request_id: chunk.completion for chunk in llm.step() if chunk.completion}
    return [case.judge(done[one], EXACT_BOUND) for case, one in zip(cases, ids, strict=True)]


@pytest.fixture(scope="module")
def healthy(llm: LLM) -> list[AuditCase]:
    return served(llm)


def changed(cases: list[AuditCase], healthy: list[AuditCase], least: int) -> list[AuditCase]:
    """Answers that damage has changed: what no token shows, no audit can see."""
    found = [case for case, other in zip(cases, healthy, strict=True) if case != other]
    assert len(found) >= least
    return found


def share_found(verdicts: list[Finding]) -> float:
    return sum(verdict.result == "different" for verdict in verdicts) / len(verdicts)


def test_healthy_answers_are_equal_whatever_is_drafted_and_cached(
    llm: LLM, healthy: list[AuditCase]
):
    cached = served(llm, count=8)
    assert {verdict.result for verdict in audited(llm, *healthy, *cached)} == {"equal"}
    looked_up = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    other = LLM(bundled("target"), looked_up, EngineConfig(max_num_batched_tokens=16))
    assert {verdict.result for verdict in audited(other, *served(other, count=8))} == {"equal"}


def test_drafts_that_are_accepted_falsely_are_found(llm: LLM, healthy: list[AuditCase]):
    rates = (1.0, 0.9, 0.8)
    false = SpeculativeConfig(
        **DRAFTER,
        num_speculative_tokens=len(rates),
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
    )
    cases = changed(served(LLM(bundled("target"), false)), healthy, least=16)
    verdicts = audited(llm, *cases)
    assert share_found(verdicts) >= 0.95
    worst, verdict = max(zip(cases, verdicts, strict=True), key=lambda pair: pair[1].margin)
    place = verdict.first
    alone = llm.complete(worst.replay(place, num_speculative_tokens=0))
    assert worst.cause(place, alone, llm.complete(worst.replay(place))) == "not_reproduced"


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """Those that an engine makes from here on."""
    made: list[KVCache] = []
    make = KVCache.__init__
    monkeypatch.setattr(
        KVCache,
        "__init__",
        lambda self, *given, **named: (make(self, *given, **named), made.append(self))[0],
    )
    return made


@pytest.mark.parametrize(("damage", "least", "share"), [("zeroed", 8, 0.9), ("stale", 3, 0.6)])
def test_damaged_keys_that_change_an_answer_are_found(
    healthy: list[AuditCase], caches: list[KVCache], damage: str, least: int, share: float
):
    llm = LLM(bundled("target"), SpeculativeConfig(**DRAFTER))

    def change() -> None:
        for cache in caches:
            for tensor, slots in cache.tensors:
                rows = slots[: len(ALL)]
                if damage == "zeroed":  # the second block
                    tensor[:, :, rows[:, 16:32].flatten()] = 0
                else:
                    tensor[:, :, rows[:, 20]] = tensor[:, :, rows[:, 12]]

    with torch.inference_mode():
        cases = changed(served(llm, change), healthy, least)
    assert share_found(audited(llm, *cases)) >= share


def test_an_audit_leaves_no_trace():
    llm = LLM(bundled("target"), SpeculativeConfig(**DRAFTER))
    drawn = SamplingParams(temperature=1.0, max_tokens=12)
    first = llm.generate(PROMPTS[:1], drawn)[0]
    case = AuditCase.of(llm.prepare(PROMPTS[0], drawn), first)
    assert case is not None
    before = llm.engine.stats
    [verdict] = audited(llm, case)
    assert (verdict.result, llm.engine.stats) == ("equal", before)
    assert len(verdict.margins) == 12
    assert llm.generate(PROMPTS[1:2], drawn)[0].seed == first.seed + 1
    longer = PROMPTS[2] * 8
    request = llm.prepare(longer, SamplingParams(max_tokens=1))
    llm.complete(
        AuditCase(tuple(request.tokens[:60]), tuple(request.tokens[60:]), 0, 0, 0, 1, 0).scoring
    )
    assert llm.complete(request).cached_tokens == 0


def test_what_depends_on_more_than_tokens_is_not_judged(llm: LLM):
    for params in (
        SamplingParams(max_tokens=4, repetition_penalty=1.2),
        SamplingParams(max_tokens=4, logit_bias={5: 2.0}),
        SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9),
        SamplingParams(max_tokens=4, allowed_token_ids=(5, 6)),
    ):
        [done] = llm.generate(PROMPTS[:1], params)
        assert AuditCase.of(llm.prepare(PROMPTS[0], params), done) is None


def test_tokens_beyond_a_filter_are_found(llm: LLM):
    case = served(llm, count=12)[-1]
    place = 30
    scored = llm.complete(case.scoring).prompt_logprobs[place - len(case.answer)]
    assert scored is not None
    for shape in ({"top_k": 3}, {"min_p": 0.2}):
        kinds = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **shape}
        answer = list(case.answer)
        answer[place] = scored.top[-1][0]
        false = AuditCase(case.prompt, tuple(answer), case.seed, **kinds)
        assert audited(llm, false)[0].margins[place] > EXACT_BOUND


def test_cases_are_kept_for_their_owner_alone(tmp_path: Path):
    case = AuditCase((1, 2), (3,), 7, 0.5, 0, 1.0, 0.0)
    case.save(tmp_path / "case.json")
    assert AuditCase.load(tmp_path / "case.json") == case
    assert (tmp_path / "case.json").stat().st_mode & 0o77 == 0
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(InputError, match="no case of an audit"):
        AuditCase.load(tmp_path / "other.json")
