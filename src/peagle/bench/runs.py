"""Runs of cases, and what all rounds of them say together."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from peagle.bench.case import Case
from peagle.bench.measures import Measures

Outputs = tuple[Any, ...]
"""What was written for each request in order: token ids, or a server's text; None: it failed."""


@dataclass(frozen=True)
class Run:
    """A case, its measures and its outputs."""

    case: Case
    measures: Measures
    outputs: Outputs
    same_text: bool | None = None
    """Whether every output equals its reference's (see `Results`); None where that is unknown."""
    rounds: tuple[float, ...] = ()
    """OTPS of every round; this run is the median one."""
    core_share: float | None = None
    """Share of its time in which this thread, which computes, had its core; None where it waits for
    something else, or a server computes."""
    failed: int = 0
    """Requests that got no answer and are in no measure."""
    branches: bool = False
    """Whether K drafts of all its requests at once branch."""

    def as_json(self) -> dict[str, Any]:
        """The run as an entry of the result file; its engine where several are compared."""
        case = asdict(self.case)
        if not self.case.engine:
            del case["engine"]
        others = {"same_text": self.same_text, "rounds": self.rounds, "failed": self.failed}
        share = {} if self.core_share is None else {"core_share": self.core_share}
        trees = {"branches": True} if self.branches else {}
        return {**case, **asdict(self.measures), **others, **share, **trees}


@dataclass(frozen=True)
class Failure:
    """Why a case could not run."""

    case: Case
    reason: str


class Results:
    """All runs so far of some cases.

    Outputs are compared with those of a reference: of the cases with the same prompts and
    temperature the first one with runs, if it is none or a server. comparable: whether that makes
    sense.
    """

    def __init__(self, cases: Iterable[Case], comparable: bool) -> None:
        self._runs: dict[Case, list[Run]] = {case: [] for case in cases}
        self._comparable = comparable

    def add(self, run: Run) -> None:
        """Keep a run; equal outputs are kept once."""
        before = self._runs[run.case]
        if before and before[0].outputs == run.outputs:
            run = replace(run, outputs=before[0].outputs)
        before.append(run)

    @property
    def rounds(self) -> int:
        """Rounds in which every case has run."""
        return min(map(len, self._runs.values()))

    def medians(self) -> list[Run]:
        """The median run of each case that has any, of two in the middle the slower one;
        `Run.rounds` has the speeds of all."""
        return [self._median(case, runs) for case, runs in self._runs.items() if runs]

    def _median(self, case: Case, runs: Sequence[Run]) -> Run:
        ordered = sorted(runs, key=lambda run: run.measures.otps)
        shares = [run.core_share for run in runs if run.core_share is not None]
        return replace(
            ordered[(len(ordered) - 1) // 2],
            same_text=self._same_text(case, runs),
            rounds=tuple(run.measures.otps for run in runs),
            core_share=statistics.median(shares) if shares else None,
            failed=sum(run.failed for run in runs),
        )

    def _same_text(self, case: Case, runs: Sequence[Run]) -> bool | None:
        """Whether all rounds have the same text: one difference is enough."""
        expected = self._expected(case) if self._comparable else None
        return None if expected is None else all(_alike(run.outputs, expected) for run in runs)

    def _expected(self, case: Case) -> Outputs | None:
        alike = (case.data, case.temperature, case.is_server)
        for other, runs in self._runs.items():
            if runs and (other.data, other.temperature, other.is_server) == alike:
                if other.method != "none" and not other.is_server:
                    return None
                every = zip(*(run.outputs for run in runs), strict=True)
                return tuple(next((o for o in each if o is not None), None) for each in every)
        return None


def _alike(outputs: Outputs, expected: Outputs) -> bool:
    """Whether all that both have is equal."""
    pairs = zip(outputs, expected, strict=False)
    return all(one == other for one, other in pairs if one is not None and other is not None)
