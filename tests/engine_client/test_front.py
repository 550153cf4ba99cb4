"""An engine as one of several fronts sees it; the engine's end of the channel is here."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import tiny

from peagle import SamplingParams
from peagle.engine.engine import Engine, EngineDeadError
from peagle.engine_client.messages import Beat, Channel, FromEngine, Ready, Stepped, ToEngine
from peagle.engine_client.process import RemoteEngine


@pytest.fixture
def front(targets, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RemoteEngine, Channel]]:
    """A front whose sends wait for a second, and the other end of its channel."""
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
    ours, end = socket.socketpair()
    theirs = Channel[ToEngine](end.detach(), ToEngine)
    theirs.send(Ready(replace(engine.facts, step_timeout=1.0), engine.stats))
    with monkeypatch.context() as patch:
        patch.setattr("peagle.engine_client.process.SPARE", 0.0)
        front = RemoteEngine(Channel[FromEngine](ours.detach(), FromEngine), os.getpid())
    yield front, theirs
    front.close()
    theirs.close()


def test_a_front_whose_request_waits_sees_how_busy_others_keep_the_engine(
    front: tuple[RemoteEngine, Channel],
):
    """Steps tell only those who get tokens. A beat may be older than a step that came before it."""
    here, theirs = front
    here.add("0", [5], SamplingParams(), None)
    busy, busier = (replace(here.stats, running=2, waiting=waiting) for waiting in (1, 2))
    for message, told in (
        (Beat(0.0, busy), busy),
        (Stepped([], busier), busier),
        (Beat(0.0, busy), busier),
        (Beat(0.0, busy), busy),
    ):
        theirs.send(message)
        here.step()
        assert here.stats == told


def test_a_front_ends_after_half_a_message(front: tuple[RemoteEngine, Channel]):
    """Whoever reads the other half would take the next message for it."""
    here, _ = front
    here.add("0", [5] * 1_000_000, SamplingParams(), None)  # more than the engine reads in time
    with pytest.raises(EngineDeadError):
        here.step(0.0)
