"""A drafter's network over the rows of some requests, in torch's operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.drafters.proposer import Hidden
from peagle.engine.host.attention import HostCache
from peagle.engine.spans import Span
from peagle.ops.draft_rows import draft_rows
from peagle.ops.products.normed import Normed


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

    def __init__(self, model: DraftModel, cache: HostCache) -> None:
        self.model, self.cache = model, cache
        mask_token = model.config.mask_token_id
        self._mask_token: Tensor | None = None
        if mask_token is not None:
            self._mask_token = torch.tensor([mask_token], device=model.mask_hidden.device)
            self._mask_feature = model.mask_feature()

    def run(self, known: KnownRows, masks: int) -> Hidden:
        """The output of each request's last known row and of `masks` mask slots behind it."""
        spans, tokens, features = known.spans, known.tokens, known.features
        counts = [span.count for span in spans]
        sources, reads = draft_rows(counts, masks, tokens.device)
        if masks:
            assert self._mask_token is not None, "mask slots belong to P-EAGLE"
            tokens = torch.cat((tokens, self._mask_token)).index_select(0, sources)
            features = torch.cat((features, self._mask_feature)).index_select(0, sources)
            spans = tuple(Span(span.row, span.start, span.count + masks) for span in spans)
        stream = self._forward(spans, tokens, features).index_select(0, reads)
        readout = self.model.readout
        return Hidden(stream, Normed(readout.norm(stream), None, readout.norm.eps))

    def fill(self, known: KnownRows) -> None:
        """Write the keys and values of known rows."""
        self._forward(known.spans, known.tokens, known.features)

    def _forward(self, spans: Sequence[Span], tokens: Tensor, features: Tensor) -> Tensor:
        positions, attend = self.cache.open(spans)
        return self.model(tokens, features, positions, attend)
