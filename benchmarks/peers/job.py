"""What vLLM is to do, in a form that travels as JSON between two environments."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Gate:
    """A directory in which an engine says that it is ready, and waits until it may go on."""

    directory: Path

    @property
    def ready(self) -> bool:
        """Whether the engine waits."""
        return (self.directory / "ready").exists()

    def open(self) -> None:
        """Let the engine go on."""
        (self.directory / "open").touch()

    def wait(self) -> None:
        """Be ready, and wait; exits where nobody is left to open."""
        (self.directory / "ready").touch()
        parent = os.getppid()
        while not (self.directory / "open").exists():
            if os.getppid() != parent:
                raise SystemExit("nobody is left who would open the gate")
            time.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class Job:
    """An engine of vLLM, and either a load whose speed counts or prompts whose outputs count."""

    method: str
    k: int
    dtype: str
    max_num_seqs: int
    max_tokens: int
    shape: str | None = None
    """The size of a target with vLLM's dummy weights, and of a drafter with random ones."""
    checkpoint: str | None = None
    """The target's directory; None: `shape` is made."""
    drafter: str | None = None
    """The drafter's directory; None: one of `shape` is written."""
    acceptance_rates: Sequence[float] = ()
    """The share of cycles that accept draft 1, 2, … K, whatever the target says."""
    max_model_len: int | None = None
    captured: int | None = None
    """Rows up to which CUDA graphs are captured; None: vLLM's choice."""
    moe_backend: str | None = None
    memory_share: float = 0.9
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `vllm.LLM` that come beside these, or in place of some."""
    concurrencies: Sequence[int] = ()
    """Requests in flight, of each number `rounds` rounds."""
    rounds: int = 3
    prompt_tokens: int = 0
    warm_up_tokens: int = 0
    prompts: Sequence[Sequence[int]] = ()
    """Prompts whose outputs are wanted in place of speeds."""
    gate: str | None = None
    """The directory of the gate at which the engine waits before its load; None: it does not."""

    @classmethod
    def read(cls, file: Path) -> "Job":
        """A job from its file."""
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        """Write a job to a file."""
        file.write_text(json.dumps(asdict(self)))
