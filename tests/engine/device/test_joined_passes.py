"""Cycles and prompts in one pass give what they give apart, here on a CPU, uncaptured."""

from collections.abc import Sequence

import pytest
import tiny
import torch

from peagle.config import SamplingParams
from peagle.drafters.lookup import Lookup
from peagle.drafters.resident import CycleShape
from peagle.drafters.selector import SelectorConfig
from peagle.engine.device import prompt_attention
from peagle.engine.device.cycle import DeviceCycle
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.device.joined_passes import REQUESTS, JoinedPasses, Trial
from peagle.engine.device.prefill import MULTIPLE_BESIDE
from peagle.engine.device.rows import DeviceRows
from peagle.engine.engine import Engine
from peagle.engine.step import Chunk, Cycle, Step

PROMPTS = [[(5 * i + j + j * j) % tiny.MASK for j in range(9 + 7 * i)] for i in range(6)]
MIXED = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=20, temperature=1.1, seed=3),
    SamplingParams(max_tokens=9, repetition_penalty=1.3),
    SamplingParams(max_tokens=17, temperature=0.8, top_k=5, seed=4, num_speculative_tokens=0),
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=15, temperature=0.9, seed=5),
]
FAMILIES = ["easy", "qwen3_moe", "qwen3_windows", "gpt_oss", "gemma4", "gemma4_moe"]


def engine_of(
    target, drafter, joined: bool, lookup: Lookup | None = None, **changes: object
) -> Engine:
    """An engine on the device, whose prompts come in pieces while other requests write."""
    config = {"max_num_batched_tokens": 12, "max_num_seqs": 4, "draft_length": "fixed"}
    config = tiny.engine_config(**{**config, **changes})
    k = 4 if drafter or lookup else 0
    engine = tiny.engine(target.decoder, drafter, k, True, config, lookup)
    if joined:
        engine.worker.joined_passes.least_requests = 1
        engine.worker.joined_passes.most_rows = 1 << 20
    return engine


class Counted:
    """How often a worker joins passes, which are padded to few numbers of rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes, run = 0, CycleGraphs.run_beside

        def counted(graphs, rows, shape, prompts):
            self.passes += 1
            count = graphs.target_rows(len(rows), shape.drafts) + len(prompts.rows.tokens)
            assert count % MULTIPLE_BESIDE == 0
            return run(graphs, rows, shape, prompts)

        monkeypatch.setattr(CycleGraphs, "run_beside", counted)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


def told(requests: Sequence) -> list[object]:
    """What came out, and how drafts fared."""
    return [tiny.outputs(requests), [request.speculation for request in requests]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3", "selector"])
def test_texts_and_acceptance_are_the_same(
    targets, trained, tmp_path, joined: Counted, family: str, method: str
):
    target, drafter, params = targets[family], None, MIXED
    if method == "none":
        usual = {"num_speculative_tokens": None}
        params = [how.model_copy(update=usual) for how in MIXED]
    elif family == "easy" and method != "selector":
        drafter = trained[method].drafter
    else:
        selector = SelectorConfig(rank=8, candidates=12) if method == "selector" else None
        config = tiny.drafter_config(method != "eagle3", selector=selector)
        drafter = tiny.random_drafter_for(target.decoder, tmp_path, config)
    apart, together = (
        tiny.run(engine_of(target, drafter, each), PROMPTS, params) for each in (False, True)
    )
    assert told(together) == told(apart)
    assert joined.passes > 3


@pytest.mark.parametrize("lengths", [(4, 0, 2), (0, 0, 4)])
def test_lengths_may_change_from_pass_to_pass(
    targets, trained, joined: Counted, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
):
    """Also to none, while the drafter falls behind."""
    found = []
    for together in (False, True):
        engine = engine_of(
            targets["easy"], trained["peagle"].drafter, together, draft_length="auto"
        )
        engine.scheduler.pace.draft_length = tiny.GivenLengths(lengths)
        found.append(tiny.outputs(tiny.run(engine, PROMPTS, MIXED)))
    assert found[0] == found[1]
    assert joined.passes > 3


def test_taps_of_the_last_layer(targets, tmp_path, joined: Counted):
    target = targets["easy"]
    taps = (1, len(target.decoder.layers))
    drafter = tiny.random_drafter_for(
        target.decoder, tmp_path, tiny.drafter_config(True, taps=taps)
    )
    apart, together = (
        tiny.run(engine_of(target, drafter, each), PROMPTS, MIXED) for each in (False, True)
    )
    assert told(together) == told(apart)
    assert joined.passes > 3


def test_lookups_beside_prompts(targets, trained, joined: Counted):
    repeated = [[3, 1, 4, 1, 5, 9, 2, 6] * 3 + [i] for i in range(6)]
    found = []
    for together in (False, True):
        lookup = Lookup(2, 5, torch.device("cpu"))
        engine = engine_of(targets["easy"], trained["peagle"].drafter, together, lookup)
        found.append(told(tiny.run(engine, repeated, MIXED)))
    assert found[0] == found[1]
    assert joined.passes > 3


@pytest.mark.parametrize("how", [{"logprobs": 2}, {"prompt_logprobs": 1}, {"logit_bias": {5: 1.0}}])
def test_where_the_host_takes_part_nothing_is_joined(targets, trained, joined: Counted, how: dict):
    """Nor where tokens of a prompt are scored."""
    params = [each.model_copy(update=how) for each in MIXED]
    drafter = trained["peagle"].drafter
    apart, together = (
        tiny.run(engine_of(targets["easy"], drafter, each), PROMPTS, params)
        for each in (False, True)
    )
    assert tiny.outputs(together) == tiny.outputs(apart)
    assert not joined.passes


@pytest.mark.parametrize("method", ["none", "peagle"])
def test_without_memory_for_both_each_runs_by_itself(
    targets, trained, monkeypatch: pytest.MonkeyPatch, method: str
):
    """When drafts have been made already. Passes as large are not tried again."""
    drafter = None if method == "none" else trained[method].drafter
    params = [how.model_copy(update={"num_speculative_tokens": None}) for how in MIXED]
    expected = told(tiny.run(engine_of(targets["easy"], drafter, False), PROMPTS, params))
    ran, failed, run_beside = [], [], CycleGraphs.run_beside
    engine = engine_of(targets["easy"], drafter, True)

    def narrow(graphs, rows, shape, prompts):
        own = graphs.target_rows(len(rows), shape.drafts)
        if own + len(prompts.rows.ends) > graphs.target_rows(2, shape.drafts):
            failed.append(own)
            if shape.drafts:
                graphs.draft(rows, shape)
            raise torch.OutOfMemoryError
        ran.append(own)
        return run_beside(graphs, rows, shape, prompts)

    monkeypatch.setattr(CycleGraphs, "run_beside", narrow)
    assert told(tiny.run(engine, PROMPTS, params)) == expected
    assert ran
    assert 0 < len(failed) < 4


def test_without_memory_for_first_tokens_prompts_run_again(
    targets, trained, joined: Counted, monkeypatch: pytest.MonkeyPatch
):
    """And the cycle beside them has run."""
    drafter, more = trained["peagle"].drafter, {"max_num_batched_tokens": 48}
    prompts = [PROMPTS[-1][i:] for i in range(6)]
    expected = tiny.outputs(
        tiny.run(engine_of(targets["easy"], drafter, False, **more), prompts, MIXED)
    )
    refused, begin = [], DeviceRows.begin

    def narrow(rows, chunks, ends):
        if joined.passes and not refused:
            refused.append(len(chunks))
            raise torch.OutOfMemoryError
        begin(rows, chunks, ends)

    monkeypatch.setattr(DeviceRows, "begin", narrow)
    with pytest.warns(UserWarning, match="no memory for"):
        found = tiny.run(engine_of(targets["easy"], drafter, True, **more), prompts, MIXED)
    assert tiny.outputs(found) == expected
    assert refused


def test_short_prompts_attend_as_captured_ones_do(
    targets, trained, joined: Counted, monkeypatch: pytest.MonkeyPatch
):
    """Else a GPU would plan for each number of prompts and their length while it serves."""
    drafter, more = trained["peagle"].drafter, {"max_num_batched_tokens": 64}
    apart = tiny.run(engine_of(targets["easy"], drafter, False, **more), PROMPTS, MIXED)
    laid_out = prompt_attention._laid_out

    def alone(table, spans, padding):
        assert not padding, "passes beside cycles are padded"
        return laid_out(table, spans, padding)

    monkeypatch.setattr(prompt_attention, "_laid_out", alone)
    together = tiny.run(engine_of(targets["easy"], drafter, True, **more), PROMPTS, MIXED)
    assert tiny.outputs(together) == tiny.outputs(apart)
    assert joined.passes


def test_idle_rows_and_the_prompt_that_are_timed_have_different_tokens(
    targets, trained, joined: Counted, monkeypatch: pytest.MonkeyPatch
):
    """Rows that are all alike would ask for few experts only."""
    engine = engine_of(
        targets["qwen3_moe"], None, False, max_num_seqs=8, max_num_batched_tokens=512
    )
    read, verify = [], DeviceCycle._verify_beside

    def seen(cycle, state, requests, drafts, prompts):
        newest = state.emitted[requests, state.pending[requests] - 1]
        read.append((len({*newest.tolist()}), len({*prompts.rows.tokens.tolist()})))
        return verify(cycle, state, requests, drafts, prompts)

    monkeypatch.setattr(DeviceCycle, "_verify_beside", seen)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    with torch.inference_mode():
        engine.worker.joined_passes.measure()
    assert read[0][0] == 8
    assert read[0][1] > 64


TRIAL = Trial(0, tuple(range(100)), followed=True)


class Timed:
    """Passes whose times are given: (together, apart) by number of requests."""

    def __init__(self, times: dict[int, tuple[float, float]], most: int) -> None:
        self.times, self.sizes, self.clock, self._size = times, [most], 0.0, 0
        self.lengths, self.largest = (4,), 0

    def steady_run(self, size: int) -> tuple[list[int], None]:
        self._size, self.largest = size, max(size, self.largest)
        return list(range(size)), CycleShape(4, 5)

    def run_beside(self, *_: object) -> None:
        self.clock += self.times[self._size][0]

    def run(self, *_: object) -> None:
        self.clock += self.times[self._size][1]

    def target_rows(self, requests: int, drafts: int) -> int:
        return requests * (drafts + 1)

    def laid_out(self, *_: object) -> None:
        """No time."""


class Prompts(Timed):
    """Of prompts, that take none."""

    def __init__(self) -> None:
        super().__init__({}, 0)

    def run(self, *_: object) -> None:
        """No time."""


@pytest.mark.parametrize(
    ("gains", "most", "least"),
    [
        ((False, False, True), 256, 128),
        ((False, True, True), 128, 32),
        ((True, True, True), 200, 8),
        ((True, True, False), 128, None),
        ((True, False, True), 64, None),
        ((True, True, False), 64, 8),
        ((True, True, True), 4, None),
    ],
)
def test_from_how_many_requests_on_is_measured(
    monkeypatch: pytest.MonkeyPatch, gains: tuple[bool, ...], most: int, least: int | None
):
    """By the times of both ways, and only if all larger numbers gain, too."""
    times = {size: (1.0, 1.2 if gain else 1.01) for size, gain in zip(REQUESTS, gains, strict=True)}
    graphs = Timed(times, most)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("time.perf_counter", lambda: graphs.clock)
    passes = JoinedPasses(graphs, Prompts(), TRIAL, most_rows=1000)
    passes.measure()
    assert passes.least_requests == least


def test_passes_without_memory_stay_apart_and_too_large_ones_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
):
    graphs = Timed(dict.fromkeys(REQUESTS, (1.0, 1.2)), 128)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("time.perf_counter", lambda: graphs.clock)
    passes = JoinedPasses(graphs, Prompts(), TRIAL, most_rows=128 * 5 + 99)
    passes.measure()
    assert passes.least_requests == 8
    assert graphs.largest == 32

    def narrow(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(graphs, "run_beside", narrow)
    passes = JoinedPasses(graphs, Prompts(), TRIAL, most_rows=1000)
    passes.measure()
    assert passes.least_requests is None


def test_few_requests_prompts_alone_and_repeated_cycles_stay_apart():
    passes = JoinedPasses(Timed({}, 8), None, TRIAL, most_rows=11)
    cycles = tuple(Cycle(row, 5, 2) for row in range(3))
    chunks = (Chunk(7, 0, (1, 2), 3, completes=True),)
    step = Step(number=1, cycles=cycles, chunks=chunks)
    assert not passes.serve(step, 2)
    passes.least_requests = 3
    assert passes.serve(step, 2)
    assert not passes.serve(step, 3)
    assert not passes.serve(Step(number=1, cycles=cycles[:2], chunks=chunks), 2)
    assert not passes.serve(Step(number=1, cycles=cycles), 2)
    assert not passes.serve(Step(number=1, chunks=chunks), 2)
    assert not passes.serve(Step(number=1, cycles=cycles, chunks=chunks, repeats=2), 2)
    passes.found_too_large(step, 2)
    assert not passes.serve(step, 2)
    assert passes.serve(step, 1)
