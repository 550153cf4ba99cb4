"""Every formula once, with its unit."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peagle.completion import Completion
from peagle.speculation import DraftTotals

MS = 1_000.0
"""Milliseconds in a second."""
RESAMPLES = 1_000


@dataclass(frozen=True)
class Percentiles:
    """Median and tail of a latency, in ms."""

    p50: float
    p95: float
    p99: float


NOT_MEASURED = Percentiles(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Acceptance:
    """How many drafts were right."""

    length: float
    """Mean tokens emitted per cycle that drafted, bonus included; 1 if nothing was drafted."""
    rates: tuple[float, ...]
    """For draft token 1, 2, ... K: the share of all cycles in which it was accepted."""
    interval: tuple[float, float] | None = None
    """95 % of the length, if requests like these were drawn anew; None where that is unknown."""


@dataclass(frozen=True)
class Measures:
    """What one run measured; the field names are those of the result file."""

    otps: float
    acceptance_length: float | None
    """None where a server does not tell."""
    acceptance_rate_per_position: tuple[float, ...]
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    output_tokens: int
    acceptance_length_interval: tuple[float, float] | None = None
    tokens_per_cycle: float | None = None
    """Mean tokens emitted per cycle, those without drafts included; None as above."""
    mean_step_ms: float | None = None
    """Mean time between the steps that brought a request tokens: of a server, its events."""


def measure(completions: Sequence[Completion], seconds: float) -> Measures:
    """All measures of requests that together took `seconds` of wall time."""
    done = [completion for completion in completions if completion.token_times]
    did = DraftTotals.pooled([completion.speculation for completion in done])
    rates = tuple(count / max(did.cycles, 1) for count in did.accepted_per_position)
    drafts = Acceptance(did.acceptance_length, rates, acceptance_interval(done))
    found = measured([completion.token_times for completion in done], drafts, seconds)
    return replace(found, tokens_per_cycle=did.tokens_per_cycle)


def measured(
    times: Sequence[Sequence[float]], accepted: Acceptance | None, seconds: float
) -> Measures:
    """All measures of requests that together took `seconds` of wall time.

    times: of each request, seconds from its arrival to each of its tokens, at least one.
    """
    tokens = sum(map(len, times))
    return Measures(
        otps=tokens / seconds,
        acceptance_length=accepted.length if accepted else None,
        acceptance_rate_per_position=accepted.rates if accepted else (),
        ttft_ms=percentiles([MS * each[0] for each in times]),
        itl_ms=percentiles([MS * gap for each in times for gap in token_gaps(each)]),
        e2e_ms=percentiles([MS * each[-1] for each in times]),
        output_tokens=tokens,
        acceptance_length_interval=accepted.interval if accepted else None,
        mean_step_ms=MS * mean_step(times),
    )


def acceptance_interval(completions: Sequence[Completion]) -> tuple[float, float] | None:
    """As `Acceptance.interval`: a bootstrap over the requests; None of fewer than two."""
    parts = [done.speculation for done in completions if done.speculation.cycles]
    if len(parts) < 2:
        return None
    counts = np.array([(part.accepted, part.cycles) for part in parts])
    draws = np.random.default_rng(0).integers(len(parts), size=(RESAMPLES, len(parts)))
    accepted, cycles = counts[draws].sum(axis=1).T
    low, high = np.quantile(1 + accepted / cycles, [0.025, 0.975])
    return float(low), float(high)


def token_gaps(times: Sequence[float]) -> Iterator[float]:
    """Time between tokens (ITL), one value for each token after the first step's, in `times`' unit.

    Tokens of one step share its time; each gets an equal part of the gap to the step before. So a
    request's values sum to its last time less its first one.
    """
    steps = [(time, len(list(same))) for time, same in itertools.groupby(times)]
    for (before, _), (now, count) in itertools.pairwise(steps):
        yield from [(now - before) / count] * count


def mean_step(times: Sequence[Sequence[float]]) -> float:
    """Mean time between the steps that brought each request tokens, in `times`' unit; 0 if each
    had all of its tokens in one step."""
    steps = sum(len(set(each)) - 1 for each in times)
    return sum(each[-1] - each[0] for each in times) / steps if steps else 0.0


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50, p95 and p99, interpolated linearly; zeros if there is no value."""
    return Percentiles(*map(float, np.percentile(values or [0.0], (50, 95, 99))))
