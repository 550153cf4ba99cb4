"""The engine in a process of its own: the same answers, and what becomes of it."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny_pair import TinyPair, save_pair

from peagle import LLM, AsyncLLM, InputError, SamplingParams, SpeculativeConfig
from peagle.async_llm import EngineClosedError
from peagle.completion import Completion
from peagle.config import StructuredOutputs
from peagle.engine.engine import EngineDeadError
from peagle.engine_client.process import EngineProcess

PROMPTS = ["def name(self):", "for item in items:\n", "é世🙂", "x"]
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
PATIENCE = 240.0
"""Seconds, far more than anything here takes on an idle machine."""

pytestmark = pytest.mark.usefixtures("forked")  # all but `apart`, which is made before


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


def made(pair: TinyPair, own_process: bool, **config) -> LLM:
    speculation = SpeculativeConfig(model=str(pair.peagle), num_speculative_tokens=3)
    sizes = tiny.engine_config(dtype="float32", device="cpu", **config)
    return LLM(pair.target, speculation, sizes, own_process=own_process)


@pytest.fixture(scope="module")
def here(pair: TinyPair) -> LLM:
    return made(pair, own_process=False)


@pytest.fixture(scope="module")
def apart(pair: TinyPair) -> Iterator[AsyncLLM]:
    with contextlib.closing(AsyncLLM(lambda: made(pair, own_process=True))) as llm:
        yield llm


def answers(llm: AsyncLLM, params: Sequence[SamplingParams]) -> list[Completion]:
    async def one(prompt: str, how: SamplingParams) -> Completion:
        return await llm.complete(await llm.prepare(prompt, how))

    async def every() -> list[Completion]:
        return await asyncio.gather(*map(one, PROMPTS, params))

    return asyncio.run(every())


def exact(done: Completion) -> Completion:
    """What depends neither on times, nor on which requests a step runs together, nor on how many
    had no seed before."""
    scored = {"logprobs": (), "prompt_logprobs": (), "seed": 0}
    return replace(done, request_id="", token_times=(), queued=0.0, **scored)


def scores(done: Completion) -> list[float]:
    """All numbers of its log-probabilities."""
    entries = [entry for entry in (*done.logprobs, *done.prompt_logprobs) if entry]
    return [n for one in entries for n in (one.chosen, one.rank, *itertools.chain(*one.top))]


def wait_until(true) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def rests(pid: int) -> bool:
    """Whether a process neither runs nor waits for a core for half a second."""
    before = core_seconds(pid)
    time.sleep(0.5)
    return core_seconds(pid) - before < 0.01


def core_seconds(pid: int) -> float:
    """How long all threads of a process have run or waited for a core."""
    times = [place.read_text().split() for place in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return 1e-9 * sum(int(ran) + int(waited) for ran, waited, _ in times)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.9, "seed": 1 << 80, "top_p": 0.9, "repetition_penalty": 1.2},
        {"logprobs": 3, "prompt_logprobs": 2, "logit_bias": {17: 30.0}},
        {"min_tokens": 5, "stop": ("e",), "include_stop_str_in_output": True},
        {"allowed_token_ids": (5, 60, 61, 62), "bad_words": ("a",)},
        {"num_speculative_tokens": 0, "cache_salt": "\udce9", "priority": 1},
        {"structured_outputs": StructuredOutputs(regex="[a-f]{3,12}x")},
        {"structured_outputs": StructuredOutputs(json={"const": 1 << 70}), "bad_words": ("9",)},
    ],
    ids=lambda values: ",".join(values) or "greedy",
)
def test_answers_are_those_of_an_engine_here(here: LLM, apart: AsyncLLM, values):
    """Token for token, with their log-probabilities and what speculation did."""
    params = [SamplingParams(max_tokens=n, **values) for n in (20, 5, 20, 11)]
    expected = here.generate(PROMPTS, params)
    found = answers(apart, params)
    assert [*map(exact, found)] == [*map(exact, expected)]
    for one, other in zip(found, expected, strict=True):
        assert scores(one) == pytest.approx(scores(other), abs=1e-4)
        assert (len(one.logprobs) > 0) == ("logprobs" in values)
    assert all(done.token_times == tuple(sorted(done.token_times)) for done in found)


def test_a_stream_brings_what_every_step_brings(here: LLM, apart: AsyncLLM):
    how = SamplingParams(max_tokens=20, logprobs=1)

    async def read() -> list:
        return [chunk async for chunk in apart.stream(PROMPTS[0], how)]

    chunks = asyncio.run(read())
    (expected,) = here.generate([PROMPTS[0]], how)
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected.token_ids
    assert len(chunks) > 1


def test_who_reads_late_gets_several_steps_at_once(here: LLM, apart: AsyncLLM):
    """An event loop that is busy: the engine runs on, and the loop catches up in larger pieces."""
    how = SamplingParams(max_tokens=60, ignore_eos=True, num_speculative_tokens=0)
    engine = apart.llm.engine
    assert isinstance(engine, EngineProcess)

    async def read() -> list:
        chunks = []
        async for chunk in apart.stream(PROMPTS[0], how):
            chunks.append(chunk)
            wait_until(lambda: rests(engine.pid))  # nothing else has a turn
        return chunks

    chunks = asyncio.run(read())
    (expected,) = here.generate([PROMPTS[0]], how)
    assert len(chunks) < len(expected.token_ids) / 2
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected.token_ids
    assert exact(chunks[-1].completion) == exact(expected)


def test_an_answer_that_was_whole_before_the_engine_died_is_delivered(pair: TinyPair, here: LLM):
    """Though nobody had read it by then."""
    how = SamplingParams(max_tokens=8, ignore_eos=True)
    with contextlib.closing(made(pair, own_process=True)) as llm:
        engine = llm.engine
        assert isinstance(engine, EngineProcess)
        llm.submit(llm.prepare(PROMPTS[0], how))
        wait_until(lambda: rests(engine.pid))  # its answer is written
        os.kill(engine.pid, signal.SIGKILL)
        os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
        chunks = llm.step()
        assert exact(chunks[-1].completion) == exact(*here.generate([PROMPTS[0]], how))
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            llm.step()


def test_the_facts_are_the_same(here: LLM, apart: AsyncLLM):
    assert apart.llm.engine.facts == here.engine.facts
    assert apart.llm.beyond_training == here.beyond_training


def test_a_request_that_is_left_ends_there(apart: AsyncLLM):
    async def leave() -> None:
        async for _ in apart.stream(PROMPTS[0], LONG):
            assert apart.llm.engine.stats.running == 1
            return

    asyncio.run(leave())
    wait_until(lambda: apart.llm.engine.stats.running == 0)
    assert apart.llm.engine.stats.kv_usage == 0


def test_a_grammar_that_is_wrong_is_refused_before_it_runs(here: LLM, apart: AsyncLLM):
    how = SamplingParams(structured_outputs=StructuredOutputs(regex="[a"))
    with pytest.raises(InputError) as expected:
        here.prepare(PROMPTS[0], how)
    with pytest.raises(InputError) as found:
        apart.llm.prepare(PROMPTS[0], how)
    assert str(found.value) == str(expected.value)


def test_what_cannot_be_loaded_is_told_as_here(pair: TinyPair):
    told = []
    for own_process in (False, True):
        with pytest.raises(InputError) as error:
            made(pair, own_process, kv_cache_memory=1)
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What threads raise, which Python prints."""
    found: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda hook: found.append(hook.exc_value))
    return found


def test_one_that_is_killed_takes_its_streams_along(pair: TinyPair, raised: list[BaseException]):
    """The next ones are refused, and it is told why."""
    llm = AsyncLLM(lambda: made(pair, own_process=True))
    engine = llm.llm.engine
    assert isinstance(engine, EngineProcess)

    async def read(prompt: str) -> None:
        async for _ in llm.stream(prompt, LONG):
            if engine.stats.running == len(PROMPTS):
                os.kill(engine.pid, signal.SIGKILL)

    async def every() -> list:
        return await asyncio.gather(*map(read, PROMPTS), return_exceptions=True)

    ends = asyncio.run(every())
    assert [type(end) for end in ends] == [EngineClosedError] * len(PROMPTS)
    wait_until(lambda: not llm.alive)
    assert llm.failed
    assert [str(error) for error in raised] == ["the engine's process ended: killed by SIGKILL"]
    with pytest.raises(EngineClosedError):
        asyncio.run(read(PROMPTS[0]))


def test_an_idle_one_that_is_killed_is_missed(pair: TinyPair, raised: list[BaseException]):
    llm = AsyncLLM(lambda: made(pair, own_process=True))
    engine = llm.llm.engine
    assert isinstance(engine, EngineProcess)
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: not llm.alive)
    assert llm.failed
    assert len(raised) == 1


def test_closing_ends_the_process(pair: TinyPair):
    """Within a step, too; what its owner is told by a signal it does not heed."""
    llm = AsyncLLM(lambda: made(pair, own_process=True))
    engine = llm.llm.engine
    assert isinstance(engine, EngineProcess)
    os.kill(engine.pid, signal.SIGTERM)
    os.kill(engine.pid, signal.SIGINT)

    async def close_early() -> None:
        stream = llm.stream(PROMPTS[0], LONG)
        await anext(stream)
        llm.close()
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass

    asyncio.run(close_early())
    with pytest.raises(ProcessLookupError):
        os.kill(engine.pid, 0)
    assert not llm.failed
    bound = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-f]{7}"))
    with pytest.raises(EngineClosedError) as told:
        asyncio.run(llm.prepare(PROMPTS[0], bound))
    assert not told.value.failed
