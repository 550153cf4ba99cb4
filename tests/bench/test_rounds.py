import dataclasses
from types import SimpleNamespace

import pytest

from peagle.bench.case import Case, Grid, Setup
from peagle.bench.load import EngineCase, open_case
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.pair import METHODS, Pair
from peagle.bench.prompts import load_sets
from peagle.bench.rounds import run_engines, take_turns
from peagle.bench.runs import Failure, Results, Run
from peagle.bench.workload import PromptWorkload
from peagle.config import SamplingParams
from peagle.errors import InputError, MemoryShortageError
from peagle.ops.weight import QuantizedWeight

CASES = Grid([1]).cases(METHODS, {method: [2] for method in METHODS})


@pytest.fixture
def workload(pair):
    drafters = {"eagle3": str(pair.eagle3), "peagle": str(pair.peagle)}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    return PromptWorkload(Pair(str(pair.target), drafters), load_sets(["bundled"], 2), params)


@pytest.fixture
def opened(monkeypatch):
    """Engines that were opened, in order: method, K, seats, and whether beside others."""
    opened, original = [], PromptWorkload.open

    def watched(self, setup, concurrency, shared=False):
        opened.append((setup.method, setup.k, concurrency, shared))
        return original(self, setup, concurrency, shared)

    monkeypatch.setattr(PromptWorkload, "open", watched)
    return opened


def made_up(case, otps=1.0, outputs=((1,),)):
    none = Percentiles(0.0, 0.0, 0.0)
    return Run(case, Measures(otps, 1.0, (), none, none, none, 1), outputs)


def ready(*methods, run=made_up):
    cases = [Case(method, 0, 1) for method in methods]
    return [
        SimpleNamespace(case=case, run=lambda on_finish, case=case: run(case)) for case in cases
    ]


def test_each_round_begins_with_the_next_case():
    order = [run.case.method for run in take_turns(ready("a", "b", "c"), 4)]
    assert "".join(order) == "abcbcacababc"


def test_a_case_that_fails_is_left_out_and_the_others_go_on():
    def run(case):
        if case.method == "b":
            raise InputError("the server is gone")
        return made_up(case)

    done = list(take_turns(ready("a", "b", "c", run=run), 2))
    assert done[1] == Failure(Case("b", 0, 1), "the server is gone")
    assert [each.case.method for each in done] == ["a", "b", "c", "c", "a"]


def test_methods_take_turns_and_write_what_none_writes(workload):
    results, finished = Results(CASES, comparable=True), []
    for run in run_engines(workload, CASES, 2, lambda: finished.append(1)):
        results.add(run)
    medians = results.medians()
    assert [run.case for run in medians] == CASES
    assert all(run.same_text and len(run.rounds) == 2 for run in medians)
    assert len(finished) == 2 * 2 * len(CASES)


def test_an_engine_is_opened_once_for_all_rounds_and_loads(workload, opened):
    cases = Grid([1, 2]).cases(["none", "peagle"], {"peagle": [2, 3]})
    assert len(list(run_engines(workload, cases, 3))) == 3 * len(cases)
    assert opened == [("none", 0, 2, True), ("peagle", 2, 2, True), ("peagle", 3, 2, True)]


def test_drafters_are_rounded_where_the_pair_says_so(pair):
    chosen = Pair(str(pair.target), {"peagle": str(pair.peagle)}, "fp8")
    params = SamplingParams(max_tokens=4)
    workload = PromptWorkload(chosen, load_sets(["bundled"], 2), params)
    llm = workload.open(Setup("peagle", 2, "fixed"), 1)
    assert isinstance(llm.engine.core.proposer.model.readout.head.weight, QuantizedWeight)


def test_engines_share_the_targets_weights(workload):
    none, peagle = (workload.open(CASES[index].setup, 1, shared=True) for index in (0, 2))
    ours, theirs = (llm.engine.core.target.embed.weight.data_ptr() for llm in (none, peagle))
    assert ours == theirs


def test_beside_others_an_engine_holds_what_its_requests_need(workload):
    alone, beside = (workload.open(CASES[2].setup, 2, shared) for shared in (False, True))
    assert beside.engine.core.blocks.num_blocks < alone.engine.core.blocks.num_blocks
    case = dataclasses.replace(CASES[2], concurrency=2)
    open_case(workload, beside, case).run()
    assert beside.engine.stats.preemptions == 0


def test_engines_that_do_not_fit_together_run_one_after_the_other(workload, opened, monkeypatch):
    original, told = PromptWorkload.open, []

    def crowded(self, setup, concurrency, shared=False):
        if shared and setup.method == "peagle":
            raise MemoryShortageError("3.0 GiB are missing. Take a larger GPU")
        return original(self, setup, concurrency, shared)

    monkeypatch.setattr(PromptWorkload, "open", crowded)
    runs = list(run_engines(workload, CASES, 2, warn=told.append))
    assert [run.case.method for run in runs] == [m for m in METHODS for _ in range(2)]
    (sentence,) = told
    assert "do not fit beside one another (3.0 GiB are missing), so each runs all" in sentence
    assert opened[-3:] == [("none", 0, 1, False), ("eagle3", 2, 1, False), ("peagle", 2, 1, False)]


def test_one_engine_that_does_not_fit_is_refused(workload, monkeypatch):
    monkeypatch.setattr(
        PromptWorkload, "open", lambda *_: (_ for _ in ()).throw(InputError("no memory"))
    )
    with pytest.raises(InputError, match="no memory"):
        next(run_engines(workload, CASES[:1], 1))


def test_what_no_memory_mends_is_refused_before_any_turn(workload, monkeypatch):
    def refused(*_):
        raise InputError("the chat template refuses this")

    monkeypatch.setattr(PromptWorkload, "requests", refused)
    told = []
    with pytest.raises(InputError, match="template refuses"):
        next(run_engines(workload, CASES, 1, warn=told.append))
    assert not told


def test_what_does_not_fit_is_refused_before_any_turn(workload):
    finished = []
    longer = SamplingParams(max_tokens=500, ignore_eos=True)
    with pytest.raises(InputError, match="context holds 512; lower --max-tokens"):
        next(
            run_engines(
                dataclasses.replace(workload, sampling=longer),
                CASES[:1],
                1,
                lambda: finished.append(1),
            )
        )
    assert not finished


def test_a_run_knows_for_how_much_of_its_time_it_had_a_core(workload, monkeypatch):
    (run,) = run_engines(workload, CASES[:1], 1)
    assert 0.0 < run.core_share <= 1.1  # two clocks
    monkeypatch.setattr("peagle.bench.load.time.thread_time", lambda: 1.0)  # it never runs
    (run,) = run_engines(workload, CASES[:1], 1)
    assert run.core_share == 0.0


def test_a_failed_request_fails_the_case(workload, monkeypatch):
    def fail(done):
        raise InputError("prompt 1 ended with an error: NaN")

    original = EngineCase.run

    def run(self, on_finish):
        monkeypatch.setattr("peagle.bench.load.check_finished", fail)
        return original(self, on_finish)

    monkeypatch.setattr(EngineCase, "run", run)
    (failure,) = run_engines(workload, CASES[:1], 2)
    assert failure.reason == "prompt 1 ended with an error: NaN"
