"""A step that is under way on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.logprobs import PromptLogprobs
from peagle.engine.step import Cycle, CycleTime, PromptChunk
from peagle.transfer import Download


@dataclass(frozen=True)
class LaunchedCycle:
    """A captured cycle in flight, run once or more often, and the events that time it."""

    requests: int
    drafts: int
    repeats: int
    started: torch.cuda.Event
    ended: torch.cuda.Event

    @property
    def seconds(self) -> float:
        """How long it took each time; only after it has ended."""
        return self.started.elapsed_time(self.ended) / 1e3 / self.repeats


@dataclass(frozen=True)
class Flight:
    """A launched step, and where its results will be."""

    number: int
    work: tuple[PromptChunk | Cycle, ...]
    """The parts of the step that were not refused."""
    drafts: int
    """The drafts of each request in the step's cycle."""
    results: Download
    """[table rows, K + 3] the results, as `CycleState` has them"""
    repeated: Download | None
    """[table rows, repeats] what a cycle chose each time; None: it ran once."""
    cycle: LaunchedCycle | None
    host: float
    """As in `CycleTime`."""
    catching_up: float
    """As in `CycleTime`."""
    logits: Mapping[int, Tensor]
    """[rows, vocab] by table row, of those that want log-probabilities."""
    prompts: PromptLogprobs | None
    """Log-probabilities of prompts' own tokens; None where none are wanted."""

    @property
    def time(self) -> CycleTime | None:
        """How long its cycle took, where that is known; only after it has ended."""
        cycle = self.cycle
        if cycle is None:
            return None
        times = cycle.seconds, self.host, self.catching_up
        return CycleTime(cycle.requests, cycle.drafts, *times)

    def tokens(self, found: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """What each request got, by table row. found: the results."""
        repeated = None if self.repeated is None else self.repeated.tolist()
        got: dict[int, tuple[int, ...]] = {}
        for item in self.work:
            mine = found[item.row]
            if repeated is not None and isinstance(item, Cycle):
                got[item.row] = tuple(repeated[item.row])
            else:
                # a row of results is: how many drafts were accepted, the tokens, whether drafts
                # were looked up
                got[item.row] = tuple(mine[1 : mine[0] + 2]) if item.completes else ()
        return got
