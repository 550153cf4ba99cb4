"""Whatever carries out steps, on the device or on the host."""

from dataclasses import replace

import torch
from torch import nn

from peagle.engine.branching import num_tree_nodes
from peagle.engine.capacity import Capacity
from peagle.engine.device.worker import DeviceWorker, captures_cycles
from peagle.engine.drafting import Drafting
from peagle.engine.host.worker import HostWorker
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.request_memory import RequestMemory
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.ops.cached_attention import FIXED_ROWS
from peagle.ops.linear import Linear
from peagle.ops.moe import RoutedExperts
from peagle.ops.products.few_rows import covers

Worker = HostWorker | DeviceWorker
"""What carries out steps, and keeps what requests need between them; it knows what steps say.

Both `exchange` a step for an outcome, and `forget` all requests. When `exchange` raises, nobody
knows how much of the step was done: the caller makes the worker forget. Facts of each: `runs_ahead`
(whether it takes a step before it has answered the one before; requests then stay with it after
their prompt), `pauses` (whether a cycle may have no drafts, and leave the drafter behind),
`branching` (which cycles may have trees) and `cycle_seconds` (of cycles by number of requests and
drafts; empty where only steps tell, None where there is no choice).
"""


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
    least_trees = int(bool(drafting.num_tree_nodes))
    nodes = num_tree_nodes(target, drafting, captured=captures)
    drafting = replace(drafting, num_tree_nodes=nodes)
    memory = RequestMemory(target, drafting, capacity, spare=int(captures))
    if not captures:
        return HostWorker(target, drafting, memory, processor)
    worker = DeviceWorker(target, drafting, memory, processor)
    _capture(worker, least_trees)
    return worker


def _capture(worker: DeviceWorker, least_trees: int) -> None:
    try:
        worker.capture(least_trees)
    except RuntimeError as error:
        if "C compiler" not in str(error):
            raise
        raise InputError(
            "Triton builds its launcher with a C compiler and found none; install gcc and Python's "
            "headers (python3-dev), or set CC"
        ) from error


def check_batch_invariance(target: Decoder, most_drafts: int, captures: bool) -> None:
    """Raise `InputError` where results would depend on a pass's other rows all the same.

    most_drafts: of a cycle; captures: whether kernels cover the models' attention.
    """
    if most_drafts >= FIXED_ROWS:
        raise InputError(
            f"K = {most_drafts} is above {FIXED_ROWS - 1}, the most with batch_invariant"
        )
    on_a_gpu = target.embed.weight.is_cuda
    if on_a_gpu and not (captures and all(map(_covered, target.modules()))):
        raise InputError(
            "batch_invariant needs GPU kernels, and for this model there are none on this GPU"
        )


def _covered(part: nn.Module) -> bool:
    """Whether kernels cover a part's own products, if it has any."""
    if isinstance(part, RoutedExperts):
        return part.has_kernels()
    return not isinstance(part, Linear) or covers(part.weight)
