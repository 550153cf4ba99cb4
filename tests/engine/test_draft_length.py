"""The number of drafts that a cycle gets."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import at_night

from peagle.engine.branching import Branching
from peagle.engine.cycle_times import MeasuredTimes, RunningTimes, Seconds
from peagle.engine.draft_length import MIN_CYCLES, DraftLength, candidate_lengths
from peagle.engine.step import CycleTime

FLAT = {1: {1: 5.0, 3: 5.2, 7: 5.6}}
"""Seconds where rows cost next to nothing: one request."""
STEEP = {64: {1: 9.0, 3: 12.0, 7: 21.0}}
"""Where each row costs."""


ANY = {0: 4.5, 1: 5.2, 3: 5.3, 7: 5.6}
"""One request on a GPU, where a cycle may have no drafts."""
MANY = {0: 12.0, 1: 14.0, 3: 17.0, 7: 24.0}
"""64 requests there."""
CHAINS = Branching(7, 0, 0)
"""Seven drafts at most, which never branch."""
FREE, CROWDED = {1: {0: 4.5, 1: 4.6, 3: 4.7, 7: 4.8}}, {64: {0: 12.0, 1: 40.0, 3: 60.0, 7: 90.0}}
"""Where drafts cost next to nothing, and where no draft is worth its time."""
ON_A_CPU = {0: 1.0, 1: 1.5, 3: 1.8, 7: 2.3}


def draft_length(seconds: Seconds) -> DraftLength:
    """One that always drafts."""
    return DraftLength(MeasuredTimes(seconds), False, CHAINS)


def chosen_for(length: DraftLength, requests: int) -> int:
    """The drafts of a cycle that is launched."""
    drafts = length.choose(requests, requests)
    length.launched(requests, requests, drafts)
    return drafts


def settled(length: DraftLength, requests: int, rate: float, verifications: int = 8000) -> int:
    """What is chosen once drafts were accepted at a rate."""
    for lot in lots([rate] * 7, verifications):
        length.verified([drawn(chosen_for(length, requests), lot)])
    return length.choose(requests, requests)


def lots(rates: list[float], count: int) -> list[int]:
    """How many drafts in a row are right, so many times, where each has its chance."""
    draw = random.Random(0)
    return [[draw.random() < rate for rate in [*rates, 0]].index(False) for _ in range(count)]


def drawn(drafts: int, right: int) -> tuple[int, int]:
    return drafts, min(drafts, right)


def changes(chosen: list[int]) -> int:
    return sum(one != other for one, other in pairwise(chosen))


def test_lengths():
    assert candidate_lengths(8) == (0, 1, 3, 6, 8)
    assert candidate_lengths(7) == (0, 1, 3, 7)
    assert candidate_lengths(2) == (0, 1, 2)
    assert candidate_lengths(1) == (0, 1)
    assert candidate_lengths(0) == (0,)


@pytest.mark.parametrize(
    ("costs", "requests", "rate", "expected"),
    [(FLAT, 1, 0.8, 7), (FLAT, 1, 0.02, 1), (STEEP, 64, 0.8, 3), (STEEP, 64, 0.98, 7)],
)
def test_as_many_as_bring_the_most_tokens_a_second(costs, requests, rate, expected):
    assert settled(draft_length(costs), requests, rate) == expected


def test_it_follows_the_load():
    length = draft_length(FLAT | STEEP)
    assert settled(length, 1, 0.8) == 7
    assert settled(length, 40, 0.8) == 3
    assert settled(length, 1, 0.8) == 7


def test_it_follows_acceptance_both_ways():
    length = draft_length(STEEP)
    assert [settled(length, 64, rate) for rate in (0.2, 0.99, 0.2)] == [1, 7, 1]


def test_long_contexts_are_worth_more_drafts():
    """Their keys are read once a cycle, however many rows read them."""
    length = draft_length(STEEP)
    assert settled(length, 64, 0.8) == 3
    for _ in range(500):
        length.took(CycleTime(64, 3, 112.0))
    assert settled(length, 64, 0.8) == 7


def test_it_does_not_change_its_mind_where_later_drafts_are_worse():
    """One rate for all places would: short cycles would ask for long ones, and the reverse."""
    length = draft_length({64: {1: 9.0, 3: 12.0, 7: 20.0}})
    rates, chosen = [0.87, 0.80, 0.72, 0.66, 0.60, 0.55, 0.50], []
    rights = iter(lots(rates, 64 * 1500))
    for _ in range(1500):
        chosen.append(chosen_for(length, 64))
        length.verified([drawn(chosen[-1], next(rights)) for _ in range(64)])
    assert chosen.count(3) > 1350
    assert changes(chosen) < 12


def test_changes_stand_apart():
    """A shorter cycle's first one is not captured."""
    length, chosen = draft_length(FLAT | STEEP), []
    for cycle in range(200):
        chosen.append(chosen_for(length, 64 if cycle % 2 else 1))
    places = [i for i, (one, other) in enumerate(pairwise(chosen)) if one != other]
    assert len(places) == changes(chosen) > 2
    assert min(b - a for a, b in pairwise(places)) > MIN_CYCLES


TREES = {1: {0: 4.0, 1: 5.0, 3: 5.1, 7: 7.2}, 8: {0: 6.0, 1: 7.0, 3: 7.5, 7: 9.0}}
"""One request's seven drafts branch."""


def branching(may_stop: bool) -> DraftLength:
    return DraftLength(MeasuredTimes(TREES), may_stop, Branching(7, 15, most_requests=1))


def with_trees(length: DraftLength, requests: int, cycles: int, chain: float, tree: float) -> list:
    """What is chosen where a tree's drafts are right at another rate."""
    rights = {rate: iter(lots([rate] * 7, requests * cycles)) for rate in {chain, tree}}
    chosen = []
    for _ in range(cycles):
        drafts = chosen_for(length, requests)
        mine = rights[tree if requests == 1 and drafts == 7 else chain]
        branched = requests == 1 and drafts == 7
        length.verified([drawn(drafts, next(mine)) for _ in range(requests)], branched)
        chosen.append(drafts)
    return chosen


def test_a_trees_drafts_are_not_taken_for_a_chains():
    """Three drafts would be faster if they were right as often as the tree's; they are not."""
    chosen = with_trees(branching(False), 1, 3000, 0.6, 0.75)
    assert chosen.count(7) > 2700
    assert changes(chosen) < 12


def test_a_tree_is_tried_after_many_requests_had_chains():
    length = branching(False)
    with_trees(length, 8, 1000, 0.6, 0.75)
    assert with_trees(length, 1, 1000, 0.6, 0.75).count(7) > 800


def test_what_is_known_of_chains_grows_old_while_drafts_branch():
    """Of other texts it may be far too high, and said more than what trees had just shown."""
    length = branching(False)
    with_trees(length, 8, 2000, 0.9, 0.95)
    assert with_trees(length, 1, 3000, 0.45, 0.5).count(3) > 2000


def test_where_drafts_may_not_branch_nothing_is_expected_of_trees():
    """As where the host takes part: K was as large as if they did, with a chain's rates."""
    length = branching(False)
    with_trees(length, 1, 1000, 0.45, 0.9)
    rights, chosen = iter(lots([0.45] * 7, 3000)), []
    for _ in range(3000):
        chosen.append(length.choose(1, 1, branch=False))
        length.launched(1, 1, chosen[-1], branch=False)
        length.verified([drawn(chosen[-1], next(rights))])
    assert chosen[1000:].count(3) > 1800


def test_where_a_tree_is_hardly_better_a_shorter_chain_is_faster():
    chosen = with_trees(branching(False), 1, 3000, 0.6, 0.63)
    assert chosen.count(3) > 2400


def test_trees_stop_and_begin_again():
    length = branching(True)
    assert with_trees(length, 1, 2000, 0.05, 0.06)[-1000:].count(0) > 950
    assert with_trees(length, 1, 3000, 0.75, 0.85)[-1000:].count(7) > 900


class Run:
    """An engine's cycles, with given costs and draws."""

    def __init__(
        self,
        costs: dict[int, float],
        requests: int,
        running: bool,
        catching_up: float = 0.0,
        seed: int = 0,
    ) -> None:
        """running: whether times are found while running, rather than at the start; catching_up:
        seconds before drafts after a cycle without."""
        lengths = sorted(costs)
        times = RunningTimes(lengths) if running else MeasuredTimes({requests: costs})
        self._length = DraftLength(times, True, Branching(lengths[-1], 0, 0))
        self._costs, self._requests, self._running = costs, requests, running
        self._catching_up = catching_up
        self._draw = random.Random(seed)
        self.tokens, self.seconds = 0.0, 0.0
        """Of each request; in all."""
        self.chosen: list[tuple[float, int]] = []
        """Tokens before each cycle, and its drafts."""

    def begin(self) -> "Run":
        """Begin a request."""
        self._length.begun()
        return self

    def go_on(self, tokens: int, rate: float) -> "Run":
        """Run while each draft behind right ones is right at a rate."""
        stop = self.tokens + tokens
        while self.tokens < stop:
            drafts = chosen_for(self._length, self._requests)
            if self._catching_up and drafts and self.chosen and not self.chosen[-1][1]:
                self._catch_up(drafts)
            self.chosen.append((self.tokens, drafts))
            cycle = [(drafts, self._right(drafts, rate)) for _ in range(self._requests)]
            self.seconds += self._costs[drafts]
            self.tokens += 1 + sum(right for _, right in cycle) / self._requests
            if self._running:
                noise = self._draw.lognormvariate(0, 0.05)
                self._length.took(CycleTime(self._requests, drafts, noise * self._costs[drafts]))
            self._length.verified(cycle)
        return self

    def _catch_up(self, drafts: int) -> None:
        self.seconds += self._catching_up
        times = self._costs[drafts], 0.0, self._catching_up
        self._length.took(CycleTime(self._requests, drafts, *times))

    def _right(self, drafts: int, rate: float) -> int:
        return [*(self._draw.random() < rate for _ in range(drafts)), False].index(False)

    @property
    def speed_up(self) -> float:
        """Over no drafts."""
        return self.tokens * self._costs[0] / self.seconds

    def in_use(self, tokens: float) -> bool:
        """Whether most of the last cycles, over so many tokens, had drafts."""
        last = [drafts > 0 for at, drafts in self.chosen if at >= self.tokens - tokens]
        return sum(last) > 0.9 * len(last)


LOADS = pytest.mark.parametrize(
    ("costs", "requests", "running"),
    [(ANY, 1, False), (MANY, 64, False), (ON_A_CPU, 1, True), (ON_A_CPU, 8, True)],
    ids=["gpu", "64 requests", "cpu", "8 requests on a cpu"],
)


@LOADS
def test_a_drafter_that_is_hardly_ever_right_costs_nothing(costs, requests: int, running: bool):
    """AL 1.05. What it costs until that is known is bounded, however long a text is."""
    run = Run(costs, requests, running).go_on(500, 0.05)
    assert run.tokens - run.seconds / costs[0] > -25
    before, at = run.seconds, run.tokens
    run.go_on(3000, 0.05)
    assert (run.tokens - at) * costs[0] / (run.seconds - before) > 0.99


@LOADS
@pytest.mark.parametrize("rate", [0.8, 1.0])
def test_a_drafter_that_is_right_again_is_in_use_again(
    costs, requests: int, running: bool, rate: float
):
    run = Run(costs, requests, running).go_on(2000, 0.0)
    assert not run.in_use(1000)
    assert run.go_on(500, rate).in_use(20)


@pytest.mark.parametrize("catching_up", [2.0, 7.0])
def test_what_it_takes_a_drafter_to_catch_up_is_counted(catching_up: float):
    """Else probes would take four parts in a hundred, as they did at 7 ms for cycles of 4.5."""
    run = Run(ANY, 1, False, catching_up).go_on(1000, 0.05)
    before, at = run.seconds, run.tokens
    run.go_on(4000, 0.05)
    assert (run.tokens - at) * ANY[0] / (run.seconds - before) > 0.99
    assert run.go_on(500, 0.8).in_use(20)


@LOADS
def test_a_drafter_that_is_always_right_is_never_out_of_use(costs, requests: int, running: bool):
    run = Run(costs, requests, running).go_on(4000, 0.9)
    looks = sum(drafts == 0 for _, drafts in run.chosen)
    assert looks <= (2 + len(run.chosen) / 256 + 1 if running else 0)


GOOD_ON_A_GPU, GOOD_ON_A_CPU, BAD = 0.77, 0.85, 0.12
"""How often drafts are right: an AL of 3.9 and one of 5.4 at K = 7, as greedy chats have, and what
drafts of a chat at a high temperature may come to."""


def chats(run: Run, count: int, tokens: int, rate: float) -> None:
    """One chat behind another, as a client sends them."""
    for _ in range(count):
        run.begin().go_on(tokens, rate)


@pytest.mark.parametrize("seed", [*range(4), *at_night(range(4, 67))])
@pytest.mark.parametrize(
    ("costs", "good", "fresh"),
    [(ANY, GOOD_ON_A_GPU, False), (ANY, GOOD_ON_A_GPU, True), (ON_A_CPU, GOOD_ON_A_CPU, False)],
    ids=["gpu", "fresh on a gpu", "cpu"],
)
def test_a_good_drafter_is_not_lost_to_sampled_chats(costs, good: float, fresh: bool, seed: int):
    run = Run(costs, 1, costs is ON_A_CPU, catching_up=costs[1] / 2, seed=seed)
    chats(run, 0 if fresh else 5, 200, good)
    before, at = run.seconds, run.tokens
    chats(run, 8 if fresh else 40, 100, BAD)
    assert (run.tokens - at) * costs[0] / (run.seconds - before) > 0.92
    assert run.begin().go_on(100, good).in_use(40)
    assert run.speed_up > (0.95 if fresh else 1.0), "tries are paid from what drafts gained"


def test_it_says_why_it_stopped():
    wrong = Run(ANY, 1, False).go_on(500, 0.0)
    assert wrong._length.stopped == "wrong drafts"
    length = DraftLength(MeasuredTimes(FREE | CROWDED), True, CHAINS)
    assert settled(length, 1, 0.5, 400) == 7
    assert length.stopped is None
    assert settled(length, 64, 0.5, 400) == 0
    assert length.stopped == "slower cycles"


@pytest.mark.parametrize(("rate", "again"), [(0.8, True), (0.1, False)])
def test_drafts_come_back_as_requests_do_that_were_left(rate: float, again: bool):
    """64 in flight, of 300 tokens each; while drafts do not pay, eight have a drafter."""
    length, draw = DraftLength(MeasuredTimes({64: MANY}), True, CHAINS), random.Random(1)
    left, followed = [draw.randrange(300) for _ in range(64)], [True] * 64
    used = []
    for cycle in range(4000):
        right = 0.0 if cycle < 2000 else rate
        drafts = length.choose(64, sum(followed))
        length.launched(64, sum(followed), drafts)
        made = [drafts * one for one in followed]
        hits = [[*(draw.random() < right for _ in range(n)), False].index(False) for n in made]
        length.verified(list(zip(made, hits, strict=True)))
        used.append((drafts > 0, sum(followed)))
        for place, hit in enumerate(hits):
            left[place] -= 1 + hit
            if left[place] <= 0:
                followed[place] = False
                left[place], followed[place] = 300, length.pays(64) or sum(followed) < 8
    assert {count for _, count in used[1500:2000]} == {8}
    assert sum(drafts for drafts, _ in used[1500:2000]) < 20
    assert all(drafts for drafts, _ in used[2600:]) == again
    assert all(count == 64 for _, count in used[2800:]) == again


def test_times_are_those_of_the_nearest_load():
    times = RunningTimes([0, 2, 4])
    for requests, drafts, seconds in 3 * [(2, 0, 1.0), (2, 4, 2.0), (9, 0, 3.0), (9, 2, 4.0)]:
        times.took(CycleTime(requests, drafts, seconds))
    unknown = "nobody knows what four drafts cost for nine"
    assert times.seconds(9) == {0: 1.0, 2: 1.5, 4: 2.0}, unknown
    for _ in range(3):
        times.took(CycleTime(9, 4, 9.0))
    assert times.seconds(7) == {0: 3.0, 2: 4.0, 4: 9.0}
    assert times.seconds(3) == {0: 1.0, 2: 1.5, 4: 2.0}


LOAD = st.tuples(st.integers(1, 4), st.integers(1, 80), st.sampled_from([0.0, 0.3, 0.6, 0.9]))


@settings(max_examples=50)
@given(st.lists(LOAD, min_size=2, max_size=12))
def test_a_load_that_changes_meets_lengths_that_never_ran_there(loads):
    """Loads: requests, for so many cycles, whose drafts are right at some rate."""
    lengths = candidate_lengths(7)
    length = DraftLength(RunningTimes(lengths), True, CHAINS)
    for requests, cycles, rate in loads:
        for right in lots([rate] * 7, cycles):
            drafts = chosen_for(length, requests)
            assert drafts in lengths
            length.took(CycleTime(requests, drafts, 1 + drafts * requests / 8))
            length.verified([drawn(drafts, right)] * requests)


def test_a_moment_in_which_the_machine_was_busy_is_forgotten():
    times = RunningTimes([0, 4])
    for seconds in (30.0, 1.0, 1.1, 0.9, 25.0):
        times.took(CycleTime(1, 0, seconds))
        times.took(CycleTime(1, 4, 2 * seconds))
    assert times.seconds(1) == {0: 0.9, 4: 1.8}


def test_other_programs_on_the_machine_stop_no_drafts():
    """A browser that shows the text, say: every third cycle takes three times as long."""
    for seed in range(20):
        lengths, draw = sorted(ON_A_CPU), random.Random(seed)
        length, used = DraftLength(RunningTimes(lengths), True, CHAINS), 0
        for _ in range(1000):
            drafts = chosen_for(length, 1)
            used += drafts > 0
            held_up = 3.0 if draw.random() < 0.33 else 1.0
            length.took(CycleTime(1, drafts, held_up * ON_A_CPU[drafts]))
            right = [*(draw.random() < 0.75 for _ in range(drafts)), False].index(False)
            length.verified([(drafts, right)])
        assert used > 940
