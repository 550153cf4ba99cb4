"""What speculation did, counted from what steps brought."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Speculation:
    """What speculation did for one request."""

    accepted_per_position: list[int]
    """How often draft token 1, 2, ... K was accepted."""
    accepted_per_cycle: list[int] = field(default_factory=list)
    """Drafts accepted in each verification, past the request's end too, as vLLM counts."""
    drafted: int = 0
    pauses: int = 0
    """Cycles without a draft, each of which emitted one token."""
    looked_up: int = 0
    """Of the drafts, those found in the request's own text."""
    looked_up_accepted: int = 0
    """How many of these were accepted."""

    @property
    def cycles(self) -> int:
        """Verifications of at least one draft token."""
        return len(self.accepted_per_cycle)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted in all."""
        return sum(self.accepted_per_cycle)

    @property
    def acceptance_length(self) -> float:
        """AL: mean tokens emitted per cycle, bonus included; 1 where nothing was drafted."""
        return 1.0 + (self.accepted / self.cycles if self.cycles else 0.0)

    @property
    def tokens_per_cycle(self) -> float:
        """Mean tokens emitted per cycle, over all of them."""
        cycles = self.cycles + self.pauses
        return 1.0 + (self.accepted / cycles if cycles else 0.0)

    @classmethod
    def pooled(cls, parts: Sequence["Speculation"]) -> "Speculation":
        """What speculation did for several requests with the same K together."""
        counts = zip(*(part.accepted_per_position for part in parts), strict=True)
        return cls(
            [sum(position) for position in counts],
            [accepted for part in parts for accepted in part.accepted_per_cycle],
            sum(part.drafted for part in parts),
            sum(part.pauses for part in parts),
            sum(part.looked_up for part in parts),
            sum(part.looked_up_accepted for part in parts),
        )

    def record(
        self, drafted: int, accepted: int, looked_up: bool = False, repeats: int = 1
    ) -> None:
        """Count one cycle.

        looked_up: whether its drafts were; repeats: how often it ran, if without drafts.
        """
        if looked_up:
            self.looked_up += drafted
            self.looked_up_accepted += accepted
        if not drafted:
            self.pauses += repeats
        else:
            self.drafted += drafted
            self.accepted_per_cycle.append(accepted)
            for position in range(accepted):
                self.accepted_per_position[position] += 1


@dataclass
class DraftTotals:
    """What speculation did for all requests so far, those that run or were aborted too."""

    accepted_per_position: list[int]
    """As in `Speculation`."""
    cycles: Counter[int] = field(default_factory=Counter)
    """Cycles by the tokens that they drafted; 0: those without drafts."""
    accepted: int = 0
    looked_up: int = 0
    """As in `Speculation`."""
    looked_up_accepted: int = 0

    @property
    def drafts(self) -> int:
        """Cycles that drafted."""
        return self.cycles.total() - self.cycles[0]

    @property
    def drafted(self) -> int:
        """Tokens drafted."""
        return sum(length * count for length, count in self.cycles.items())

    def record(self, drafted: int, accepted: int, looked_up: bool, repeats: int) -> None:
        """Count one cycle, as `Speculation.record` does."""
        self.cycles[drafted] += 1 if drafted else repeats
        self.accepted += accepted
        if looked_up:
            self.looked_up += drafted
            self.looked_up_accepted += accepted
        for position in range(accepted):
            self.accepted_per_position[position] += 1
