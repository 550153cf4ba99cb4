"""Prefixes of targets with recurrent layers: found where a state is kept beside their keys."""

import pytest
import tiny
from blocks import check_blocks

from peagle.config import SamplingParams
from peagle.engine.block_pool import BlockPool
from peagle.engine.engine import Engine

NEW = 12
LONG = [(11 * i + i * i) % tiny.MASK for i in range(60)]
Texts = list[list[int]]


@pytest.fixture(autouse=True)
def _short_prefixes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.engine.plan.WORTH_KEEPING", 8)


@pytest.fixture(params=[False, True], ids=["host", "resident"])
def engine(request: pytest.FixtureRequest, targets, drafter_of) -> Engine:
    config = tiny.engine_config(max_model_len=128, block_size=4)
    return tiny.engine(targets["qwen3_5"].decoder, drafter_of(True), 3, request.param, config)


@pytest.fixture
def expected(targets) -> Engine:
    config = tiny.engine_config(max_model_len=128, enable_prefix_caching=False)
    return Engine(targets["qwen3_5"].decoder, None, 0, config)


def run(engine: Engine, *prompts: list[int]) -> tuple[Texts, list[int]]:
    """Texts one after the other, and how many tokens of each prompt were found."""
    how = SamplingParams(max_tokens=NEW)
    requests = [tiny.run(engine, [prompt], how)[0] for prompt in prompts]
    return [request.output for request in requests], [request.cached for request in requests]


def test_a_prompt_that_comes_again_is_found_up_to_its_last_block(engine, expected):
    texts, cached = run(engine, LONG, LONG)
    assert texts == run(expected, LONG, LONG)[0]
    assert cached == [0, 56]


def test_a_chat_goes_on_from_its_last_prompt(engine, expected):
    [first], _ = run(engine, LONG)
    chat = LONG + first + [3, 1, 4, 1, 5]
    texts, cached = run(engine, chat)
    assert texts == run(expected, chat)[0]
    assert cached == [56]


def test_what_two_prompts_share_is_found_by_the_third(engine, expected):
    """The second finds no state where their texts part, and leaves one there."""
    prompts = [LONG[:40] + [tail] * 20 for tail in (1, 2, 3)]
    texts, cached = run(engine, *prompts)
    assert texts == run(expected, *prompts)[0]
    assert cached == [0, 0, 36], "a drafter's keys depend on the token behind a block"


def test_requests_at_once_and_after_others_left(engine, expected):
    prompts = [[*LONG[:n], n] for n in (20, 33, 47, 59)] + [LONG]
    how = SamplingParams(max_tokens=NEW)
    for _ in range(3):
        assert tiny.outputs(tiny.run(engine, prompts, how)) == run(expected, *prompts)[0]
    check_blocks(engine.blocks)


def test_states_are_reused_oldest_first(targets, drafter_of, expected, monkeypatch):
    monkeypatch.setattr("peagle.engine.capacity.STATES_PER_SEQ", 1)
    engine = tiny.engine(
        targets["qwen3_5"].decoder,
        drafter_of(True),
        3,
        False,
        tiny.engine_config(max_model_len=128, block_size=4, max_num_seqs=2),
    )
    assert engine.blocks.states.num_blocks == 2
    others = [[n, *LONG[:40]] for n in (1, 2)]
    texts, cached = run(engine, LONG, *others, LONG, others[1])
    assert texts == run(expected, LONG, *others, LONG, others[1])[0]
    assert cached == [0, 0, 0, 0, 40]


def test_a_slot_that_two_prompts_of_a_step_get_holds_the_state_of_the_second(engine, expected):
    """The second's prompt is longer: on the device it runs first."""
    engine.blocks.states = BlockPool(1)
    prompts = [[*LONG[:n], n] for n in (20, 47)]
    how = SamplingParams(max_tokens=NEW)
    tiny.run(engine, prompts, how)
    again = [tiny.run(engine, [prompt], how)[0] for prompt in reversed(prompts)]
    assert [request.cached for request in again] == [44, 0]
    assert tiny.outputs(again) == run(expected, *reversed(prompts))[0]


def test_a_restart_forgets_states_that_may_not_be_written(engine, expected):
    run(engine, LONG)
    engine.scheduler.restart()
    engine.worker.forget()
    texts, cached = run(engine, LONG)
    assert texts == run(expected, LONG)[0]
    assert cached == [0]
