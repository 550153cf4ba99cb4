"""The state of requests on the device, and how they get there, at the end of their prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.drafters.resident import CycleShape
from peagle.engine.batch import Scheduled
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import PromptEnds
from peagle.models.decoder import Decoder
from peagle.ops.argmax import argmax
from peagle.ops.penalties import penalize
from peagle.ops.resident import ResidentState
from peagle.ops.sampling import Sampling, sample_requests
from peagle.transfer import upload


class ResidentRequests:
    """What the device and the host know of each, by its row in the request table."""

    def __init__(self, target: Decoder, width: int, most_drafts: int, table: RequestTable) -> None:
        """width: of projected features."""
        weight, rows = target.embed.weight, len(table.limits)
        features = weight.new_zeros(rows, most_drafts + 1, width)
        vocab = target.spec.vocab_size
        self.state = ResidentState.empty(table.slots, table.limits, features, vocab)
        self.sampling = Sampling.empty(rows, weight.device)
        self._pending = [1] * rows
        """Most positions that a request's next cycle can find unseen by the drafter."""

    def next_shape(self, work: Sequence[Scheduled], drafts: int) -> CycleShape:
        """The shape of the next cycle of some requests, which leaves up to `drafts` + 1 pending."""
        rows = [item.request.row for item in work]
        shape = CycleShape(drafts, max(self._pending[row] for row in rows))
        for row in rows:
            self._pending[row] = drafts + 1
        return shape

    def begin(self, begun: list[Scheduled], ends: PromptEnds) -> None:
        """Choose the first tokens of requests, and write all that their cycles will read."""
        rows, state, logits = self._write_settings(begun), self.state, ends.logits
        self._count_tokens(begun)
        penalize(logits, rows.new_empty(len(rows), 0), state.penalties, rows)
        greedy = argmax(logits)
        first = sample_requests(logits, greedy, self.sampling, rows, state.computed)
        state.begin(rows, first, ends.features)

    def _count_tokens(self, begun: list[Scheduled]) -> None:
        """Of requests with penalties."""
        for item in begun:
            request = item.request
            if request.params.penalized:
                known = upload(request.tokens, self.state.computed.device)
                prompt, output = known[: request.prompt_length], known[request.prompt_length :]
                self.state.penalties.begin(request.row, prompt, output)

    def _write_settings(self, begun: list[Scheduled]) -> Tensor:
        """Write what requests bring into their table rows, which are returned: [requests]."""
        for item in begun:
            self._pending[item.request.row] = 1
        state, sampling = self.state, self.sampling
        whole, real = (
            upload([*zip(*map(numbers, begun), strict=True)], state.computed.device)
            for numbers in (_whole_numbers, _real_numbers)
        )
        rows, stops, ks, seeds, top_ks = whole
        temperatures, top_ps, min_ps, *rates = real
        for column, values in (
            (state.computed, stops),
            (state.ks, ks),
            (sampling.seeds, seeds),
            (sampling.top_k, top_ks),
            (sampling.temperature, temperatures),
            (sampling.top_p, top_ps),
            (sampling.min_p, min_ps),
            (state.penalties.rates, torch.stack(rates, dim=1)),
        ):
            column.index_copy_(0, rows, values)
        return rows


def _whole_numbers(item: Scheduled) -> tuple[int, ...]:
    request = item.request
    return request.row, item.stop, request.k, request.seed, max(request.params.top_k, 0)


def _real_numbers(item: Scheduled) -> tuple[float, ...]:
    params = item.request.params
    numbers = (params.temperature, params.top_p, params.min_p, *params.penalties)
    return tuple(map(float, numbers))
