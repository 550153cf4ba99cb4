"""A drafter's network over the rows of some requests, in torch's operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.network import Network
from peagle.drafters.proposer import Hidden
from peagle.engine.host.attention import open_pass
from peagle.engine.kv_cache import KVCache
from peagle.engine.spans import Span
from peagle.ops.products.normed import Normed
from peagle.transfer import upload


@dataclass(frozen=True)
class KnownRows:
    """Rows that a drafter has not seen, request after request."""

    spans: tuple[Span, ...]
    tokens: Tensor
    """[rows] the token after each position."""
    features: Tensor
    """[rows, hidden_size] the projected feature of each position."""

    def after(self, tokens: Tensor, features: Tensor) -> "KnownRows":
        """The row behind each request's last. tokens: [requests]; features: [requests, hidden]."""
        spans = tuple(Span(span.row, span.start + span.count, 1) for span in self.spans)
        return KnownRows(spans, tokens, features)


class HostNetwork:
    """A drafter's model and the cache of its keys and values."""

    def __init__(self, model: Network, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        norms = model.first_norms()
        self._mask_feature = norms.mask_feature[None]
        self._mask_token = torch.tensor([norms.mask_token], device=norms.embedding.device)

    def run(self, known: KnownRows, masks: int, first: Tensor | None = None) -> Hidden:
        """The output of each request's last known row and of `masks` mask slots behind it.

        first: as of `ProposerRows`.
        """
        spans, tokens, features = known.spans, known.tokens, known.features
        counts = [span.count for span in spans]
        sources, reads = draft_rows(counts, masks, tokens.device)
        if masks:
            # the mask slot's input comes last, so that `sources` points at it for every mask slot
            tokens = torch.cat((tokens, self._mask_token)).index_select(0, sources)
            features = torch.cat((features, self._mask_feature)).index_select(0, sources)
            spans = tuple(Span(span.row, span.start, span.count + masks) for span in spans)
        reads = reads.view(len(counts), masks + 1)
        # the first slot is the newest token's own, where the network gives it one
        if first is not None:
            tokens = tokens.index_copy(0, reads[:, 1], first)
        whole = self._forward(spans, tokens, features, reads[:, 1:] if masks else None)
        stream = whole.index_select(0, reads[:, self.model.unread :].flatten())
        readout = self.model.readout
        return Hidden(stream, Normed(readout.norm(stream), None, readout.norm.eps))

    def fill(self, known: KnownRows) -> None:
        """Write the keys and values of known rows."""
        self._forward(known.spans, known.tokens, known.features)

    def _forward(
        self, spans: Sequence[Span], tokens: Tensor, features: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """slots: [requests, masks] the places of mask slots; None: there are none."""
        positions, attend = open_pass(self.cache, spans, whole=slots is not None)
        if slots is None:
            return self.model(tokens, features, positions, attend)
        return self.model.with_slots((tokens, features, positions), attend, slots)


def draft_rows(counts: Sequence[int], masks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lay out one request after another: its `count` known rows, then `masks` mask slots.

    Returns the source of each row, an index into the concatenated known rows or `sum(counts)` for a
    mask slot, and the rows at which drafts are read: the last known row and the mask slots of each
    request.
    """
    sources: list[int] = []
    reads: list[int] = []
    known, mask = 0, sum(counts)
    for count in counts:
        sources += range(known, known + count)
        known += count
        reads += range(len(sources) - 1, len(sources) + masks)
        sources += [mask] * masks
    return upload(sources, device), upload(reads, device)
