"""A step that is under way on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.logprobs import PromptLogprobs
from peagle.engine.step import Cycle, CycleTime, PromptChunk, Step
from peagle.transfer import Download

Timed = tuple[torch.cuda.Event, torch.cuda.Event]
"""The events around a step's cycles."""


@dataclass(frozen=True)
class Flight:
    """A launched step, and where its results will be."""

    step: Step
    chunks: tuple[PromptChunk, ...]
    """Those of the step that were not refused: all of them, or none."""
    drafts: int
    """The drafts of each request in the step's cycle."""
    results: Download
    """[table rows, K + 3] the results, as `CycleState` has them"""
    repeated: Download | None
    """[table rows, repeats] what a cycle chose each time; None: it ran once."""
    timed: Timed | None
    """None: its cycles were not captured, or the host took part in them."""
    host: float
    """As in `CycleTime`."""
    catching_up: float
    """As in `CycleTime`."""
    logits: Mapping[int, Tensor]
    """[rows, vocab] by table row, of those that want log-probabilities."""
    prompts: PromptLogprobs | None
    """Log-probabilities of prompts' own tokens; None where none are wanted."""

    @property
    def work(self) -> tuple[Cycle | PromptChunk, ...]:
        """The parts of the step that were not refused."""
        return *self.step.cycles, *self.chunks

    @property
    def refused(self) -> tuple[int, ...]:
        """The rows of chunks for which there was no memory."""
        return () if self.chunks else tuple(chunk.row for chunk in self.step.chunks)

    @property
    def time(self) -> CycleTime | None:
        """How long its cycle took, where that is known; only after it has ended."""
        if self.timed is None:
            return None
        started, ended = self.timed
        seconds = started.elapsed_time(ended) / 1e3 / self.step.repeats
        requests = len(self.step.cycles)
        return CycleTime(requests, self.drafts, seconds, self.host, self.catching_up)

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
