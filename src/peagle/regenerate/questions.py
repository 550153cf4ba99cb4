"""Questions that the target writes itself, where a user has none.

A target that has learned conversations goes on with a question where its own chat template has
begun a user's turn (Xu et al., Magpie, 2024).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.async_llm import AsyncLLM
from peagle.config import SamplingParams
from peagle.errors import InputError
from peagle.models.chat_template import render_chat
from peagle.regenerate.output import append, read_lines
from peagle.regenerate.run import seeded

BEGINNING = '{"messages": '
"""How every line of questions begins."""
MARK = "QUESTION"
"""Stands for the question in a user's turn."""
SAMPLED = SamplingParams(temperature=1.0, max_tokens=512)
"""How questions are chosen; longer ones are left out."""
TRIES, MORE_TRIES = 4, 64
"""Times the number wanted, and further ones, after which too many are alike."""


class Questioner:
    """Writes questions of a target loaded in this process.

    A template that puts nothing before a user's words has a text's first token in its place.
    variables: the chat template's own. Raises `InputError` when nothing begins a user's turn.
    """

    def __init__(self, llm: AsyncLLM, seed: int, variables: Mapping[str, Any]) -> None:
        self._async, tokenizer = llm, llm.llm.tokenizer
        turn = [{"role": "user", "content": MARK}]
        before, shown, after = render_chat(tokenizer, turn, None, **variables).partition(MARK)
        begins_text = [token for token in [tokenizer.bos_token_id] if token is not None]
        self._prompt = llm.llm.tokenize(before, add_special_tokens=False) or begins_text
        if not shown or not self._prompt:
            raise InputError(
                "--self-prompted: the chat template begins a user's turn with nothing, and no "
                "token begins a text; give files of questions in its place"
            )
        self._params = SAMPLED.model_copy(update={"seed": seed, **_end(llm, after)})

    async def ask(self, number: int) -> str | None:
        """The question of a number, the same in every run; None where it is empty or too long."""
        params = seeded(self._params, f"question {number}")
        prepared = await self._async.prepare(self._prompt, params)
        done = await self._async.complete(prepared)
        return done.text.strip() or None if done.finish_reason == "stop" else None


def _end(llm: AsyncLLM, after: str) -> dict[str, Any]:
    """How a user's turn ends: at the first special token after it, else at the text there."""
    special = set(llm.llm.tokenizer.all_special_ids)
    ids = llm.llm.tokenize(after, add_special_tokens=False)
    first = next((token for token in ids if token in special), None)
    if first is not None:
        return {"stop_token_ids": (first,)}
    return {"stop": (after.strip() or after,)} if after else {}


@dataclass
class QuestionFile:
    """A file of different questions in the order of their numbers, which a later run continues.

    Each line is a conversation that `regenerate` answers. Raises `InputError` when it cannot be
    written, or holds something else.
    """

    path: Path
    by: str
    """Who writes them, and how."""
    count: int = 0
    following: int = 0
    """Number of the next question."""
    _known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for place, found in read_lines(self.path, BEGINNING):
            self._note(*self._checked(found, place))

    def add(self, number: int, question: str | None) -> bool:
        """Write the question of a number, unless there is one like it; whether it is new."""
        if question is None or _plain(question) in self._known:
            self.following = number + 1
            return False
        turn = {"role": "user", "content": question}
        append(self.path, {"messages": [turn], "number": number, "by": self.by})
        self._note(number, question)
        return True

    def _note(self, number: int, question: str) -> None:
        self._known.add(_plain(question))
        self.count, self.following = self.count + 1, number + 1

    def _checked(self, found: Any, place: str) -> tuple[int, str]:
        match found:
            case {"messages": [{"content": str(said)}], "number": int(number), "by": self.by}:
                return number, said
            case {"number": int(), "by": str(by)}:
                raise InputError(f"{place}: written by {by}, not by {self.by}; move the file away")
        raise InputError(f"{place}: not a question of peagle regenerate; move the file away")


async def write_questions(
    ask: Callable[[int], Awaitable[str | None]],
    file: QuestionFile,
    wanted: int,
    in_flight: int,
    on_question: Callable[[], None],
) -> None:
    """Ask for questions, `in_flight` at a time, until the file has as many as are wanted.

    They are written in the order of their numbers, so that the same are left out in every run.
    Raises `InputError` when too many are alike.
    """
    waiting: deque[asyncio.Task[str | None]] = deque()
    asked, most = file.following, TRIES * wanted + MORE_TRIES
    try:
        while file.count < wanted:
            while asked < most and len(waiting) < min(in_flight, 2 * (wanted - file.count)):
                waiting.append(asyncio.ensure_future(ask(asked)))
                asked += 1
            if not waiting:
                raise InputError(
                    f"the target wrote {file.count} different questions in {most} tries; ask for "
                    "no more, or give a file of questions"
                )
            if file.add(file.following, await waiting.popleft()):
                on_question()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _plain(question: str) -> str:
    """What is the same in questions that differ in nothing but spaces and capitals."""
    return " ".join(question.casefold().split())
