"""Cycles without drafts, and how the drafter catches up: nothing else may change."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import tiny
from torch import Tensor

from peagle.config import SamplingParams
from peagle.drafters.proposer import Drafter
from peagle.engine.device import worker as on_device
from peagle.engine.engine import Engine
from peagle.engine.host import worker as on_host
from peagle.engine.pace import SCOUTS
from peagle.engine.request import Request
from peagle.engine.step import CycleTime, Outcome, Step
from peagle.ops.acceptance import Path
from peagle.ops.draft import Draft

PROMPTS = [[(5 * i + j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
WAYS = [
    SamplingParams(max_tokens=60),
    SamplingParams(max_tokens=60, temperature=0.9, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=60, temperature=0.7, top_k=9, seed=4, logprobs=2),
    SamplingParams(max_tokens=60, num_speculative_tokens=0),
]
PAUSES = [4, 0, 0, 0, 1, 0, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]
DEVICES = pytest.mark.parametrize("device", [False, True])
METHODS = pytest.mark.parametrize("method", ["peagle", "eagle3"])


@pytest.fixture
def engine_with(targets, trained) -> Callable[..., Engine]:
    """An engine over the easy pair, whose cycles have given lengths."""

    def make(method: str, device: bool, lengths: Sequence[int], **room) -> Engine:
        config = tiny.engine_config(draft_length="auto", **room)
        engine = tiny.engine(targets["easy"].decoder, trained[method].drafter, 4, device, config)
        engine.scheduler.pace.draft_length = tiny.GivenLengths(lengths)
        return engine

    return make


@pytest.fixture
def plain(targets) -> Callable[..., list[Request]]:
    """What is written without a drafter."""

    def run(prompts, params) -> list[Request]:
        params = [how.model_copy(update={"num_speculative_tokens": None}) for how in params]
        return tiny.run(
            Engine(targets["easy"].decoder, None, 0, tiny.engine_config()), prompts, params
        )

    return run


def few_unseen(monkeypatch, most: int) -> None:
    for worker in (on_host, on_device):
        monkeypatch.setattr(worker, "MOST_UNSEEN", most)


def written(requests: Sequence[Request]) -> list[tuple[object, ...]]:
    scores = [
        [(entry.rank, [token for token, _ in entry.top]) for entry in request.logprobs]
        for request in requests
    ]
    return list(zip(tiny.outputs(requests), scores, strict=True))


def as_from_scratch(drafter, target, request: Request) -> list[int]:
    """The drafts accepted in each of a request's cycles; each is checked against what the drafter
    proposes after the same tokens, seen for the first time.

    Cycles without drafts give one token.
    """
    known, accepted = request.prompt_length + 1, iter(request.speculation.accepted_per_cycle)
    found = []
    for length in itertools.cycle(PAUSES):
        follows = request.tokens[known : known + max(length, 1)]
        if len(follows) < max(length, 1):
            return found
        hits = 0
        if length:
            drafts = tiny.propose(drafter, target, request.tokens[:known], length).drafts
            agreed = [draft == token for draft, token in zip(drafts, follows, strict=True)]
            hits = [*agreed, False].index(False)
            assert next(accepted) == hits
            found.append(hits)
        known += hits + 1
    raise AssertionError("a text has an end")


@pytest.mark.sweep
@DEVICES
@METHODS
@pytest.mark.parametrize("most", [6, 256])
def test_no_token_changes(engine_with, plain, monkeypatch, method: str, device: bool, most: int):
    """Greedy, sampled, penalized, with log-probabilities, and beside requests that draft never;
    also where the drafter has to catch up within a pause."""
    few_unseen(monkeypatch, most)
    engine = engine_with(method, device, PAUSES)
    requests = tiny.run(engine, PROMPTS, WAYS)
    assert written(requests) == written(plain(PROMPTS, WAYS))
    did = requests[0].speculation
    assert 0 < did.cycles < 0.6 * (did.cycles + did.pauses)


@pytest.mark.sweep
@DEVICES
@METHODS
@pytest.mark.parametrize("most", [6, 256])
def test_drafts_after_a_pause_are_those_from_scratch(
    targets, trained, engine_with, monkeypatch, method: str, device: bool, most: int
):
    few_unseen(monkeypatch, most)
    engine = engine_with(method, device, PAUSES)
    requests = tiny.run(engine, PROMPTS[:1], SamplingParams(max_tokens=50))
    drafter, target = trained[method].drafter, targets["easy"].decoder
    assert sum(as_from_scratch(drafter, target, requests[0])) > 3


@DEVICES
def test_what_the_drafter_has_missed_is_bounded(engine_with, monkeypatch, device: bool):
    few_unseen(monkeypatch, 12)
    engine = engine_with("peagle", device, [0])
    request = engine.add("r", PROMPTS[0], SamplingParams(max_tokens=80))
    most = []
    while engine.busy:
        tiny.step(engine)
        most.append(request.pending)
    assert max(most) == 12
    assert request.speculation.drafted == 0


@DEVICES
def test_texts_that_were_never_drafted_are_cached(targets, trained, engine_with, device: bool):
    """With the drafter's keys, so that drafts after them are as good."""
    engine = engine_with("peagle", device, [0], block_size=4)
    (first,) = tiny.run(engine, PROMPTS[:1], SamplingParams(max_tokens=30))
    engine.scheduler.pace.draft_length = tiny.GivenLengths(PAUSES)
    (again,) = tiny.run(engine, [first.tokens], SamplingParams(max_tokens=30))
    assert again.cached >= first.total - 5
    drafter, target = trained["peagle"].drafter, targets["easy"].decoder
    assert sum(as_from_scratch(drafter, target, again)) > 3


@pytest.mark.sweep
@DEVICES
@METHODS
def test_preempted_requests_go_on(targets, trained, engine_with, plain, method: str, device: bool):
    room = {"block_size": 4, "kv_cache_memory": 24 * 4 * 1280, "max_model_len": 84}
    engine = engine_with(method, device, PAUSES, **room)
    requests = tiny.run(engine, PROMPTS, WAYS)
    assert engine.stats.preemptions > 0
    assert written(requests) == written(plain(PROMPTS, WAYS))


def clocked(engine: Engine, seconds: dict[int, float]) -> Engine:
    """An engine whose cycles take given times by number of drafts."""
    exchange = engine.worker.exchange

    def timed(step: Step) -> Outcome:
        outcome = exchange(step)
        if outcome.time is None:
            return outcome
        drafts = outcome.time.drafts
        return replace(outcome, time=CycleTime(len(step.cycles), drafts, seconds[drafts]))

    engine.worker.exchange = timed  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("useful", [False, True])
def test_a_cpu_drafts_where_that_is_faster(targets, trained, tmp_path, useful: bool):
    """By its own times: here drafts double a cycle's."""
    target = targets["easy"].decoder
    drafter = trained["peagle"].drafter
    if not useful:
        drafter = tiny.random_drafter_for(target, tmp_path, tiny.drafter_config(parallel=True))
    config = tiny.engine_config(draft_length="auto")
    engine = clocked(Engine(target, drafter, 4, config), {0: 1.0, 1: 1.9, 3: 1.95, 4: 2.0})
    tiny.run(engine, PROMPTS, SamplingParams(max_tokens=150))
    (last,) = tiny.run(engine, PROMPTS[:1], SamplingParams(max_tokens=100))
    did = last.speculation
    assert (did.cycles > 0.8 * (did.cycles + did.pauses)) == useful


class Worthless(tiny.GivenLengths):
    """Drafts that do not pay."""

    def pays(self, requests: int) -> bool:
        return False


@METHODS
def test_where_drafts_do_not_pay_few_are_followed(engine_with, plain, monkeypatch, method: str):
    """By those it is known when they do. The drafter never sees the others."""
    few_unseen(monkeypatch, 12)
    engine = engine_with(method, True, [0], max_num_seqs=16)
    engine.scheduler.pace.draft_length = Worthless([0])
    prompts = [[(7 * i + j) % tiny.MASK for j in range(9 + i)] for i in range(SCOUTS + 3)]
    ways = [WAYS[i % 3] for i in range(len(prompts))]
    requests = tiny.run(engine, prompts, ways)
    assert [request.speculates for request in requests] == [True] * SCOUTS + [False] * 3
    assert written(requests) == written(plain(prompts, ways))
    assert [request.drafter_computed for request in requests[SCOUTS:]] == [
        request.computed for request in requests[SCOUTS:]
    ]
    engine.scheduler.pace.draft_length = tiny.GivenLengths(PAUSES)
    again = tiny.run(engine, prompts, ways)
    assert all(request.speculates and request.speculation.drafted for request in again)
    assert written(again) == written(requests)


def test_those_that_were_left_draft_nothing_beside_others(engine_with, plain):
    engine = engine_with("peagle", True, PAUSES, max_num_seqs=16)
    engine.scheduler.pace.draft_length = Worthless(PAUSES)
    prompts = [[(7 * i + j) % tiny.MASK for j in range(9 + i)] for i in range(SCOUTS + 2)]
    requests = tiny.run(engine, prompts, WAYS[0])
    assert written(requests) == written(plain(prompts, [WAYS[0]] * len(prompts)))
    drafted = [request.speculation.drafted > 0 for request in requests]
    assert drafted == [True] * SCOUTS + [False] * 2


def test_who_asks_for_drafts_is_followed(engine_with):
    engine = engine_with("peagle", True, [0], max_num_seqs=16)
    engine.scheduler.pace.draft_length = Worthless([0])
    for i in range(SCOUTS):
        engine.add(f"scout {i}", PROMPTS[0], SamplingParams(max_tokens=2))
    asked = engine.add("asked", PROMPTS[0], SamplingParams(num_speculative_tokens=2))
    assert asked.speculates
    assert not engine.add("another", PROMPTS[0], SamplingParams()).speculates


def test_nothing_is_learnt_from_drafts_for_those_that_were_left(engine_with, monkeypatch):
    """Which come of a drafter that has not seen their text."""
    known: list[list[bool]] = []

    def noted(self: Drafter, draft: Draft, path: Path, followed: Tensor) -> None:
        known.append(followed[: SCOUTS + 2].tolist())

    monkeypatch.setattr(Drafter, "learn", noted)
    monkeypatch.setattr(Drafter, "learns", True)
    engine = engine_with("peagle", True, [4], max_num_seqs=16)
    engine.scheduler.pace.draft_length = Worthless([4])
    tiny.run(engine, PROMPTS[:1] * (SCOUTS + 2), SamplingParams(max_tokens=9, temperature=0.8))
    whole = [one for one in known if len(one) == SCOUTS + 2]  # behind them come rows of padding
    assert sum(whole[0]) == SCOUTS


def test_who_was_left_finds_what_a_drafter_has_seen(engine_with, plain):
    """A conversation goes on, and so does a prompt that others began with."""
    engine = engine_with("peagle", True, [0], max_num_seqs=16, block_size=4)
    (first,) = tiny.run(engine, [PROMPTS[3]], WAYS[0])
    for i in range(SCOUTS):
        engine.add(f"scout {i}", PROMPTS[0], SamplingParams(max_tokens=2))
    engine.scheduler.pace.draft_length = Worthless([0])
    for turn in (first.tokens, [*first.tokens, *PROMPTS[1]]):
        request = engine.add("again", turn, SamplingParams(max_tokens=30))
        assert not request.speculates
        while request.id in engine.scheduler.requests:
            engine.step()
        for i in range(SCOUTS):
            engine.add(f"scout {i} of {len(turn)}", PROMPTS[0], SamplingParams(max_tokens=2))
        assert request.cached >= len(first.tokens) - 5
        assert [request.output] == [
            r.output for r in plain([turn], [SamplingParams(max_tokens=30)])
        ]
    tiny.finish(engine)


def test_fixed_always_drafts(targets, trained):
    config = tiny.engine_config(draft_length="fixed")
    engine = clocked(Engine(targets["easy"].decoder, trained["peagle"].drafter, 4, config), {})
    (request,) = tiny.run(engine, PROMPTS[:1], SamplingParams(max_tokens=60))
    assert request.speculation.pauses == 0
