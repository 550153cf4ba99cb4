"""What every way of drafting is to the engine: what it needs, and what it drafts.

Whatever a proposer drafts, the target's text stays the same: a draft is only compared with the
target's own choice. Each proposer is one class, which runs over `ProposerRows`: on the host these
are some requests' rows of any number, on the device a captured cycle's, padded.

Four kinds fit this cut. What a text adds becomes known in a cycle's commit:

            fill, with the features of known positions       propose, from the newest token
P-EAGLE     needs the following token: its pending rows       mask slots behind the pending rows
            run with the next proposal, in one pass
EAGLE-3     the same                                          K - 1 further rows, each fed the last
MTP         the same; its feature is the final norm's output  the same, by its own norm
DFlash      keys and values alone, right after the commit     a block of the newest token and masks
Lookup      reads the text itself                             what followed the same tokens before
Outside     reads the text itself                             what another package says
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from peagle.drafters.network import Network
from peagle.models.spec import DecoderSpec
from peagle.ops.acceptance import Path
from peagle.ops.draft import Draft
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race


@dataclass(frozen=True)
class Needs:
    """What the engine keeps for a proposer."""

    network: Network | None = None
    """The network whose rows the engine lays out, and whose keys and values it keeps; None: the
    proposer has none."""
    history: bool = False
    """Whether it reads the requests' texts."""
    on_host: bool = False
    """Whether its code runs on the host, so that no whole cycle can be captured."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose streams are its features, ascending; none: it reads no features."""
        return () if self.network is None else self.network.config.taps

    @property
    def cache(self) -> DecoderSpec | None:
        """The layers whose keys and values are kept for it; None: it has none."""
        return None if self.network is None else self.network.config.transformer


class Texts(NamedTuple):
    """The texts of some requests."""

    tokens: Tensor
    """[table rows, positions] int32, every request's prompt and output."""
    requests: Tensor
    """[requests] the table rows of these requests."""
    counts: Tensor
    """[requests] how many tokens of each are known."""


class Hidden(NamedTuple):
    """What a network's pass gives."""

    stream: Tensor
    """[rows, hidden_size] the residual stream of the rows that are read."""
    normed: Normed
    """The same under the final norm."""


class ProposerRows(Protocol):
    """The requests that a proposer drafts for in one cycle, on the host or on the device."""

    @property
    def drafts(self) -> int:
        """Most drafts along a path."""

    @property
    def nodes(self) -> int:
        """Drafts of each request where they branch; 0: they are a chain."""

    @property
    def race(self) -> Race | None:
        """The draws that drafts are for; None where all requests are greedy."""

    @property
    def texts(self) -> Texts:
        """The requests' texts; only for a proposer that needs the history."""

    @property
    def newest(self) -> Tensor:
        """[requests] the newest token of each; only for a proposer with a network."""

    def unbranched(self) -> Tensor:
        """[requests] which of the requests' drafts must be a chain, though they may branch."""

    def run(self, masks: int, first: Tensor | None = None) -> Hidden:
        """A network's pass over the positions that it has not seen, then `masks` mask slots.

        first: [requests] the token of each request's first slot, for a network that gives it one;
        None: the mask token.
        What is read are the newest token's row and the mask slots': [requests * (masks + 1)] rows.
        """

    def after(self, tokens: Tensor, features: Tensor) -> Self:
        """One further row for each request: that of its draft [requests], with a feature
        [requests, hidden_size]."""


class Proposer(ABC):
    """Proposes drafts for the requests of a cycle."""

    needs = Needs()
    """What the engine keeps for it."""
    branches = False
    """Whether its drafts can be trees, of `ProposerRows.nodes`."""
    learns = False
    """Whether it wants to know what the target made of its drafts."""

    @abstractmethod
    def propose(self, rows: ProposerRows) -> Draft:
        """A draft for each request."""

    def learn(self, draft: Draft, path: Path, followed: Tensor) -> None:  # noqa: B027 (most do not)
        """Learn from what the target made of a draft; changes which drafts come, never a token.

        followed: [requests] bool, for whom drafts are made at all.
        """


class Drafter(Proposer):
    """A proposer that is a network: it reads the target's tapped hidden states."""

    def __init__(self, model: Network) -> None:
        self.model = model
        self.needs = Needs(model)
