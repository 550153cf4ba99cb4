"""What speculation did, counted from what steps brought."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class DraftTotals:
    """What speculation did for any number of requests, those that run or were aborted too."""

    accepted_per_position: list[int]
    """How often draft token 1, 2, ... K was accepted."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Cycles by the tokens that they drafted."""

    @property
    def cycles(self) -> int:
        """Verifications of at least one draft token."""
        return self.lengths.total() - self.pauses

    @property
    def pauses(self) -> int:
        """Cycles without a draft, each of which emitted one token."""
        return self.lengths[0]

    @property
    def drafted(self) -> int:
        """Draft tokens in all."""
        return sum(length * count for length, count in self.lengths.items())

    @property
    def accepted(self) -> int:
        """Draft tokens accepted in all."""
        return sum(self.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """AL: mean tokens emitted per cycle, bonus included; 1 where nothing was drafted."""
        return 1.0 + self.accepted / max(self.cycles, 1)

    @property
    def tokens_per_cycle(self) -> float:
        """Mean tokens emitted per cycle, over all of them."""
        return 1.0 + self.accepted / max(self.lengths.total(), 1)

    @classmethod
    def pooled(cls, parts: "Sequence[DraftTotals]") -> "DraftTotals":
        """What speculation did for several requests with the same K together."""
        counts = zip(*(part.accepted_per_position for part in parts), strict=True)
        return DraftTotals(
            [sum(position) for position in counts], sum((part.lengths for part in parts), Counter())
        )

    def record(self, drafted: int, accepted: int, repeats: int = 1) -> None:
        """Count one cycle. repeats: how often it ran, if without drafts."""
        self.lengths[drafted] += 1 if drafted else repeats
        for position in range(accepted):
            self.accepted_per_position[position] += 1


@dataclass
class Speculation(DraftTotals):
    """What speculation did for one request."""

    accepted_per_cycle: list[int] = field(default_factory=list)
    """Drafts accepted in each verification, past the request's end too, as vLLM counts."""

    def record(self, drafted: int, accepted: int, repeats: int = 1) -> None:
        """Count one cycle, as for all requests."""
        super().record(drafted, accepted, repeats)
        if drafted:
            self.accepted_per_cycle.append(accepted)
