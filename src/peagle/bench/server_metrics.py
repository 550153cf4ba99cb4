"""What a server's /metrics say about its drafts, by vLLM's names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from peagle.bench.measures import Acceptance

SAMPLE = re.compile(r"^([\w:]+)(?:\{([^}]*)\})?\s+(\S+)")
"""A line of Prometheus's text format: name, labels, value."""
POSITION = re.compile(r'position="(\d+)"')
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
AT_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class DraftCounts:
    """Counted since the server's start, over all its requests."""

    drafts: float
    """Cycles that drafted."""
    accepted: float
    at_position: tuple[float, ...]
    """Accepted drafts 1, 2, ... K."""

    @classmethod
    def read(cls, text: str) -> Self | None:
        """From a page of metrics; None where it does not count drafts."""
        found = [(name, labels, value) for name, labels, value in samples(text)]
        if not any(name == DRAFTS for name, _, _ in found):
            return None
        positions: dict[int, float] = {}
        for name, labels, value in found:
            place = POSITION.search(labels)
            if name == AT_POSITION and place is not None:
                number = int(place[1])
                positions[number] = positions.get(number, 0.0) + value
        return cls(
            sum(value for name, _, value in found if name == DRAFTS),
            sum(value for name, _, value in found if name == ACCEPTED),
            tuple(positions.get(place, 0.0) for place in range(len(positions))),
        )

    def since(self, before: "DraftCounts") -> Acceptance | None:
        """How many drafts were right since an earlier count; None if the server restarted since."""
        drafts = self.drafts - before.drafts
        if drafts < 0:
            return None
        if not drafts:
            return Acceptance(1.0, ())
        earlier = (*before.at_position, *(0.0 for _ in self.at_position))
        at_position = zip(self.at_position, earlier, strict=False)
        return Acceptance(
            1.0 + (self.accepted - before.accepted) / drafts,
            tuple((now - then) / drafts for now, then in at_position),
        )


def samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of every sample of a page of metrics."""
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is not None:
            try:
                yield found[1], found[2] or "", float(found[3])
            except ValueError:
                continue
