"""Answers whose token ids are known: each is learned as the target wrote it, after its own prompt.

A rendering shows later what an answer says, which is not always what was written: templates leave
out earlier thoughts, and other tokens may spell the same text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from peagle.detokenizer import detokenize
from peagle.errors import InputError
from peagle.train.packing import Document
from peagle.train.samples import Chat, Message
from peagle.train.template import ChatTemplate

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Half a character, which may be a whole one together with what follows markers."""
Turn = tuple[Chat, tuple[int, ...] | None]
"""A conversation that ends with an answer, and the answer's token ids if they are known."""


def own_documents(
    chats: Sequence[Chat], template: ChatTemplate, tokenizer: Any
) -> list[list[Document]]:
    """Documents of conversations with `token_ids`, in order.

    Answers share a document as long as each prompt begins with all that was shown and written
    before. Raises `InputError` naming a turn whose ids say something else, and what the template
    refuses or cannot show.
    """
    for chat in chats:
        _check(chat, tokenizer)
    turns = [list(_turns(chat)) for chat in chats]
    every = [turn for of_one in turns for turn in of_one]
    prompts = iter(template.prompts([chat for chat, ids in every if ids is not None]))
    others = iter(template.encode_last([chat for chat, ids in every if ids is None]))

    def document(ids: tuple[int, ...] | None) -> Document:
        return next(others) if ids is None else _answered(next(prompts), ids)

    return [joined(document(ids) for _, ids in of_one) for of_one in turns]


def check_ids(ids: Sequence[int], texts: Iterable[str], tokenizer: Any, place: str) -> None:
    """Raise `InputError` unless some texts are in what token ids say.

    Between their letters there may be more: markers, thoughts, arguments of calls.
    """
    known = len(tokenizer)
    said = detokenize(tokenizer, [token for token in ids if token < known])
    if not all(_within(text, said) for text in texts):
        raise InputError(
            f"{place}: token_ids say something else by the tokenizer of {tokenizer.name_or_path}; "
            "use the target that wrote them, or remove them to learn the text"
        )


def joined(documents: Iterable[Document]) -> list[Document]:
    """The same responses, in fewer documents where one begins with all tokens of the one before."""
    kept: list[Document] = []
    for document in documents:
        if kept and document.tokens[: len(kept[-1].tokens)] == kept[-1].tokens:
            before = kept.pop()
            document = replace(document, responses=before.responses + document.responses)
        kept.append(document)
    return kept


def _check(chat: Chat, tokenizer: Any) -> None:
    for turn, (message, ids) in enumerate(zip(chat.messages, chat.token_ids, strict=True), 1):
        if ids is not None:
            check_ids(ids, _texts(message), tokenizer, f"{chat.place}: turn {turn}")


def _texts(message: Message) -> Iterator[str]:
    """What an answer says, part by part."""
    parts = [message.get("reasoning_content"), message.get("content")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        match call:
            case {"function": {"name": name}}:
                parts.append(name)
    return (part for part in parts if isinstance(part, str))


def _turns(chat: Chat) -> Iterator[Turn]:
    for turn, (message, ids) in enumerate(zip(chat.messages, chat.token_ids, strict=True)):
        if message["role"] == "assistant":
            yield replace(chat, messages=chat.messages[: turn + 1], token_ids=()), ids


def _answered(prompt: Sequence[int], ids: Sequence[int]) -> Document:
    return Document.answered((*prompt, *ids), len(prompt))


def _within(text: str, whole: str) -> bool:
    """Whether the letters of a text occur in another, in their order.

    Among broken characters only those of ASCII are sure.
    """
    whole_letters = BROKEN not in whole
    wanted = (one for one in text if not one.isspace() and (whole_letters or one.isascii()))
    letters = iter(whole)
    return text in whole or all(one in letters for one in wanted)
