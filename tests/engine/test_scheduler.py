"""What takes part in a step: seen through the steps that the engine hands to its worker."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.engine.step import Outcome, Step

Steps = list[list[tuple[str, int, int]]]
"""Per step: request id, target rows, drafts."""


@pytest.fixture
def watched(targets, trained) -> Callable[..., tuple[Engine, Steps]]:
    """An engine over the easy pair, and the work of each of its steps."""

    def make(k: int = 0, **room: Any) -> tuple[Engine, Steps]:
        drafter = trained["peagle"].drafter if k else None
        engine = Engine(targets["easy"].decoder, drafter, k, tiny.engine_config(**room))
        steps: Steps = []
        exchange, names = engine.worker.exchange, dict[int, str]()

        def watch(step: Step) -> Outcome:
            names.update({request.row: request.id for request in engine.scheduler.running})
            cycles = [(names[c.row], c.drafts + 1, c.drafts) for c in step.cycles]
            steps.append(cycles + [(names[c.row], c.rows, 0) for c in step.chunks])
            return exchange(step)

        engine.worker.exchange = watch  # type: ignore[method-assign]
        return engine, steps

    return make


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + i * i) % tiny.MASK for i in range(length)]


FEW = SamplingParams(max_tokens=4)


def first_rows(engine: Engine, steps: Steps, tokens: list[int], k: int | None = None) -> int:
    """Rows of the first step that a request alone takes: its prompt less what is cached."""
    steps.clear()
    tiny.run(engine, [tokens], SamplingParams(max_tokens=4, num_speculative_tokens=k))
    return steps[0][0][1]


def test_a_prompt_is_prefilled_in_chunks_of_the_budget(watched):
    engine, steps = watched(max_num_batched_tokens=10)
    tiny.run(engine, [prompt(25)], FEW)
    assert steps == [[("r0", rows, 0)] for rows in (10, 10, 5, 1, 1, 1)]


def test_running_requests_go_before_waiting_ones(watched):
    engine, steps = watched(max_num_batched_tokens=10)
    engine.add("a", prompt(4), FEW)
    engine.add("b", prompt(12, first=2), FEW)
    tiny.finish(engine)
    assert steps[0] == [("a", 4, 0), ("b", 6, 0)]
    assert steps[1] == [("a", 1, 0), ("b", 6, 0)]
    assert steps[2] == [("a", 1, 0), ("b", 1, 0)]


def test_a_burst_does_not_wait_for_its_last_prompt(watched):
    """On a CPU, where twice the rows take twice as long."""
    engine, steps = watched(max_num_seqs=16)
    tiny.run(engine, [prompt(100, first=i) for i in range(16)], FEW)
    rows = [[rows for _, rows, _ in step] for step in steps[:2]]
    assert rows == [[100] * 10 + [24], [1] * 10 + [76] + [100] * 5]


@pytest.fixture
def worth_64(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a request waits for."""
    monkeypatch.setattr("peagle.engine.plan.WORTH_WAITING", 64)


def sharing(count: int, shared: int) -> list[list[int]]:
    """Prompts that begin alike."""
    return [prompt(shared) + prompt(12, first=3 + i) for i in range(count)]


def test_a_burst_that_shares_a_prefix_computes_it_once(watched, worth_64):
    """Those behind the first wait for it; others do not wait for them."""
    engine, steps = watched(max_num_seqs=16, block_size=16)
    tiny.run(engine, [*sharing(3, 100), prompt(100, first=2)], FEW)
    assert steps[0] == [("r0", 112, 0), ("r3", 100, 0)]
    assert steps[1] == [("r0", 1, 0), ("r3", 1, 0), ("r1", 16, 0), ("r2", 16, 0)]
    assert engine.stats.prefix_hits == 2 * 96


def test_nobody_waits_for_what_is_computed_as_fast(watched, worth_64):
    engine, steps = watched(max_num_seqs=16, block_size=16)
    tiny.run(engine, sharing(3, 60), FEW)
    assert [rows for _, rows, _ in steps[0]] == [72] * 3


def test_who_waits_for_a_request_goes_on_without_it(watched, worth_64):
    """It is cancelled in the middle of its prompt; what it has computed is found."""
    engine, steps = watched(max_num_seqs=16, block_size=16, max_num_batched_tokens=50)
    first, *others = (engine.add(f"r{i}", each, FEW) for i, each in enumerate(sharing(3, 150)))
    engine.step()
    engine.step()
    engine.abort(first.id)
    tiny.finish(engine)
    assert [step[0] for step in steps[:3]] == [("r0", 50, 0), ("r0", 50, 0), ("r1", 50, 0)]
    assert [other.output_length for other in others] == [4, 4]
    assert engine.stats.prefix_hits == 96 + 144


@pytest.mark.parametrize("method", ["none", "peagle"])
def test_a_burst_that_shares_a_prefix_computes_it_once_on_a_device(
    targets, trained, worth_64, method
):
    drafter = trained["peagle"].drafter if method == "peagle" else None
    prompts, config = sharing(5, 100), tiny.engine_config(max_num_seqs=16, block_size=16)
    engine = tiny.engine(targets["easy"].decoder, drafter, 4 if drafter else 0, True, config)
    found = tiny.outputs(tiny.run(engine, prompts, FEW))
    assert engine.stats.prefix_hits == 4 * 96
    alone = tiny.engine(targets["easy"].decoder, None, 0, False, config)
    assert found == [tiny.outputs(tiny.run(alone, [each], FEW))[0] for each in prompts]


@pytest.mark.parametrize("budget", [1, 3, 8, 20])
def test_no_step_is_larger_than_the_budget(watched, budget: int):
    engine, steps = watched(k=4, max_num_batched_tokens=budget)
    tiny.run(engine, [prompt(9, first=i) for i in range(6)], SamplingParams(max_tokens=12))
    assert max(sum(rows for _, rows, _ in step) for step in steps) <= budget
    assert any(drafts for step in steps for _, _, drafts in step) == (budget > 1)


def test_verifying_takes_one_row_more_than_drafts(watched):
    engine, steps = watched(k=4)
    tiny.run(engine, [prompt(9)], SamplingParams(max_tokens=20, num_speculative_tokens=3))
    assert steps[0] == [("r0", 9, 0)]
    assert {step[0][1:] for step in steps[1:]} == {(4, 3)}


def test_no_more_requests_run_than_allowed(watched):
    engine, steps = watched(max_num_seqs=2)
    tiny.run(engine, [prompt(5, first=i) for i in range(5)], FEW)
    assert max(len(step) for step in steps) == 2
    order = [request for step in steps for request, rows, _ in step if rows > 1]
    assert order == ["r0", "r1", "r2", "r3", "r4"]


def ranked(priority: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "priority": priority, **more})


def test_the_lowest_number_goes_first_and_equals_in_order_of_arrival(watched):
    engine, steps = watched(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1), ("e", 5), ("f", -1)):
        engine.add(name, prompt(5), ranked(priority))
    tiny.finish(engine)
    order = list(dict.fromkeys(request for step in steps for request, *_ in step))
    assert order == ["d", "f", "a", "c", "b", "e"]


def test_the_highest_number_is_preempted(watched):
    """Though it came first."""
    engine, _ = watched(
        block_size=4, kv_cache_memory=16 * 4 * 1024, max_model_len=64, enable_prefix_caching=False
    )
    how = {"max_tokens": 16}
    least = engine.add("a", prompt(24, 0), ranked(1, **how))
    engine.step()
    first = engine.add("b", prompt(24, 1), ranked(0, **how))
    while first.finish_reason is None:
        engine.step()
    assert not least.running
    assert least.finish_reason is None
    assert engine.stats.preemptions == 1
    tiny.finish(engine)
    assert least.output_length == 16


def test_requests_with_other_salts_share_no_prefix(watched):
    engine, steps = watched(block_size=4)
    tokens = prompt(21)

    def rows(salt: str | None) -> int:
        steps.clear()
        tiny.run(engine, [tokens], ranked(0, cache_salt=salt))
        return steps[0][0][1]

    salts = (None, None, "a", "a", "b", None, "a", "")
    assert [rows(salt) for salt in salts] == [21, 1, 21, 1, 21, 1, 1, 1]


def test_the_youngest_is_preempted_and_comes_back_first(watched):
    """16 blocks of 4: two requests that grow to 40 tokens do not fit at once."""
    engine, steps = watched(
        block_size=4, kv_cache_memory=16 * 4 * 1024, max_model_len=64, enable_prefix_caching=False
    )
    assert engine.blocks.num_blocks == 16
    how = SamplingParams(max_tokens=16)
    old, young, last = (engine.add(name, prompt(24, i), how) for i, name in enumerate("abc"))
    while old.finish_reason is None:
        engine.step()
        assert old.running or old.finish_reason, "the oldest never gives way"
    assert not young.running
    assert young.finish_reason is None
    assert 0 < young.output_length < 16
    tiny.finish(engine)
    newest = next(step for step in steps if any(name == "c" for name, *_ in step))
    assert [name for name, *_ in newest] == ["b", "c"], "the newest is not admitted before"
    assert [r.output_length for r in (old, young, last)] == [16, 16, 16]


class TestPrefixCaching:
    def test_a_repeated_prompt_is_hardly_computed(self, watched):
        engine, steps = watched(block_size=4)
        rows = [first_rows(engine, steps, prompt(30)) for _ in range(3)]
        assert rows == [30, 2, 2]  # seven whole blocks are known

    def test_one_token_is_always_computed(self, watched):
        engine, steps = watched(block_size=4)
        assert [first_rows(engine, steps, prompt(28)) for _ in range(2)] == [28, 4]

    def test_a_drafters_keys_need_one_token_more(self, watched):
        """The keys of a block's last position depend on the token after it."""
        engine, steps = watched(k=4, block_size=4)
        other = [*prompt(28), 5, 6]
        assert other[28] != prompt(29)[28]
        rows = [first_rows(engine, steps, tokens) for tokens in (prompt(30), other, prompt(30))]
        assert rows == [30, 6, 2]

    def test_blocks_without_a_drafters_keys_are_not_shared(self, watched):
        """A request that ends at its first token never ran the drafter."""
        engine, steps = watched(k=4, block_size=4)
        tiny.run(engine, [prompt(30)], SamplingParams(max_tokens=1))
        assert first_rows(engine, steps, prompt(30)) == 30

    def test_output_is_cached_too(self, watched):
        engine, steps = watched(block_size=4)
        (request,) = tiny.run(engine, [prompt(20)], SamplingParams(max_tokens=20))
        assert first_rows(engine, steps, [*request.tokens, 1]) == 41 - 36  # token 40 had no keys

    def test_running_requests_share_their_blocks(self, watched):
        engine, _ = watched(block_size=4)
        engine.add("a", prompt(30), FEW)
        engine.step()
        held = engine.blocks.num_blocks - sum(engine.blocks.free_by_group())
        engine.add("b", [*prompt(28), 3, 3], FEW)
        engine.step()
        assert engine.blocks.num_blocks - sum(engine.blocks.free_by_group()) == held + 1
        tiny.finish(engine)

    def test_requests_with_and_without_a_drafter_do_not_share(self, watched):
        engine, steps = watched(k=4, block_size=4)
        rows = [first_rows(engine, steps, prompt(30), k) for k in (0, None, 0, 2)]
        assert rows == [30, 30, 2, 2]

    def test_it_can_be_turned_off(self, watched):
        engine, steps = watched(block_size=4, enable_prefix_caching=False)
        assert [first_rows(engine, steps, prompt(30)) for _ in range(2)] == [30, 30]

    def test_a_preempted_request_finds_its_own_blocks(self, watched):
        engine, steps = watched(block_size=4, kv_cache_memory=16 * 4 * 1024, max_model_len=64)
        how = SamplingParams(max_tokens=16)
        tiny.run(engine, [prompt(24, 1), prompt(24, 2)], how)
        again = [rows for step in steps[1:] for name, rows, _ in step if name == "r1" and rows > 1]
        assert again
        assert max(again) < 24
