"""What passes between an engine's process and the one in front of it: plain data, nothing pickled.

Configurations travel as JSON in ASCII, which holds any number and any text that Python has.
"""

import contextlib
import json
import os
import select
import socket
import struct
import threading
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

from peagle.config import SamplingParams
from peagle.engine.engine import EngineFacts, EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine_client.form import Form

IN_FORM = {"allowed_token_ids", "bad_words", "structured_outputs"}
"""Sampling parameters that a request's form tells, some of them at length."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message."""


class Open(Envelope, frozen=True):
    """The first message: what to load."""

    source: str
    """`EngineSource` as JSON."""
    threads: int
    """Threads of torch on the CPU."""


class Compile(Envelope, frozen=True):
    """As the method of `EngineClient`; to be `Answered`."""

    call: int
    form: Form


class Add(Envelope, frozen=True):
    """As the method of `EngineClient`."""

    request_id: str
    prompt: list[int]
    params: str
    """`SamplingParams` as JSON."""
    form: Form | None


class Abort(Envelope, frozen=True):
    """As the method of `EngineClient`."""

    request_id: str
    reason: str


class Ready(Envelope, frozen=True):
    """The engine is loaded."""

    facts: EngineFacts
    stats: EngineStats


class Refused(Envelope, frozen=True):
    """The engine cannot be loaded, for a reason that concerns the user."""

    complaint: str


class Stepped(Envelope, frozen=True):
    """What a step gave its requests, and how busy the engine is after it."""

    outputs: list[RequestOutput]
    stats: EngineStats


class Beat(Envelope, frozen=True):
    """Sent every second: the process has turns."""

    step_age: float
    """As in `EngineClient`, like the stats."""
    stats: EngineStats


class Failed(Envelope, frozen=True):
    """An exception; the engine has no requests any more."""

    error: str
    traceback: str
    dead: bool
    """Whether the process ends by it."""


class Answered(Envelope, frozen=True):
    """The end of a call."""

    call: int
    complaint: str | None = None
    """The words of an `InputError`."""
    failed: Failed | None = None
    """What is known of any other exception."""


ToEngine = Open | Compile | Add | Abort
FromEngine = Ready | Refused | Stepped | Beat | Failed | Answered
Received = TypeVar("Received")


class Channel(Generic[Received]):
    """One end of the socket pair. Any thread may send; one receives."""

    def __init__(self, descriptor: int, received: Any) -> None:
        """received: the union of the messages that the other end sends."""
        self._connection = Connection(descriptor)
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(received)

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._connection.fileno()

    def send(self, message: Envelope) -> None:
        """Send a message. Raises `OSError` when nobody can get it any more."""
        data = msgspec.msgpack.encode(message)
        with self._sending:
            self._connection.send_bytes(data)

    @property
    def is_full(self) -> bool:
        """Whether a message would wait for the other end."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        return not poll.poll(0)

    def limit_sends(self, seconds: float) -> None:
        """From now on a `send` that the other end lets wait for so long raises `BlockingIOError`;
        part of the message may have gone."""
        limit = struct.pack("ll", int(seconds), 0)
        with socket.socket(fileno=os.dup(self.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def end(self) -> None:
        """Let nothing pass any more, in either direction; whoever receives is told at once."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)  # which the other end may have done

    def receive(self) -> Received:
        """The next message. Raises `EOFError` or `OSError` when none can come any more."""
        return self._decoder.decode(self._connection.recv_bytes())

    def receive_all(self) -> list[Received]:
        """All messages that have come, at least one. Raises as `receive`, once none is left."""
        messages = [self.receive()]
        with contextlib.suppress(EOFError, OSError):  # the next call tells
            while self._connection.poll():
                messages.append(self.receive())
        return messages

    def close(self) -> None:
        """Let the other end know that nothing more comes."""
        with self._sending:
            self._connection.close()


def written_params(params: SamplingParams) -> str:
    """Sampling parameters as JSON, but for what a form tells."""
    return json.dumps(params.model_dump(exclude_defaults=True, exclude=IN_FORM))


def read_params(text: str) -> SamplingParams:
    """What `written_params` wrote."""
    return SamplingParams(**json.loads(text))
