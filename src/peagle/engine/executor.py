"""The device's owner: KV caches and request table, and the runners that work on them."""

from collections.abc import Sequence

import torch

from peagle.drafters.drafter import Drafter
from peagle.engine.batch import Scheduled
from peagle.engine.capacity import Capacity
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_runner import ResidentRunner, captures_cycles
from peagle.engine.runner import CycleResult, Runner
from peagle.errors import InputError
from peagle.models.decoder import Decoder


class Executor:
    """Runs all requests on the resident runner where the device has it, else on the plain one.

    lengths: the draft lengths that a cycle may have, ascending, K last. Raises `InputError` for
    synthetic acceptance on a GPU whose kernels do not cover the model, and where Triton finds no C
    compiler.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        lengths: Sequence[int],
        capacity: Capacity,
        synthetic: Sequence[float] | None = None,
    ) -> None:
        weight = target.embed.weight
        if weight.is_cuda:
            torch.cuda.set_device(weight.device)  # where Triton launches
        resident = _runs_resident(target, drafter, synthetic)
        rows = capacity.num_seqs + resident  # one that is spare
        self.table = RequestTable(
            rows, capacity.max_length, capacity.block_size, weight.device, null_slot=capacity.slots
        )
        caches = _caches(target, drafter, self.table, capacity.slots)
        self._caches = [cache for cache in caches if cache is not None]
        self.refused: list[Scheduled] = []
        """Prompt chunks of the last step for which the device had no memory."""
        self.plain = Runner(target, drafter, self.table, caches)
        self.resident: ResidentRunner | None = None
        if resident:
            self.resident = ResidentRunner(
                target, drafter, lengths, self.table, caches, capacity.batched_tokens, synthetic
            )
            _capture(self.resident)

    def draft_length(self, requests: int) -> int | None:
        """Drafts of a cycle of so many resident requests; None: each request's own K."""
        return None if self.resident is None else self.resident.draft_length(requests)

    @property
    def in_flight(self) -> bool:
        """Whether the device works on a step whose results were not returned yet."""
        return self.resident is not None and self.resident.in_flight

    @property
    def filling(self) -> bool:
        """Whether the device works on prompts and on nothing else."""
        return self.resident is not None and self.resident.filling

    def run(self, work: Sequence[Scheduled]) -> list[tuple[Scheduled, CycleResult]]:
        """Start the work; return the results of it, or of the step before on the device."""
        self.refused = []
        if self.resident is None:
            return self._run_plain(work) if work else []
        done = self.resident.run(work)
        self.refused = self.resident.refused
        return done

    def _run_plain(self, work: Sequence[Scheduled]) -> list[tuple[Scheduled, CycleResult]]:
        """Where memory is short nothing has happened yet: the next step repeats what can run."""
        try:
            return list(zip(work, self.plain.run(work), strict=True))
        except torch.OutOfMemoryError:
            chunks = [item for item in work if not item.request.decoding]
            if not chunks:
                raise
            torch.cuda.empty_cache()
            self.refused = chunks
            return []

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks in every cache."""
        for cache in self._caches:
            cache.clear(blocks)


def _capture(resident: ResidentRunner) -> None:
    try:
        resident.capture()
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise InputError(
            "Triton builds its launcher with a C compiler and found none; install gcc and Python's "
            "headers (python3-dev), or set CC"
        ) from error


def _runs_resident(
    target: Decoder, drafter: Drafter | None, synthetic: Sequence[float] | None
) -> bool:
    captures = captures_cycles(target, drafter)
    if synthetic is not None and not captures and target.embed.weight.is_cuda:
        raise InputError(
            "synthetic acceptance needs GPU kernels, and there are none for this model"
        )
    return captures or synthetic is not None


def _caches(
    target: Decoder, drafter: Drafter | None, table: RequestTable, slots: int
) -> tuple[KVCache, KVCache | None]:
    dtype = target.embed.weight.dtype
    of_target = KVCache(target.spec, table, slots, dtype)
    if drafter is None:
        return of_target, None
    return of_target, KVCache(drafter.model.config.transformer, table, slots, dtype)
