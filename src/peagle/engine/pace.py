"""How the next step's cycles go: for whom there are drafts, how many, and how often they run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from peagle.engine.branching import Branching
from peagle.engine.capacity import Capacity
from peagle.engine.draft_length import DraftLength, Stopped
from peagle.engine.repeats import Repeats
from peagle.engine.request import Request
from peagle.engine.step import CycleTime

SCOUTS = 8
"""Requests that the drafter follows where drafts do not pay, so that it is known when they do."""


@dataclass
class Pace:
    """What is chosen by load and by what came of earlier cycles; never a token depends on it."""

    draft_length: DraftLength | None
    """Chooses the drafts of requests that decode; None: always K."""
    repeats: Repeats | None
    """Chooses how often a step has its cycle; None: once."""
    branching: Branching
    """Which cycles may have trees in place of chains."""
    capacity: Capacity

    def follows_one_more(self, requests: Collection[Request]) -> bool:
        """Whether the drafter is to follow a request beside these.

        To follow one costs a drafter a pass over all its tokens, drafts or none.
        """
        if self.draft_length is None:
            return True
        if self.draft_length.pays(min(len(requests) + 1, self.capacity.num_seqs)):
            return True
        return _followed(requests) < SCOUTS

    @property
    def drafting_stopped(self) -> Stopped | None:
        """Why nothing is drafted; None: drafts are in use."""
        return None if self.draft_length is None else self.draft_length.stopped

    def begun(self, request: Request) -> None:
        """Note a request that is added."""
        if self.draft_length is not None and request.speculates:
            self.draft_length.begun()

    def choose(self, decoding: Sequence[Request], crowded: bool) -> tuple[int | None, int]:
        """Most drafts of each of these, None for its own K; how often the next step has the cycle.

        Changes nothing. crowded: whether the step before had no rows left for prompts.
        """
        drafts = None
        if self.draft_length is not None and decoding:
            branch = self.may_branch(decoding)
            drafts = self.draft_length.choose(len(decoding), _followed(decoding), branch)
        return drafts, 1 if crowded else self._repeats(decoding, drafts)

    def nodes_for(self, cycles: Sequence[Request], drafts: int | None) -> int:
        """Drafts of each request's tree, with drafts as they were chosen; 0: these are chains."""
        if not self.may_branch(cycles):
            return 0
        most = max((request.k for request in cycles), default=0)
        return self.branching.nodes_for(len(cycles), most if drafts is None else min(most, drafts))

    def may_branch(self, cycles: Sequence[Request]) -> bool:
        """Whether drafts of some requests may be trees in one cycle: neither the host nor penalties
        take all drafts to be one behind another."""
        if any(request.needs_host for request in cycles):
            return False
        # one request with penalties gets a chain among trees (`unbranched`)
        return not all(request.params.penalized for request in cycles)

    def launched(self, cycles: Sequence[Request], drafts: int | None, repeats: int) -> None:
        """Note the cycles of a step, with drafts as they were chosen."""
        if self.draft_length is not None and drafts is not None and cycles:
            followed, branch = _followed(cycles), self.may_branch(cycles)
            for _ in range(repeats):
                self.draft_length.launched(len(cycles), followed, drafts, branch)

    def landed(
        self, verified: Sequence[tuple[int, int]], time: CycleTime | None, branched: bool
    ) -> None:
        """Learn from a step: the drafts of each request, how many were accepted, and its time.

        branched: whether the drafts were trees.
        """
        if self.draft_length is not None:
            self.draft_length.verified(verified, branched)
            if time is not None:
                self.draft_length.took(time)
        if self.repeats is not None and time is not None:
            self.repeats.took(time)

    def _repeats(self, decoding: Sequence[Request], drafts: int | None) -> int:
        if self.repeats is None or drafts or (wanted := self.repeats.wanted) == 1:
            return 1
        if any((drafts is None and request.k) or request.needs_host for request in decoding):
            return 1
        # no cycle of the step may reach beyond a context's end
        furthest = max((request.furthest for request in decoding), default=0)
        return max(min(wanted, self.capacity.max_length - furthest), 1)


def _followed(requests: Collection[Request]) -> int:
    """For how many of some requests a drafter works."""
    return sum(request.speculates for request in requests)
