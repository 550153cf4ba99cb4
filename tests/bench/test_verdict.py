"""Verdicts on made-up times: what a machine does to equal and to unequal methods."""

import itertools
import math
import random
from dataclasses import replace

import pytest

from peagle.bench.advice import Price, advise
from peagle.bench.case import Case
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.runs import Results, Run
from peagle.bench.verdict import Ranking, Ratio, compare, doubts, interval, judge, speed_up

NO_TIMES = Percentiles(0.0, 0.0, 0.0)
ROUNDS = 12


def run(method, otps, length=3.0, k=5, core_share=1.0):
    found = Measures(otps, length, (), NO_TIMES, NO_TIMES, NO_TIMES, 100)
    case = Case(method, 0 if method == "none" else k, 1)
    return Run(case, found, ((1, 2),), core_share=core_share)


def median_runs(rounds):
    results = Results([one.case for one in rounds[0]], comparable=True)
    for turns in rounds:
        for one in turns:
            results.add(one)
    return results.medians()


def measured(speeds, seed, noise, bursts, rounds=ROUNDS):
    """Median runs on a machine whose speed drifts from round to round and has bursts of work."""
    chance = random.Random(seed)
    made = []
    for _ in range(rounds):
        drift = chance.lognormvariate(0.0, 0.15)
        turns = []
        for method, speed in speeds.items():
            slower = chance.lognormvariate(0.0, noise)
            if chance.random() < bursts:
                slower *= chance.uniform(1.3, 2.5)
            turns.append(run(method, speed * drift / slower))
        made.append(turns)
    return median_runs(made)


SPEEDS = {"none": 300.0, "eagle3": 450.0, "peagle": 450.0}


@pytest.mark.parametrize("bursts", [0.0, 0.03])
def test_a_difference_of_a_tenth_is_named_in_six_of_six(bursts):
    for seed in range(6):
        verdict = judge(measured(SPEEDS | {"peagle": 495.0}, seed, noise=0.02, bursts=bursts))
        assert verdict.clear
        assert verdict.first.case.method == "peagle"
        assert verdict.second.case.method == "eagle3"


@pytest.mark.parametrize(
    ("noise", "bursts", "most"), [(0.001, 0.0, 0), (0.02, 0.0, 0), (0.02, 0.1, 0), (0.05, 0.2, 5)]
)
def test_equal_methods_have_no_winner(noise, bursts, most):
    """However bad the machine, not more often than the confidence allows."""
    named = sum(judge(measured(SPEEDS, seed, noise, bursts)).clear for seed in range(100))
    assert named <= most


def test_a_lead_of_one_percent_is_no_lead_however_steady_the_machine():
    assert not judge(measured(SPEEDS | {"peagle": 454.5}, 0, noise=0.0, bursts=0.0)).clear


def test_no_speculation_may_be_the_fastest():
    verdict = judge(measured(SPEEDS | {"none": 600.0}, 0, noise=0.02, bursts=0.0))
    assert verdict.clear
    assert verdict.first.case.method == "none"


def test_a_method_is_judged_by_its_fastest_k():
    speeds = {3: 100.0, 5: 120.0, 7: 110.0}
    runs = [replace(run("peagle", speed, k=k), rounds=(speed,) * 6) for k, speed in speeds.items()]
    verdict = judge([replace(run("none", 90.0), rounds=(90.0,) * 6), *runs])
    assert verdict.first.case.k == 5
    assert verdict.second.case.method == "none"
    assert verdict.lead.median == pytest.approx(120 / 90)


def test_too_few_rounds_decide_nothing():
    speeds = SPEEDS | {"peagle": 900.0}
    few = judge(measured(speeds, 0, noise=0.0, bursts=0.0, rounds=5))
    assert not few.clear
    assert not few.lead.bounded
    assert judge(measured(speeds, 0, noise=0.0, bursts=0.0, rounds=6)).clear


def test_rounds_are_compared_in_pairs():
    """A machine that slows down by half hides no difference."""
    none, peagle = (
        replace(run(method, 1.0), rounds=tuple(speed / slower for slower in (1, 1, 1, 2, 2, 2)))
        for method, speed in (("none", 100.0), ("peagle", 150.0))
    )
    assert compare(peagle, none) == Ratio(1.5, 1.5, 1.5)
    assert speed_up(peagle, [none, peagle]) == Ratio(1.5, 1.5, 1.5)
    assert speed_up(peagle, [peagle]) is None
    assert not Ranking(peagle, none, Ratio(1.5, 1.01, 1.9)).clear


def test_what_is_advised_is_the_fastest_by_the_speed_ups_that_are_told():
    """Of three rounds, relative speeds say otherwise."""
    none, eagle3, peagle = (
        replace(run(method, otps), rounds=rounds)
        for method, otps, rounds in (
            ("none", 100.0, (100.0, 100.0, 40.0)),
            ("eagle3", 156.0, (156.0, 200.0, 40.0)),
            ("peagle", 165.0, (165.0, 150.0, 80.0)),
        )
    )
    runs = [none, eagle3, peagle]
    gains = {one.case.method: speed_up(one, runs).median for one in runs}
    assert gains["peagle"] > gains["eagle3"]
    assert advise(runs).fastest is peagle
    verdict = judge(runs)
    assert not verdict.clear
    assert verdict.first is peagle


def test_the_fastest_are_found_by_rounds_too():
    """The slower one ran once more often while the machine was fast."""
    fast, slow = (
        replace(run(method, otps), rounds=rounds)
        for method, otps, rounds in (
            ("peagle", 105.0, (105.0, 105.0, 105.0, 105.0, 210.0, 210.0, 150.0)),
            ("eagle3", 200.0, (100.0, 100.0, 100.0, 200.0, 200.0, 200.0, 200.0)),
        )
    )
    verdict = judge([slow, fast])
    assert (verdict.first, verdict.second) == (fast, slow)
    assert not verdict.clear
    assert verdict.lead.median == pytest.approx(1.05)


def exact_coverage(count):
    """The share of all ways to lie on either side of the median in which the interval holds it."""
    held = 0
    for sides in itertools.product((-1, 1), repeat=count):
        values = [side * (place + 1.0) for place, side in enumerate(sides)]
        low, high = interval(values)
        held += low <= 0.0 <= high
    return held / 2**count


@pytest.mark.parametrize("count", [6, 8, 9, 12])
def test_the_interval_holds_the_median_as_often_as_it_says_and_is_not_wider_than_needed(count):
    assert 0.95 <= exact_coverage(count) < 1.0
    ordered = [float(value) for value in range(count)]
    low, high = interval(ordered)
    beyond = 2 * sum(math.comb(count, place) for place in range(int(low) + 2)) / 2**count
    assert low + high == count - 1
    assert beyond > 0.05


def test_an_interval_of_few_values_has_no_bounds():
    assert interval([1.0] * 5) == (0.0, math.inf)


def quiet(method, speed, length=3.0, **others):
    return replace(run(method, speed, length, **others), rounds=(speed,) * 6)


def test_nothing_is_doubted_on_a_quiet_machine():
    assert not list(doubts([quiet("none", 300.0, 1.0), quiet("peagle", 490.0)]))


def test_a_speed_up_above_the_acceptance_length_is_doubted():
    (doubt,) = doubts([quiet("none", 100.0, 1.0), quiet("eagle3", 875.0, 4.34)])
    assert "8.75 cannot be" in doubt
    assert "EAGLE-3 at K = 5 emits 4.34 tokens" in doubt


def test_a_speed_up_is_compared_with_its_own_rounds_tokens_a_cycle():
    """By load: most cycles of the median round drafted nothing, and the machine was slow before."""
    none = replace(run("none", 100.0, 1.0), rounds=(90.0, 100.0))
    found = replace(run("peagle", 104.0), rounds=(99.0, 104.0))
    rare = replace(found.measures, acceptance_length=1.0, tokens_per_cycle=1.05)
    assert not list(doubts([none, replace(found, measures=rare)]))
    fewer = replace(rare, tokens_per_cycle=1.01)
    (doubt,) = doubts([none, replace(found, measures=fewer)])
    assert "1.04 cannot be" in doubt


def test_ours_may_be_faster_than_a_peer_without_speculation_too():
    ours, peer = (
        replace(quiet("none", otps, 1.0), case=Case("none", 0, 1, engine=engine))
        for engine, otps in (("peagle", 261.0), ("vLLM", 201.0))
    )
    assert speed_up(ours, [ours, peer]) == Ratio(pytest.approx(261 / 201), 0.0, math.inf)
    assert not list(doubts([ours, peer]))


def test_a_busy_machine_is_named():
    (doubt,) = doubts(
        [quiet("none", 300.0, 1.0, core_share=0.4), quiet("peagle", 490.0, core_share=0.6)]
    )
    assert "had this one's core for 50% of the time" in doubt
    unknown = [quiet("none", 300.0, 1.0, core_share=None), quiet("peagle", 490.0, core_share=None)]
    assert not list(doubts(unknown))


def test_a_server_may_be_any_number_of_times_as_fast_as_another():
    def server(name, speed, length):
        return replace(quiet(name, speed, length), case=Case(name, None, 1))

    runs = [server("theirs", 100.0, 3.0), server("ours", 900.0, None)]
    assert not list(doubts(runs))
    assert speed_up(runs[1], runs).median == 9.0
    assert judge(runs).first is runs[1]


def test_an_unsteady_machine_is_named_but_not_one_bad_round():
    none, peagle = quiet("none", 300.0, 1.0), quiet("peagle", 490.0)
    assert not list(doubts([none, replace(peagle, rounds=(490.0,) * 5 + (245.0,))]))
    (doubt,) = doubts([none, replace(peagle, rounds=(490.0,) * 4 + (245.0,) * 2)])
    assert "1.6 times as long in one quarter of the rounds" in doubt
    assert not list(doubts([replace(run, rounds=run.rounds[:1]) for run in (none, peagle)]))


def grid(noise, seed, speeds):
    """Rounds of a grid of methods and Ks, speeds by (method, K)."""
    chance = random.Random(seed)
    rounds = []
    for _ in range(6):
        drift = chance.lognormvariate(0.0, 0.1)
        rounds.append(
            [
                run(method, speed * drift * chance.lognormvariate(0.0, noise), k=k)
                for (method, k), speed in speeds.items()
            ]
        )
    return median_runs(rounds)


FLAT = {("none", 0): 300.0} | {(m, k): 450.0 for m in ("eagle3", "peagle") for k in (3, 5, 7)}


def test_six_rounds_of_a_grid_name_a_difference_of_a_tenth_in_six_of_six():
    """The case that is faster than the six equal ones is what to use, and is clearly faster."""
    for seed in range(6):
        found = advise(grid(0.005, seed, FLAT | {("peagle", 5): 495.0}))
        assert (found.choice.case.method, found.choice.case.k) == ("peagle", 5)
        assert found.clear
        assert found.gain.low > 1.5
        assert judge(grid(0.005, seed, FLAT | {("peagle", 5): 495.0})).clear


def test_of_equal_cases_none_is_named_however_many_there_are():
    for seed in range(20):
        runs = grid(0.02, seed, FLAT)
        assert not judge(runs).clear
        assert len(advise(runs).others) == 5


def test_what_is_not_clearly_faster_than_no_speculation_is_not_advised():
    slow = advise(grid(0.02, 0, dict.fromkeys(FLAT, 300.0)))
    assert slow.choice.case.method == "none"
    assert not slow.clear
    faster = grid(0.01, 0, FLAT | {("none", 0): 600.0})
    assert advise(faster).choice.case.method == "none"
    assert advise(faster).gain is None


def test_in_too_few_rounds_the_fastest_is_named_and_not_sure():
    few = [replace(one, rounds=one.rounds[:4]) for one in grid(0.01, 0, FLAT)]
    found = advise(few)
    assert found.choice is found.fastest
    assert found.choice.case.method != "none"
    assert not found.clear


def test_a_server_may_be_called_none():
    ours, theirs = (replace(quiet(name, 90.0), case=Case(name, None, 1)) for name in ("a", "none"))
    assert speed_up(theirs, [ours, theirs]) == compare(theirs, ours)
    assert theirs.case.label == "none"


def test_a_method_alone_has_no_verdict_but_a_best_k():
    runs = [quiet("peagle", speed, k=k) for k, speed in {3: 100.0, 5: 120.0}.items()]
    assert judge(runs) is None
    assert advise(runs).choice.case.k == 5


def test_a_case_that_was_stopped_earlier_is_compared_as_far_as_it_went():
    none = replace(run("none", 100.0), rounds=(100.0,) * 5)
    peagle = replace(run("peagle", 150.0), rounds=(150.0,) * 5 + (1.0,))
    assert compare(peagle, none).median == compare(none, peagle).median ** -1 == 1.5
    assert judge([none, peagle]).first is peagle


def test_a_price_and_a_rate_make_costs():
    price = Price(per_hour=3.6, target_rate=10_000.0)
    assert price.tokens_per_dollar(500.0) == pytest.approx(500_000)
    assert price.machines(500.0) == 20
    assert price.machines(501.0) == 20
    assert (Price().tokens_per_dollar(1.0), Price().machines(1.0)) == (None, None)
