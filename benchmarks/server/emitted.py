"""What an emitted token costs on the host: text, events of a dialect, delivery, HTTP's bytes.

    python benchmarks/server/emitted.py --tokenizer DIRECTORY --requests 64 --tokens 3

No model runs: an engine writes given answers, so many tokens of each request a step, and its own
time is taken off. Where tasks wait for it a step takes `--pause`, as a device would. Answers are
text of the repository's pages; those of conversations begin with thoughts where the tokenizer has
markers of them. Processor time of the process, in microseconds per token, the best of several
rounds:

llm: `LLM.step`, so token ids -> chunks; async: also handed to as many tasks on an event loop; http:
also a chat completion's events through the application, to a client that takes whatever it is sent;
late: the same over an engine that does not wait, as one in another process: it steps each `--pause`
by the clock, and what nobody has read yet is read at once.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from peagle import LLM, AsyncLLM, SamplingParams
from peagle.bench.environment import machine
from peagle.bench.result_file import result_file
from peagle.cli.script import run
from peagle.config import ChatConfig
from peagle.engine.engine import EngineFacts, EngineStats
from peagle.engine.request import Request, RequestOutput
from peagle.engine_client.local import LocalEngine
from peagle.live_request import ChatTurn
from peagle.models.tokenizer import load_tokenizer
from peagle.pair import bundled
from peagle.server.app import create_app
from peagle.server.settings import ServerSettings

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
STOPS = ("\nUser:", "<|user|>", "### Instruction", "```\n\n\n")
THINKING = "<think>\n{thought}\n</think>\n\n{answer}"
CHANNELS = (
    "<|channel|>analysis<|message|>{thought}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{answer}"
)
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
ROUTE = "/v1/chat/completions"
CASES = ("text", "stops", "chat")
GATHERED = 10
"""Steps of 512 requests that a socket pair holds."""


def main(
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="Directory of a tokenizer; repeatable.")
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens that a step gives each.")] = 3,
    length: Annotated[int, typer.Option(help="Tokens of an answer.")] = 384,
    pause: Annotated[float, typer.Option(help="Milliseconds of a step on a device.")] = 20.0,
    rounds: Annotated[int, typer.Option(help="Rounds, of which the best counts.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Measure every case with every tokenizer."""
    facts = {"requests": requests, "tokens": tokens, "length": length, "rounds": rounds}
    facts["pause"] = pause
    rows = []
    with result_file(out) as write:
        for place in tokenizer or [str(bundled("target"))]:
            work = Work(load_tokenizer(Path(place)), requests, tokens, length, pause)
            for case, (side, measure) in itertools.product(CASES, SIDES.items()):
                if side in ("http", "late") and case != "chat":
                    continue
                least = min((measure(work, case) for _ in range(rounds)), key=astuple)
                row = {"tokenizer": Path(place).name, "case": case, "side": side}
                row["microseconds"] = round(least.processor * 1e6, 2)
                rows.append(row | {"tokens_per_second": round(1 / least.wall)})
                print(json.dumps(rows[-1]), flush=True)
        write(machine() | facts | {"rows": rows})


@dataclass(frozen=True)
class Cost:
    """Seconds for a token: of the processor, and of the clock."""

    processor: float
    wall: float


class Work:
    """Answers of one tokenizer, and how they come."""

    def __init__(
        self, tokenizer: Any, requests: int, tokens: int, length: int, pause: float = 0
    ) -> None:
        self.tokenizer, self.tokens, self.pause = tokenizer, tokens, pause / 1e3
        text = "\n".join(page.read_text() for page in PAGES)
        form = _form(tokenizer)
        self.texts, self.chats = [], []
        for index in range(requests):
            part = text[3001 * index % len(text) :][: 12 * length]
            chat = form.format(thought=part[: 2 * length], answer=part[2 * length :])
            self.texts.append(self._encoded(part)[:length])
            self.chats.append(self._encoded(chat)[:length])

    def answers(self, case: str) -> list[list[int]]:
        """What the requests write."""
        return self.chats if case == "chat" else self.texts

    def engine(self, case: str, pause: float = 0.0) -> "WritingEngine":
        """An engine that writes a case's answers, and pauses so many seconds a step."""
        return WritingEngine(self.answers(case), self.tokens, len(self.tokenizer), pause)

    def llm(self, engine: "WritingEngine") -> LLM:
        """An LLM over such an engine."""
        return LLM.over(engine, self.tokenizer, ChatConfig(chat_template=TEMPLATE))  # type: ignore[arg-type]

    def count(self, case: str) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers(case)))

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids


def _form(tokenizer: Any) -> str:
    added = tokenizer.get_added_vocab()
    if "<|channel|>" in added:
        return CHANNELS
    return THINKING if "<think>" in added else "{thought}{answer}"


class WritingEngine:
    """In an engine's place: writes given answers, and knows how long that took it."""

    end_tokens, busy = (), True

    def __init__(
        self, answers: Sequence[Sequence[int]], tokens: int, vocab_size: int, pause: float
    ) -> None:
        self._answers, self._tokens, self.vocab_size = iter(answers), tokens, vocab_size
        self._pause = pause
        self.facts = EngineFacts(
            vocab_size,
            self.end_tokens,
            max_length=1 << 20,
            max_num_seqs=len(answers),
            k=0,
            most_trees=0,
            runs_ahead=True,
            drafter=None,
        )
        self._running: dict[str, tuple[Request, Sequence[int]]] = {}
        self.waits_for = len(answers)
        """Requests before which no step gives anything, so that all run at once."""
        self.seconds = 0.0
        """Processor time of its own."""

    @property
    def stats(self) -> EngineStats:
        return EngineStats(len(self._running), 0, 0.0, 0, 0, 0)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, constraint: Any = None
    ) -> Request:
        request = Request(request_id, list(prompt), params, 0, 0)
        self._running[request_id] = request, next(self._answers)
        return request

    def abort(self, request_id: str, reason: str = "abort") -> None:
        self._running.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        if len(self._running) < self.waits_for:
            time.sleep(1e-4)
            return []
        count, self.waits_for = self._wait(), 0
        begun = time.thread_time()
        outputs = [
            self._write(*item) for _ in range(count) for item in list(self._running.values())
        ]
        self.seconds += time.thread_time() - begun
        return outputs

    def _wait(self) -> int:
        """Take as long as a device; returns how many steps it made."""
        time.sleep(self._pause)
        return 1

    def _write(self, request: Request, answer: Sequence[int]) -> RequestOutput:
        new = answer[request.output_length :][: self._tokens]
        request.tokens += new
        ended = request.output_length == len(answer)
        if ended:
            del self._running[request.id]
        return RequestOutput(request.id, tuple(new), 0, "length" if ended else None)


class RunningEngine(WritingEngine):
    """Steps by the clock, whether or not its steps are read, until so many have gathered."""

    begun: float | None = None
    steps = 0

    def _wait(self) -> int:
        self.begun = self.begun or time.perf_counter()
        behind = self.begun + (self.steps + 1) * self._pause - time.perf_counter()
        if behind > 0:
            time.sleep(behind)
        passed = int((time.perf_counter() - self.begun) / self._pause)
        count = min(max(passed - self.steps, 1), GATHERED)
        self.begun += max(passed - self.steps - GATHERED, 0) * self._pause  # it waited, too
        self.steps += count
        return count


class Apart(LocalEngine):
    """A client of an engine that is in another process, as far as its reader can tell."""

    in_process = False


def _params(case: str) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 16, stop=STOPS if case == "stops" else ())


def _turn(case: str) -> ChatTurn | None:
    return ChatTurn() if case == "chat" else None


def _llm(work: Work, case: str) -> Cost:
    llm = work.llm(engine := work.engine(case))
    for _ in work.answers(case):
        llm.submit(llm.prepare([1], _params(case), _turn(case)))
    ended, begun, start = 0, time.process_time(), time.perf_counter()
    while ended < len(work.answers(case)):
        ended += sum(chunk.completion is not None for chunk in llm.step())
    seconds = time.process_time() - begun - engine.seconds, time.perf_counter() - start
    return Cost(*(each / work.count(case) for each in seconds))


def _async(work: Work, case: str) -> Cost:
    async def use(llm: AsyncLLM) -> None:
        async def one() -> None:
            prepared = await llm.prepare([1], _params(case), _turn(case))
            async with llm.run([prepared]) as chunks:
                async for _ in chunks:
                    pass

        await asyncio.gather(*(one() for _ in work.answers(case)))

    engine = work.engine(case, work.pause)
    return _on_a_loop(work, case, use, engine, work.llm(engine))


def _http(work: Work, case: str) -> Cost:
    engine = work.engine(case, work.pause)
    return _on_a_loop(work, case, _served(work, case), engine, work.llm(engine))


def _late(work: Work, case: str) -> Cost:
    engine = RunningEngine(work.answers(case), work.tokens, len(work.tokenizer), work.pause)
    llm = work.llm(engine)
    llm.engine = Apart(engine, llm.engine.constraints)  # type: ignore[arg-type, attr-defined]
    return _on_a_loop(work, case, _served(work, case), engine, llm)


def _served(work: Work, case: str) -> Callable[[AsyncLLM], Awaitable[None]]:
    """Asks the application for all answers at once."""
    body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 1 << 16}
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": ROUTE,
        "raw_path": ROUTE.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }

    async def use(llm: AsyncLLM) -> None:
        app = create_app(llm, ServerSettings(model_names=("demo",)))

        async def one() -> None:
            asked = [{"type": "http.request", "body": json.dumps(body).encode()}]

            async def receive() -> Any:
                return asked.pop() if asked else await asyncio.Event().wait()

            async def send(message: Any) -> None:
                assert message.get("status", 200) == 200, message

            await app(dict(scope), receive, send)

        await asyncio.gather(*(one() for _ in work.answers(case)))

    return use


def _on_a_loop(
    work: Work,
    case: str,
    use: Callable[[AsyncLLM], Awaitable[None]],
    engine: WritingEngine,
    llm: LLM,
) -> Cost:
    found: list[float] = []
    asynchronous = AsyncLLM(lambda: llm)

    async def measured() -> None:
        begun, start = time.process_time(), time.perf_counter()
        await use(asynchronous)
        found.extend((time.process_time() - begun - engine.seconds, time.perf_counter() - start))

    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measured())
    asynchronous.close()
    return Cost(*(seconds / work.count(case) for seconds in found))


SIDES = {"llm": _llm, "async": _async, "http": _http, "late": _late}

if __name__ == "__main__":
    run(main)
