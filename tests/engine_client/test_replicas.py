"""Two engines as one: the same answers, who gets which request, and one that ends."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import tiny
from forks import Popen, Zygote, can_fork
from tiny_pair import TinyPair, save_pair

from peagle import LLM, AsyncLLM, InputError, SamplingParams, SpeculativeConfig
from peagle.completion import Completion
from peagle.config import StructuredOutputs
from peagle.engine_client import prefix_owners, replicas
from peagle.engine_client.prefix_owners import PrefixOwners
from peagle.engine_client.process import EngineProcess
from peagle.engine_client.replicas import LOST

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40, ignore_eos=True)
ONE, OTHER = [list(range(first, first + 100)) for first in (20, 150)]
"""Prompts that begin differently, each longer than a piece."""
PATIENCE = 240.0
"""Seconds, far more than anything here takes on an idle machine."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", autouse=True)
def _forked(zygote: Zygote) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if can_fork():
            patch.setattr(Popen, "zygote", zygote)
            patch.setattr("subprocess.Popen", Popen)
        yield


def made(pair: TinyPair, count: int, device: str = "cpu") -> LLM:
    speculation = SpeculativeConfig(model=str(pair.peagle), num_speculative_tokens=3)
    sizes = tiny.engine_config(dtype="float32", device=device, seed=7)
    return LLM(pair.target, speculation, sizes, replicas=count)


@pytest.fixture(scope="module")
def two(pair: TinyPair) -> Iterator[AsyncLLM]:
    with contextlib.closing(AsyncLLM(lambda: made(pair, 2))) as llm:
        yield llm


async def answer(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> Completion:
    return await llm.complete(await llm.prepare(prompt, params))


def wait_until(true) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_answers_are_those_of_one_engine_whichever_gets_them(two: AsyncLLM, pair: TinyPair):
    """Sampled without a seed too, since the front gives the seeds; and a prompt goes to the engine
    that has computed its beginning."""
    sampled = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    prompts = [ONE, OTHER, [*ONE, 5, 6], [*OTHER, 9], ONE]
    expected = made(pair, 1).generate(prompts, sampled)
    found = [asyncio.run(answer(two, prompt, sampled)) for prompt in prompts]
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.seed for one in found] == [7, 8, 9, 10, 11]
    first, second = found[0].replica, found[1].replica
    assert {first, second} == {0, 1}
    assert [one.replica for one in found[2:]] == [first, second, first]
    assert all(one.cached_tokens > 64 for one in found[2:])
    each = [engine.stats.prefix_hits for engine in two.llm.engine.replicas]
    assert 0 not in each
    assert two.llm.engine.stats.prefix_hits == sum(each)


def test_an_engine_that_has_much_to_do_does_not_get_what_it_knows(two: AsyncLLM):
    """Of many that begin alike and come at once, the other one gets some."""

    async def all_at_once() -> list[Completion]:
        return await asyncio.gather(*(answer(two, [*ONE, n], SHORT) for n in range(20, 36)))

    counts = [one.replica for one in asyncio.run(all_at_once())]
    assert min(counts.count(0), counts.count(1)) >= 4
    assert abs(counts.count(0) - counts.count(1)) > 1, "the one that knows it gets more"


def test_forms_are_compiled_wherever_their_requests_may_go(two: AsyncLLM):
    params = SamplingParams(
        max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-f]{3,12}x")
    )
    found = [asyncio.run(answer(two, [40 + n], params)) for n in range(2)]
    assert {one.replica for one in found} == {0, 1}
    assert all(set(one.text) <= set("abcdefx") for one in found)
    wrong = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
    with pytest.raises(InputError):
        asyncio.run(answer(two, ONE, wrong))


def test_one_that_ends_fails_its_own_requests_and_comes_back(two: AsyncLLM, pair: TinyPair):
    engine = two.llm.engine
    lost = engine.replicas[1].pid

    async def run() -> list[Completion]:
        jobs = [asyncio.ensure_future(answer(two, [20 + n], LONG)) for n in range(4)]
        while sum(one.stats.running for one in engine.replicas) < 4:
            await asyncio.sleep(0.01)
        os.kill(lost, signal.SIGKILL)
        return await asyncio.gather(*jobs)

    found = asyncio.run(run())
    assert sorted(one.replica for one in found) == [0, 0, 1, 1]
    for one in found:
        if one.replica:
            assert one.finish_reason == "error"
            assert one.failure == LOST
        else:
            assert (one.finish_reason, len(one.token_ids)) == ("length", 400)
    assert two.responds, "the other one serves"
    assert engine.replicas[1].stats.running == 0
    wait_until(lambda: engine.replicas[1].responds)
    assert engine.replicas[1].pid != lost
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    again = [asyncio.run(answer(two, [30 + n], params)) for n in range(2)]
    assert {one.replica for one in again} == {0, 1}
    assert [one.token_ids for one in again] == [
        one.token_ids for one in made(pair, 1).generate([[30], [31]], params)
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_fails_once_no_engine_is_left_and_none_starts(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """So that a supervisor starts it again."""
    monkeypatch.setattr(replicas, "PAUSE", 0.01)
    pair = save_pair(tmp_path)
    with contextlib.closing(AsyncLLM(lambda: made(pair, 2))) as llm:
        pair.target.rename(tmp_path / "elsewhere")
        for engine in llm.llm.engine.replicas:
            os.kill(engine.pid, signal.SIGKILL)
        wait_until(lambda: llm.failed)
        assert not llm.responds


def test_one_that_starts_while_all_are_closed_is_closed_too(
    pair: TinyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    started, begins, is_closed = [], threading.Event(), threading.Event()

    class Late(EngineProcess):
        def __init__(self, *given):
            if len(started) == 2:
                begins.set()
                assert is_closed.wait(PATIENCE)
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(replicas, "EngineProcess", Late)
    with contextlib.closing(AsyncLLM(lambda: made(pair, 2))) as llm:
        os.kill(started[1].pid, signal.SIGKILL)
        assert begins.wait(PATIENCE)
    assert not llm.responds
    caplog.clear()
    is_closed.set()
    wait_until(lambda: len(started) == 3 and not is_running(started[2].pid))
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cuda", "3 engines need a GPU each, and torch sees 2; give fewer"),
        ("cuda:1", "3 engines on cuda:1 alone; leave its number out"),
    ],
)
def test_more_engines_than_gpus_are_refused_before_anything_is_loaded(
    pair: TinyPair, device: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(InputError) as refusal:
        made(pair, 3, device)
    assert str(refusal.value) == told


@pytest.mark.parametrize(("visible", "each"), [(None, ["0", "1"]), ("4,2,7", ["4", "2"])])
def test_each_engine_has_a_gpu_of_those_that_are_visible(
    pair: TinyPair, visible: str | None, each: list[str], monkeypatch: pytest.MonkeyPatch
):
    given = []

    def start(source: object, variables: dict[str, str]) -> None:
        given.append(variables["CUDA_VISIBLE_DEVICES"])
        if len(given) == 2:
            raise InputError("enough is seen")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(replicas, "EngineProcess", start)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(InputError, match="enough is seen"):
        made(pair, 2, "cuda")
    assert given == each


def test_beginnings_are_known_by_whole_pieces_and_salts(monkeypatch: pytest.MonkeyPatch):
    owners = PrefixOwners()
    owners.give(ONE, None, 1)
    assert owners.find([*ONE[:64], 3], None) == 1
    assert owners.find(ONE[:63], None) is None, "less than a piece"
    assert owners.find([3, *ONE[1:]], None) is None
    assert owners.find(ONE, "another tenant") is None
    owners.give([*ONE, *OTHER], None, 0)
    assert owners.find(ONE, None) == 0, "the newest"
    monkeypatch.setattr(prefix_owners, "MOST", 2)
    owners.give(OTHER, None, 1)
    assert owners.find(ONE, None) is None, "the oldest are forgotten"
    assert owners.find(OTHER, None) == 1
