"""What a step is to do for each request, and what is kept of requests between steps."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle.engine.spans import Span
from peagle.engine.step import Begin, Cycle, PromptChunk, Settings


@dataclass
class HostRequest:
    """A request, while it has a row of the request table."""

    settings: Settings
    tokens: list[int]
    """The tokens of prompt and output."""
    prompt_length: int
    computed: int = 0
    """Positions with the target's keys."""
    features: list[Tensor] = field(default_factory=list)
    """Features [positions, feature_size] of the last positions, which the drafter has not seen."""
    unseen: int = 0
    """How many positions the drafter has not seen."""

    @classmethod
    def of(cls, begin: Begin) -> "HostRequest":
        """A request that begins."""
        return cls(begin.settings, list(begin.tokens), begin.prompt_length)

    @property
    def speculates(self) -> bool:
        """Whether a drafter works for the request."""
        return self.settings.k > 0

    def keep(self, features: Tensor) -> None:
        """Keep the features of further positions."""
        self.features.append(features)
        self.unseen += len(features)

    def forget(self, count: int) -> None:
        """Forget the features of the first `count` unseen positions: the drafter saw them."""
        self.unseen -= count
        # a copy, since a view would hold what is forgotten
        self.features = [torch.cat(self.features)[count:].clone()] if self.unseen else []


@dataclass(frozen=True)
class RequestRows:
    """A request's rows in the target's pass: known tokens, then drafts."""

    item: PromptChunk | Cycle
    request: HostRequest
    known: tuple[int, ...]
    drafts: int

    @classmethod
    def of(cls, item: PromptChunk | Cycle, request: HostRequest) -> "RequestRows":
        """An item of a step."""
        if isinstance(item, PromptChunk):
            return cls(item, request, item.tokens, 0)
        return cls(item, request, (request.tokens[item.start],), item.drafts)

    @property
    def span(self) -> Span:
        """The positions of the rows."""
        return Span(self.item.row, self.item.start, len(self.known) + self.drafts)
