"""Steps that repeat their cycle: the same tokens, in larger pieces."""

from collections.abc import Callable

import pytest
import tiny

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.engine.repeats import MOST_REPEATS, Repeats
from peagle.engine.request import Request
from peagle.engine.step import CycleTime

PROMPTS = [[(5 * i + j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
WAYS = [
    SamplingParams(max_tokens=41),
    SamplingParams(max_tokens=38, temperature=0.9, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=44, temperature=0.7, top_k=9, seed=4, presence_penalty=0.5),
    SamplingParams(max_tokens=40, min_p=0.1, temperature=1.0, seed=5),
]


def repeating(engine: Engine) -> Engine:
    assert engine.scheduler.pace.repeats is not None
    engine.scheduler.pace.repeats = tiny.MostRepeats()
    return engine


@pytest.fixture
def make(targets, trained) -> Callable[..., Engine]:
    """An engine whose worker runs ahead, with a drafter or without."""

    def of(method: str | None = None, **room) -> Engine:
        drafter = trained[method].drafter if method else None
        config = tiny.engine_config(**({"draft_length": "auto"} | room))
        return tiny.engine(targets["easy"].decoder, drafter, 4 if method else 0, True, config)

    return of


@pytest.fixture
def plain(targets) -> Callable[..., list[list[int]]]:
    """What is written by one cycle a step, on the host."""

    def run(prompts, params) -> list[list[int]]:
        engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
        return tiny.outputs(tiny.run(engine, prompts, params))

    return run


def pieces(engine: Engine, request: Request) -> list[int]:
    """How many tokens each step brings."""
    found = []
    while engine.busy:
        found += [len(out.new_tokens) for out in engine.step() if out.request_id == request.id]
    return [count for count in found if count]


def test_tokens_come_in_pieces_and_end_where_they_did(make, plain):
    engine = repeating(make())
    requests = tiny.run(engine, PROMPTS, WAYS)
    assert tiny.outputs(requests) == plain(PROMPTS, WAYS)
    assert [request.speculation.pauses for request in requests] == pytest.approx(
        [how.max_tokens - 1 for how in WAYS], abs=MOST_REPEATS
    )
    request = engine.add("alone", PROMPTS[0], WAYS[0])
    assert pieces(engine, request) == [1, *[MOST_REPEATS] * 10]


def test_an_end_of_text_ends_it_within_a_piece(make, plain):
    (known,) = plain(PROMPTS[:1], WAYS[0])
    token = known[6]
    how = SamplingParams(max_tokens=41, stop_token_ids=(token,))
    (request,) = tiny.run(repeating(make()), PROMPTS[:1], how)
    assert request.output == known[: known.index(token) + 1]
    assert request.finish_reason == "stop"


@pytest.mark.parametrize("room", [13, 14, 15, 16, 17])
def test_a_context_ends_where_it_did(make, targets, room: int):
    length = len(PROMPTS[0]) + room
    host = Engine(targets["easy"].decoder, None, 0, tiny.engine_config(max_model_len=length))
    engine = repeating(make(max_model_len=length))
    how = SamplingParams(max_tokens=100)
    found, expected = (tiny.run(one, PROMPTS[:1], how)[0] for one in (engine, host))
    assert found.output == expected.output
    assert found.finish_reason == expected.finish_reason == "length"


def test_where_the_host_takes_part_steps_have_one_cycle(make, plain):
    ways = [WAYS[0], SamplingParams(max_tokens=20, logprobs=2)]
    engine = repeating(make())
    requests = [engine.add(str(i), PROMPTS[i], how) for i, how in enumerate(ways)]
    counts = pieces(engine, requests[0])
    assert max(counts[:18]) == 1
    assert MOST_REPEATS in counts[20:]
    assert tiny.outputs(requests) == plain(PROMPTS[:2], ways)


def test_while_prompts_wait_for_the_next_step_it_has_one_cycle(make, plain):
    """Their first tokens would else wait for several cycles at each step."""
    engine = repeating(make(max_num_batched_tokens=16))
    first = engine.add("0", PROMPTS[0], WAYS[0])
    while first.output_length < 2:
        engine.step()
    others = [
        engine.add(str(i), [*prompt] * 4, how)
        for i, (prompt, how) in enumerate(zip(PROMPTS[1:], WAYS[1:], strict=False), 1)
    ]
    counts = []
    while any(not other.output_length for other in others):
        counts += [len(out.new_tokens) for out in engine.step() if out.request_id == first.id]
    # the step before they came was under way, and the last of them leaves room
    assert max(counts[2:-2]) == 1
    assert MOST_REPEATS in pieces(engine, first)
    assert first.output == plain(PROMPTS[:1], WAYS[:1])[0]


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("most", [9, 256])
def test_drafts_behind_them_are_as_good(make, plain, monkeypatch, method: str, most: int):
    """Also where the drafter has to catch up meanwhile."""
    monkeypatch.setattr("peagle.engine.device.worker.MOST_UNSEEN", most)
    prompt, how = PROMPTS[0], SamplingParams(max_tokens=100)
    found = []
    for engine in (repeating(make(method)), make(method)):
        engine.scheduler.pace.draft_length = tiny.GivenLengths([0, 0, 0, 0, 4])
        (request,) = tiny.run(engine, [prompt], how)
        assert [request.output] == plain([prompt], how)
        found.append(request.speculation.accepted_per_cycle[:12])
    assert found[0] == found[1]
    assert any(found[0])


def test_preempted_requests_go_on(make, plain):
    room = {"block_size": 4, "kv_cache_memory": 24 * 4 * 1024, "max_model_len": 84}
    engine = repeating(make(**room))
    requests = tiny.run(engine, PROMPTS, WAYS)
    assert engine.stats.preemptions > 0
    assert tiny.outputs(requests) == plain(PROMPTS, WAYS)


def test_a_step_has_as_much_as_the_host_takes_time_for():
    repeats = Repeats()
    assert repeats.wanted == 1
    for host, wanted in ((0.5e-3, 1), (2.5e-3, 3), (60e-3, MOST_REPEATS), (0.8e-3, 1)):
        for _ in range(100):
            repeats.took(CycleTime(64, 0, 1e-3, host))
        assert repeats.wanted == wanted


def test_one_long_wait_says_little():
    repeats = Repeats()
    for host in [0.5e-3] * 50 + [3.0] + [0.5e-3] * 20:
        repeats.took(CycleTime(64, 0, 1e-3, host))
    assert repeats.wanted == 1


def test_cycles_with_drafts_and_the_first_ones_say_nothing():
    repeats = Repeats()
    repeats.took(CycleTime(64, 4, 1e-3, 9e-3))
    repeats.took(CycleTime(64, 0, 1e-3))
    assert repeats.wanted == 1
