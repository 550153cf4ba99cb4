"""Whatever carries out steps, on the device or on the host."""

from dataclasses import replace
from typing import Protocol

import torch

from peagle.engine.batch_invariance import check_batch_invariance
from peagle.engine.branching import Branching, num_tree_nodes
from peagle.engine.capacity import Capacity
from peagle.engine.cycle_times import Seconds
from peagle.engine.device.worker import DeviceWorker, captures_cycles
from peagle.engine.drafting import Drafting
from peagle.engine.fixed_memory import memory_of
from peagle.engine.host.worker import HostWorker
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.request_table import RequestTable
from peagle.engine.step import Outcome, Step
from peagle.errors import InputError
from peagle.models.decoder import Decoder


class Worker(Protocol):
    """Owner of the models' KV caches, of the request table, and of what a request needs between
    steps. It knows of a request what steps say."""

    @property
    def runs_ahead(self) -> bool:
        """Whether it takes a step before it has answered the one before.

        Then requests stay with it after their prompt: their cycles need nothing from the host.
        """
        ...

    @property
    def cycle_seconds(self) -> Seconds | None:
        """Seconds of cycles by number of requests and drafts; empty where only steps tell, None
        where there is no choice."""
        ...

    @property
    def pauses(self) -> bool:
        """Whether a cycle may have no drafts, and leave the drafter behind meanwhile."""
        ...

    @property
    def branching(self) -> Branching:
        """Which cycles may have trees in place of chains."""
        ...

    def exchange(self, step: Step) -> Outcome:
        """Take a step, and answer it or the one before.

        It may be empty, to have the answer alone. When this raises, nobody knows how much of the
        step was done: the caller makes the worker `forget`.
        """
        ...

    def forget(self) -> None:
        """Forget all requests and steps; raises where the device is lost."""
        ...


def open_worker(
    target: Decoder, drafting: Drafting, capacity: Capacity, processor: LogitsProcessor
) -> Worker:
    """The device's worker where it has kernels for the models, else the host's.

    Raises `InputError` for trees and batch invariance that there cannot be, and where Triton finds
    no C compiler.
    """
    device = target.embed.weight.device
    if device.type == "cuda":
        torch.cuda.set_device(device)  # where Triton launches
    captures = not drafting.needs.on_host and captures_cycles(target, drafting.needs)
    if target.batch_invariant:
        check_batch_invariance(target, drafting.k, captures)
    nodes = num_tree_nodes(target, drafting, captured=captures)
    drafting = replace(drafting, num_tree_nodes=nodes)
    table = RequestTable(
        capacity.num_seqs + captures,  # one that is spare
        capacity.max_length,
        capacity.block_size,
        device,
        null_slot=capacity.slots,
        windows=capacity.window_slots,
    )
    kept = capacity.kv_dtype
    memory = memory_of(target, len(table.limits), capacity.states or 0, drafting.k)
    if not captures:
        return HostWorker(target, drafting, table, capacity.slots, processor, memory, kept)
    worker = DeviceWorker(
        target,
        drafting,
        table,
        capacity.slots,
        capacity.batched_tokens,
        processor,
        memory,
        kept,
    )
    _capture(worker)
    return worker


def _capture(worker: DeviceWorker) -> None:
    try:
        worker.capture()
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise InputError(
            "Triton builds its launcher with a C compiler and found none; install gcc and Python's "
            "headers (python3-dev), or set CC"
        ) from error
