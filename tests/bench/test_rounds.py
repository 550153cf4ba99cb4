import dataclasses
from itertools import islice

import pytest

from peagle.bench import load
from peagle.bench.load import PromptWorkload, list_cases
from peagle.bench.pair import METHODS, Pair
from peagle.bench.prompts import load_prompts
from peagle.bench.rounds import median_runs, take_turns
from peagle.errors import InputError

CASES = list_cases(METHODS, [2], [1])


@pytest.fixture(scope="module")
def workload(pair):
    drafters = {"eagle3": str(pair.eagle3), "peagle": str(pair.peagle)}
    return PromptWorkload(Pair(str(pair.target), drafters), tuple(load_prompts("bundled", 2)), 6)


@pytest.fixture
def opened(monkeypatch):
    """Engines that were opened, in order."""
    opened, original = [], PromptWorkload.open

    def watched(self, *arguments):
        opened.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(PromptWorkload, "open", watched)
    return opened


def test_each_round_begins_with_the_next_case(workload, monkeypatch):
    order, original = [], load.OpenCase.run

    def watched(self, *arguments):
        order.append(self.case.method)
        return original(self, *arguments)

    monkeypatch.setattr(load.OpenCase, "run", watched)
    rounds = list(islice(take_turns(workload, CASES), 4))
    assert [order[start : start + 3] for start in range(0, 12, 3)] == [
        ["none", "eagle3", "peagle"],
        ["eagle3", "peagle", "none"],
        ["peagle", "none", "eagle3"],
        ["none", "eagle3", "peagle"],
    ]
    assert all([run.case for run in runs] == CASES for runs in rounds)
    assert all(run.identical_to_none for runs in rounds for run in runs)


def test_an_engine_is_opened_once_for_all_rounds(workload, opened):
    cases = list_cases(["none", "peagle"], [2, 3], [1, 2])
    list(islice(take_turns(workload, cases), 3))
    assert opened == [("none", 0, 2), ("peagle", 2, 2), ("peagle", 3, 2)]


def test_a_difference_in_any_round_is_kept(workload):
    first, second = islice(take_turns(workload, CASES), 2)
    other = dataclasses.replace(second[2], identical_to_none=False)
    medians = median_runs([first, [second[0], second[1], other]])
    assert [run.identical_to_none for run in medians] == [True, True, False]
    speeds = [tuple(runs[index].measures.otps for runs in (first, second)) for index in range(3)]
    assert [run.rounds for run in medians] == speeds


def test_without_none_no_text_is_compared(workload):
    runs = next(take_turns(workload, CASES[1:]))
    assert [run.identical_to_none for run in runs] == [None, None]


def test_what_does_not_fit_is_refused_before_any_turn(workload, opened):
    finished = []
    longer = dataclasses.replace(workload, max_tokens=500)
    with pytest.raises(InputError, match="context holds 512"):
        next(take_turns(longer, CASES, lambda: finished.append(1)))
    assert not finished
