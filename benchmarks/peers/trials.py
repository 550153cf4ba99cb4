"""What both sides run: a shape, a method with its K and acceptance, and each request's work."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from peagle.bench.load import WARM_UP_TOKENS
from peagle.bench.random_weights import PLAIN
from peagle.bench.shapes import shape_of
from peagle.bench.synthetic import CONTEXT, acceptance_rates
from peagle.config import DraftLengthMode
from peagle.errors import InputError
from peers.job import Job

Side = Literal["peagle", "vllm"]
METHODS = {
    "none": (0, 1.0),
    "peagle": (7, 3.94),
    "eagle3": (3, 2.6),
    "mtp": (3, 2.8),
    "dflash": (15, 6.34),
}
"""K and acceptance length where none are given."""
DEFAULT = "qwen3-8b:none,qwen3-8b:peagle,qwen3-8b:eagle3,qwen3-30b-a3b:peagle"
LOADED = 8
"""Requests in flight from which fewer drafts may be faster."""
NOT_DUMMY = "has weights unlike vLLM's dummy ones, so both sides have to read them"
GRAPH_ROWS = 512
"""Rows up to which vLLM captures graphs by default."""


@dataclass(frozen=True)
class Match:
    """A shape of random weights, and how it drafts."""

    shape: str
    method: str
    k: int
    acceptance_length: float
    """Tokens that a cycle of K drafts emits, on both sides, whatever the target says."""

    @classmethod
    def parse(cls, text: str) -> "Match":
        """SHAPE:METHOD or SHAPE:METHOD:K:AL. Raises `InputError`."""
        shape, _, rest = text.partition(":")
        method, *given = rest.split(":")
        shape_of(shape)
        if method not in METHODS or len(given) not in (0, 2):
            raise InputError(
                f"{text} is not SHAPE:METHOD[:K:AL], with a method of {', '.join(METHODS)}"
            )
        try:
            k, length = (int(given[0]), float(given[1])) if given else METHODS[method]
        except ValueError:
            raise InputError(f"{text}: K and AL are numbers, such as 7:3.94") from None
        return cls(shape, method, k, length)

    @property
    def plain(self) -> bool:
        """Whether vLLM's dummy weights are like the target's."""
        return shape_of(self.shape).weights == PLAIN

    @property
    def experts(self) -> bool:
        """Whether the target has experts."""
        return shape_of(self.shape).target.layers[0].experts is not None

    def drafter_rows(self, concurrency: int) -> int:
        """Rows of vLLM's largest draft pass: P-EAGLE's K + 1 verified and K - 1 masks each."""
        each = 2 * self.k if self.method == "peagle" else self.k + 1
        return each * concurrency


@dataclass(frozen=True)
class Work:
    """The work of every request, and the number of rounds."""

    prompt_tokens: int = 256
    max_tokens: int = 512
    rounds: int = 3
    """The median counts."""
    max_num_seqs: int = 64
    dtype: str = "bfloat16"
    routing: str | None = None
    """How alike rows choose experts; None: as the shape has it."""


@dataclass(frozen=True)
class Trial:
    """One process of one side."""

    side: Side
    match: Match
    concurrencies: tuple[int, ...]
    captured: int | None = None
    """Rows up to which vLLM captures graphs; None is its own choice."""
    draft_length: DraftLengthMode = "fixed"
    """Whether ours may draft fewer than K tokens where that is faster."""
    moe_backend: str | None = None
    """vLLM's kernels for experts; None is its own choice."""

    @property
    def setting(self) -> str:
        """What of the side was not left to it."""
        graphs = f"graphs to {self.captured} rows" if self.captured else None
        return ", ".join(filter(None, (self.moe_backend, graphs)))

    @property
    def given_acceptance(self) -> float | None:
        """The acceptance length that is set; None without drafts."""
        return self.match.acceptance_length if self.match.k else None


def trials(
    side: Side,
    match: Match,
    concurrencies: tuple[int, ...],
    moe_backends: Sequence[str | None] = (None,),
) -> list[Trial]:
    """A side's processes. Where drafts cost most, ours runs again with K by load, and vLLM with
    larger graphs if the drafter does not fit its default ones; vLLM with each backend of experts.
    """
    if side == "vllm":
        backends = moe_backends if match.experts else (None,)
        return [one for backend in backends for one in _theirs(match, concurrencies, backend)]
    first = Trial(side, match, concurrencies)
    many = tuple(c for c in concurrencies if match.k and c >= LOADED)
    return [first, Trial(side, match, many, draft_length="auto")] if many else [first]


def at_once(planned: Iterable[Trial], concurrencies: tuple[int, ...]) -> list[Trial]:
    """vLLM's trials among some, one for each match and backend: with the larger graphs where two
    were planned, at every number of requests."""
    found: dict[tuple[Match, str | None], Trial] = {}
    for one in planned:
        if one.side == "vllm":
            found[one.match, one.moe_backend] = replace(one, concurrencies=concurrencies)
    return [*found.values()]


def _theirs(match: Match, concurrencies: tuple[int, ...], backend: str | None) -> list[Trial]:
    first = Trial("vllm", match, concurrencies, moe_backend=backend)
    beyond = tuple(c for c in concurrencies if match.k and match.drafter_rows(c) > GRAPH_ROWS)
    if not beyond:
        return [first]
    captured = -(-match.drafter_rows(max(beyond)) // 16) * 16
    return [first, Trial("vllm", match, beyond, captured, moe_backend=backend)]


def schedule(
    matches: Sequence[Match],
    concurrencies: tuple[int, ...],
    sides: Sequence[Side],
    moe_backends: Sequence[str | None] = (None,),
) -> Iterator[Trial]:
    """All processes in order: the side that begins alternates from match to match."""
    for index, match in enumerate(matches):
        for side in sides if index % 2 == 0 else sides[::-1]:
            yield from trials(side, match, concurrencies, moe_backends)


def bench_flags(trial: Trial, work: Work, result: str, checkpoint: Path | None = None) -> list[str]:
    """Arguments of `peagle bench` for a trial. checkpoint: the target; None: it is made."""
    match = trial.match
    drafting = ["--k", str(match.k)] if match.k else []
    acceptance = ["--synthetic-acceptance", str(match.acceptance_length)]
    return [
        *("bench", "--shape", match.shape, "--random-weights", *acceptance),
        *("--methods", match.method, *drafting, "--draft-length", trial.draft_length),
        *("--concurrency", ",".join(map(str, trial.concurrencies))),
        *("--prompt-tokens", str(work.prompt_tokens), "--max-tokens", str(work.max_tokens)),
        *("--rounds", str(work.rounds), "--dtype", work.dtype, "--json", result),
        *(["--checkpoint", str(checkpoint)] if checkpoint else []),
    ]


def peer_job(
    trial: Trial,
    work: Work,
    checkpoint: Path | None = None,
    engine_args: Mapping[str, Any] | None = None,
    gate: Path | None = None,
) -> Job:
    """vLLM's job for a trial. checkpoint: the target; None: dummy weights. gate: its directory."""
    match, longest = trial.match, shape_of(trial.match.shape).target.max_length
    asked = work.prompt_tokens + max(work.max_tokens, WARM_UP_TOKENS)
    return Job(
        method=match.method,
        k=match.k,
        dtype=work.dtype,
        max_num_seqs=max(work.max_num_seqs, *trial.concurrencies),
        max_tokens=work.max_tokens,
        shape=match.shape,
        checkpoint=str(checkpoint) if checkpoint else None,
        acceptance_rates=acceptance_rates(match.k, match.acceptance_length),
        max_model_len=max(min(CONTEXT, longest), asked),
        captured=trial.captured,
        moe_backend=trial.moe_backend,
        engine_args=engine_args or {},
        concurrencies=trial.concurrencies,
        rounds=work.rounds,
        prompt_tokens=work.prompt_tokens,
        warm_up_tokens=WARM_UP_TOKENS,
        gate=str(gate) if gate else None,
    )
