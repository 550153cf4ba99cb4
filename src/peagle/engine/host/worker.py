"""The worker on a CPU: one step's batch at a time, whose tokens the host sees before the next."""

import time
from collections.abc import Sequence

import torch

from peagle.engine.branching import Branching
from peagle.engine.cycle import run_cycle
from peagle.engine.cycle_times import Seconds
from peagle.engine.drafting import Drafting
from peagle.engine.host.batch import HostBatch, HostSide
from peagle.engine.host.network import HostNetwork
from peagle.engine.host.proposals import HostProposals
from peagle.engine.host.rows import HostRequest, RequestRows
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.request_memory import RequestMemory
from peagle.engine.step import MOST_UNSEEN, CycleTime, Outcome, PromptChunk, Step
from peagle.models.decoder import Decoder


class HostWorker:
    """Runs one cycle for all requests of a step together.

    An outcome is that of the step itself. Where memory is short nothing has happened yet: its
    chunks are refused, and what can run comes again with the next step.
    """

    runs_ahead = False
    pauses = True

    def __init__(
        self, target: Decoder, drafting: Drafting, memory: RequestMemory, processor: LogitsProcessor
    ) -> None:
        needs, proposer = drafting.needs, drafting.proposer
        network = None
        if needs.network is not None and memory.network_cache is not None:
            network = HostNetwork(needs.network, memory.network_cache)
        self._memory = memory
        self._side = HostSide(
            target,
            memory,
            processor,
            None if proposer is None else HostProposals(proposer, network, memory.history),
            needs.taps,
            drafting.accept(len(memory.table.limits), target.embed.weight.device),
        )
        self._requests: dict[int, HostRequest] = {}
        chosen = (network is not None or needs.on_host) and len(drafting.lengths) > 1
        self.cycle_seconds: Seconds | None = {} if chosen else None
        """Nothing is measured at the start. For a lookup there is nothing to choose: a request in
        whose text nothing is found drafts nothing anyway."""
        self._most_pending = drafting.k + 1
        """Positions that a cycle with drafts leaves unseen, at most."""
        self.branching = Branching(drafting.k, drafting.num_tree_nodes or 0, most_requests=1)

    @torch.inference_mode()
    def exchange(self, step: Step) -> Outcome:
        """Run a step."""
        # first of all: the prefix cache knows the blocks of these rows already
        left = [(row, self._requests[row]) for row in step.caught_up]
        self._catch_up([(row, request, request.unseen) for row, request in left])
        self._memory.update(step)
        for row in step.left:
            self._requests.pop(row, None)
        self._requests |= {begin.row: HostRequest.of(begin) for begin in step.begun}
        if not step.work:
            return Outcome()
        parts = [RequestRows.of(item, self._requests[item.row]) for item in step.work]
        try:
            behind = [part for part in parts if self._is_behind(part)]
            # all but the last position, from which the cycle drafts
            self._catch_up([(p.item.row, p.request, p.request.unseen - 1) for p in behind])
            started = time.perf_counter()
            batch = HostBatch(self._side, step, parts)
            run_cycle(batch)
            if self._memory.states is not None:
                self._memory.states.keep(step.chunks)
        except torch.OutOfMemoryError:
            if not step.chunks or self._memory.states is not None:  # states may have moved on
                raise
            torch.cuda.empty_cache()
            return Outcome(step.number, refused=tuple(chunk.row for chunk in step.chunks))
        if step.chunks or self.cycle_seconds is None:
            return Outcome(step.number, batch.results)
        seconds, drafts = time.perf_counter() - started, max(part.drafts for part in parts)
        return Outcome(step.number, batch.results, CycleTime(len(parts), drafts, seconds))

    @torch.inference_mode()
    def forget(self) -> None:
        """Forget all requests; raises where the device is lost."""
        self._memory.table.forget()
        self._requests.clear()

    def _is_behind(self, part: RequestRows) -> bool:
        """Whether the drafter has missed more than it sees in a cycle, or than is kept for it.

        It follows a prompt chunk by chunk: the prefix cache knows blocks that it has seen.
        """
        follows = isinstance(part.item, PromptChunk) or part.drafts
        most = self._most_pending if follows else MOST_UNSEEN - part.span.count
        return part.request.unseen > max(most, 1)

    def _catch_up(self, work: Sequence[tuple[int, HostRequest, int]]) -> None:
        """Have the drafter see positions without drafting, in one pass: (table row, request, how
        many)."""
        if not work:
            return
        assert self._side.proposals is not None
        self._side.proposals.fill(work)
        for _, request, count in work:
            request.forget(count)
