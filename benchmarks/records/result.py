"""One schema for everything that was measured; what an old record does not tell is `UNKNOWN`."""

import statistics
from collections.abc import Iterator
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from peagle.config import DraftLengthMode

UNKNOWN: Final = "unknown"
Text = Annotated[str, Field(min_length=1)]
Count = int | Literal["unknown"]
Value = str | bool | int | float | None | tuple[float, ...]
"""A cell of a row: what tells rows apart, or a figure; several figures of equal kind in order."""
Row = dict[str, Value]


class Strict(BaseModel):
    """A part of a result: no key that the schema lacks, and no change once it is made."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Percentiles(Strict):
    """Median and tail of a latency in milliseconds."""

    p50: float
    p95: float
    p99: float


class Run(Strict):
    """One engine or server under one load, over all rounds."""

    side: Text = "peagle"
    """Whose engine ran: `peagle`, `vllm`, `transformers`."""
    setting: str = ""
    """What of the side was not its default: "graphs to 896 rows", "batch-invariant"."""
    data: Text
    """The set of prompts, or the shape whose prompts were random tokens."""
    method: Text
    """A method of `peagle bench`."""
    k: int | None = 0
    """The most drafts of a cycle; 0 for no speculation, None where a server does not tell."""
    draft_length: DraftLengthMode = "fixed"
    given_acceptance: float | None = None
    """The acceptance length that was set; None where the target decided."""
    concurrency: int
    """Requests in flight; 0 where they came at `request_rate`."""
    request_rate: float = 0.0
    temperature: float = 0.0
    rounds: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Output tokens per second of every round in order; empty where only acceptance was counted."""
    acceptance_length: float | None = None
    acceptance_length_interval: tuple[float, float] | None = None
    """95 % of the acceptance length, if requests like these were drawn anew."""
    acceptance_rate_per_position: tuple[float, ...] = ()
    tokens_per_cycle: float | None = None
    ttft_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None
    e2e_ms: Percentiles | None = None
    mean_step_ms: float | None = None
    """Mean time between the steps, or a server's events, that brought a request tokens."""
    output_tokens: int = 0
    same_text: bool | None = None
    failed: int = 0
    core_share: float | None = None
    branches: bool = False
    """Whether the drafts were trees."""

    @property
    def speed(self) -> float | None:
        """The median round's tokens per second, of two in the middle the slower one."""
        return statistics.median_low(self.rounds) if self.rounds else None

    @property
    def case(self) -> tuple[object, ...]:
        """What it shares with a later measurement of the same thing."""
        load = self.data, self.concurrency, self.request_rate, self.temperature
        how = self.method, self.k, self.draft_length, self.given_acceptance, self.branches
        return (self.side, self.setting, *load, *how)


class Process(Strict):
    """A process of a comparison: what it was asked for, and what it told beside figures."""

    side: Text
    setting: str = ""
    data: Text
    method: Text
    k: int = 0
    draft_length: DraftLengthMode = "fixed"
    concurrencies: tuple[int, ...]
    seconds: float | None = None
    start_seconds: float | None = None
    chosen: tuple[str, ...] = ()
    """Lines in which the peer said which kernels it chose."""
    resolved: dict[str, JsonValue] = {}
    """What the peer made of its arguments."""
    card_before: dict[str, str | float] = {}
    failure: str | None = None


class Machine(Strict):
    """Where it ran."""

    device: Text = UNKNOWN
    """The graphics card's name, or `cpu`."""
    cpu: Text = UNKNOWN
    cores: Count = UNKNOWN
    threads: Count = UNKNOWN
    python: Text = UNKNOWN
    card: dict[str, str | float] = {}
    """The card's reading before the first process."""


class Result(Strict):
    """What one command measured on one machine."""

    measured: Text
    """What was measured, in a sentence."""
    claim: Annotated[str, Field(pattern=r"^[a-z0-9-]+$")] = UNKNOWN
    """What the pages say by it: results of one claim replace one another in a page's table."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d\+00:00)?$")]
    command: Text = UNKNOWN
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{7,40}\+?|unknown)$")] = UNKNOWN
    """The commit that was measured, with `+` where files differed from it."""
    machine: Machine = Machine()
    versions: dict[str, dict[str, str]] = {}
    """For each side the versions of what it ran."""
    setting: dict[str, JsonValue] = {}
    """What all its figures depend on: models, dtype, lengths."""
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    """Why its figures should not be relied on."""
    superseded_by: str | None = None
    """The result of the same claim that holds today."""
    processes: tuple[Process, ...] = ()
    units: dict[str, str] = {}
    """The unit of each figure of `rows`; a row's other cells say which row it is."""
    runs: tuple[Run, ...] = ()
    rows: tuple[Row, ...] = ()

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if not (self.runs or self.rows or self.processes):
            yield "it holds no figure"
        for side in sorted({run.side for run in self.runs} - self.versions.keys()):
            yield f"versions of {side} are missing; write {UNKNOWN} where nobody knows them"
        named = {name for row in self.rows for name, value in row.items() if _is_figure(value)}
        for name in sorted(named - self.units.keys()):
            yield f"{name} has no unit"
        for name in sorted(self.units.keys() - {name for row in self.rows for name in row}):
            yield f"no row has {name}"

    @property
    def day(self) -> str:
        """The date without the time."""
        return self.date[:10]

    def row_case(self, row: Row) -> tuple[object, ...]:
        """What a row shares with a later measurement of the same thing."""
        return tuple((name, row[name]) for name in sorted(row) if name not in self.units)


def _is_figure(value: Value) -> bool:
    return isinstance(value, (float, tuple))
