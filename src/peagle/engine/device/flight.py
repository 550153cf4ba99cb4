"""A step that is under way on the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.logprobs import PromptLogprobs
from peagle.engine.step import Chunk, Cycle
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
    work: tuple[Chunk | Cycle, ...]
    """What was not refused."""
    drafts: int
    """Of its cycle."""
    results: Download
    """[table rows, K + 3]"""
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
