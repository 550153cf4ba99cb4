"""What is drafted on the host: a proposal for each group of requests that want as many drafts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafters.proposer import Hidden, Proposer, Texts
from peagle.engine.history import History
from peagle.engine.host.network import HostNetwork, KnownRows
from peagle.engine.host.rows import HostRequest, RequestRows
from peagle.engine.host.sampler import sampling_of
from peagle.engine.spans import Span
from peagle.ops.acceptance import Path
from peagle.ops.draft import Draft
from peagle.ops.race import Race


@dataclass(frozen=True)
class HostProposerRows:
    """`ProposerRows` of requests that want as many drafts."""

    drafts: int
    nodes: int
    race: Race | None
    network: HostNetwork | None
    known: KnownRows | None
    """The rows that the network has not seen; None without a network."""
    history: Texts | None

    @property
    def texts(self) -> Texts:
        """As `ProposerRows`."""
        assert self.history is not None, "a proposer that reads texts says so"
        return self.history

    @property
    def newest(self) -> Tensor:
        """As `ProposerRows`: the token after each request's last known row."""
        assert self.known is not None
        counts = torch.tensor([span.count for span in self.known.spans])
        return self.known.tokens[counts.cumsum(0) - 1]

    def unbranched(self) -> Tensor:
        """As `ProposerRows`: a step has trees only where all its requests may branch."""
        assert self.known is not None
        requests = len(self.known.spans)
        return torch.zeros(requests, dtype=torch.int64, device=self.known.tokens.device)

    def run(self, masks: int, first: Tensor | None = None) -> Hidden:
        """As `ProposerRows`."""
        assert self.network is not None
        assert self.known is not None
        return self.network.run(self.known, masks, first)

    def after(self, tokens: Tensor, features: Tensor) -> "HostProposerRows":
        """As `ProposerRows`."""
        assert self.known is not None
        return replace(self, known=self.known.after(tokens, features))


class Proposal(NamedTuple):
    """The draft of requests that want as many."""

    places: tuple[int, ...]
    """Where these requests are among the sampled ones of a step."""
    draft: Draft


class HostProposals:
    """A proposer over requests whose rows are on the host."""

    def __init__(
        self, proposer: Proposer, network: HostNetwork | None, history: History | None
    ) -> None:
        """network: of a proposer that has one; history: the texts of one that reads them."""
        self._proposer, self.network, self.history = proposer, network, history

    def propose(self, sampled: Sequence[RequestRows], nodes: int) -> list[Proposal]:
        """A proposal for each number of drafts. nodes: drafts of each that branch; 0: a chain."""
        places: dict[int, list[int]] = {}
        for place, part in enumerate(sampled):
            places.setdefault(part.drafts, []).append(place)
        # who wants no drafts needs no proposal
        places.pop(0, None)
        return [
            Proposal(
                tuple(members),
                self._proposer.propose(self._rows([sampled[i] for i in members], drafts, nodes)),
            )
            for drafts, members in places.items()
        ]

    def learn(self, proposals: Sequence[Proposal], path: Path) -> None:
        """Have the proposer learn from a step. path: of all its sampled requests."""
        for proposal in proposals if self._proposer.learns else ():
            members, k = list(proposal.places), proposal.draft.depth
            # a proposal may be narrower than the step's widest one, and the rest of its row is
            # padding
            of_these = Path(path.drafts[members, :k], path.chosen[members, : k + 1])
            followed = torch.ones(len(members), dtype=torch.bool, device=path.chosen.device)
            self._proposer.learn(proposal.draft, of_these, followed)

    def fill(self, unseen: Sequence[tuple[int, HostRequest, int]]) -> None:
        """Show the network positions that it has not seen: (table row, request, how many)."""
        assert self.network is not None
        self.network.fill(self._known(unseen))

    def _rows(self, parts: Sequence[RequestRows], drafts: int, nodes: int) -> HostProposerRows:
        known, history = None, None
        if self.network is not None:
            known = self._known([(p.item.row, p.request, p.request.unseen) for p in parts])
        if self.history is not None:
            rows, counts = zip(*((p.item.row, len(p.request.tokens)) for p in parts), strict=True)
            history = self.history.of(torch.tensor(rows), torch.tensor(counts))
        race = race_of([part.request for part in parts])
        return HostProposerRows(drafts, nodes, race, self.network, known, history)

    def _known(self, unseen: Sequence[tuple[int, HostRequest, int]]) -> KnownRows:
        assert self.network is not None
        spans, following, features = [], [], []
        for row, request, count in unseen:
            start = request.computed - request.unseen
            spans.append(Span(row, start, count))
            # a position's feature goes with the token behind it
            following += request.tokens[start + 1 : start + 1 + count]
            features.append(torch.cat(request.features)[:count])
        taps = torch.cat(features)
        tokens = torch.tensor(following, device=taps.device)
        return KnownRows(tuple(spans), tokens, self.network.model.project(taps))


def race_of(requests: Sequence[HostRequest]) -> Race | None:
    """The draws that the requests' drafts are for; None where all are greedy."""
    settings = [request.settings for request in requests]
    if all(each.params.temperature == 0 for each in settings):
        return None
    newest = torch.tensor([len(request.tokens) - 1 for request in requests])
    return Race(sampling_of(settings, newest.device), newest, torch.arange(len(requests)))
