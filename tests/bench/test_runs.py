from dataclasses import replace

import pytest

from peagle.bench.case import Case
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.runs import Results, Run

TIMES = Percentiles(10.0, 20.0, 30.0)
NONE, PEAGLE = Case("none", 0, 1), Case("peagle", 3, 1)
OTHER_LOAD = replace(PEAGLE, concurrency=4)
WARM = replace(PEAGLE, temperature=0.7)


def run(case, otps=100.0, outputs=((1, 2),), core_share=None):
    found = Measures(otps, 2.5, (0.9, 0.6), TIMES, TIMES, TIMES, 128)
    return Run(case, found, outputs, core_share=core_share)


def medians(cases, *runs, comparable=True):
    results = Results(cases, comparable)
    for each in runs:
        results.add(each)
    return results.medians()


def test_the_median_round_counts():
    speeds = [(30.0, 1.0), (10.0, 0.4), (20.0, 0.6)]
    (median,) = medians([NONE], *(run(NONE, otps, core_share=share) for otps, share in speeds))
    assert (median.measures.otps, median.rounds) == (20.0, (30.0, 10.0, 20.0))
    assert median.core_share == 0.6
    assert medians([NONE], run(NONE))[0].core_share is None


def test_a_case_without_a_run_is_left_out_and_a_round_counts_when_all_have_run():
    results = Results([NONE, PEAGLE], comparable=True)
    results.add(run(PEAGLE))
    assert [median.case for median in results.medians()] == [PEAGLE]
    assert results.rounds == 0
    results.add(run(NONE))
    assert results.rounds == 1


def test_one_difference_in_any_round_is_enough():
    other = run(PEAGLE, outputs=((1, 3),))
    none, peagle = medians([NONE, PEAGLE], run(NONE), run(NONE), run(PEAGLE), other)
    assert (none.same_text, peagle.same_text) == (True, False)


def test_texts_are_compared_with_nones_at_any_load_of_the_same_prompts_and_temperature():
    cases = [NONE, OTHER_LOAD, WARM, replace(PEAGLE, data="else")]
    found = medians(cases, *map(run, cases))
    assert [median.same_text for median in found] == [True, True, None, None]


def test_servers_are_compared_with_the_first_one():
    ours, theirs = Case("ours", None, 1), Case("theirs", None, 1)
    found = medians([ours, theirs], run(ours), run(theirs, outputs=(("x",),)))
    assert [median.same_text for median in found] == [True, False]


def test_requests_that_failed_are_no_other_text():
    """On either side; the reference is the first round that has them."""
    ours, theirs = Case("ours", None, 1), Case("theirs", None, 1)
    whole, half, wrong = (("x",), ("y",)), (("x",), None), (("x",), ("z",))
    rounds = [(ours, half), (theirs, whole), (ours, whole), (theirs, half)]
    each = [run(case, outputs=outputs) for case, outputs in rounds]
    assert [one.same_text for one in medians([ours, theirs], *each)] == [True, True]
    each[3] = run(theirs, outputs=wrong)
    assert [one.same_text for one in medians([ours, theirs], *each)] == [True, False]


def test_without_a_reference_nothing_is_compared():
    assert medians([PEAGLE], run(PEAGLE))[0].same_text is None
    (none,) = medians([NONE], run(NONE), comparable=False)
    assert none.same_text is None


def test_a_run_as_json_is_an_entry_of_the_result_file():
    entry = run(PEAGLE).as_json()
    case = ["method", "k", "concurrency", "draft_length", "data", "temperature", "request_rate"]
    speed = ["otps", "acceptance_length", "acceptance_rate_per_position"]
    times = ["ttft_ms", "itl_ms", "e2e_ms"]
    interval = "acceptance_length_interval"
    others = ["output_tokens", interval, "tokens_per_cycle", "mean_step_ms"]
    others += ["same_text", "rounds", "failed"]
    assert list(entry) == [*case, *speed, *times, *others]
    assert entry["ttft_ms"] == {"p50": 10.0, "p95": 20.0, "p99": 30.0}
    assert run(replace(PEAGLE, engine="vLLM")).as_json()["engine"] == "vLLM"
    assert run(PEAGLE, core_share=0.5).as_json()["core_share"] == 0.5
    assert replace(run(PEAGLE), branches=True).as_json()["branches"]


@pytest.mark.parametrize("failed", [0, 2])
def test_failed_requests_of_all_rounds_are_counted(failed):
    (median,) = medians([NONE], replace(run(NONE), failed=failed), run(NONE))
    assert median.failed == failed
