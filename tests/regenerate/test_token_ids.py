"""What training reads of regenerated answers is what the target wrote, for every family."""

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from chat_templates import user
from families import FAMILIES, Calls, encode, oddly_written, tokenizer
from scripted import Script, scripted_llm

from peagle import AsyncLLM
from peagle.config import SamplingParams
from peagle.errors import InputError
from peagle.regenerate.answers import Regeneration
from peagle.regenerate.engine import EngineAnswerer
from peagle.regenerate.output import Output
from peagle.regenerate.run import Extent, by_digest, regenerate
from peagle.train.conversations import read_documents
from peagle.train.packing import Document
from peagle.train.samples import Chat

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALL, NOW = ("get_weather", {"city": "Paris", "days": 2}), ("now", {})
Words = tuple[str, str, Calls]
"""Thoughts, content and calls of an answer."""
ANSWERS: dict[str, list[Words]] = {
    "plain": [("", "It is 4.", [])],
    "think": [("Let me think.\n\nSo.", "It is 4.", [])],
    "call": [("Hm.", "I will look.", [CALL])],
    "two calls": [("Hm.", "", [CALL, NOW])],
    "several turns": [("Hm.", "It is 4.", []), ("So.", "It is 5.", []), ("Hm.", "", [CALL])],
}
NOT_SHOWN = {("llama3.1", "two calls"), ("gpt-oss", "call"), ("gpt-oss", "two calls")}
"""Answers that a template shows otherwise than they are written, or not at all."""
SHARING = ("qwen3-coder", "plain")
"""Families whose templates show answers later as they were written, in the same tokens. Others
leave out thoughts or write another end; Llama's lines before an answer join it in other tokens."""


@dataclass
class Target:
    """One family's target, which writes one given answer after the other."""

    name: str
    llm: AsyncLLM
    script: Script
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """What it was asked, in tokens."""

    def run(
        self, answers: Sequence[Sequence[int]], path: Path, most: int = 300
    ) -> tuple[list[dict[str, Any]], list[Extent]]:
        """Regenerate a conversation of as many questions; its record, if any, and outcome."""
        turns = [turn for n in range(len(answers)) for turn in (user(f"What is {n}+2?"), OLD)]
        params, outcomes = SamplingParams(max_tokens=most), list[Extent]()
        self.prompts.clear()
        prepare = self.llm.llm.prepare

        def recorded(prompt: Any, *more: Any) -> Any:
            self.prompts.append(tuple(prompt))
            return prepare(prompt, *more)

        asked = by_digest([Chat("data:1", tuple(turns), TOOLS)])
        with (
            mock.patch("peagle.engine.host.batch.choose", self.script.choose),
            mock.patch.object(self.llm.llm, "prepare", recorded),
        ):
            output = Output(path, "us", with_ids=True)
            writer = Writer(self.llm, self.script, iter(answers))
            asyncio.run(
                regenerate(asked, writer, params, output, 1, lambda _, one: outcomes.append(one))
            )
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines], outcomes

    def written(self, words: Words, spelled: bool) -> list[int]:
        """An answer as the family writes it, with its end; `spelled`: letter by letter."""
        family = FAMILIES[self.name]
        thoughts, content, calls = self.words(words)
        text = family.write(thoughts, content, calls)
        ids = spell(self.name, text) if spelled else encode(self.name, text)
        final = self.name == "gpt-oss" and not calls
        return [*ids, *encode(self.name, "<|return|>" if final else family.end_of_call)]

    def words(self, words: Words) -> Words:
        """As much of an answer as the family can say."""
        family = FAMILIES[self.name]
        thoughts, content, calls = words
        thoughts = thoughts or ("Hm." if family.begun else "")
        return (
            thoughts if family.thinks else "",
            content if family.talks or not calls else "",
            calls,
        )

    def documents(self, path: Path) -> list[Document]:
        """What training makes of a file."""
        own = tokenizer(self.name)
        return read_documents([str(path)], lambda: own, 4096, "drop", len(own))[0]


OLD = {"role": "assistant", "content": "somebody else's"}


class Writer(EngineAnswerer):
    """Answers by the target, which is told what to write."""

    def __init__(self, llm: AsyncLLM, script: Script, answers: Iterator[Sequence[int]]) -> None:
        super().__init__(llm)
        self._script, self._answers = script, answers

    async def chat(self, *asked: Any) -> Regeneration:
        *self._script.tokens, self._script.end = next(self._answers)
        return await super().chat(*asked)


def spell(name: str, text: str) -> list[int]:
    """Token ids of a text, each letter by itself: no tokenizer encodes it like that."""
    markers = tokenizer(name).get_added_vocab()
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    letters = [one for part in parts for one in ([part] if part in markers else part)]
    ids = [token for letter in letters for token in encode(name, letter)]
    assert ids != encode(name, text)
    return ids


@pytest.fixture(scope="module", params=FAMILIES)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    llm, script = scripted_llm(request.param, tmp_path_factory.mktemp(request.param))
    running = AsyncLLM(lambda: llm)
    yield Target(request.param, running, script)
    running.close()


def learned(documents: Sequence[Document]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every response and all that stands before it."""
    spans = [(one.tokens, *span) for one in documents for span in one.responses]
    return [(tokens[:start], tokens[start:stop]) for tokens, start, stop in spans]


@pytest.mark.sweep
@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("case", ANSWERS)
def test_training_reads_what_the_target_was_shown_and_wrote(
    target: Target, tmp_path: Path, case: str, spelled: bool
):
    answers = [target.written(words, spelled) for words in ANSWERS[case]]
    [record], [outcome] = target.run(answers, tmp_path / "out.jsonl")
    assert [m["token_ids"] for m in record["messages"][1::2]] == answers
    assert outcome.problem is None
    assert len(target.prompts) == len(answers)
    pairs = [(shown, tuple(ids)) for shown, ids in zip(target.prompts, answers, strict=True)]
    assert learned(target.documents(tmp_path / "out.jsonl")) == pairs


@pytest.mark.sweep
@pytest.mark.parametrize("case", ANSWERS)
def test_messages_say_what_was_written(target: Target, tmp_path: Path, case: str):
    answers = [target.written(words, spelled=True) for words in ANSWERS[case]]
    [record], _ = target.run(answers, tmp_path / "out.jsonl")
    found = [
        (
            message.get("reasoning_content", ""),
            message["content"],
            [
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ],
        )
        for message in record["messages"][1::2]
    ]
    assert found == [target.words(words) for words in ANSWERS[case]]


@pytest.mark.sweep
@pytest.mark.parametrize("case", ANSWERS)
def test_a_template_that_shows_an_answer_shows_what_was_written(
    target: Target, tmp_path: Path, case: str
):
    """For the newest answer; without ids, data of this form is learned by rendering it."""
    words = ANSWERS[case][:1]
    target.run([target.written(one, spelled=False) for one in words], tmp_path / "out.jsonl")
    line = json.loads((tmp_path / "out.jsonl").read_text())
    del line["messages"][-1]["token_ids"]
    (tmp_path / "rendered.jsonl").write_text(json.dumps(line))
    texts = []
    for name in ("out", "rendered"):
        with contextlib.suppress(InputError):  # a template that takes one call at a time
            pairs = learned(target.documents(tmp_path / f"{name}.jsonl"))
            texts.append([tuple(map(tokenizer(target.name).decode, pair)) for pair in pairs])
    assert (texts[:1] == texts[1:]) == ((target.name, case) not in NOT_SHOWN)


def test_answers_share_a_document_while_the_template_shows_what_was_written(
    target: Target, tmp_path: Path
):
    words = ANSWERS["several turns"]
    for spelled in (False, True):
        path = tmp_path / f"{spelled}.jsonl"
        target.run([target.written(one, spelled) for one in words], path)
        shared = target.name in SHARING and not spelled
        assert len(target.documents(path)) == (1 if shared else len(words))


def test_an_answer_that_is_cut_is_left_out_with_what_follows_it(target: Target, tmp_path: Path):
    first, last = (target.written(words, True) for words in ANSWERS["several turns"][:2])
    longer = [*last[:-1], *last]
    records, [outcome] = target.run([first, longer], tmp_path / "out.jsonl", len(longer) - 1)
    assert outcome.cut
    assert [m["token_ids"] for m in records[0]["messages"][1::2]] == [first]
    records, [outcome] = target.run([longer], tmp_path / "none.jsonl", len(longer) - 1)
    assert (records, outcome.cut) == ([], True)


def test_a_call_without_a_result_ends_the_conversation(target: Target, tmp_path: Path):
    words = ANSWERS["call"] + ANSWERS["plain"]
    answers = [target.written(one, spelled=False) for one in words]
    [record], [outcome] = target.run(answers, tmp_path / "out.jsonl")
    assert [m["token_ids"] for m in record["messages"][1::2]] == answers[:1]
    assert outcome.problem == (
        "data:1: the target calls a tool, and the data has no result of that call"
    )


def test_a_call_that_is_oddly_written_is_a_call_of_the_data(target: Target, tmp_path: Path):
    name, arguments = "get_weather", {"city": "a\n\tb"}
    written = encode(target.name, oddly_written(target.name, [(name, arguments)]))
    written += encode(target.name, FAMILIES[target.name].end_of_call)
    [record], _ = target.run([written], tmp_path / "out.jsonl")
    [call] = record["messages"][1]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        name,
        arguments,
    )
