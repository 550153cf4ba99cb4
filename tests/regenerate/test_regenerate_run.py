import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_templates import assistant, user
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.errors import InputError
from peagle.regenerate.answers import NoAnswerError, Regeneration
from peagle.regenerate.output import Output
from peagle.regenerate.run import (
    Conversation,
    Extent,
    by_digest,
    plan,
    read_conversations,
    regenerate,
)
from peagle.train.samples import Chat, Continuation, Message

PARAMS = SamplingParams(max_tokens=8, seed=3)
SYSTEM = {"role": "system", "content": "be kind"}
CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "look"}}])
RESULT = {"role": "tool", "content": "seen"}


class Counting:
    """Answers by repeating the question, as often as the context allows."""

    def __init__(self, context: int = 100) -> None:
        self.context = context
        self.cut: Sequence[str] = ()
        """What answers are cut."""
        self.calls: list[dict[str, Any]] = []
        """What every answer calls."""
        self.ids: tuple[int, ...] = ()
        self.running = self.most = 0
        self.seeds: list[int | None] = []
        self.variables: list[Mapping[str, Any]] = []

    async def chat(self, asked: Chat, params: SamplingParams) -> Regeneration:
        self.variables.append(asked.variables)
        told = f"{len(asked.messages)}: {asked.messages[-1]['content']}"
        return await self._answer(told, asked.messages, params)

    async def complete(self, prompt: str, params: SamplingParams) -> Regeneration:
        return await self._answer(f"after {prompt}", prompt, params)

    async def _answer(
        self, text: str, asked: Sequence[Any], params: SamplingParams
    ) -> Regeneration:
        if len(asked) > self.context:
            raise NoAnswerError(f"{len(asked)} is too long")
        if "fail" in text:
            raise InputError("the server refuses")
        self.seeds.append(params.seed)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        more = {"tool_calls": self.calls} if self.calls else {}
        return Regeneration(assistant(text, **more), 5, text in self.cut, self.ids)


def run(
    path: Path, conversations: Sequence[Conversation], answerer: Counting, concurrency: int = 4
) -> tuple[list[dict[str, Any]], list[Extent]]:
    """The lines and the outcomes."""
    outcomes: list[Extent] = []
    asked = by_digest(conversations)
    output = Output(path, "us", with_ids=False)
    asyncio.run(
        regenerate(
            asked, answerer, PARAMS, output, concurrency, lambda _, one: outcomes.append(one)
        )
    )
    kept = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in kept.splitlines()]
    assert {line.pop("asked") for line in lines} <= asked.keys()
    assert {line.pop("by") for line in lines} <= {"us"}
    return lines, outcomes


def test_every_answer_is_the_targets_given_its_own_before(tmp_path: Path):
    chat = Chat("a:1", (SYSTEM, user("x"), assistant("old"), user("y")), [{"type": "function"}])
    lines, (outcome,) = run(tmp_path / "out", [chat], Counting())
    said = [SYSTEM, user("x"), assistant("2: x"), user("y"), assistant("4: y")]
    assert lines == [{"source": "a:1", "messages": said, "tools": [{"type": "function"}]}]
    assert (outcome.tokens, outcome.problem) == (10, None)


def test_a_conversation_keeps_its_own_variables_of_the_template(tmp_path: Path):
    """With other ones it is another question."""
    answerer, own = Counting(), {"enable_thinking": False}
    chats = [Chat("a:1", (user("x"),)), Chat("a:2", (user("x"),), variables=own)]
    lines, _ = run(tmp_path / "out", chats, answerer)
    assert answerer.variables == [{}, own]
    assert [line.get("chat_template_kwargs") for line in lines] == [None, own]
    assert not any(asked.endswith("-2") for asked in by_digest(chats))


def test_given_variables_come_before_a_conversations_own(tmp_path: Path):
    """The name of what it asks stays as it is, so that a file goes on."""
    own = {"enable_thinking": True, "lang": "x"}
    line = {"messages": [user("x")], "chat_template_kwargs": own}
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, (line, {"prompt": "x"}))))
    plain = read_conversations([str(file)])
    found = read_conversations([str(file)], variables={"enable_thinking": False})
    assert [*found] == [*plain]
    (chat, prompt), (own_chat, own_prompt) = found.values(), plain.values()
    assert chat == replace(own_chat, variables={"enable_thinking": False, "lang": "x"})
    assert prompt == own_prompt


def test_variables_that_no_template_has_are_refused(tmp_path: Path):
    line = {"messages": [user("x")], "chat_template_kwargs": {"messages": 1}}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    with pytest.raises(InputError, match=r"a\.jsonl:1: messages is no variable of a template"):
        read_conversations([str(tmp_path / "a.jsonl")])


def test_a_prompt_is_completed(tmp_path: Path):
    lines, _ = run(tmp_path / "out", [Continuation("a:1", "x", "old")], Counting())
    assert lines == [{"source": "a:1", "prompt": "x", "response": "after x"}]


PLANS: list[tuple[list[Message], list[Message | None]]] = [
    ([user("a"), assistant("b")], [user("a"), None]),
    ([user("a")], [user("a"), None]),
    ([assistant("a"), user("b")], [user("b"), None]),
    ([user("a"), user("b"), assistant("c")], [user("a"), user("b"), None]),
    ([user("a"), assistant("b"), assistant("c")], [user("a"), None]),
    ([user("a"), CALL, RESULT, assistant("b")], [user("a"), CALL, RESULT, None]),
    ([user("a"), CALL, RESULT], [user("a"), CALL, RESULT, None]),
    ([user("a"), CALL], [user("a"), None]),
    ([user("a"), CALL, user("b"), CALL, RESULT], [user("a"), None, user("b"), CALL, RESULT, None]),
    ([SYSTEM, assistant("b")], [SYSTEM]),
]


@pytest.mark.parametrize(("messages", "turns"), PLANS)
def test_where_the_target_answers(messages: list[Message], turns: list[Message | None]):
    assert plan(Chat("a:1", tuple(messages))) == turns


@given(st.lists(st.sampled_from([SYSTEM, user("q"), assistant("a"), CALL, RESULT]), max_size=8))
def test_an_answer_follows_a_question_and_no_question_is_lost(messages: list[Message]):
    turns = plan(Chat("a:1", tuple(messages)))
    for before, turn in zip([None, *turns], turns, strict=False):
        if turn is None:
            assert before is not None
            assert before["role"] in ("user", "tool")
    kept = [
        message
        for message, following in itertools.pairwise([*messages, None])
        if message["role"] != "assistant" or (message, following) == (CALL, RESULT)
    ]
    assert [turn for turn in turns if turn is not None] == kept
    assert not turns or turns[-1] is None or turns[-1]["role"] not in ("user", "tool")


CALLING = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("calls", "results", "goes_on"), [(1, 1, True), (2, 1, False), (2, 2, True)]
)
def test_calls_are_followed_by_their_results_or_end_the_conversation(
    tmp_path: Path, calls: int, results: int, goes_on: bool
):
    """Data may write calls as text, so that the target answers there and results follow."""
    answerer = Counting()
    answerer.calls = [CALLING] * calls
    messages = (user("x"), assistant("<call>"), *[RESULT] * results, assistant("?"))
    lines, (outcome,) = run(tmp_path / "out", [Chat("a:1", messages)], answerer)
    called = assistant("1: x", tool_calls=[CALLING] * calls)
    rest = [*[RESULT] * results, assistant(f"{2 + results}: seen", tool_calls=[CALLING] * calls)]
    assert lines[0]["messages"] == [user("x"), called, *(rest if goes_on else [])]
    ends = "a:1: the target calls a tool, and the data has no result of that call"
    assert outcome.problem == (None if goes_on else ends)
    assert not outcome.cut


def test_what_the_target_wrote_stands_beside_its_own_answers_alone(tmp_path: Path):
    """Ids in the data are of whoever answered there, and no part of the question."""
    answerer = Counting()
    answerer.ids = (5, 7)
    chat = Chat("a:1", (user("x"), CALL, RESULT, assistant("?")), None, (None, (1,), None, (2,)))
    lines, _ = run(tmp_path / "out", [chat, Continuation("a:2", "x", "?", (1,))], answerer)
    answer = assistant("3: seen", token_ids=[5, 7])
    assert lines[0]["messages"] == [user("x"), CALL, RESULT, answer]
    assert lines[1] == {
        "source": "a:2",
        "prompt": "x",
        "response": "after x",
        "token_ids": [5, 7],
    }
    assert by_digest([chat]).keys() == by_digest([replace(chat, token_ids=())]).keys()


def test_a_full_context_ends_a_conversation_at_its_last_answer(tmp_path: Path):
    three = (user("x"), assistant("?"), user("y"), assistant("?"), user("z"))
    chats = [Chat("a:1", three), Chat("a:2", (SYSTEM, SYSTEM, SYSTEM, SYSTEM, *three))]
    prompt = Continuation("a:3", "too long", None)
    lines, outcomes = run(tmp_path / "out", [*chats, prompt], Counting(context=3))
    said = [user("x"), assistant("1: x"), user("y"), assistant("3: y")]
    assert lines == [{"source": "a:1", "messages": said}]
    found = [(outcome.record is None, outcome.problem) for outcome in outcomes]
    problems = {"a:1: 5 is too long", "a:2: 5 is too long", "a:3: 8 is too long"}
    assert {problem for _, problem in found} == problems
    assert [problem for skipped, problem in found if not skipped] == ["a:1: 5 is too long"]


def test_a_cut_answer_is_left_out_with_what_follows_it(tmp_path: Path):
    """It would be rendered with an end of turn that the target did not write."""
    chats = [Chat(f"a:{n}", (user(n), assistant("?"), user("y"))) for n in "123"]
    answerer = Counting()
    answerer.cut = ["1: 1", "3: y"]
    lines, outcomes = run(tmp_path / "out", [chats[0]], answerer)
    why = (
        "an answer was cut after 5 tokens by --max-tokens or the context's end; to keep it raise "
        "--max-tokens"
    )
    assert (lines, outcomes) == ([], [Extent(None, 0, f"a:1: {why}", cut=True)])
    lines, (outcome,) = run(tmp_path / "out", [chats[1]], answerer)
    assert lines == [{"source": "a:2", "messages": [user("2"), assistant("1: 2")]}]
    assert (outcome.tokens, outcome.problem, outcome.cut) == (5, f"a:2: {why}", True)


def test_a_cut_text_is_kept(tmp_path: Path):
    answerer = Counting()
    answerer.cut = ["after x"]
    lines, (outcome,) = run(tmp_path / "out", [Continuation("a:1", "x", None)], answerer)
    assert (lines[0]["response"], outcome.problem, outcome.cut) == ("after x", None, False)


def test_concurrency_and_a_seed_of_its_own_for_every_answer(tmp_path: Path):
    chats = [Chat(f"a:{n}", (user("x"), assistant("?"), user("y"))) for n in range(10)]
    first, second, alone = Counting(), Counting(), Counting()
    lines, _ = run(tmp_path / "first", chats, first, concurrency=3)
    assert first.most == 3
    assert sorted(line["source"] for line in lines) == sorted(chat.place for chat in chats)
    assert len(set(first.seeds)) == 20
    run(tmp_path / "second", chats[::-1], second)
    assert sorted(second.seeds) == sorted(first.seeds)
    run(tmp_path / "alone", chats[4:5], alone)
    assert set(alone.seeds) <= set(first.seeds)


def test_an_error_names_the_conversation_and_keeps_the_finished_ones(tmp_path: Path):
    chats = [Chat(f"a:{n}", (user("fail" if n == 5 else "x"),)) for n in range(40)]
    with pytest.raises(InputError, match=r"^a:5: the server refuses$"):
        run(tmp_path / "out", chats, Counting(), concurrency=2)
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert {line["source"] for line in lines} <= {f"a:{n}" for n in range(7)}
    assert len(lines) >= 4


def test_conversations_are_read_once_and_up_to_the_limit(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    lines = [{"messages": [user("a")]}, {"prompt": "b"}, {"prompt": "c", "response": "d"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = read_conversations([str(file), str(file)])
    places = [conversation.place for conversation in found.values()]
    assert places == [f"{file}:{n}" for n in (1, 2, 3)]
    assert list(read_conversations([str(file)], limit=2)) == list(found)[:2]
    with pytest.raises(InputError, match="a limit of 0 conversations leaves nothing"):
        read_conversations([str(file)], limit=0)


ASKED = Chat("a:1", (SYSTEM, user("x"), assistant("old"), user("y")), [{"type": "function"}])
SAME: list[Conversation] = [
    replace(ASKED, place="b:7"),
    replace(ASKED, messages=(SYSTEM, user("x"), assistant("new"), user("y"), assistant("more"))),
    replace(ASKED, messages=(SYSTEM, user("x"), CALL, user("y"), CALL)),
]
OTHER: list[Conversation] = [
    replace(ASKED, tools=None),
    replace(ASKED, messages=ASKED.messages[1:]),
    replace(ASKED, messages=(*ASKED.messages[:-1], user("z"))),
    replace(ASKED, messages=(SYSTEM, user("x"), CALL, RESULT, user("y"))),
    Continuation("a:1", "x", "old"),
]


@pytest.mark.parametrize("other", SAME)
def test_a_conversation_is_the_same_wherever_it_stands(other: Conversation):
    assert by_digest([ASKED]).keys() == by_digest([other]).keys()


@pytest.mark.parametrize("other", OTHER)
def test_what_asks_otherwise_is_another_conversation(other: Conversation):
    assert len({*by_digest([ASKED]), *by_digest([other])}) == 2


def test_a_prompt_is_the_same_whatever_answered_it():
    prompts = [Continuation("a:1", "x", "old"), Continuation("a:2", "x", None)]
    assert by_digest(prompts[:1]).keys() == by_digest(prompts[1:]).keys()


def test_equal_conversations_are_told_apart_by_their_number():
    one, two, three = by_digest([ASKED, SAME[0], SAME[1]])
    assert len({one, two, three}) == 3
    assert list(by_digest([OTHER[0], ASKED, OTHER[1], ASKED]))[1::2] == [one, two]


NOTHING_ASKED = [
    ({"text": "a"}, r"data\.jsonl:1: needs messages, conversations or a prompt to answer"),
    ({"messages": [SYSTEM, assistant("a")]}, r"data\.jsonl:1: .* has no user turn to answer"),
    ({"prompt": ""}, r"data\.jsonl:1: the prompt is empty"),
    (None, r"data\.jsonl: no conversation found"),
]


@pytest.mark.parametrize(("line", "message"), NOTHING_ASKED)
def test_what_asks_nothing_is_named(tmp_path: Path, line: Any, message: str):
    (tmp_path / "data.jsonl").write_text(json.dumps(line) if line else "")
    with pytest.raises(InputError, match=message):
        read_conversations([str(tmp_path / "data.jsonl")])
