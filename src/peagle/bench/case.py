"""Cases: what is measured, and the load under which it is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from peagle.bench.pair import NAMES, measurable
from peagle.config import DraftLengthMode

OURS = "peagle"
"""This engine's name beside others."""


@dataclass(frozen=True, order=True)
class Load:
    """Which requests come, and how; only cases under the same load are compared."""

    data: str
    """The set of prompts."""
    temperature: float
    concurrency: int
    """Requests in flight; 0 where they come at `request_rate`, however many are in flight then."""
    request_rate: float
    """Requests a second, at random times; 0 where each comes when another one ends."""

    @property
    def words(self) -> str:
        """In a sentence: "8 in flight, HumanEval, temperature 0.7"."""
        often = f"{self.shown} requests" if self.request_rate else f"{self.shown} in flight"
        warm = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{often}, {self.data}{warm}"

    @property
    def shown(self) -> str:
        """As tables say it: "8", or "4/s"."""
        return f"{self.request_rate:g}/s" if self.request_rate else str(self.concurrency)

    @property
    def labelled(self) -> str:
        """Where nothing says what the number is: "C = 8", or "4/s"."""
        return self.shown if self.request_rate else f"C = {self.shown}"


@dataclass(frozen=True)
class Setup:
    """How an engine is set up to speculate."""

    method: str
    k: int
    draft_length: DraftLengthMode


@dataclass(frozen=True)
class Case:
    """A method with its K, or a server, under a load."""

    method: str
    """One of `NAMES`; or a server's name."""
    k: int | None
    """Most drafts of a cycle, 0 for none; None where it is a server's own."""
    concurrency: int
    draft_length: DraftLengthMode = "fixed"
    data: str = "bundled"
    temperature: float = 0.0
    request_rate: float = 0.0
    engine: str = ""
    """Where engines are compared, which one, and its settings: `OURS`, or a peer's."""

    @property
    def load(self) -> Load:
        """What it must share with the cases that it is compared with."""
        return Load(self.data, self.temperature, self.concurrency, self.request_rate)

    @property
    def setup(self) -> Setup:
        """The engine that it runs on; cases that differ only in their load share one."""
        return Setup(self.method, self.k or 0, self.draft_length)

    @property
    def is_server(self) -> bool:
        """Whether a server runs it."""
        return self.k is None

    @property
    def undrafted(self) -> bool:
        """Whether it is no speculation."""
        return self.method == "none" and not self.is_server

    @property
    def is_peer(self) -> bool:
        """Whether another engine runs it, with which ours is compared."""
        return self.engine not in ("", OURS)

    @property
    def name(self) -> str:
        """Its method as people write it, or its server."""
        method = self.method if self.is_server else NAMES.get(self.method, self.method)
        return self._by + method

    @property
    def label(self) -> str:
        """What is compared: "P-EAGLE, K = 7"."""
        plain = self.undrafted and not self.k
        return self._by + "no speculation" if plain else self.with_k(", ")

    def with_k(self, before: str) -> str:
        """Its name, and its K if it has one behind some words."""
        sign = "=" if self.draft_length == "fixed" else "≤"
        return f"{self.name}{before}K {sign} {self.k}" if self.k else self.name

    @property
    def _by(self) -> str:
        return f"{self.engine}: " if self.engine else ""


@dataclass(frozen=True)
class Grid:
    """The loads and draft lengths of which every combination is a case."""

    concurrencies: Sequence[int]
    data: Sequence[str] = ("bundled",)
    temperatures: Sequence[float] = (0.0,)
    draft_lengths: Sequence[DraftLengthMode] = ("fixed",)

    def cases(self, methods: Iterable[str], ks: Mapping[str, Sequence[int]]) -> list[Case]:
        """Every combination, load after load; in each `none` is first, and has no K.

        ks: method -> its Ks.
        """
        engines = [
            Setup(method, k, mode)
            for method in sorted(set(methods), key=measurable().index)
            for k in ((0,) if method == "none" else ks[method])
            for mode in (("fixed",) if method == "none" else self.draft_lengths)
        ]
        return [
            Case(one.method, one.k, concurrency, one.draft_length, data, temperature)
            for data in self.data
            for temperature in self.temperatures
            for concurrency in self.concurrencies
            for one in engines
        ]

    def servers(self, names: Iterable[str], request_rates: Sequence[float]) -> list["Case"]:
        """Every server under every load; request_rates: in place of the requests in flight."""
        loads = [(0, rate) for rate in request_rates] or [(c, 0.0) for c in self.concurrencies]
        return [
            Case(name, None, concurrency, "fixed", data, temperature, rate)
            for data in self.data
            for temperature in self.temperatures
            for concurrency, rate in loads
            for name in names
        ]
