"""The cycle that a GPU captures, run uncaptured: what the lossless invariant does not cover."""

import itertools
from collections.abc import Sequence

import pytest
import tiny
import torch
from random_engine import random_engine

from peagle.config import EngineConfig, SamplingParams
from peagle.drafters.selector import SelectorConfig
from peagle.engine.branching import Branching
from peagle.engine.cycle import Verified
from peagle.engine.cycle_times import MeasuredTimes
from peagle.engine.device.cycle import CycleShape
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.device.models import PromptEnds
from peagle.engine.device.prefill import Prefill
from peagle.engine.device.worker import DeviceWorker
from peagle.engine.draft_length import DraftLength
from peagle.engine.engine import Engine
from peagle.engine.host.batch import HostBatch
from peagle.engine.step import Outcome, PromptChunk, Step
from peagle.errors import InputError
from peagle.models.spec import LayerSpec, MLPSpec
from peagle.ops.draft import Draft
from peagle.set_acceptance import SetAcceptance

GEGLU = MLPSpec(96, activation="gelu_tanh")
PROMPTS = [[(5 * i + j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
SAMPLED = [
    SamplingParams(temperature=1.2, seed=3, max_tokens=12),
    SamplingParams(max_tokens=12),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.02, seed=4, max_tokens=12),
    SamplingParams(temperature=0.7, seed=5, max_tokens=12, num_speculative_tokens=0),
]

PENALIZED = [
    SamplingParams(max_tokens=14, repetition_penalty=1.4),
    SamplingParams(max_tokens=14, presence_penalty=2.0, frequency_penalty=1.5),
    SamplingParams(max_tokens=14),
    SamplingParams(temperature=0.9, seed=6, max_tokens=14, repetition_penalty=0.7),
]


def engine_of(target, drafter, resident: bool, **changes) -> Engine:
    k = 4 if drafter else 0
    return tiny.engine(target.decoder, drafter, k, resident, tiny.engine_config(**changes))


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_same_seeds_same_tokens_as_on_the_host(targets, trained, method: str):
    drafter = None if method == "none" else trained[method].drafter
    params = SAMPLED
    if method == "none":
        params = [how.model_copy(update={"num_speculative_tokens": None}) for how in SAMPLED]
    plain, resident = (
        tiny.run(engine_of(targets["easy"], drafter, on_device), PROMPTS, params)
        for on_device in (False, True)
    )
    assert tiny.outputs(resident) == tiny.outputs(plain)
    for one, other in zip(resident, plain, strict=True):
        if one.params.temperature == 0:
            assert one.speculation == other.speculation


RANDOM_DRAFTERS = {
    "selector": {"parallel": True, "selector": SelectorConfig(rank=8, candidates=12)},
    "windowed peagle": {"parallel": True, "windows": (None, 6)},
    "windowed eagle3": {"parallel": False, "windows": (6,)},
    "GeGLU": {"parallel": True, "layer": LayerSpec(tiny.ATTENTION, GEGLU)},
}


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["peagle", "eagle3", *RANDOM_DRAFTERS])
@pytest.mark.parametrize("hosted", [False, True])
def test_sampled_drafts_are_those_of_the_host(
    targets, trained, tmp_path, method: str, hosted: bool
):
    """Read from the drafts accepted, while the temperatures are fitted; also where cycles stop in
    between, or run beside requests that draft greedily."""
    if method in RANDOM_DRAFTERS:
        config = tiny.drafter_config(**RANDOM_DRAFTERS[method])
        drafter = tiny.random_drafter_for(targets["easy"].decoder, tmp_path, config)
    else:
        drafter = trained[method].drafter
    ways = [
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 9},
        {},
        {"temperature": 0.8, "min_p": 0.05},
    ]
    params = [
        SamplingParams(
            **way, seed=i, max_tokens=60, ignore_eos=True, logprobs=1 if hosted else None
        )
        for i, way in enumerate(ways)
    ]
    engines = [
        engine_of(targets["easy"], drafter, on, draft_length="fixed") for on in (False, True)
    ]
    plain, resident = (tiny.run(engine, PROMPTS, params) for engine in engines)
    assert tiny.outputs(resident) == tiny.outputs(plain)
    for one, other in zip(resident, plain, strict=True):
        assert one.speculation == other.speculation
        assert one.speculation.accepted > 0 or one.params.temperature == 0


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
@pytest.mark.parametrize("at_once", [1, 4])
def test_penalties_are_the_hosts(targets, trained, method: str, at_once: int):
    """One at a time, each finds the row of the one before it."""
    drafter = None if method == "none" else trained[method].drafter
    plain, resident, free = (
        tiny.run(engine_of(targets["easy"], drafter, on, max_num_seqs=at_once), PROMPTS, params)
        for on, params in ((False, PENALIZED), (True, PENALIZED), (True, PENALIZED[2]))
    )
    assert tiny.outputs(resident) == tiny.outputs(plain)
    changed = [
        one != other for one, other in zip(*map(tiny.outputs, (resident, free)), strict=True)
    ]
    assert changed == [True, True, False, True]


def test_preempted_requests_keep_their_penalties(targets, trained):
    params = [how.model_copy(update={"max_tokens": 40}) for how in PENALIZED]
    drafter, limits = trained["peagle"].drafter, {"max_model_len": 64}
    wide, narrow = (
        engine_of(targets["easy"], drafter, True, kv_cache_memory=size, **limits)
        for size in (1 << 20, 1 << 17)
    )
    expected = tiny.outputs(tiny.run(wide, PROMPTS, params))
    assert tiny.outputs(tiny.run(narrow, PROMPTS, params)) == expected
    assert narrow.scheduler.preemptions > 0
    assert wide.scheduler.preemptions == 0


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_a_lone_request_in_another_row_drafts_as_well(targets, trained, method: str):
    """Its place in the batch is not its row in the table, whose keys the later drafts read."""
    drafter, how = trained[method].drafter, SamplingParams(max_tokens=60)
    plain = tiny.run(engine_of(targets["easy"], drafter, False), PROMPTS[:1], how)[0]
    engine = engine_of(targets["easy"], drafter, True)
    others = [engine.add(str(i), prompt, how) for i, prompt in enumerate(PROMPTS[1:])]
    request = engine.add("last", PROMPTS[0], how)
    engine.step()
    for other in others:
        engine.abort(other.id)
    tiny.finish(engine)
    assert request.output == plain.output
    assert request.speculation.accepted_per_position == plain.speculation.accepted_per_position


def test_requests_that_need_the_host_run_beside_those_that_do_not(targets, trained):
    params = [
        SamplingParams(max_tokens=10, logprobs=2),
        SamplingParams(max_tokens=10),
        SamplingParams(max_tokens=10, repetition_penalty=1.3),
        SamplingParams(max_tokens=10, min_tokens=3),
    ]
    plain, mixed = (
        tiny.run(engine_of(targets["easy"], trained["peagle"].drafter, on), PROMPTS, params)
        for on in (False, True)
    )
    assert tiny.outputs(mixed) == tiny.outputs(plain)
    assert [request.speculation for request in mixed] == [request.speculation for request in plain]


@pytest.mark.parametrize("resident", [False, True])
def test_logits_that_are_no_numbers_end_their_request_alone(targets, trained, resident: bool):
    """A token that the embedding turns into NaN: whoever meets it fails, its neighbours do not."""
    target, bad = targets["easy"], 93  # which no request drafts
    engine = engine_of(target, trained["peagle"].drafter, resident)
    prompts = [[t if t != bad else t + 1 for t in prompt] for prompt in PROMPTS]
    expected = tiny.outputs(tiny.run(engine, prompts, SamplingParams(max_tokens=8)))
    engine = engine_of(target, trained["peagle"].drafter, resident)
    with tiny.nan_row(target.decoder.embed.weight, bad):
        poisoned = [[bad, *prompts[0]], *prompts[1:]]
        requests = tiny.run(engine, poisoned, SamplingParams(max_tokens=8))
    assert requests[0].finish_reason == "error"
    assert requests[0].output == []
    healthy = [pair for pair in zip(requests, expected, strict=True) if bad not in pair[1]][1:]
    assert healthy
    for request, output in healthy:
        assert (request.output, request.finish_reason) == (output, "length")


def test_an_aborted_request_leaves_the_flight_behind(targets, trained):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True)
    how = SamplingParams(max_tokens=20)
    expected = tiny.outputs(tiny.run(engine, PROMPTS, how))
    requests = [engine.add(str(i), prompt, how) for i, prompt in enumerate(PROMPTS)]
    engine.step()
    engine.abort("1")
    engine.step()
    engine.abort("2")
    again = engine.add("again", PROMPTS[2], how)
    tiny.finish(engine)
    assert [requests[0].output, requests[3].output] == [expected[0], expected[3]]
    assert again.output == expected[2]


def test_a_last_token_known_to_come_starts_no_further_cycle(targets, trained):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True)
    engine.add("one", PROMPTS[0], SamplingParams(max_tokens=1))
    assert engine.step() == []
    assert engine.scheduler.plan().work == ()
    assert [len(output.new_tokens) for output in engine.step()] == [1]


def test_a_missing_compiler_is_told_in_a_line(targets, monkeypatch):
    def fail(self: DeviceWorker, least_trees: int) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable")

    monkeypatch.setattr(DeviceWorker, "capture", fail)
    with pytest.raises(InputError, match="install gcc"):
        engine_of(targets["easy"], None, True)


def test_a_cycle_takes_no_rows_from_prompts(targets, trained):
    """Or a small number of them would keep prompts waiting for as long as others run."""
    config = {"max_num_batched_tokens": 3}
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True, **config)
    running = engine.add("running", PROMPTS[0], SamplingParams(max_tokens=40))
    while not running.output:
        engine.step()
    waiting = engine.add("waiting", PROMPTS[1], SamplingParams(max_tokens=2))
    while not waiting.output:
        engine.step()
    assert not running.finish_reason


@pytest.fixture
def begun(monkeypatch) -> list[list[str]]:
    """What each step on the device was: a cycle of so many, and prompts in which table rows."""
    found: list[list[str]] = []
    exchange, fill, cycle = DeviceWorker.exchange, Prefill.run, CycleGraphs.run

    def noted_step(self: DeviceWorker, step: Step) -> Outcome:
        found.append([])
        return exchange(self, step)

    def noted_fill(self: Prefill, chunks: list[PromptChunk], followed: bool) -> PromptEnds:
        found[-1] += [f"row {chunk.row}" for chunk in chunks]
        return fill(self, chunks, followed)

    def noted_cycle(self: CycleGraphs, rows: list[int], shape: CycleShape) -> bool:
        found[-1].append(f"cycle of {len(rows)}")
        return cycle(self, rows, shape)

    monkeypatch.setattr(DeviceWorker, "exchange", noted_step)
    monkeypatch.setattr(Prefill, "run", noted_fill)
    monkeypatch.setattr(CycleGraphs, "run", noted_cycle)
    return found


def test_first_tokens_come_before_the_next_step_begins(targets, trained, begun):
    """So that whoever asks meanwhile is in it; beside cycles nothing waits."""
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True)
    brought = []
    for newcomers in (["a"], [], ["b", "c"], ["d"], []):
        for name in newcomers:
            engine.add(name, PROMPTS[1], SamplingParams(max_tokens=40))
        brought.append({output.request_id for output in engine.step()})
    assert begun == [
        ["row 0"],
        [],
        ["cycle of 1", "row 1", "row 2"],
        ["cycle of 3", "row 3"],
        ["cycle of 4"],
    ]
    assert brought == [set(), {"a"}, set(), {"a", "b", "c"}, {"a", "b", "c", "d"}]
    tiny.finish(engine)


def test_nobody_waits_for_the_first_tokens_of_others(targets, trained, begun):
    """Not who asks in time for the next step, not the rest of a prompt, not the host's requests."""
    drafter, how = trained["peagle"].drafter, SamplingParams(max_tokens=40)
    alone, rest = [["row 0"], ["cycle of 1", "row 1"]], [["row 0"], ["row 1", "row 0"]]
    for rows, steps in ((64, alone), (16, rest)):
        engine = engine_of(targets["easy"], drafter, True, max_num_batched_tokens=rows)
        for name in "ab":
            engine.add(name, PROMPTS[2], how)
            engine.step()
        assert begun == steps
        tiny.finish(engine)
        begun.clear()
    engine = engine_of(targets["easy"], drafter, True)
    host = engine.add("host", PROMPTS[1], how.model_copy(update={"logprobs": 1}))
    engine.add("a", PROMPTS[1], how)
    engine.step()
    engine.step()
    assert begun == [["row 0", "row 1"], []]
    assert host.output_length == 2
    tiny.finish(engine)


def out_of_memory_above(most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let passes of more rows have no memory; returns the rows of those that were tried."""
    tried: list[int] = []
    fill, verify = Prefill.run, HostBatch.verify

    def note(rows: int) -> None:
        tried.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError

    def noted_fill(self: Prefill, chunks: list[PromptChunk], followed: bool) -> PromptEnds:
        note(sum(chunk.rows for chunk in chunks))
        return fill(self, chunks, followed)

    def noted_verify(self: HostBatch, draft: Draft) -> Verified:
        note(sum(part.span.count for part in self._parts))
        return verify(self, draft)

    monkeypatch.setattr(Prefill, "run", noted_fill)
    monkeypatch.setattr(HostBatch, "verify", noted_verify)
    return tried


@pytest.mark.parametrize("resident", [True, False])
def test_prompts_too_large_for_the_memory_come_in_smaller_chunks(
    targets, trained, monkeypatch, resident: bool
):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, resident)
    how = SamplingParams(max_tokens=6)
    prompts = [[(3 * i + j * j) % tiny.MASK for j in range(50)] for i in range(3)]
    expected = tiny.outputs(tiny.run(engine, prompts, how))
    engine = engine_of(
        targets["easy"], trained["peagle"].drafter, resident, enable_prefix_caching=False
    )
    tried = out_of_memory_above(40, monkeypatch)
    with pytest.warns(UserWarning, match="no memory for 150 prompt tokens"):
        assert tiny.outputs(tiny.run(engine, prompts, how)) == expected
    assert tried[:2] == [150, 75]


def test_no_memory_for_the_smallest_chunk_is_an_error(targets, trained, monkeypatch):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True)

    def none(self: Prefill, chunks: list[PromptChunk], followed: bool) -> PromptEnds:
        raise torch.OutOfMemoryError

    neighbour = engine.add("zero", PROMPTS[1], SamplingParams(max_tokens=30))
    engine.step()
    monkeypatch.setattr(Prefill, "run", none)
    request = engine.add("one", PROMPTS[0], SamplingParams(max_tokens=6))
    tiny.finish(engine)
    assert (request.output, request.finish_reason) == ([], "error")
    assert request.failure is not None
    assert request.failure.startswith("the GPU has no memory for ")
    assert (len(neighbour.output), neighbour.finish_reason) == (30, "length")


def test_a_later_chunk_without_memory_keeps_the_earlier_one(targets, trained, monkeypatch):
    """The chunk before it lands in the same step, and its blocks get their names."""
    drafter = trained["peagle"].drafter
    prompt = [(3 * i + i * i) % tiny.MASK for i in range(90)]
    how = SamplingParams(max_tokens=6)
    expected = tiny.run(engine_of(targets["easy"], drafter, True), [prompt], how)[0].output
    engine = engine_of(targets["easy"], drafter, True, max_num_batched_tokens=40)
    run, calls = Prefill.run, []

    def second_time_short(self: Prefill, chunks: list[PromptChunk], followed: bool) -> PromptEnds:
        calls.append(sum(item.rows for item in chunks))
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return run(self, chunks, followed)

    monkeypatch.setattr(Prefill, "run", second_time_short)
    with pytest.warns(UserWarning, match="no memory for 40 prompt tokens"):
        assert tiny.run(engine, [prompt], how)[0].output == expected
    assert engine.stats.prefix_hits >= 32
    assert max(calls[2:]) <= 20


def test_fewer_prompt_rows_leave_decoding_alone(targets, trained):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True, max_num_batched_tokens=64)
    requests = [engine.add(str(i), PROMPTS[0], SamplingParams(max_tokens=40)) for i in range(8)]
    for _ in range(3):
        engine.step()
    engine.scheduler.max_prompt_tokens = 16
    for _ in range(2):
        before = [request.output_length for request in requests]
        engine.step()
        assert all(r.output_length > n for r, n in zip(requests, before, strict=True))
    tiny.finish(engine)


def test_a_captured_cycle_does_not_wait_for_rows_of_others(targets, trained):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True, max_num_batched_tokens=5)
    engine.add("on the host", PROMPTS[0][:2], SamplingParams(max_tokens=60, logprobs=0))
    captured = engine.add("captured", PROMPTS[1][:3], SamplingParams(max_tokens=60))
    for _ in range(10):
        engine.step()
    assert captured.on_device
    before = captured.output_length
    for _ in range(5):
        engine.step()
    assert captured.output_length >= before + 5
    tiny.finish(engine)


@pytest.mark.parametrize("how", [{"num_speculative_tokens": 0}, {"logprobs": 1}])
def test_fewer_prompt_rows_are_not_taken_by_those_beyond_their_prompt(targets, trained, how):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, True, max_num_batched_tokens=64)
    engine.scheduler.max_prompt_tokens = 2
    asked = SamplingParams(max_tokens=30, **how)
    requests = [engine.add(str(i), PROMPTS[0][:4], asked) for i in range(8)]
    for _ in range(25):
        engine.step()
    assert all(request.output for request in requests)
    tiny.finish(engine)


def test_a_step_that_raises_loses_nobodys_tokens(targets, trained, monkeypatch):
    """What came for those on the device was not handed over yet: they begin again behind it."""
    drafter, how = trained["peagle"].drafter, SamplingParams(max_tokens=40)
    engine = engine_of(targets["easy"], drafter, True)
    [alone] = tiny.outputs(tiny.run(engine, PROMPTS[:1], how))
    one = engine.add("one", PROMPTS[0], how)
    for _ in range(4):
        engine.step()
    engine.add("other", PROMPTS[0], SamplingParams(max_tokens=9))

    def broken(*_: object) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(Prefill, "run", broken)
        assert engine.scheduler.in_flight
        with pytest.raises(RuntimeError):
            engine.step()
    tiny.finish(engine)
    assert one.output == alone


@pytest.mark.parametrize("on_device", [False, True])
def test_set_acceptance_emits_the_length_asked_for(targets, trained, on_device: bool):
    drafter = trained["peagle"].drafter
    rates, how = (0.8, 0.5, 0.3, 0.1), SamplingParams(max_tokens=200)
    acceptance = SetAcceptance(rates)
    with tiny.on_device(on_device):
        engine = Engine(
            targets["easy"].decoder, drafter, 4, tiny.engine_config(), acceptance=acceptance
        )
    done = tiny.run(engine, PROMPTS[:1], how)[0].speculation
    assert done.acceptance_length == pytest.approx(1 + sum(rates), abs=0.06)
    assert [n / done.cycles for n in done.accepted_per_position] == pytest.approx(rates, abs=0.05)


def test_synthetic_acceptance_of_a_few_cycles_is_about_the_length_asked_for(targets, trained):
    drafter = trained["peagle"].drafter
    rates, how = (0.69, 0.48, 0.33), SamplingParams(max_tokens=16, ignore_eos=True)
    acceptance = SetAcceptance(rates)
    engine = Engine(
        targets["easy"].decoder, drafter, 3, tiny.engine_config(), acceptance=acceptance
    )
    done = tiny.run(engine, PROMPTS[:1], how)[0].speculation
    assert done.acceptance_length == pytest.approx(2.5, rel=0.12)


class Drawn(DraftLength):
    """Lengths in a given order, again and again."""

    def __init__(self, lengths: list[int]) -> None:
        times = MeasuredTimes({64: dict.fromkeys(lengths, 1.0)})
        super().__init__(times, False, Branching(max(lengths), 0, 0))
        self._drawn = itertools.cycle(lengths)
        self._next = next(self._drawn)

    def choose(self, requests: int, followed: int, branch: bool = True) -> int:
        return self._next

    def launched(self, requests: int, followed: int, drafts: int, branch: bool = True) -> None:
        self._next = next(self._drawn)


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_cycles_of_changing_length_emit_the_same(targets, trained, method: str, temperature: float):
    """Shorter after longer, the reverse, and requests that begin in between."""
    how = SamplingParams(temperature=temperature, seed=8, max_tokens=50)
    drafter = trained[method].drafter
    plain = tiny.outputs(tiny.run(engine_of(targets["easy"], drafter, False), PROMPTS, how))
    engine = engine_of(targets["easy"], drafter, True, draft_length="auto")
    lengths = [4, 1, 3, 1, 4, 4, 3, 3]
    engine.scheduler.pace.draft_length = Drawn(lengths)
    requests = [engine.add(str(i), prompt, how) for i, prompt in enumerate(PROMPTS[:3])]
    for _ in range(4):
        engine.step()
    requests.append(engine.add("late", PROMPTS[3], how))
    tiny.finish(engine)
    assert tiny.outputs(requests) == plain
    for did in (request.speculation for request in requests):
        assert did.cycles < did.drafted < 4 * did.cycles


def test_lengths_are_chosen_by_what_was_accepted(targets, trained):
    """Every verification is learnt from, with the drafts that its request got."""
    seen: list[tuple[int, int]] = []

    class Seeing(DraftLength):
        def verified(self, cycle: Sequence[tuple[int, int]], branched: bool = False) -> None:
            seen.extend(request for request in cycle if request[0])
            super().verified(cycle, branched)

    params = [SamplingParams(max_tokens=60, num_speculative_tokens=k) for k in (None, 2, 0, None)]
    drafter = trained["peagle"].drafter
    plain = tiny.outputs(tiny.run(engine_of(targets["easy"], drafter, False), PROMPTS, params))
    engine = engine_of(targets["easy"], drafter, True, draft_length="auto")
    times = MeasuredTimes({4: {1: 1.0, 3: 1.5, 4: 1.6}})
    engine.scheduler.pace.draft_length = Seeing(times, False, Branching(4, 0, 0))
    requests = tiny.run(engine, PROMPTS, params)
    assert tiny.outputs(requests) == plain
    assert seen[0][0] == 4
    assert seen[-1][0] == 1
    done = [request.speculation for request in requests]
    assert sum(drafts for drafts, _ in seen) == sum(did.drafted for did in done)
    assert sum(accepted for _, accepted in seen) == sum(did.accepted for did in done)
    assert done[2].drafted == 0


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_cycles_of_changing_length_draft_as_from_scratch(targets, trained, method: str):
    """Whatever lengths came before, the drafter's keys and features are those of the tokens."""
    target, drafter = targets["easy"].decoder, trained[method].drafter
    engine = engine_of(targets["easy"], drafter, True, draft_length="auto")
    lengths = [4, 1, 3, 1, 4, 4, 3, 3]
    engine.scheduler.pace.draft_length = Drawn(lengths)
    request = tiny.run(engine, PROMPTS[:1], SamplingParams(max_tokens=50))[0]
    known, hits = request.prompt_length + 1, 0
    pairs = zip(itertools.cycle(lengths), request.speculation.accepted_per_cycle, strict=False)
    for length, accepted in pairs:
        follows = request.tokens[known : known + length]
        if len(follows) < length:
            break
        drafts = tiny.propose(drafter, target, request.tokens[:known], length).drafts
        agreed = [draft == token for draft, token in zip(drafts, follows, strict=True)]
        assert accepted == [*agreed, False].index(False)
        known, hits = known + accepted + 1, hits + accepted
    assert hits > 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_requests_come_and_go_without_the_host_waiting_for_the_device():
    """Short prompts, which are captured, and one of more rows than that."""
    rates, how = (0.8, 0.5, 0.3, 0.1), EngineConfig(max_num_seqs=3, enable_prefix_caching=False)
    engine = random_engine("tiny", "peagle", 4, rates, how)
    for again in range(2):  # what is compiled and allocated at first may wait
        torch.cuda.set_sync_debug_mode("error" if again else "default")
        try:
            for i, length in enumerate((9, 40, 700, 3, 80)):
                prompt = [(i + 7 * j) % 512 for j in range(length)]
                engine.add(f"{again} {i}", prompt, SamplingParams(max_tokens=8 + 5 * i))
            tiny.finish(engine)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_contexts_of_windows_end_where_drafts_would_reach_beyond(targets, tmp_path):
    """The longest context fills its blocks; drafts of the last cycles have no place there."""
    decoder = targets["qwen3_windows"].decoder
    drafter = tiny.random_drafter_for(decoder, tmp_path, tiny.drafter_config(True))
    prompt = PROMPTS[0]
    changes = {"max_model_len": 32, "block_size": 4, "max_num_seqs": 1}
    config = tiny.engine_config(**changes)
    params = SamplingParams(max_tokens=32 - len(prompt), ignore_eos=True)
    plain, drafted = (
        tiny.run(tiny.engine(decoder, by, k, True, config), [prompt], params)
        for by, k in ((None, 0), (drafter, 5))
    )
    assert tiny.outputs(drafted) == tiny.outputs(plain)
    assert len(tiny.outputs(drafted)[0]) == 32 - len(prompt)
