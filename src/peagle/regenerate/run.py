"""Conversations answered again, turn by turn, many at once."""

import asyncio
import itertools
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peagle.config import SamplingParams
from peagle.errors import InputError, about
from peagle.models.chat_template import RESERVED
from peagle.regenerate.answers import Answerer, NoAnswerError, Regeneration
from peagle.regenerate.output import VARIABLES, Output
from peagle.train.digest import digest
from peagle.train.samples import Chat, Continuation, Message, Sample, read_samples

Conversation = Chat | Continuation
QUESTIONERS = ("user", "tool")
"""Roles whose turns the assistant answers."""
CALLED = "the target calls a tool, and the data has no result of that call"


@dataclass(frozen=True)
class Extent:
    """How far a conversation got."""

    record: dict[str, Any] | None
    """What to write; None if there is no answer."""
    tokens: int
    problem: str | None = None
    """The conversation's place, and why it ends before its last turn."""
    cut: bool = False
    """Whether it ends early because a limit cut an answer short."""


def read_conversations(
    sources: Sequence[str], limit: int | None = None, variables: Mapping[str, Any] = {}
) -> dict[str, Conversation]:
    """The first `limit` conversations and prompts of some sources, as `by_digest` gives them.

    variables: of the chat template, which come before a conversation's own. Raises `InputError`
    naming a line that has nothing to answer.
    """
    if limit is not None and limit < 1:
        raise InputError(f"a limit of {limit} conversations leaves nothing to answer")
    samples = itertools.islice(read_samples(sources), limit)
    found = {sample.place: _asking(sample) for sample in samples}
    if not found:
        raise InputError(f"{', '.join(sources)}: no conversation found")
    asked = by_digest(found.values())
    return {name: _with_variables(one, variables) for name, one in asked.items()}


def by_digest(conversations: Iterable[Conversation]) -> dict[str, Conversation]:
    """Conversations keyed by a digest of what they ask, wherever they are in the data.

    Answers that are ignored are not part of the digest. Repeats get a number appended.
    """
    counts = Counter[str]()
    found: dict[str, Conversation] = {}
    for conversation in conversations:
        asked = digest([json.dumps(_question(conversation)).encode()])
        counts[asked] += 1
        found[asked if counts[asked] == 1 else f"{asked}-{counts[asked]}"] = conversation
    return found


def plan(chat: Chat) -> list[Message | None]:
    """The turns of a conversation, with None where the target is to answer.

    It answers where the assistant does, and a last question without an answer. Calls of tools are
    kept where results follow, which belong to them; other assistant turns that do not follow a
    question are left out.
    """
    turns: list[Message | None] = []
    asked = False
    followers: list[Message | None] = [*chat.messages[1:], None]
    for message, following in zip(chat.messages, followers, strict=False):
        belongs = "tool_calls" in message and _is_result(following)
        if message["role"] != "assistant" or belongs:
            turns.append(message)
            asked = message["role"] in QUESTIONERS
        elif asked:
            turns.append(None)
            asked = False
    return [*turns, None] if asked else turns


async def regenerate(
    conversations: Mapping[str, Conversation],
    answerer: Answerer,
    params: SamplingParams,
    output: Output,
    concurrency: int,
    on_finish: Callable[[int, Extent], None],
    keep_cut: bool = False,
) -> None:
    """Answer conversations, `concurrency` at a time, and write each as soon as it is finished.

    conversations: keyed by their digests. on_finish: takes a conversation's place in the order in
    which they begin. keep_cut: also write first answers that a limit cut. Raises `InputError`
    naming a conversation that cannot be asked; those finished by then are written.
    """
    waiting = iter(enumerate(conversations.items()))

    async def work() -> None:
        for place, (asked, conversation) in waiting:
            outcome = await _answer(conversation, answerer, seeded(params, asked), keep_cut)
            if outcome.record is not None:
                output.write(asked, conversation.place, outcome.record)
            on_finish(place, outcome)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _asking(sample: Sample) -> Conversation:
    """The sample, if it has something to answer. Raises `InputError` otherwise."""
    if isinstance(sample, Chat):
        if None not in plan(sample):
            raise InputError(f"{sample.place}: the conversation has no user turn to answer")
        if taken := sorted(RESERVED & sample.variables.keys()):
            raise InputError(f"{sample.place}: {taken[0]} is no variable of a template")
        return sample
    if isinstance(sample, Continuation):
        if not sample.prompt:
            raise InputError(f"{sample.place}: the prompt is empty")
        return sample
    raise InputError(f"{sample.place}: needs messages, conversations or a prompt to answer")


def _with_variables(conversation: Conversation, variables: Mapping[str, Any]) -> Conversation:
    if isinstance(conversation, Continuation):
        return conversation
    return replace(conversation, variables={**conversation.variables, **variables})


def _question(conversation: Conversation) -> Any:
    """What determines the answers, apart from model and sampling."""
    if isinstance(conversation, Continuation):
        return conversation.prompt
    own = [conversation.variables] if conversation.variables else []
    return [plan(conversation), conversation.tools, *own]


async def _answer(
    conversation: Conversation, answerer: Answerer, params: SamplingParams, keep_cut: bool
) -> Extent:
    with about(conversation.place):
        if isinstance(conversation, Continuation):
            return await _complete(conversation, answerer, params)
        return await _converse(conversation, answerer, params, keep_cut)


async def _complete(text: Continuation, answerer: Answerer, params: SamplingParams) -> Extent:
    """Continue a text; nothing is appended to it, so it may end anywhere."""
    try:
        answer = await answerer.complete(text.prompt, seeded(params, 0))
    except NoAnswerError as error:
        return Extent(None, 0, f"{text.place}: {error}")
    said = {"prompt": text.prompt, "response": answer.message["content"]}
    return Extent({**said, **answer.written}, answer.tokens)


async def _converse(
    chat: Chat, answerer: Answerer, params: SamplingParams, keep_cut: bool
) -> Extent:
    """Answer turn by turn, up to the first turn for which the target has no complete answer.

    A partial answer would be rendered with an end of turn that the target did not write, so it is
    kept as token ids, if at all. A call that has no result in the data is an answer, but none can
    follow it.
    """
    said: list[Message] = []
    answers: dict[int, Regeneration] = {}
    problem: str | None = None
    cut: Regeneration | None = None
    turns = plan(chat)
    for turn, message in enumerate(turns):
        if message is not None:
            said.append(message)
            continue
        try:
            so_far = replace(chat, messages=tuple(said), token_ids=())
            answer = await answerer.chat(so_far, seeded(params, turn))
        except NoAnswerError as error:
            problem = f"{chat.place}: {error}"
            break
        if answer.cut:
            problem, cut = f"{chat.place}: {_cut_short(answer)}", answer
            break
        answers[turn] = answer
        said.append(answer.message)
        following = turns[turn + 1 :]
        if _awaits_results(answer, following):
            problem = f"{chat.place}: {CALLED}" if None in following else None
            break
    if keep_cut and cut is not None and cut.token_ids and not answers:
        said_so_far = cut.message.get("content") or cut.message.get("reasoning_content") or ""
        ids = {"prompt_token_ids": cut.prompt_ids, "token_ids": cut.token_ids}
        return Extent({**ids, "text": said_so_far}, cut.tokens)
    record = _record(said, answers, chat) if answers else None
    tokens = sum(answer.tokens for answer in answers.values())
    return Extent(record, tokens, problem, cut is not None)


def _cut_short(answer: Regeneration) -> str:
    """That a limit ended an answer, rather than the target."""
    kept = ", or --keep-cut for first answers" if answer.token_ids else ""
    return (
        f"an answer was cut after {answer.tokens} tokens by --max-tokens or the context's end; to "
        f"keep it raise --max-tokens{kept}"
    )


def _awaits_results(answer: Regeneration, following: Sequence[Message | None]) -> bool:
    """Whether an answer makes more calls than there are results right after it."""
    results = itertools.takewhile(_is_result, following)
    return len(answer.message.get("tool_calls", ())) > len([*results])


def _is_result(message: Message | None) -> bool:
    return message is not None and message["role"] == "tool"


def _record(
    said: Sequence[Message], answers: Mapping[int, Regeneration], chat: Chat
) -> dict[str, Any]:
    """A conversation up to its last answer, each with what the target wrote."""
    messages = [
        {**message, **(answers[turn].written if turn in answers else {})}
        for turn, message in enumerate(said[: max(answers) + 1])
    ]
    shown = {"tools": chat.tools, VARIABLES: chat.variables}
    return {"messages": messages, **{name: value for name, value in shown.items() if value}}


def seeded(params: SamplingParams, what: str | int) -> SamplingParams:
    """Parameters with a seed for each conversation, or for each turn; the same in every run."""
    seed = zlib.crc32(f"{params.seed}:{what}".encode())
    return params.model_copy(update={"seed": seed})
