"""The other process's part, here on a thread: errors within a step."""

import contextlib
import functools
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from blocks import check_blocks

from peagle import SamplingParams
from peagle.engine.engine import Engine
from peagle.engine_client.local import LocalEngine
from peagle.engine_client.loop import EngineLoop
from peagle.engine_client.messages import (
    Add,
    Beat,
    Channel,
    Failed,
    FromEngine,
    Ready,
    Stepped,
    ToEngine,
    written_params,
)

HOW = written_params(SamplingParams(max_tokens=3))


@contextlib.contextmanager
def running(engine: Engine) -> Iterator[tuple[Any, Channel, threading.Thread]]:
    """A loop over an engine, and the end of the channel in front of it."""
    with running_for(engine, 1) as (loop, [(front, theirs)], thread):
        take = functools.partial(loop.take, front=theirs)
        yield SimpleNamespace(take=take), front, thread


@contextlib.contextmanager
def running_for(engine: Engine, count: int) -> Iterator[Any]:
    """A loop over an engine, and both ends of each channel."""
    pairs = [socket.socketpair() for _ in range(count)]
    channels = [
        (Channel[FromEngine](ours.detach(), FromEngine), Channel[ToEngine](end.detach(), ToEngine))
        for ours, end in pairs
    ]
    loop = EngineLoop([theirs for _, theirs in channels])
    loop.open(LocalEngine(engine, None))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for front, _ in channels:
        assert isinstance(front.receive(), Ready)
    yield loop, channels, thread


@pytest.fixture
def engine(targets) -> Engine:
    return Engine(targets["easy"].decoder, None, 0, tiny.engine_config())


def received(front: Channel):
    """The next message that is no beat."""
    while isinstance(message := front.receive(), Beat):
        pass
    return message


def tokens_of(front: Channel, request_id: str) -> int:
    """How many tokens a request gets until it ends."""
    count = 0
    while True:
        message = received(front)
        assert isinstance(message, Stepped)
        for output in message.outputs:
            assert output.request_id == request_id
            count += len(output.new_tokens)
            if output.finish_reason is not None:
                return count


def test_a_step_that_fails_ends_its_requests_and_no_others(engine: Engine, monkeypatch):
    with running(engine) as (loop, front, _):
        with monkeypatch.context() as patch:

            def fail(step):
                patch.undo()
                raise RuntimeError("no step")

            patch.setattr(engine.worker, "exchange", fail)
            loop.take(Add("lost", [5, 6, 7], HOW, None))
            message = received(front)
        assert isinstance(message, Failed)
        assert (message.error, message.dead) == ("RuntimeError: no step", False)
        assert 'raise RuntimeError("no step")' in message.traceback
        idle = received(front)
        assert isinstance(idle, Stepped)
        assert (idle.outputs, idle.stats.running, idle.stats.waiting) == ([], 0, 0)
        loop.take(Add("next", [5, 6, 7], HOW, None))
        assert tokens_of(front, "next") == 3
    check_blocks(engine.blocks)


def test_a_lost_device_ends_it(engine: Engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("no device")

    monkeypatch.setattr(engine.worker, "exchange", fail)
    monkeypatch.setattr(engine.worker, "forget", fail)
    with running(engine) as (loop, front, thread):
        loop.take(Add("lost", [5, 6, 7], HOW, None))
        message = received(front)
        thread.join(30)
    assert isinstance(message, Failed)
    assert message.dead
    assert "the device is lost: no device" in message.error
    assert not thread.is_alive()


def test_each_of_several_fronts_gets_what_is_its_own(engine: Engine):
    """The first channel is that of who started it, and has no requests."""
    with running_for(engine, 3) as (loop, [_, first, second], _):
        for (_, theirs), request_id in ((first, "0"), (second, "1"), (first, "2")):
            loop.take(Add(request_id, [5, 6, 7], HOW, None), theirs)
        assert tokens_by_request(first[0], 2) == {"0": 3, "2": 3}
        assert tokens_by_request(second[0], 1) == {"1": 3}
    check_blocks(engine.blocks)


def tokens_by_request(front: Channel, ends: int) -> dict[str, int]:
    """How many tokens each request gets until so many have ended."""
    counts: dict[str, int] = {}
    while ends:
        message = received(front)
        assert isinstance(message, Stepped)
        for output in message.outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.new_tokens)
            ends -= output.finish_reason is not None
    return counts


def test_a_front_that_ends_loses_its_requests_and_no_others(engine: Engine, monkeypatch):
    aborted = threading.Event()
    monkeypatch.setattr(
        engine, "abort", lambda *given: (Engine.abort(engine, *given), aborted.set())
    )
    long = written_params(SamplingParams(max_tokens=40, ignore_eos=True))
    with running_for(engine, 3) as (loop, [_, first, second], _):
        first[0].close()
        loop.take(Add("0", [5, 6, 7], long, None), first[1])
        loop.take(Add("1", [5, 6, 7], long, None), second[1])
        assert tokens_by_request(second[0], 1) == {"1": 40}
        assert aborted.wait(60)
        assert not engine.busy
    check_blocks(engine.blocks)
