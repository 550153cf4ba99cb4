"""Samples: what a line of data says, in any of its forms."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from peagle.configuration import parsed
from peagle.errors import InputError
from peagle.train.sources import read_records

Message = dict[str, Any]
"""`role` and `content`, both text, and whatever else the chat template may use."""
Tools = list[dict[str, Any]]
"""Functions that the assistant may call, as the template takes them."""
SPEAKERS = {
    "system": "system",
    "user": "user human",
    "assistant": "assistant gpt chatgpt model function_call",
    "developer": "developer",
    "tool": "tool observation function function_response ipython tool_response",
}
"""Who speaks, and every name for it."""
ROLES = {name: role for role, names in SPEAKERS.items() for name in names.split()}
SILENT = ("assistant", "tool")
"""Roles whose turns may hold no text."""
FORMS = (
    "messages, conversations, prompt (+ response), text, prompt_token_ids + token_ids, or "
    "input_ids + loss_mask"
)


@dataclass(frozen=True)
class Chat:
    """A conversation, for the target's chat template."""

    place: str
    messages: tuple[Message, ...]
    tools: Tools | None = None
    token_ids: tuple[tuple[int, ...] | None, ...] = ()
    """What the target wrote, for each message; None where that is unknown, empty where all is."""
    variables: dict[str, Any] = field(default_factory=dict)
    """The chat template's, with which the target was asked."""


@dataclass(frozen=True)
class Continuation:
    """A text and what follows it."""

    place: str
    prompt: str
    response: str | None
    token_ids: tuple[int, ...] | None = None
    """What the target wrote of the response, if that is known."""


@dataclass(frozen=True)
class Passage:
    """A text that is a response from its start."""

    place: str
    text: str


@dataclass(frozen=True)
class TokenIds:
    """Token ids of which some are responses: a prompt's one, or as speculators keeps them."""

    place: str
    ids: tuple[int, ...]
    responses: tuple[tuple[int, int], ...]
    """First and past-the-last token of each."""
    text: str = ""
    """What the only response says, as far as that is known."""


Sample = Chat | Continuation | Passage | TokenIds


def read_samples(sources: Sequence[str]) -> Iterator[Sample]:
    """Every line of some sources, in order. Raises `InputError` naming file and line."""
    for place, value in read_records(sources):
        yield parse_sample(place, value)


def parse_sample(place: str, record: dict[str, Any]) -> Sample:
    """The sample in a JSON object; keys with null count as absent. Raises `InputError`."""
    value = _present(record)
    if value.keys() >= {"prompt_token_ids", "token_ids"}:
        prompt, answer = (_ids(value, key, place) for key in ("prompt_token_ids", "token_ids"))
        text = _text(value, "text", place) if "text" in value else ""
        whole = prompt + answer
        return TokenIds(place, whole, ((len(prompt), len(whole)),), text)
    if value.keys() >= {"input_ids", "loss_mask"}:
        read, mask = (_ids(value, key, place) for key in ("input_ids", "loss_mask"))
        if len(read) != len(mask):
            raise InputError(f"{place}: input_ids and loss_mask are not equally long")
        ends = itertools.accumulate(len([*run]) for _, run in itertools.groupby(mask))
        runs = itertools.pairwise((0, *ends))
        return TokenIds(place, read, tuple(run for run in runs if mask[run[0]]))
    for key in ("messages", "conversations"):
        if key in value:
            return _chat(value, key, place)
    if "prompt" in value:
        response = _text(value, "response", place) if "response" in value else None
        ids = _ids(value, "token_ids", place) if "token_ids" in value else None
        return Continuation(place, _text(value, "prompt", place), response, ids)
    if "text" in value:
        return Passage(place, _text(value, "text", place))
    raise InputError(f"{place}: needs {FORMS}")


def _chat(value: dict[str, Any], key: str, place: str) -> Chat:
    turns = _messages(value[key], key, place)
    written = [_taken_ids(item, f"{place}: turn {n}") for n, item in enumerate(turns, 1)]
    before = _instruction(value, turns)
    ids = (*(None for _ in before), *written) if any(written) else ()
    variables = value.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise InputError(f"{place}: chat_template_kwargs is not an object")
    return Chat(place, (*before, *turns), _tools(value, place), ids, variables)


def _present(value: dict[str, Any]) -> dict[str, Any]:
    """An object without its null values: every row of a dataset has all columns."""
    return {key: item for key, item in value.items() if item is not None}


def _messages(items: Any, key: str, place: str) -> tuple[Message, ...]:
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise InputError(f"{place}: {key} is not a list of objects, one per turn")
    if not items:
        raise InputError(f"{place}: {key} is empty")
    return tuple(_message(_present(item), f"{place}: turn {n}") for n, item in enumerate(items, 1))


def _instruction(value: dict[str, Any], turns: Sequence[Message]) -> list[Message]:
    """A system's message that stands beside the turns, as some datasets keep it."""
    text = value.get("system")
    if not isinstance(text, str) or not text or turns[0]["role"] == "system":
        return []
    return [{"role": "system", "content": text}]


def _message(item: dict[str, Any], turn: str) -> Message:
    """A turn in OpenAI's form (role, content) or ShareGPT's (from, value)."""
    speaker, said = ("from", "value") if "from" in item else ("role", "content")
    name = item.get(speaker)
    if not isinstance(name, str) or name not in ROLES:
        raise InputError(f"{turn}: {speaker} {name!r} is none of {', '.join(ROLES)}")
    role = ROLES[name]
    content = _content(item.get(said, "" if role in SILENT else None), f"{turn}: {said}")
    calls = _calls(item, turn)
    if name == "function_call" and (written := _written_calls(content)):
        content, calls = "", written
    taken = (speaker, said, "tool_calls", "function_call")
    rest = {key: value for key, value in item.items() if key not in taken and value != []}
    return {"role": role, "content": content, **rest, **({"tool_calls": calls} if calls else {})}


def _calls(item: dict[str, Any], turn: str) -> list[dict[str, Any]]:
    """The calls of a turn; OpenAI's former field holds one."""
    if "tool_calls" not in item and "function_call" in item:
        return [_call(item["function_call"])]
    return _objects(item.get("tool_calls"), f"{turn}: tool_calls")


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    """A list of objects, or its JSON text; without a value an empty one."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "null")):
        return []
    if isinstance(value, str):
        value = parsed(value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InputError(f"{what} is not a list of objects")
    return value


def _written_calls(text: str) -> list[dict[str, Any]]:
    """The calls that a turn of ShareGPT's function_call has as its text; none for other text."""
    found = parsed(text)
    calls = found if isinstance(found, list) else [found]
    named = all(isinstance(call, dict) and "name" in call for call in calls)
    return [_call(call) for call in calls] if named else []


def _call(function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _taken_ids(message: Message, turn: str) -> tuple[int, ...] | None:
    """Take the target's token ids out of a message, since no template reads them."""
    known = message["role"] == "assistant" and "token_ids" in message
    ids = _ids(message, "token_ids", turn) if known else None
    message.pop("token_ids", None)
    return ids


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


def _tools(value: dict[str, Any], place: str) -> Tools | None:
    """A sample's tools in OpenAI's form; in the data they may be bare functions."""
    tools = _objects(value.get("tools"), f"{place}: tools")
    return [tool if "function" in tool else _call(tool) for tool in tools] or None


def _ids(value: dict[str, Any], key: str, place: str) -> tuple[int, ...]:
    ids = value[key]
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise InputError(f"{place}: {key} is not a list of token ids")
    return tuple(ids)


def _text(value: dict[str, Any], key: str, place: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise InputError(f"{place}: {key} is not a string")
    return text
