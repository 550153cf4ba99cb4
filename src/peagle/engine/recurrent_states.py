"""What recurrent layers keep of each request, of a size that does not grow with its context.

A state belongs to a row of the request table. A pass that has a request's position 0 begins a new
one, so that nothing is cleared when a request leaves; behind a cached prefix it is a copy of the
state that was kept there.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from peagle.engine.spans import Span
from peagle.engine.step import Begin, PromptChunk
from peagle.models.decoder import Recur
from peagle.models.spec import DecoderSpec
from peagle.ops.delta_net import DeltaRows, DeltaState, DeltaWeights, recur
from peagle.transfer import upload


def state_bytes(spec: DecoderSpec, drafts: int, dtype: torch.dtype) -> int:
    """Bytes that a request takes in all recurrent layers, with so many drafts a cycle."""
    nowhere = torch.device("meta")
    layers = spec.recurrent.values()
    each = (DeltaState.empty(heads, 1, drafts, dtype, nowhere) for heads in layers)
    return sum(layer.state.nbytes + layer.kept.nbytes for layer in each)


class RecurrentStates:
    """The states of all recurrent layers, and the drafts that have not been accepted into them.

    Behind the rows of the request table are slots for states of prefixes.
    """

    def __init__(self, spec: DecoderSpec, rows: int, slots: int, drafts: int, like: Tensor) -> None:
        """rows: of the request table; slots: for prefixes; drafts: most of a cycle."""
        self.accepted = torch.zeros(rows, dtype=torch.int64, device=like.device)
        """[table rows] how many drafts of a row's last pass were accepted."""
        self._rows = rows
        self._layers = {
            layer: DeltaState.empty(heads, rows + slots, drafts, like.dtype, like.device)
            for layer, heads in spec.recurrent.items()
        }

    def open(self, rows: DeltaRows) -> Recur:
        """The recurrences of one pass."""

        def of_layer(layer: int, product: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
            return recur(product, gates, weights, self._layers[layer], rows)

        return of_layer

    def rows_of(self, spans: Sequence[Span], sure: Sequence[int]) -> DeltaRows:
        """The rows of a pass over some spans. sure: how many of each are of known tokens."""
        columns = zip(*((span.row, span.start, span.count) for span in spans), strict=True)
        device = self.accepted.device
        requests, starts, counts = (upload(column, device) for column in columns)
        firsts, most = counts.cumsum(0) - counts, max(span.count for span in spans)
        known = upload(sure, device)
        return DeltaRows(requests, starts, firsts, counts, known, self.accepted, most)

    def settle(self, requests: Tensor) -> None:
        """Note that some requests' last pass had no drafts: [requests] table rows."""
        self.accepted.index_fill_(0, requests, 0)

    def commit(self, requests: Tensor, accepted: Tensor) -> None:
        """Note how many drafts of their last pass were accepted. Both: [requests]."""
        self.accepted.index_copy_(0, requests, accepted)

    def begin(self, begun: Iterable[Begin]) -> None:
        """Give requests the states behind their cached prefixes."""
        for begin in begun:
            if begin.state is not None:
                self._copy(self._rows + begin.state, begin.row)
                self.accepted[begin.row].fill_(0)

    def keep(self, chunks: Iterable[PromptChunk]) -> None:
        """Keep the states behind chunks that just ran, where others are to find them."""
        for chunk in chunks:
            if chunk.state is not None:
                self._copy(chunk.row, self._rows + chunk.state)

    def _copy(self, source: int, target: int) -> None:
        for layer in self._layers.values():
            for part in (layer.state, layer.kept):
                part[target].copy_(part[source])
