"""The worker on a GPU: steps are launched, and their outcome is read one step behind."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from peagle.drafters.fused import fused_drafter
from peagle.drafters.proposer import Needs
from peagle.engine.branching import Branching
from peagle.engine.cycle_times import Seconds
from peagle.engine.device.cycle import DeviceSide
from peagle.engine.device.flight import Flight, Timed
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.device.models import DeviceModels
from peagle.engine.device.prefill import Prefill, PromptGraphs, in_order
from peagle.engine.device.rows import DeviceRows
from peagle.engine.drafting import Drafting
from peagle.engine.logits_processor import Choice, LogitsProcessor
from peagle.engine.logprobs import PromptLogprobs, output_logprobs
from peagle.engine.repeats import MOST_REPEATS
from peagle.engine.request_memory import RequestMemory
from peagle.engine.step import MOST_UNSEEN, Cycle, Outcome, PromptChunk, Result, Step, TokenLogprobs
from peagle.models.decoder import Decoder
from peagle.ops.cached_attention import supports_head_dim
from peagle.ops.moe import RoutedExperts
from peagle.ops.triton import AVAILABLE, kernels
from peagle.transfer import Download


def captures_cycles(target: Decoder, needs: Needs) -> bool:
    """Whether a whole cycle can run on the device by itself: on a GPU with Triton.

    Sizes that the kernels do not cover run without them, as on a CPU, and a warning says so; so do
    experts in FP8 on a GPU without its instructions.
    """
    if not (target.embed.weight.is_cuda and AVAILABLE):
        return False
    specs = [target.spec] + ([needs.cache] if needs.cache else [])
    sizes = {heads.head_dim for spec in specs for heads in spec.attention.values()}
    for heads in target.spec.recurrent.values():
        sizes |= {heads.key_dim, heads.value_dim}
    if not all(map(supports_head_dim, sizes)):
        warnings.warn(f"no GPU kernels for head_dim {sizes}: running plain torch", stacklevel=2)
        return False
    if not all(e.has_kernels() for e in target.modules() if isinstance(e, RoutedExperts)):
        if kernels("skinny_product").able(target.embed.weight.device):  # else it has said so
            message = "no GPU kernels for these experts' weights: running plain torch"
            warnings.warn(message, stacklevel=2)
        return False
    return True


class DeviceWorker:
    """Keeps requests' newest tokens on the device, so that steps are launched without them.

    A step is one captured cycle for all requests after their prompt, then the prompt chunks, which
    are captured where they are short. Its outcome comes with the next call. Where the host takes
    part in the choice for one of the requests, the cycle stops in between, and the outcome comes at
    once, since the next choice depends on it.
    """

    runs_ahead = True

    def __init__(
        self, target: Decoder, drafting: Drafting, memory: RequestMemory, processor: LogitsProcessor
    ) -> None:
        """memory: whose table has one row more than there can be requests."""
        self._memory, self._processor, table = memory, processor, memory.table
        needs, lengths, rows = drafting.needs, drafting.lengths, len(table.limits)
        network = None if needs.network is None else fused_drafter(needs.network)
        self._models = DeviceModels(target, network, memory)
        self.pauses, self._follows = lengths[0] == 0, network is not None
        most_unseen = MOST_UNSEEN if self.pauses and self._follows else 0
        self._rows = DeviceRows(target, drafting, most_unseen, table)
        side = DeviceSide(
            self._models,
            drafting.proposer,
            memory.history,
            drafting.accept(rows, target.embed.weight.device),
            self._rows.state,
            self._rows.sampling,
        )
        spare = rows - 1
        self.graphs = CycleGraphs(side, spare, lengths, drafting.num_tree_nodes or 0)
        self._most_rows = memory.capacity.batched_tokens
        self._prompts = PromptGraphs(self._models, table, spare, self._most_rows)
        self._prefill = Prefill(self._models, table, self._prompts)
        self.cycle_seconds: Seconds | None = None
        """Measured where there are several draft lengths to choose from."""
        self._flight: Flight | None = None
        self._repeated = self._rows.state.results.new_zeros(rows, MOST_REPEATS)
        """[table rows, most repeats] what a cycle that is repeated chooses each time."""
        self._landed = 0.0
        """When the newest results came, while the step behind them was in flight; else 0."""
        self._catching_up = 0.0
        """`CycleTime.catching_up` of the step that is about to be launched."""

    @property
    def branching(self) -> Branching:
        """As `Worker`."""
        return self.graphs.branching

    @torch.inference_mode()
    def capture(self, least_trees: int = 0) -> None:
        """Capture graphs and build plans, before the first request.

        least_trees: as `CycleGraphs.measure_trees`.
        """
        if not self._rows.state.computed.is_cuda:
            return
        self.graphs.capture()
        self.graphs.measure_trees(least_trees)
        self._prompts.capture(self.graphs.pool)
        self._prefill.warm_up(self._most_rows)
        if len(self.graphs.lengths) > 1:
            self.cycle_seconds = self.graphs.seconds_by_length()

    @torch.inference_mode()
    def exchange(self, step: Step) -> Outcome:
        """Launch a step; return the outcome of the one before.

        A step in which the host takes part returns its own, and is not launched behind another.
        """
        if step.hosted:
            assert self._flight is None, "its choices depend on what is in flight"
        landed = self._catch_up(step)
        self._memory.update(step)
        for begin in step.begun:
            self._rows.admit(begin)
        launched = due = self._launch(step) if step.work else None
        if not step.hosted:
            # the step before is read, and this one stays in flight
            due, self._flight = self._flight, launched
        if due is not None:
            landed = self._land(due)
        return replace(landed, refused=() if launched is None else launched.refused)

    @torch.inference_mode()
    def forget(self) -> None:
        """Forget all requests and what is in flight; raises where the device is lost."""
        self._flight, self._landed = None, 0.0
        self._memory.table.forget()

    def _catch_up(self, step: Step) -> Outcome:
        """Have the drafter see what it has missed where it must.

        This needs the outcome of what is in flight, which is returned then: what a cycle accepted
        says where the next positions are.
        """
        behind, self._catching_up = self._behind(step), 0.0
        if not behind and not step.caught_up:
            return Outcome()
        landed = Outcome() if self._flight is None else self._land(self._flight)
        self._flight = None
        began = time.perf_counter()
        missed = [self._rows.missed(row) for row in step.caught_up]
        for row in behind:
            span = self._rows.missed(row)
            # the last position is left to the next cycle, which drafts from it
            missed.append(replace(span, count=span.count - 1))
        self._prefill.fill_network(self._rows.state, missed, self._most_rows)
        if behind:
            self._rows.catch_up(behind)
        # what is launched kernel by kernel takes the host longer than the device
        self._catching_up = time.perf_counter() - began
        return landed

    def _behind(self, step: Step) -> list[int]:
        if not (self.pauses and self._follows and step.cycles):
            return []
        drafts = self.graphs.length_for(max(cycle.drafts for cycle in step.cycles))
        return self._rows.behind([cycle.row for cycle in step.cycles], drafts, step.repeats)

    def _launch(self, step: Step) -> Flight:
        """Launch a step."""
        logits: dict[int, Tensor] = {}
        drafts = max((cycle.drafts for cycle in step.cycles), default=0)
        drafts = self.graphs.length_for(drafts)
        repeated, timed = None, None
        if step.cycles:
            timed = self._cycle(step, drafts, logits)
            if step.repeats > 1:
                repeated = Download(self._repeated[:, : step.repeats])
        # after the cycle, whose replay would overwrite what a prompt leaves in their memory
        chunks, prompts = self._start(step.chunks, logits)
        results = Download(self._rows.state.results)
        if self._flight is None:
            # nothing was in flight: the host has waited for requests, which is no time for a step
            self._landed = 0.0
        host = time.perf_counter() - self._landed if self._landed else 0.0
        times = timed, host, self._catching_up
        return Flight(step, chunks, drafts, results, repeated, *times, logits, prompts)

    def _cycle(self, step: Step, drafts: int, logits: dict[int, Tensor]) -> Timed | None:
        """Run a step's cycles; their times are known only where the host takes no part."""
        rows = [cycle.row for cycle in step.cycles]
        if not any(cycle.hosted for cycle in step.cycles):
            return self._timed(step, rows, drafts)
        shape = self._rows.next_shape(rows, drafts)
        proposed = Download(self.graphs.draft(rows, shape))
        verified = self.graphs.verify(rows, drafts)  # launched; forms look at the drafts meanwhile
        logits |= self._edit(step.cycles, drafts, verified.logits, proposed)
        self.graphs.accept(rows, drafts, verified)
        return None

    def _start(
        self, chunks: Sequence[PromptChunk], logits: dict[int, Tensor]
    ) -> tuple[tuple[PromptChunk, ...], PromptLogprobs | None]:
        """Run prompt chunks, and move requests whose prompt is complete to the cycle.

        Returns none of them if the device has no memory for them, and their log-probabilities.
        """
        if not chunks:
            return (), None
        ordered = in_order(chunks)
        try:
            followed = any(self._rows.followed(chunk.row) for chunk in ordered)
            ends = self._prefill.run(ordered, followed)
            if self._memory.states is not None:
                # in the step's order: a slot that several chunks get belongs to the last of them
                self._memory.states.keep(chunks)
            prompts = None if ends.scores is None else PromptLogprobs(ordered, ends.scores)
            last = [chunk for chunk in ordered if chunk.completes]
            if last:
                logits |= self._edit(last, 0, ends.logits, Download(torch.empty(0)))
                self._rows.begin(last, ends)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return (), None
        return tuple(ordered), prompts

    def _edit(
        self, work: Sequence[PromptChunk | Cycle], drafts: int, logits: Tensor, proposed: Download
    ) -> dict[int, Tensor]:
        """Edit logits in place; returns what they were for log-probabilities, by table row.

        logits: [work * (drafts + 1), vocab], proposed: [work * drafts], both with padding behind.
        """
        kept: dict[int, Tensor] = {}
        choices = [Choice(self._rows.settings(item.row), drafts, item.missing) for item in work]
        rows = logits[: len(work) * (drafts + 1)]
        for item, choice, share in zip(work, choices, rows.split(drafts + 1), strict=True):
            if choice.settings.params.logprobs is not None:
                kept[item.row] = share.clone()
        self._processor.edit(rows, choices, proposed)
        return kept

    def _timed(self, step: Step, rows: list[int], drafts: int) -> Timed | None:
        """Run and time a cycle; None if it was not captured, since its time is not typical then."""
        if not self._rows.state.computed.is_cuda:
            self._repeat(step, rows, drafts)
            return None
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started.record()
        replayed = self._repeat(step, rows, drafts)
        ended.record()
        return (started, ended) if replayed else None

    def _repeat(self, step: Step, rows: list[int], drafts: int) -> bool:
        """Run a cycle as often as the step says, and keep what it chooses; returns whether it was
        captured."""
        replayed = True
        for turn in range(step.repeats):
            replayed &= self.graphs.run(rows, self._rows.next_shape(rows, drafts, step.nodes))
            if step.repeats > 1:
                # the next turn writes its results in the same place
                self._repeated[:, turn].copy_(self._rows.state.results[:, 1])
        return replayed

    def _land(self, flight: Flight) -> Outcome:
        """Read what a step brought; waits for it."""
        found = flight.results.tolist()
        self._landed = time.perf_counter()
        tokens = flight.tokens(found)
        scores = self._scores(flight.logits, tokens) if flight.logits else {}
        prompts = {} if flight.prompts is None else flight.prompts.by_row()
        results = tuple(
            Result(
                item.row,
                tokens[item.row],
                *self._verified(item, flight, found[item.row]),
                pending=self._rows.land(item, len(tokens[item.row]), flight.drafts),
                logprobs=scores.get(item.row, ()),
                prompt_logprobs=prompts.get(item.row, ()),
            )
            for item in flight.work
        )
        return Outcome(flight.step.number, results, flight.time)

    def _verified(
        self, item: Cycle | PromptChunk, flight: Flight, found: Sequence[int]
    ) -> tuple[int, int]:
        """How many drafts were accepted, and of how many. found: the row of the results."""
        if not isinstance(item, Cycle) or flight.repeated is not None:
            return 0, 0
        accepted, looked_up = found[0], flight.drafts > 0 and found[-1] > 0
        return accepted, item.drafts if self._follows or looked_up or accepted else 0

    def _scores(
        self, logits: Mapping[int, Tensor], tokens: Mapping[int, tuple[int, ...]]
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities by table row."""
        asked = [row for row in logits if row in tokens]  # not those of refused chunks
        tops = [self._rows.settings(row).params.logprobs for row in asked]
        of_rows = [logits[row] for row in asked], [tokens[row] for row in asked]
        return dict(zip(asked, output_logprobs(tops, *of_rows), strict=True))
