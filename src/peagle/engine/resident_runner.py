"""Requests that the device runs by itself: steps are launched, and read one step behind."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter
from peagle.drafters.resident import CycleShape, resident_drafter
from peagle.engine.batch import Scheduled
from peagle.engine.draft_length import DraftLength
from peagle.engine.graph import CycleGraphs
from peagle.engine.kv_cache import KVCache
from peagle.engine.prefill import Prefill
from peagle.engine.prompt_graphs import PromptGraphs
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import PromptEnds, ResidentCycle
from peagle.engine.runner import CycleResult
from peagle.engine.upload import upload
from peagle.models.decoder import Decoder
from peagle.ops.argmax import argmax
from peagle.ops.cached_attention import supports_head_dim
from peagle.ops.penalties import penalize
from peagle.ops.resident import ResidentState
from peagle.ops.sampling import Sampling, sample_requests
from peagle.ops.triton import AVAILABLE, kernels


def captures_cycles(target: Decoder, drafter: Drafter | None) -> bool:
    """Whether a whole cycle can run on the device by itself: on a GPU with Triton.

    Sizes that the kernels do not cover run without them, as on a CPU, and a warning says so.
    """
    if not (target.embed.weight.is_cuda and AVAILABLE):
        return False
    shapes = [target.config] + ([drafter.model.config.transformer] if drafter else [])
    sizes = {shape.head_dim for shape in shapes}
    if all(map(supports_head_dim, sizes)):
        return True
    warnings.warn(f"no GPU kernels for head_dim {sizes}: running plain torch", stacklevel=2)
    return False


@dataclass(frozen=True)
class LaunchedCycle:
    """A captured cycle in flight, and the events that time it."""

    requests: int
    drafts: int
    started: torch.cuda.Event
    ended: torch.cuda.Event

    @property
    def seconds(self) -> float:
        """How long it took; only after it has ended."""
        return self.started.elapsed_time(self.ended) / 1e3


@dataclass(frozen=True)
class Flight:
    """A launched step: its work, and where the results will be."""

    work: tuple[Scheduled, ...]
    admissions: tuple[int, ...]
    """`Request.admissions` of each, at the launch."""
    results: Tensor
    """[table rows, K + 2], in host memory once `arrived` has happened."""
    arrived: torch.cuda.Event | None
    cycle: LaunchedCycle | None
    prompts_alone: bool
    """Whether it has prompt chunks only."""


class ResidentRunner:
    """Runs requests whose tokens the device chooses; the host launches without waiting for tokens.

    A step is one captured cycle for all requests after their prompt, then the prompt chunks, which
    are captured where they are short. Its results are returned by the next call.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        lengths: Sequence[int],
        table: RequestTable,
        caches: tuple[KVCache, KVCache | None],
        max_batched_tokens: int,
        synthetic: Sequence[float] | None = None,
    ) -> None:
        """lengths: draft lengths that a cycle may have, ascending, K last; max_batched_tokens: most
        target rows in one pass."""
        self._table, spare = table, table.admit()
        drafting = None if drafter is None else resident_drafter(drafter)
        of_target, of_drafter = caches
        tensors = (of_target.tensor, None if of_drafter is None else of_drafter.tensor)
        cycle = ResidentCycle(target, drafting, tensors, synthetic)
        width = 1 if drafter is None else drafter.model.config.transformer.hidden_size
        features = target.embed.weight.new_zeros(len(table.limits), lengths[-1] + 1, width)
        vocab = target.config.vocab_size
        self._state = ResidentState.empty(table.slots, table.limits, features, vocab)
        self._sampling = Sampling.empty(len(table.limits), features.device)
        self._graphs = CycleGraphs(cycle, self._state, self._sampling, spare, lengths)
        self._prompts = PromptGraphs(cycle, table, spare, max_batched_tokens)
        self._prefill = Prefill(cycle, table, self._prompts)
        self._longest_chunk = min(max_batched_tokens, table.slots.shape[1])
        self._pending = [1] * len(table.limits)
        """By table row: most positions that its next cycle can find unseen by the drafter."""
        self.chooser: DraftLength | None = None
        """Chooses the number of drafts; None: always K."""
        self._flight: Flight | None = None
        self.refused: list[Scheduled] = []
        """Chunks of the last step for which the device had no memory."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Choose tiles, capture graphs and build plans, before the first request."""
        device = self._state.computed.device
        if device.type != "cuda":
            return
        kernels("tuning").choose_tiles(self._graphs, kernels("tiles").tiles_of(device))
        self._graphs.capture()
        self._prompts.capture(self._graphs.pool)
        self._prefill.warm_up(self._longest_chunk)
        if len(self._graphs.lengths) > 1:
            self.chooser = DraftLength(self._graphs.seconds_by_length())

    def draft_length(self, requests: int) -> int:
        """Drafts of the next cycle, which has `requests` requests."""
        if self.chooser is None or not requests:
            return self._graphs.lengths[-1]
        return self.chooser.choose(requests)

    @property
    def filling(self) -> bool:
        """Whether the step in flight has prompt chunks only."""
        return self._flight is not None and self._flight.prompts_alone

    @torch.inference_mode()
    def run(self, work: Sequence[Scheduled]) -> list[tuple[Scheduled, CycleResult]]:
        """Launch a step; return the results of the one before, of requests that still run."""
        self.refused = []
        flight, self._flight = self._flight, self._launch(work) if work else None
        return [] if flight is None else self._land(flight)

    def _launch(self, work: Sequence[Scheduled]) -> Flight:
        self._table.flush()
        chunks = [item for item in work if not item.request.resident]
        cycles = [item for item in work if item.request.resident]
        cycle = self._cycle(cycles) if cycles else None
        # after the cycle, whose replay would overwrite what a prompt leaves in the graphs' memory
        self.refused = self._start(chunks) if chunks else []
        work = [item for item in work if item not in self.refused]
        for item in work:
            item.request.launch(item.rows, item.completes)
        admissions = tuple(item.request.admissions for item in work)
        return Flight(tuple(work), admissions, *self._fetch(), cycle, not cycles)

    def _cycle(self, work: list[Scheduled]) -> LaunchedCycle | None:
        rows = [item.request.row for item in work]
        drafts = self._graphs.length_for(max(item.drafts for item in work))
        shape = CycleShape(drafts, max(self._pending[row] for row in rows))
        launched = self._timed(rows, shape)
        for row in rows:
            self._pending[row] = drafts + 1
        return launched

    def _timed(self, rows: list[int], shape: CycleShape) -> LaunchedCycle | None:
        """Run and time a cycle; None if it was not captured, since its time is not typical then."""
        if not self._state.computed.is_cuda:
            self._graphs.run(rows, shape)
            return None
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        replayed = self._graphs.run(rows, shape)
        ended.record()
        cycle = LaunchedCycle(len(rows), shape.drafts, started, ended)
        return cycle if replayed else None

    def _start(self, chunks: list[Scheduled]) -> list[Scheduled]:
        """Run chunks, and move requests whose prompt is complete to the cycle.

        Returns all chunks if the device has no memory for them.
        """
        chunks = sorted(chunks, key=lambda item: (item.start > 0, item.rows))
        try:
            ends = self._prefill.run(chunks)
            begun = [item for item in chunks if item.completes]
            if begun:
                self._enter(begun, ends)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return chunks
        return []

    def _enter(self, begun: list[Scheduled], ends: PromptEnds) -> None:
        """Move requests whose prompt is complete to the cycle, with their first token."""
        for item in begun:
            self._pending[item.request.row] = 1
        rows = self._write_settings(begun)
        self._penalize(begun, ends.logits, rows)
        greedy, positions = argmax(ends.logits), self._state.computed
        first = sample_requests(ends.logits, greedy, self._sampling, rows, positions)
        self._state.begin(rows, first, ends.features)

    def _write_settings(self, begun: list[Scheduled]) -> Tensor:
        """Write what requests bring into their table rows, which are returned: [requests]."""
        state, sampling = self._state, self._sampling
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

    def _penalize(self, begun: list[Scheduled], logits: Tensor, rows: Tensor) -> None:
        """Count the tokens of requests with penalties, and penalize the first logits of all."""
        penalties = self._state.penalties
        for item in begun:
            request = item.request
            if request.params.penalized:
                known = upload(request.tokens, rows.device)
                prompt, output = known[: request.prompt_length], known[request.prompt_length :]
                penalties.begin(request.row, prompt, output)
        penalize(logits, rows.new_empty(len(rows), 0), penalties, rows)

    def _land(self, flight: Flight) -> list[tuple[Scheduled, CycleResult]]:
        if flight.arrived is not None:
            flight.arrived.synchronize()
        landed = _landed(flight)
        if self.chooser is not None:
            for item, result in landed:
                if item.drafts:
                    self.chooser.verified(item.drafts, result.accepted)
            if flight.cycle is not None:
                cycle = flight.cycle
                self.chooser.took(cycle.requests, cycle.drafts, cycle.seconds)
        return landed

    def _fetch(self) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy all results to the host."""
        results = self._state.results
        if not results.is_cuda:
            return results.clone(), None
        host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
        host.copy_(results, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return host, arrived


def _whole_numbers(item: Scheduled) -> tuple[int, ...]:
    request = item.request
    return request.row, item.stop, request.k, request.seed, max(request.params.top_k, 0)


def _real_numbers(item: Scheduled) -> tuple[float, ...]:
    params = item.request.params
    numbers = (params.temperature, params.top_p, params.min_p, *params.penalties)
    return tuple(map(float, numbers))


def _landed(flight: Flight) -> list[tuple[Scheduled, CycleResult]]:
    results = flight.results.tolist()
    landed = []
    for item, admissions in zip(flight.work, flight.admissions, strict=True):
        request = item.request
        if request.row < 0 or request.admissions != admissions or request.finish_reason:
            continue
        request.land(item.rows, item.completes)
        accepted, *tokens = results[request.row]
        new = tokens[: accepted + 1] if item.completes else []
        landed.append((item, CycleResult(new, accepted if new else 0, None, [])))
    return landed
