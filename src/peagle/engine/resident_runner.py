"""Requests whose state is on the device: steps are launched, and read one step behind."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter
from peagle.drafters.resident import CycleShape, resident_drafter
from peagle.engine.batch import Scheduled
from peagle.engine.draft_length import DraftLength
from peagle.engine.graph import CycleGraphs
from peagle.engine.kv_cache import KVCache
from peagle.engine.logprobs import PromptLogprobs, output_logprobs
from peagle.engine.prefill import Prefill
from peagle.engine.prompt_graphs import PromptGraphs
from peagle.engine.request import TokenLogprobs
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import ResidentCycle
from peagle.engine.resident_requests import ResidentRequests
from peagle.engine.runner import CycleResult
from peagle.engine.sampler import edit
from peagle.models.decoder import Decoder
from peagle.ops.cached_attention import supports_head_dim
from peagle.ops.triton import AVAILABLE, kernels
from peagle.transfer import Download


def captures_cycles(target: Decoder, drafter: Drafter | None) -> bool:
    """Whether a whole cycle can run on the device by itself: on a GPU with Triton.

    Sizes that the kernels do not cover run without them, as on a CPU, and a warning says so.
    """
    if not (target.embed.weight.is_cuda and AVAILABLE):
        return False
    specs = [target.spec] + ([drafter.model.config.transformer] if drafter else [])
    sizes = {layer.attention.head_dim for spec in specs for layer in spec.layers}
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
    results: Download
    """[table rows, K + 2]"""
    cycle: LaunchedCycle | None
    prompts_alone: bool
    """Whether it has prompt chunks only."""
    logits: Mapping[str, Tensor]
    """[rows, vocab] by request id, of those that want log-probabilities."""
    prompts: PromptLogprobs | None
    """Log-probabilities of prompts' own tokens; None where none are wanted."""


class ResidentRunner:
    """Runs requests whose newest tokens are on the device, so that the host launches without them.

    A step is one captured cycle for all requests after their prompt, then the prompt chunks, which
    are captured where they are short. Its results are returned by the next call. Where the host
    takes part in the choice for one of the requests, the cycle stops in between, and its results
    are returned at once, since the next choice depends on them.
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
        self._requests = ResidentRequests(target, width, lengths[-1], table)
        state, sampling = self._requests.state, self._requests.sampling
        self._graphs = CycleGraphs(cycle, state, sampling, spare, lengths)
        self._prompts = PromptGraphs(cycle, table, spare, max_batched_tokens)
        self._prefill = Prefill(cycle, table, self._prompts)
        self._most_rows = max_batched_tokens
        self.chooser: DraftLength | None = None
        """Chooses the number of drafts; None: always K."""
        self._flight: Flight | None = None
        self.refused: list[Scheduled] = []
        """Chunks of the last step for which the device had no memory."""

    @torch.inference_mode()
    def capture(self) -> None:
        """Choose tiles, capture graphs and build plans, before the first request."""
        device = self._requests.state.computed.device
        if device.type != "cuda":
            return
        kernels("tuning").choose_tiles(self._graphs, kernels("tiles").tiles_of(device))
        self._graphs.capture()
        self._prompts.capture(self._graphs.pool)
        self._prefill.warm_up(self._most_rows)
        if len(self._graphs.lengths) > 1:
            self.chooser = DraftLength(self._graphs.seconds_by_length())

    def draft_length(self, requests: int) -> int:
        """Drafts of the next cycle, which has `requests` requests."""
        if self.chooser is None or not requests:
            return self._graphs.lengths[-1]
        return self.chooser.choose(requests)

    @property
    def in_flight(self) -> bool:
        """Whether the results of a step are still to be read."""
        return self._flight is not None

    @property
    def filling(self) -> bool:
        """Whether the step in flight has prompt chunks only."""
        return self._flight is not None and self._flight.prompts_alone

    @torch.inference_mode()
    def run(self, work: Sequence[Scheduled]) -> list[tuple[Scheduled, CycleResult]]:
        """Launch a step; return the results of the one before, of requests that still run.

        A step in which the host takes part returns its own, and is not launched behind another.
        """
        self._table.flush()
        self.refused = []
        if any(item.completes and item.request.needs_host for item in work):
            assert self._flight is None, "its choices depend on what is in flight"
            return self._land(self._launch(work))
        flight, self._flight = self._flight, self._launch(work) if work else None
        return [] if flight is None else self._land(flight)

    def _launch(self, work: Sequence[Scheduled]) -> Flight:
        chunks = [item for item in work if not item.request.resident]
        cycles = [item for item in work if item.request.resident]
        logits: dict[str, Tensor] = {}
        cycle = self._cycle(cycles, logits) if cycles else None
        # after the cycle, whose replay would overwrite what a prompt leaves in the graphs' memory
        self.refused, prompts = self._start(chunks, logits) if chunks else ([], None)
        work = [item for item in work if item not in self.refused]
        for item in work:
            item.request.launch(item.rows, item.completes)
        admissions = tuple(item.request.admissions for item in work)
        results = Download(self._requests.state.results)
        return Flight(tuple(work), admissions, results, cycle, not cycles, logits, prompts)

    def _cycle(self, work: list[Scheduled], logits: dict[str, Tensor]) -> LaunchedCycle | None:
        """Run a cycle; its times are known only where the host takes no part in it."""
        drafts = self._graphs.length_for(max(item.drafts for item in work))
        shape = self._requests.next_shape(work, drafts)
        rows = [item.request.row for item in work]
        if not any(item.request.needs_host for item in work):
            return self._timed(rows, shape)
        proposed = Download(self._graphs.draft(rows, shape).flatten())
        verified = self._graphs.verify(rows, drafts)  # launched; forms look at the drafts meanwhile
        alike = [replace(item, rows=drafts + 1, drafts=drafts) for item in work]
        logits.update(_edited(alike, verified.logits, proposed))
        self._graphs.accept(rows, verified)
        return None

    def _start(
        self, chunks: list[Scheduled], logits: dict[str, Tensor]
    ) -> tuple[list[Scheduled], PromptLogprobs | None]:
        """Run prompt chunks, and move requests whose prompt is complete to the cycle.

        Returns all chunks if the device has no memory for them, and their log-probabilities.
        """
        chunks = sorted(chunks, key=lambda item: (item.start > 0, item.rows))
        try:
            ends = self._prefill.run(chunks)
            prompts = None if ends.scores is None else PromptLogprobs(chunks, ends.scores)
            begun = [item for item in chunks if item.completes]
            if begun:
                logits.update(_edited(begun, ends.logits, Download(torch.empty(0))))
                self._requests.begin(begun, ends)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return chunks, None
        return [], prompts

    def _timed(self, rows: list[int], shape: CycleShape) -> LaunchedCycle | None:
        """Run and time a cycle; None if it was not captured, since its time is not typical then."""
        if not self._requests.state.computed.is_cuda:
            self._graphs.run(rows, shape)
            return None
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        replayed = self._graphs.run(rows, shape)
        ended.record()
        cycle = LaunchedCycle(len(rows), shape.drafts, started, ended)
        return cycle if replayed else None

    def _land(self, flight: Flight) -> list[tuple[Scheduled, CycleResult]]:
        landed = _landed(flight)
        if self.chooser is not None:
            for item, result in landed:
                if item.drafts:
                    self.chooser.verified(item.drafts, result.accepted)
            if flight.cycle is not None:
                cycle = flight.cycle
                self.chooser.took(cycle.requests, cycle.drafts, cycle.seconds)
        return landed


def _edited(work: Sequence[Scheduled], logits: Tensor, drafts: Download) -> dict[str, Tensor]:
    """Edit logits in place; returns what they were, by request id, for log-probabilities.

    logits: [sum(drafts + 1), vocab]; drafts: [sum(drafts)]; then of padding.
    """
    counts = [item.drafts + 1 for item in work]
    rows = logits[: sum(counts)]
    shares = zip(work, rows.split(counts), strict=True)
    kept = {
        item.request.id: share.clone()
        for item, share in shares
        if item.request.params.logprobs is not None
    }
    edit(rows, work, drafts)
    return kept


def _landed(flight: Flight) -> list[tuple[Scheduled, CycleResult]]:
    results, tokens = flight.results.tolist(), {}
    for item, admissions in zip(flight.work, flight.admissions, strict=True):
        request = item.request
        if request.row < 0 or request.admissions != admissions or request.finish_reason:
            continue
        request.land(item.rows, item.completes)
        accepted, *emitted = results[request.row]
        tokens[item] = emitted[: accepted + 1] if item.completes else []
    scores = _scores(flight.logits, tokens)
    prompts = {} if flight.prompts is None else flight.prompts.by_request()
    landed = []
    for item, new in tokens.items():
        own, of_prompt = (found.get(item.request.id, []) for found in (scores, prompts))
        landed.append((item, CycleResult(new, max(len(new) - 1, 0), None, own, of_prompt)))
    return landed


def _scores(
    logits: Mapping[str, Tensor], tokens: Mapping[Scheduled, list[int]]
) -> dict[str, list[TokenLogprobs]]:
    """Log-probabilities by request id."""
    asked = {item.request: new for item, new in tokens.items() if item.request.id in logits}
    rows = [logits[request.id] for request in asked]
    scores = output_logprobs([*asked], rows, [*asked.values()])
    return {request.id: own for request, own in zip(asked, scores, strict=True)}
