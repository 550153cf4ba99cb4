"""The other process's part, here on a thread: errors within a step."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
import tiny

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
def running(engine: Engine) -> Iterator[tuple[EngineLoop, Channel, threading.Thread]]:
    """A loop over an engine, and the end of the channel in front of it."""
    ours, theirs = socket.socketpair()
    front: Channel[FromEngine] = Channel(ours.detach(), FromEngine)
    loop = EngineLoop(Channel[ToEngine](theirs.detach(), ToEngine))
    loop.open(LocalEngine(engine, None))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    assert isinstance(front.receive(), Ready)
    yield loop, front, thread


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
    engine.blocks.check()


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
