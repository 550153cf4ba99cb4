"""Every formula once, with its unit."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peagle.engine.request import Speculation
from peagle.llm import Completion

MS = 1_000.0
"""Milliseconds in a second."""


@dataclass(frozen=True)
class Percentiles:
    """Median and tail of a latency, in ms."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class Measures:
    """What one run measured; the field names are those of the result file."""

    otps: float
    acceptance_length: float
    acceptance_rate_per_position: tuple[float, ...]
    ttft_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    output_tokens: int


def measure(completions: Sequence[Completion], seconds: float) -> Measures:
    """All measures of requests that together took `seconds` of wall time."""
    tokens = sum(len(completion.token_ids) for completion in completions)
    completions = [completion for completion in completions if completion.token_times]
    return Measures(
        otps=tokens / seconds,
        acceptance_length=acceptance_length(completions),
        acceptance_rate_per_position=acceptance_rates(completions),
        ttft_ms=percentiles([MS * completion.token_times[0] for completion in completions]),
        itl_ms=percentiles([MS * gap for c in completions for gap in token_gaps(c.token_times)]),
        e2e_ms=percentiles([MS * completion.token_times[-1] for completion in completions]),
        output_tokens=tokens,
    )


def acceptance_length(completions: Sequence[Completion]) -> float:
    """Mean tokens emitted per cycle, bonus included; 1 if nothing was drafted."""
    return _pooled(completions).acceptance_length


def acceptance_rates(completions: Sequence[Completion]) -> tuple[float, ...]:
    """For draft token 1, 2, ... K: the share of all cycles in which it was accepted."""
    did = _pooled(completions)
    return tuple(count / max(did.cycles, 1) for count in did.accepted_per_position)


def token_gaps(times: Sequence[float]) -> Iterator[float]:
    """Time between tokens (ITL), one value for each token after the first step's, in `times`' unit.

    Tokens of one step share its time; each gets an equal part of the gap to the step before. So a
    request's values sum to its last time less its first one.
    """
    steps = [(time, len(list(same))) for time, same in itertools.groupby(times)]
    for (before, _), (now, count) in itertools.pairwise(steps):
        yield from [(now - before) / count] * count


def percentiles(values: Sequence[float]) -> Percentiles:
    """p50, p95 and p99, interpolated linearly; zeros if there is no value."""
    ordered = sorted(values) or [0.0]
    return Percentiles(*(_percentile(ordered, share) for share in (0.50, 0.95, 0.99)))


def _pooled(completions: Sequence[Completion]) -> Speculation:
    return Speculation.pooled([completion.speculation for completion in completions])


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))
