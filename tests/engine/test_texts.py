"""Drafts looked up in the requests' own texts, on either worker."""

from collections.abc import Sequence

import pytest
import tiny
import torch

from peagle.config import SamplingParams
from peagle.drafters.lookup import Lookup
from peagle.engine.engine import Engine

REPEATS = [(5 * i) % 11 for i in range(44)]
"""A text that repeats itself."""
NEW = 40
BOTH = pytest.mark.parametrize("resident", [False, True])


def engine_of(targets, resident: bool, **changes: object) -> Engine:
    found = Lookup(2, 8, torch.device("cpu"))
    config = tiny.engine_config(**changes)
    return tiny.engine(targets["easy"].decoder, found, 4, resident, config)


def plain(targets, prompts: Sequence[Sequence[int]], how: SamplingParams) -> list[list[int]]:
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
    return tiny.outputs(tiny.run(engine, prompts, how))


@BOTH
def test_a_text_that_repeats_itself_is_drafted_without_a_drafter(targets, resident: bool):
    how = SamplingParams(max_tokens=NEW, allowed_token_ids=(3, 5))  # so few that it repeats itself
    request = tiny.run(engine_of(targets, resident), [REPEATS], how)[0]
    did = request.speculation
    assert request.output == plain(targets, [REPEATS], how)[0]
    assert did.drafted >= did.accepted > NEW / 4


def test_on_a_device_lookups_may_pause(targets):
    """The number of drafts is chosen there for all requests together, none among the choices."""
    how = SamplingParams(max_tokens=NEW)
    prompts = [REPEATS, list(range(30))]
    engine = engine_of(targets, True, draft_length="auto")
    engine.scheduler.pace.draft_length = tiny.GivenLengths([0, 4])
    requests = tiny.run(engine, prompts, how)
    assert tiny.outputs(requests) == plain(targets, prompts, how)
    assert all(request.speculation.pauses > NEW / 8 for request in requests)


@BOTH
def test_the_same_seed_gives_the_same_tokens(targets, resident: bool):
    how = SamplingParams(max_tokens=NEW, temperature=1.0, seed=5)
    prompts = [REPEATS, REPEATS[:7], [1, 2, 3, 1, 2]]
    drafted = tiny.run(engine_of(targets, resident), prompts, how)
    assert tiny.outputs(drafted) == plain(targets, prompts, how)


@BOTH
def test_preempted_requests_go_on(targets, resident: bool):
    engine = engine_of(targets, resident, block_size=4)
    how = SamplingParams(max_tokens=NEW)
    request = engine.add("one", REPEATS, how)
    while request.output_length < 10:
        engine.step()
    engine.scheduler.preempt(request)
    tiny.finish(engine)
    assert request.output == plain(targets, [REPEATS], how)[0]
    again = tiny.run(engine, [REPEATS], how)[0]  # after a prefix that the cache knows
    assert again.reused > 0
    assert again.output == request.output


def test_on_a_cpu_a_text_without_repetition_costs_no_drafts(targets):
    prompt = list(range(40))
    request = tiny.run(engine_of(targets, False), [prompt], SamplingParams(max_tokens=3))[0]
    assert request.speculation.drafted == 0
    assert request.speculation.pauses == 2  # the first token is the prompt's
