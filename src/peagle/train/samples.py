"""Samples: what a line of data says, in any of its forms."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.errors import InputError
from peagle.train.sources import read_records

Message = dict[str, Any]
"""`role` and `content`, both text, and whatever else the chat template may use."""
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
FORMS = "messages, conversations, prompt (+ response), text, or prompt_token_ids + token_ids"


@dataclass(frozen=True)
class Chat:
    """A conversation, for the target's chat template."""

    place: str
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    """Functions that the assistant may call, as the template takes them."""
    token_ids: tuple[tuple[int, ...] | None, ...] = ()
    """What the target wrote, for each message; None where that is unknown, empty where all is."""


@dataclass(frozen=True)
class Completion:
    """A text and what follows it."""

    place: str
    prompt: str
    response: str | None
    token_ids: tuple[int, ...] | None = None
    """What the target wrote of the response, if that is known."""


@dataclass(frozen=True)
class Text:
    """A text that is a response from its start."""

    place: str
    text: str


@dataclass(frozen=True)
class TokenIds:
    """A prompt and its response, as token ids."""

    place: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]


Sample = Chat | Completion | Text | TokenIds


def read_samples(sources: Sequence[str]) -> Iterator[Sample]:
    """Every line of some sources, in order. Raises `InputError` naming file and line."""
    for place, value in read_records(sources):
        yield parse_sample(place, value)


def parse_sample(place: str, record: dict[str, Any]) -> Sample:
    """The sample in a JSON object; keys with null count as absent. Raises `InputError`."""
    value = _present(record)
    if value.keys() >= {"prompt_token_ids", "token_ids"}:
        prompt = _ids(value["prompt_token_ids"], f"{place}: prompt_token_ids")
        return TokenIds(place, prompt, _ids(value["token_ids"], f"{place}: token_ids"))
    for key in ("messages", "conversations"):
        if key in value:
            return _chat(value, key, place)
    if "prompt" in value:
        response = _text(value, "response", place) if "response" in value else None
        ids = _ids(value["token_ids"], f"{place}: token_ids") if "token_ids" in value else None
        return Completion(place, _text(value, "prompt", place), response, ids)
    if "text" in value:
        return Text(place, _text(value, "text", place))
    raise InputError(f"{place}: needs {FORMS}")


def _chat(value: dict[str, Any], key: str, place: str) -> Chat:
    messages = _messages(value[key], key, place)
    written = tuple(_taken_ids(item, f"{place}: turn {n}") for n, item in enumerate(messages, 1))
    return Chat(place, messages, _tools(value, place), written if any(written) else ())


def _present(value: dict[str, Any]) -> dict[str, Any]:
    """An object without its null values: every row of a dataset has all columns."""
    return {key: item for key, item in value.items() if item is not None}


def _messages(items: Any, key: str, place: str) -> tuple[Message, ...]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError(f"{place}: {key} is not a list of objects, one per turn")
    if not items:
        raise InputError(f"{place}: {key} is empty")
    return tuple(_message(_present(item), f"{place}: turn {n}") for n, item in enumerate(items, 1))


def _message(item: dict[str, Any], turn: str) -> Message:
    """A turn in OpenAI's form (role, content) or ShareGPT's (from, value)."""
    speaker, said = ("from", "value") if "from" in item else ("role", "content")
    role = item.get(speaker)
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{turn}: {speaker} {role!r} is none of {', '.join(ROLES)}")
    content = item.get(said, "" if "tool_calls" in item else None)
    rest = {key: value for key, value in item.items() if key not in (speaker, said) and value != []}
    return {"role": ROLES[role], "content": _content(content, f"{turn}: {said}"), **rest}


def _taken_ids(message: Message, turn: str) -> tuple[int, ...] | None:
    """Take the target's token ids out of a message, since no template reads them."""
    ids = message.pop("token_ids", None)
    if ids is None or message["role"] != "assistant":
        return None
    return _ids(ids, f"{turn}: token_ids")


def _content(content: Any, what: str) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise InputError(f"{what} is neither a text nor a list of parts of type text")
    return "".join(texts)


def _tools(value: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
    tools = value.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(f"{place}: tools is not a list of objects")
    return tools or None


def _ids(ids: Any, what: str) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise InputError(f"{what} is not a list of token ids")
    return tuple(ids)


def _text(value: dict[str, Any], key: str, place: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise InputError(f"{place}: {key} is not a string")
    return text
