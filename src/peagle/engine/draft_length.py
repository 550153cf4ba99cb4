"""How many drafts a cycle makes: the number that gives the most tokens per second, or none."""

import math
from collections.abc import Sequence
from typing import Literal

from peagle.engine.branching import Branching
from peagle.engine.cycle_times import CycleTimes
from peagle.engine.step import CycleTime

Stopped = Literal["wrong drafts", "slower cycles"]
"""Why drafting stops: drafts cost more than they gave, or would at the present load."""
CANDIDATES = (1, 3, 6, 12, 24)
"""Few, since each is captured for every batch size at the start: the best of these is within a few
percent of the best of all."""
PRIOR_RATE, PRIOR_COUNT = 0.8, 32
"""Acceptance rate of the first draft before any was verified, and how many it counts as."""
MEMORY = 4096
"""Verifications after which an old one weighs 1/e of a new one."""
PROBE_MEMORY = 8
"""Cycles after which an old verification weighs 1/e of a new one where drafts are only tried."""
DOUBT = 2
"""Wrong first drafts that are remembered when drafting stops; all else is forgotten."""
KNOWN = 64
"""First drafts that must have been tried for their rate to stop drafting; before that, chance would
stop it too often, and credit bounds what it costs to find out."""
MIN_CYCLES = 16
"""Cycles between two changes: the first cycle after a change to fewer drafts is not captured."""
MIN_GAIN = 1.02
"""Speed-up that a change must promise."""
MOST_PRICE = 1.75
"""What a try counts at most, in cycles without drafts: the times may say more by chance, and a
drafter that is right again must be found."""
SMOOTHING = 1 / 4
"""Weight of the newest time of catching up in the moving average."""
LEAST_PRICE = 0.1
"""The least price of a cycle with drafts, in cycles without; measured times may say less by
chance."""
ALLOWANCE = 0.005
"""What trying a drafter that is not in use may cost, as a share of the time."""
MOST_CREDIT, STAKE, MOST_STAKE = 16.0, 4.0, 10.0
"""What drafts may lose before they stop, in cycles without drafts: at most, and when they come into
use, at least and with savings."""
FIRST_SAVINGS, MOST_SAVINGS = 64.0, 512.0
"""Credit that is kept for tries where a request begins, in cycles without drafts: at the start, and
at most of what drafts gained."""
TRIES = 5
"""Cycles in a row for which drafts are tried where a request begins: few good drafters are wrong in
all of them."""
TRY_EVERY = 64
"""Cycles between two such tries."""


def candidate_lengths(k: int) -> tuple[int, ...]:
    """The lengths to choose from for a drafter of K tokens: none, candidates up to 3/4 of K, K."""
    return (0, *(count for count in CANDIDATES if 4 * count <= 3 * k), k) if k else (0,)


class DraftLength:
    """Weighs the time of cycles against the tokens that they are expected to give.

    Each draft position has its own acceptance rate, given that those before it were accepted. The
    rate of a position that no cycle has tried for long drifts to that of the one before it, so that
    it is tried again. Of drafts that branch more are accepted at every position, so they have rates
    of their own.

    Drafting keeps an account, in cycles without drafts: a cycle with drafts pays what it takes
    longer, and is paid the tokens that were accepted. Without credit drafting stops. From then on
    credit comes in slowly, and is spent on probes: cycles with as many drafts as a good drafter
    would have, so that it is in use again when it is right again. Those that are right pay for the
    next probe.
    A request that begins may be of another kind than those whose drafts were wrong: probes in a row
    are paid for it, from what drafts gained before.
    """

    def __init__(self, times: CycleTimes, may_stop: bool, branching: Branching) -> None:
        """may_stop: whether a cycle may have no drafts; branching: which cycles have trees."""
        self._times, self._may_stop, self._branching = times, may_stop, branching
        self._k = self._chosen = branching.k
        self._if_good = _expected([PRIOR_RATE] * self._k)
        self._cycles = MIN_CYCLES
        """Cycles since the last change."""
        self._launched = 0
        """Cycles in all."""
        self._probed = False
        """Whether the last cycle was a probe, so that the drafter has missed nothing since."""
        self._chains, self._trees = (
            AcceptanceRates(self._k, PRIOR_RATE, PRIOR_COUNT) for _ in range(2)
        )
        self._credit, self._savings = MOST_CREDIT, FIRST_SAVINGS
        self._begun, self._tried = False, 0
        """Whether a request began since the last cycle; the cycle of the last try for one."""
        self._stopped: Stopped = "wrong drafts"
        self._catching_up = 0.0
        """Seconds for which the drafter catches up before a probe."""

    def choose(self, requests: int, followed: int, branch: bool = True) -> int:
        """Drafts of the next cycle of `requests` requests. Changes nothing.

        followed: for how many of them there is a drafter; branch: whether their drafts may branch.
        """
        costs = self._times.seconds(requests)
        if self._look is not None:
            return self._look
        if not costs:  # too little has been timed so far
            return self._chosen
        share, tree = followed / requests, self._tree(requests, branch)
        if self._chosen:
            # a change costs a cycle that is not captured; only credit that ran out does not wait
            too_soon = self._cycles < MIN_CYCLES and not self._broke
            return self._chosen if too_soon else self._best(costs, share, tree)
        # drafting has stopped: credit that came in since then pays for a probe now and then
        probe = self._probe(costs)
        probes = followed > 0 and self._credit >= self._price(costs, probe)
        return self._best(costs, share, tree) or (probe if probes else 0)

    def pays(self, requests: int) -> bool:
        """Whether drafts for all of so many requests would be faster than none, as far as known."""
        costs = self._times.seconds(requests)
        if not self._may_stop or not costs:
            return True
        speeds = self._speeds(costs, 1.0, self._tree(requests, branch=True))
        return max(speeds, key=lambda drafts: speeds[drafts]) > 0

    @property
    def stopped(self) -> Stopped | None:
        """Why nothing is drafted; None: drafts are in use."""
        return None if self._chosen else self._stopped

    def begun(self) -> None:
        """Note a request that begins."""
        self._begun = True

    def launched(self, requests: int, followed: int, drafts: int, branch: bool = True) -> None:
        """Note a cycle with drafts as they were chosen. branch: as of `choose`."""
        looks, costs = self._look is not None, self._times.seconds(requests)
        self._launched += 1
        if looks or not costs:
            return
        best = self._best(costs, followed / requests, self._tree(requests, branch))
        probes = drafts > 0 and not self._chosen and drafts != best
        # in cycles without drafts, whose length is the unit of the account
        self._credit += ALLOWANCE if not drafts else -self._price(costs, drafts)
        self._probed = probes
        if not probes:
            self._change_to(drafts)
        self._credit = min(self._credit, MOST_CREDIT)
        if self._begun and not self._chosen:
            self._try_again(costs)
        self._begun = False

    def verified(self, cycle: Sequence[tuple[int, int]], branched: bool = False) -> None:
        """Learn from a cycle: the drafts of each of its requests, and how many were accepted.

        branched: whether the drafts were trees.
        """
        drafted = [(drafts, accepted) for drafts, accepted in cycle if drafts]
        if not drafted:
            return
        # probes are few, and must say soon that drafts are right again
        keep = math.exp(-len(drafted) / MEMORY) if self._chosen else 1 - 1 / PROBE_MEMORY
        newest, other = (self._trees, self._chains) if branched else (self._chains, self._trees)
        newest.learn(drafted, keep)
        if self._branching.most_requests and self._branching.nodes:
            for place in contradictions(self._chains, self._trees):
                other.doubt(place, newest.tried[place])
        gained = sum(accepted for _, accepted in drafted) / len(cycle)
        credit = self._credit + gained
        self._credit = min(credit, MOST_CREDIT)
        # what credit has no room for is saved for later tries
        self._savings = min(self._savings + credit - self._credit, MOST_SAVINGS)

    def took(self, time: CycleTime) -> None:
        """Learn from the time of a cycle."""
        self._times.took(time)
        if time.catching_up and time.drafts:
            self._catching_up += (time.catching_up - self._catching_up) * SMOOTHING

    @property
    def _look(self) -> int | None:
        """The length of the next cycle where it is to be timed, while drafts are in use."""
        return self._times.look(self._launched) if self._chosen else None

    @property
    def _broke(self) -> bool:
        return self._may_stop and self._credit < 0

    @property
    def _known(self) -> bool:
        """Whether rates are known so well that drafts may stop by them alone, with credit left."""
        return self._chains.tried[0] + self._trees.tried[0] >= KNOWN

    def _best(self, costs: dict[int, float], share: float, tree: bool) -> int:
        """The fastest length, if it is enough faster than the chosen one; none without credit."""
        if self._chosen and self._broke:
            return 0
        speeds = self._speeds(costs, share, tree)
        if self._chosen and self._may_stop and not self._known:
            # too few drafts were tried to stop by their rates; credit still can
            del speeds[0]
        best = max(speeds, key=lambda drafts: speeds[drafts])
        return best if speeds[best] > MIN_GAIN * speeds[self._chosen] else self._chosen

    def _speeds(self, costs: dict[int, float], share: float, tree: bool) -> dict[int, float]:
        """Tokens per request and second of every length, where a share of requests has drafts.

        tree: whether K drafts of each are a tree.
        """
        tokens = self._tokens(tree)
        return {d: (1 + share * (tokens[d] - 1)) / seconds for d, seconds in costs.items()}

    def _price(self, costs: dict[int, float], drafts: int) -> float:
        """What drafts add to a cycle, in cycles without them.

        After a cycle without, the drafter has a pass more, over what it has missed.
        """
        if not self._may_stop:
            return 0.0
        price = _added(costs, drafts)
        if self._chosen or self._probed:
            return price
        return min(price + max(self._catching_up / costs[0], price), MOST_PRICE)

    def _try_again(self, costs: dict[int, float]) -> None:
        """Pay for probes in a row, for a request that begins, as far as savings go."""
        if self._launched - self._tried < TRY_EVERY:
            return
        probe = self._probe(costs)
        # the first try has to catch up as well, the others follow at once
        wanted = self._price(costs, probe) + (TRIES - 1) * _added(costs, probe) - self._credit
        paid = max(min(wanted, self._savings), 0.0)
        self._credit, self._savings = self._credit + paid, self._savings - paid
        self._tried = self._launched

    def _probe(self, costs: dict[int, float]) -> int:
        """The drafts of a probe: as many as would be fastest if the drafter were good, so that a
        probe whose drafts are right pays for the next."""
        tokens = self._if_good
        return max((d for d in costs if d), key=lambda drafts: tokens[drafts] / costs[drafts])

    def _change_to(self, drafts: int) -> None:
        if drafts == self._chosen:
            self._cycles += 1
            return
        if not drafts:
            self._stopped = "wrong drafts" if self._broke else "slower cycles"
            # what is left pays for no probe: the first one waits until credit has come in
            self._credit = min(self._credit, 0.0)
            self._chains, self._trees = (AcceptanceRates(self._k, 0.0, DOUBT) for _ in range(2))
        elif not self._chosen:
            staked = min(max(MOST_STAKE - self._credit, 0.0), self._savings)
            self._credit = max(self._credit + staked, STAKE)
            self._savings -= staked
        self._chosen, self._cycles = drafts, 0

    def _tree(self, requests: int, branch: bool) -> bool:
        """Whether K drafts of each of so many requests are a tree. branch: whether they may be."""
        return branch and self._branching.nodes_for(requests, self._k) > 0

    def _tokens(self, tree: bool) -> list[float]:
        """Expected tokens per request and cycle with 0, 1, 2 ... drafts. tree: as in `_speeds`."""
        if not tree:
            return _expected(self._chains.rates())
        of_chain, of_tree = map(_expected, consistent(self._chains, self._trees))
        return [*of_chain[:-1], of_tree[-1]]


class AcceptanceRates:
    """How often each draft of a cycle was accepted, given that those before it were."""

    def __init__(self, k: int, rate: float, count: int) -> None:
        """rate: the rate of `count` first drafts that are taken to have been tried."""
        self.accepted, self.tried = ([0.0] * k for _ in range(2))
        self.accepted[0], self.tried[0] = rate * count, float(count)

    def learn(self, drafted: Sequence[tuple[int, int]], keep: float) -> None:
        """Count drafts, of which so many were accepted. keep: what earlier counts weigh now."""
        self.accepted = [keep * count for count in self.accepted]
        self.tried = [keep * count for count in self.tried]
        for drafts, accepted in drafted:
            for place in range(min(accepted + 1, drafts)):
                self.tried[place] += 1
                self.accepted[place] += place < accepted

    def rate(self, place: int, before: float) -> float:
        """The rate of a position; where little was tried, near `before`, the rate of the one
        before."""
        if not place:
            return self.accepted[0] / max(self.tried[0], 1.0)
        return (self.accepted[place] + PRIOR_COUNT * before) / (self.tried[place] + PRIOR_COUNT)

    def doubt(self, place: int, most: float) -> None:
        """Let a position's rate stay what it is, of no more than so many drafts."""
        share = min(max(most, PRIOR_COUNT) / max(self.tried[place], 1.0), 1.0)
        self.accepted[place] *= share
        self.tried[place] *= share

    def rates(self) -> list[float]:
        """The rates of all positions."""
        found: list[float] = []
        for place in range(len(self.tried)):
            found.append(self.rate(place, found[-1] if found else 0.0))
        return found


def contradictions(chains: AcceptanceRates, trees: AcceptanceRates) -> list[int]:
    """Positions whose rate is higher in chains than in trees, which have nearly all of a chain.

    Other texts may have been written since the older of both was tried.
    """
    pairs = zip(chains.rates(), trees.rates(), strict=True)
    return [place for place, (of_chain, of_tree) in enumerate(pairs) if of_chain > of_tree]


def consistent(chains: AcceptanceRates, trees: AcceptanceRates) -> tuple[list[float], list[float]]:
    """The rates of drafts one behind another, and of those that branch.

    A tree has nearly all of a chain, so its rates are no lower: where they contradict one another,
    those that were tried more often count for both.
    """
    chain: list[float] = []
    tree: list[float] = []
    for place in range(len(chains.tried)):
        of_chain = chains.rate(place, chain[-1] if chain else 0.0)
        of_tree = trees.rate(place, tree[-1] if tree else 0.0)
        # what a chain has accepted a tree would have, too, so one of the two is out of date
        if of_chain > of_tree:
            known_by_chain = chains.tried[place] > trees.tried[place]
            of_chain = of_tree = of_chain if known_by_chain else of_tree
        chain.append(of_chain)
        tree.append(of_tree)
    return chain, tree


def _added(costs: dict[int, float], drafts: int) -> float:
    """What drafts add to a cycle, in cycles without them."""
    return max(costs[drafts] / costs[0] - 1, LEAST_PRICE)


def _expected(rates: Sequence[float]) -> list[float]:
    """Tokens of a cycle with 0, 1, 2 ... drafts of given rates."""
    tokens, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens
