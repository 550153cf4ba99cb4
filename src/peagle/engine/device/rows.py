"""What the device and the host know of each request there, by its row in the request table."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.device.cycle import CycleShape
from peagle.engine.device.models import PromptEnds
from peagle.engine.drafting import Drafting
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import Span
from peagle.engine.step import Begin, Cycle, PromptChunk, Settings
from peagle.models.decoder import Decoder
from peagle.ops.cycle_state import CycleState
from peagle.ops.penalties import penalize
from peagle.ops.sampling import Sampling, sample_requests
from peagle.transfer import upload


class DeviceRows:
    """The state of requests on the device, and how they get there, at the end of their prompt."""

    def __init__(
        self, target: Decoder, drafting: Drafting, most_unseen: int, table: RequestTable
    ) -> None:
        """most_unseen: how many positions may wait for the drafter."""
        drafter, k, weight = drafting.needs.cache, drafting.k, target.embed.weight
        self._follows, rows = drafter is not None, len(table.limits)
        self._usual, self._most = k + 1, max(most_unseen, k + 1)
        width = 1 if drafter is None else drafter.hidden_size
        features = weight.new_zeros(rows, self._most, width)
        vocab = target.spec.vocab_size
        self.state = CycleState.empty(table.slots, table.limits, features, vocab, k)
        self.sampling = Sampling.empty(rows, weight.device)
        self._pending = [1] * rows
        """Most positions that a request's next cycle can find unseen by the drafter."""
        self._unseen, self._computed = [1] * rows, [0] * rows
        """How many positions the drafter has not seen by the outcomes so far, and how many have
        the target's keys."""
        self._begun: dict[int, Begin] = {}

    def admit(self, begin: Begin) -> None:
        """A request gets a row; its prompt is still to be computed."""
        self._begun[begin.row] = begin

    def settings(self, row: int) -> Settings:
        """How a request's tokens are chosen."""
        return self._begun[row].settings

    def followed(self, row: int) -> bool:
        """Whether the drafter sees a request's positions: not of one that never drafts."""
        return self._follows and self._begun[row].settings.k > 0

    def next_shape(self, rows: Sequence[int], drafts: int, nodes: int = 0) -> CycleShape:
        """The shape of the next cycle of some requests, which leaves up to `drafts` + 1 pending."""
        # outcomes come a step late, so that what is pending is known by its upper bound alone
        shape = CycleShape(drafts, max(self._pending[row] for row in rows), nodes)
        for row in filter(self.followed, rows):
            self._pending[row] = drafts + 1 if drafts else self._pending[row] + 1
        return shape

    def behind(self, rows: Sequence[int], drafts: int, repeats: int) -> list[int]:
        """The rows among some whose drafter has to catch up before their next cycles.

        If one has to, others that will have to soon join it in the same pass.
        """
        least = self._usual if drafts else self._most // 2
        # a cycle with drafts has room for what another leaves, one without for all that may wait
        most = self._usual if drafts else self._most - repeats
        if all(self._pending[row] <= most for row in rows):
            return []
        return [row for row in rows if self._pending[row] > least]

    def land(self, item: Cycle | PromptChunk, emitted: int, drafts: int) -> int:
        """Note a step's outcome; returns how many positions the drafter has not seen.

        drafts: of the cycle.
        """
        row = item.row
        if isinstance(item, PromptChunk):
            self._computed[row], self._unseen[row] = item.stop, emitted
        else:
            self._computed[row] += emitted
            self._unseen[row] = emitted if drafts else self._unseen[row] + emitted
        return self._unseen[row] if self.followed(row) else 0

    def missed(self, row: int) -> Span:
        """The positions that the drafter has not seen, once all outcomes are known."""
        start = self._computed[row] - self._unseen[row]
        return Span(row, start, min(self._unseen[row], self.state.slots.shape[1] - start))

    def catch_up(self, rows: Sequence[int]) -> None:
        """Note that the drafter has seen all but the last position of some rows."""
        state, unseen = self.state, [self._unseen[row] - 1 for row in rows]
        last, places = upload([unseen, rows], state.computed.device)
        state.emitted[:, 0].index_copy_(0, places, state.emitted[places, last])
        state.features[:, 0].index_copy_(0, places, state.features[places, last])
        state.pending.index_fill_(0, places, 1)
        for row in rows:
            self._pending[row] = self._unseen[row] = 1

    def begin(self, chunks: Sequence[PromptChunk], ends: PromptEnds) -> None:
        """Choose the first tokens after prompts, and write all that their cycles will read.

        chunks: the last ones of their prompts.
        """
        rows, state, logits = self._write_settings(chunks), self.state, ends.logits
        self._count_tokens(chunks)
        # a first token has no drafts before it
        penalize(logits, rows.new_empty(len(rows), 0), state.penalties, rows)
        first = sample_requests(logits, self.sampling, rows, state.computed)
        state.begin(rows, first, ends.features)

    def _count_tokens(self, chunks: Sequence[PromptChunk]) -> None:
        """Count the tokens of requests with penalties."""
        for begin in (self._begun[chunk.row] for chunk in chunks):
            if begin.settings.params.penalized:
                known = upload(begin.tokens, self.state.computed.device)
                prompt, output = known[: begin.prompt_length], known[begin.prompt_length :]
                self.state.penalties.begin(begin.row, prompt, output)

    def _write_settings(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Write what requests bring into their table rows, which are returned: [requests]."""
        for chunk in chunks:
            self._pending[chunk.row] = 1
        state, sampling, device = self.state, self.sampling, self.state.computed.device
        given = [self.settings(chunk.row) for chunk in chunks]
        whole = upload([*zip(*map(_whole_numbers, chunks, given), strict=True)], device)
        real = upload([*zip(*map(_real_numbers, given), strict=True)], device)
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
            # one launch a column, however many requests begin
            column.index_copy_(0, rows, values)
        return rows


def _whole_numbers(chunk: PromptChunk, settings: Settings) -> tuple[int, ...]:
    _, top_k, _, _, seed = settings.sampling
    return chunk.row, chunk.stop, settings.k, seed, top_k


def _real_numbers(settings: Settings) -> tuple[float, ...]:
    params = settings.params
    numbers = (params.temperature, params.top_p, params.min_p, *params.penalties)
    return tuple(map(float, numbers))
