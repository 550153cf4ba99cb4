"""Time without meaning: random weights of a real size, and a set acceptance length."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from peagle.bench.case import Case, Setup
from peagle.bench.load import Exchange
from peagle.bench.random_weights import Weights, random_target
from peagle.bench.shapes import random_prompts, random_proposer, shape_of, weight_bytes
from peagle.bench.target import holding, of_setup
from peagle.config import EngineConfig, SamplingParams
from peagle.device import free_memory, gib, resolve_device, resolve_dtype
from peagle.drafters.selector import SelectorConfig
from peagle.engine.engine import Engine
from peagle.engine_client.source import computing, load_target
from peagle.errors import InputError
from peagle.llm import LLM
from peagle.models.decoder import Decoder
from peagle.models.families import read_spec
from peagle.set_acceptance import SetAcceptance

CONTEXT = 4096
CPU_WEIGHTS = 1 << 30
"""Bytes of weights above which a CPU must be asked for by name."""


def acceptance_rates(k: int, length: float) -> list[float]:
    """The share of cycles that accept draft 1, 2, ... K, for a mean acceptance length.

    Every draft is equally likely to be right if those before it are, about what real drafters
    show; the probability is found by bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        emitted = sum(rate**place for place in range(k + 1))
        low, high = (rate, high) if emitted < length else (low, rate)
    return [high**place for place in range(1, k + 1)]


def require_room(
    shape: str, methods: Iterable[str], dtype: str, device_name: str, free: int | None = None
) -> None:
    """Raise `InputError` unless the weights fit into the memory that they would be put in.

    Without a GPU a real size runs only on a CPU that was asked for: one took a machine's memory.
    free: bytes that can still be allocated; None looks, which on a GPU opens a context.
    """
    device = resolve_device(device_name)
    kind = resolve_dtype(dtype, device)
    needed = max(weight_bytes(shape, each, kind) for each in methods)
    if device.type == "cpu":
        needed *= 2  # a product's weights are kept once more, laid out for it
    free = free_memory(device) if free is None else free
    place = "GPU" if device.type == "cuda" else "machine"
    sizes = (
        f"its weights take about {gib(needed)} GiB, and {gib(free)} GiB of the {place}'s are free"
    )
    if device_name == "auto" and device.type == "cpu" and needed > CPU_WEIGHTS:
        raise InputError(
            f"shape {shape} needs a GPU, and torch sees none; on the device cpu {sizes}"
        )
    if needed > free:
        raise InputError(f"shape {shape} does not fit: {sizes}; take a smaller one")


class NoText:
    """In place of a tokenizer: random tokens have no text."""

    def decode(self, tokens: Any, **_: Any) -> str:
        """Nothing."""
        return ""


@dataclass(frozen=True)
class SyntheticWorkload:
    """A shape, and prompts of random tokens, one for each request in flight.

    Raises `InputError` for an unknown shape, lengths that do not fit it, and an acceptance length
    below 1.
    """

    shape: str
    acceptance_length: float
    """Tokens that a cycle of K drafts emits on average, whatever the target says."""
    prompt_tokens: int
    max_tokens: int
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the engines compute; their sizes follow from the cases."""
    routing: str | None = None
    """How alike rows choose experts, a key of `OVERLAPS`; None: as the shape has it."""
    checkpoint: Path | None = None
    """A directory from which the target is read; None: it is made."""
    selector: SelectorConfig | None = None
    """The selector of a P-EAGLE drafter."""

    def __post_init__(self) -> None:
        shape = shape_of(self.shape)
        shape.weights.routed(self.routing)  # which refuses a routing that there is not
        context = shape.target.max_length
        if min(self.prompt_tokens, self.max_tokens) < 1:
            raise InputError("give at least one prompt token and one output token")
        if self.prompt_tokens + self.max_tokens > context:
            raise InputError(
                f"{self.prompt_tokens} prompt and {self.max_tokens} output tokens are more than "
                f"the {context} that {self.shape} holds; give fewer"
            )
        if self.acceptance_length < 1:
            raise InputError(
                f"--synthetic-acceptance {self.acceptance_length}: a cycle emits at least 1 token"
            )
        if self.checkpoint is not None and self.routing is not None:
            raise InputError("--routing is made in a --checkpoint; give one of them")
        if self.checkpoint is not None and read_spec(self.checkpoint) != shape.target:
            raise InputError(f"--checkpoint {self.checkpoint} is not in the shape of {self.shape}")

    @property
    def caption(self) -> str:
        """What a reader must know of every figure."""
        return (
            f"SYNTHETIC: random weights in the shape of {self.shape}, acceptance length of K "
            f"drafts set to {self.acceptance_length:g}. Only the times mean anything."
        )

    def load(self, setups: Iterable[Setup]) -> None:
        """Make the target."""
        _ = self._target

    def open(self, setup: Setup, concurrency: int, shared: bool = False) -> LLM:
        """The engine for a method, over weights of the target that all share."""
        context = min(CONTEXT, shape_of(self.shape).target.max_length)
        asked = self.prompt_tokens + self.max_tokens
        config = of_setup(self.engine, setup, concurrency)
        length = asked if shared else max(context, asked)
        config = config.model_copy(update={"max_model_len": length})
        shape = replace(shape_of(self.shape), selector=self.selector)
        drafter = random_proposer(shape, setup.method, self._target)
        if shared:
            config = holding(self._target, drafter, setup.k, config, asked + setup.k)
        acceptance = SetAcceptance(acceptance_rates(setup.k, self.acceptance_length))
        engine = Engine(self._target, drafter, setup.k, config, acceptance=acceptance)
        return LLM.over(engine, NoText())

    @cached_property
    def _target(self) -> Decoder:
        if self.checkpoint is not None:
            return load_target(self.checkpoint, self.engine)
        device, spec = resolve_device(self.engine.device), shape_of(self.shape).target
        dtype = resolve_dtype(self.engine.dtype, device)
        return computing(random_target(spec, device, dtype, self._weights), self.engine)

    def requests(self, case: Case, tokenizer: Any) -> list[Exchange]:
        """One for each in flight: greedy, and never ending early."""
        vocab_size = shape_of(self.shape).target.vocab_size
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        prompts = random_prompts(case.concurrency, self.prompt_tokens, vocab_size)
        return [Exchange(prompt, params) for prompt in prompts]

    def place(self, case: Case, index: int) -> str:
        """All of them are alike."""
        return "a prompt"

    def describe(self) -> dict[str, Any]:
        """The result file's part of this; of a checkpoint's weights only its maker knows more."""
        about: dict[str, Any] = {"routing": self._weights.routing}
        if self.checkpoint is not None:
            about = {"checkpoint": self.checkpoint.name}
        return {
            "synthetic": self.caption,
            "shape": self.shape,
            "acceptance_length": self.acceptance_length,
            **about,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
        }

    @property
    def _weights(self) -> Weights:
        """What the target's are like. Raises `InputError` for an unknown routing."""
        return shape_of(self.shape).weights.routed(self.routing)
