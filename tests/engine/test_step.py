"""What passes between scheduler and worker: plain values, enough to run in another process."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import pytest
import tiny

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.engine.step import Outcome, Step

PLAIN = (int, float, str, range, type(None), SamplingParams)  # a frozen value, sent as JSON
PROMPTS = [[(5 * i + j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
WAYS = [
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=16, temperature=0.9, seed=3, repetition_penalty=1.2),
    SamplingParams(max_tokens=16, logprobs=2, prompt_logprobs=1, logit_bias={7: 4.0}),
    SamplingParams(max_tokens=16, min_tokens=9, stop_token_ids=tuple(range(0, tiny.VOCAB, 3))),
]
BOTH = pytest.mark.parametrize("device", [False, True])
TIGHT = {"block_size": 4, "kv_cache_memory": 130 * 640, "max_model_len": 64}


def engine_of(targets, trained, device: bool, **room: Any) -> Engine:
    config = tiny.engine_config(max_num_batched_tokens=11, **room)
    return tiny.engine(targets["easy"].decoder, trained["peagle"].drafter, 4, device, config)


def watched(engine: Engine, change: Callable[[Any], Any] = lambda value: value) -> list[Any]:
    """The steps and outcomes that pass, each changed on its way."""
    exchange, passed = engine.worker.exchange, []

    def between(step: Step) -> Outcome:
        outcome = exchange(change(step))
        passed.extend((step, outcome))
        return change(outcome)

    engine.worker.exchange = between  # type: ignore[method-assign]
    return passed


def leaves(value: object) -> Iterator[object]:
    """What a value is made of."""
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, tuple):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def written(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [(r.output, r.logprobs, r.prompt_logprobs, r.speculation) for r in requests]


@BOTH
def test_it_is_plain_and_may_come_from_another_process(targets, trained, device: bool):
    expected = tiny.run(engine_of(targets, trained, device), PROMPTS, WAYS)
    engine = engine_of(targets, trained, device)
    passed = watched(engine, lambda value: pickle.loads(pickle.dumps(value)))
    assert written(tiny.run(engine, PROMPTS, WAYS)) == written(expected)
    assert all(isinstance(leaf, PLAIN) for value in passed for leaf in leaves(value))


@BOTH
def test_planning_changes_nothing(targets, trained, device: bool):
    """However often a plan is asked for, with preemptions and prefixes that are shared."""
    steps, preemptions = [], []
    for plans in (0, 2):
        engine = engine_of(targets, trained, device, **TIGHT)
        passed = watched(engine)
        for again in range(2):
            for i, (prompt, how) in enumerate(zip(PROMPTS, WAYS, strict=True)):
                engine.add(f"{again} {i}", prompt, how.model_copy(update={"max_tokens": 30}))
            while engine.busy:
                assert all(engine.scheduler.plan() == engine.scheduler.plan() for _ in range(plans))
                engine.step()
        steps.append(passed)
        preemptions.append(engine.stats.preemptions)
    assert steps[0] == steps[1]
    assert preemptions[0] == preemptions[1] > 0
