"""A target's chat template: conversations -> documents, the assistant's turns as responses."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from operator import itemgetter
from typing import Any

from peagle.errors import InputError
from peagle.models.chat_template import render_chat, template_source, template_tools, template_turns
from peagle.train.packing import Document
from peagle.train.samples import Chat, Message

Span = tuple[int, int]
"""First and past-the-last, in characters or in tokens."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PRIVATE_USE = range(0xE000, 0xF900)
DATED = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
DAY = date(2026, 1, 1)
"""What every template is told as today: a run that goes on tomorrow needs the same tokens."""


class ChatTemplate:
    """Renders conversations as the target sees them, and finds what the assistant says in them.

    A response is what the target itself would write at that turn, its end-of-turn token included.
    The template's own `{% generation %}` blocks mark it. In a template without them, a turn is what
    rendering up to its end adds to the prompt before it; where earlier turns look different once
    more follows, it is what changes when its content is replaced.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise InputError(
                f"{tokenizer.name_or_path}: its tokenizer cannot tell the positions of tokens in a "
                "text; add a tokenizer.json"
            )
        self._tokenizer = tokenizer
        added = (one.content for one in tokenizer.added_tokens_decoder.values() if one.special)
        self._special = tuple(sorted({*tokenizer.all_special_tokens, *added}))
        self._closing = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._special))})")

    def encode(self, chats: Sequence[Chat]) -> list[Document]:
        """Documents of conversations, in order; what follows the last assistant turn is left out.

        Raises `InputError` naming the place of a conversation that has no assistant turn, that the
        template refuses, or whose turns cannot be found in the rendering.
        """
        return self._encode([_up_to_the_last_answer(chat) for chat in chats])

    def encode_last(self, chats: Sequence[Chat]) -> list[Document]:
        """Documents of conversations that end with an answer, which is all that is learned.

        Raises `InputError` as `encode` does.
        """
        whole = self._encode(chats, last=True)
        return [Document(one.tokens[: one.responses[-1][1]], one.responses[-1:]) for one in whole]

    def prompts(self, chats: Sequence[Chat]) -> list[list[int]]:
        """Token ids of what the target is shown before the last turn of each conversation.

        Raises `InputError` naming the place of one that the template refuses.
        """
        if not chats:
            return []
        texts = [self._render(one, one.messages[:-1], add_generation_prompt=True) for one in chats]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False).input_ids

    def _encode(self, chats: Sequence[Chat], last: bool = False) -> list[Document]:
        """Documents with all responses, or with the last one at least."""
        if not chats:
            return []
        found = [self._find_turns(self._as_shown(chat), last) for chat in chats]
        encoded = self._tokenizer(
            [text for text, _ in found],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        rows = zip(encoded["input_ids"], encoded["offset_mapping"], found, strict=True)
        return [
            Document(tuple(ids), tuple(tokens_within(offsets, turn) for turn in turns))
            for ids, offsets, (_, turns) in rows
        ]

    def _as_shown(self, chat: Chat) -> Chat:
        """A conversation with the messages that the template shows, each with a place of its own.

        Rendering such messages, or the first of them, changes nothing about them any more.
        """
        with self._naming(chat):
            source = self._source(chat)
        turns = template_turns(chat.messages, source)
        return replace(
            chat, messages=tuple(turns), tools=chat.tools and template_tools(chat.tools, source)
        )

    def _source(self, chat: Chat) -> str:
        source = template_source(self._tokenizer, None, chat.tools)
        return DATED.sub(lambda told: repr(DAY.strftime(told[2])), source)

    def _find_turns(self, chat: Chat, last: bool) -> tuple[str, list[Span]]:
        """The rendering of a conversation, and its responses in characters.

        last: whether the others need not be found.
        """
        text = self._render(chat, chat.messages)
        if MARKS.search(self._source(chat)):
            return text, self._marked_turns(chat)
        if not self._shows_answers(chat, text):
            raise self._unmarkable(chat, "it does not show everything the assistant says")
        turns = []
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant" and (not last or index + 1 == len(chat.messages)):
                turn = self._added_turn(chat, index, text) or self._altered_turn(chat, index, text)
                if turn is None:
                    raise self._unmarkable(chat, f"turn {index + 1} cannot be found in its text")
                turns.append(turn)
        return text, turns

    def _marked_turns(self, chat: Chat) -> list[Span]:
        """What is in the template's own `{% generation %}` blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

        own = {**self._tokenizer.special_tokens_map, **chat.variables}
        variables: dict[str, Any] = {**own, "tools": chat.tools}
        rendered: Any = render_jinja_template(
            [list(chat.messages)],
            chat_template=self._source(chat),
            return_assistant_tokens_mask=True,
            **variables,
        )
        _, (blocks,) = rendered
        turns = [(start, stop) for start, stop in blocks if start < stop]
        if not turns:
            raise self._unmarkable(chat, "its {% generation %} blocks contain nothing of this chat")
        return turns

    def _shows_answers(self, chat: Chat, text: str) -> bool:
        """Whether each answer has a place of its own in the rendering."""
        other = _absent_from(text)
        said = [_says(message) for message in chat.messages]
        altered = [
            {**message, "content": other} if says else message
            for message, says in zip(chat.messages, said, strict=True)
        ]
        return (self._attempt(chat, altered) or "").count(other) >= sum(said)

    def _added_turn(self, chat: Chat, index: int, text: str) -> Span | None:
        """What a turn adds to the prompt before it, if all of that is how `text` begins."""
        prompt = self._attempt(chat, chat.messages[:index], add_generation_prompt=True)
        last = index + 1 == len(chat.messages)
        through = text if last else self._attempt(chat, chat.messages[: index + 1])
        if prompt is None or through is None or len(prompt) >= len(through):
            return None
        if not (through.startswith(prompt) and text.startswith(through)):
            return None
        start, stop = len(prompt), len(through)
        closed = start + len(text[start:stop].rstrip())
        return start, closed if text.endswith(self._special, start, closed) else stop

    def _altered_turn(self, chat: Chat, index: int, text: str) -> Span | None:
        """Where `text` changes when a turn has other content, with the end-of-turn token."""
        other = _absent_from(text)
        altered = {**chat.messages[index], "content": other}
        messages = (*chat.messages[:index], altered, *chat.messages[index + 1 :])
        before, found, after = (self._attempt(chat, messages) or "").partition(other)
        if not found or not (text.startswith(before) and text.endswith(after)):
            return None
        stop = max(len(before), len(text) - len(after))
        return len(before), self._end(chat, index, text, stop)

    def _end(self, chat: Chat, index: int, text: str, stop: int) -> int:
        """The end of a turn whose content ends at `stop`: after its tool calls and last token."""
        if _says(chat.messages[index]):
            closing = self._closing.match(text, stop)
            return closing.end() if closing else stop
        through = (self._attempt(chat, chat.messages[: index + 1]) or "").rstrip()
        token = next((token for token in self._special if through.endswith(token)), "")
        return max(stop, text.find(token, stop) + len(token))

    def _attempt(self, chat: Chat, messages: Sequence[Message], **variables: Any) -> str | None:
        """The rendering of part of a conversation; None if the template refuses that."""
        try:
            return self._render(chat, messages, **variables)
        except InputError:
            return None

    def _render(self, chat: Chat, messages: Sequence[Message], **variables: Any) -> str:
        with self._naming(chat):
            own = {**chat.variables, "tools": chat.tools, **variables}
            return render_chat(self._tokenizer, messages, self._source(chat), **own)

    @contextmanager
    def _naming(self, chat: Chat) -> Iterator[None]:
        """Tell where a conversation that cannot be rendered stands."""
        try:
            yield
        except InputError as error:
            name = self._tokenizer.name_or_path
            raise InputError(f"{chat.place}: {error} (the template of {name})") from None

    def _unmarkable(self, chat: Chat, reason: str) -> InputError:
        return InputError(
            f"{chat.place}: the chat template of {self._tokenizer.name_or_path} cannot mark "
            f"assistant tokens; {reason}; put the assistant's part in {{% generation %}} blocks"
        )


def tokens_within(offsets: Sequence[Span], characters: Span) -> Span:
    """The tokens that end within some characters.

    offsets: the characters of each token, possibly without the whitespace around them.
    """
    start, stop = characters
    ends = itemgetter(1)
    return bisect_right(offsets, start, key=ends), bisect_right(offsets, stop, key=ends)


def _absent_from(text: str) -> str:
    """A character that does not occur in a text."""
    return next(mark for mark in map(chr, PRIVATE_USE) if mark not in text)


def _says(message: Message) -> bool:
    """Whether a turn is an answer in words; a tool call may have no content."""
    return message["role"] == "assistant" and "tool_calls" not in message


def _up_to_the_last_answer(chat: Chat) -> Chat:
    length = len(chat.messages)
    while length and chat.messages[length - 1]["role"] != "assistant":
        length -= 1
    if not length:
        raise InputError(
            f"{chat.place}: the conversation has no assistant turn; peagle regenerate adds them"
        )
    return replace(chat, messages=chat.messages[:length], token_ids=())
