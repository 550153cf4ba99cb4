"""Prompts to run: the bundled ones, and the formats that prompt sets come in."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.errors import InputError, about, reason
from peagle.models.chat_template import render_chat
from peagle.train.sources import Record, read_records

SETS = {"bundled": "prompts.jsonl", "chat": "chat.jsonl"}
"""The package's own, beside this file: beginnings of Python, and questions."""
FORMATS = ".jsonl, .jsonl.gz, .parquet or .txt"
LEFT_OUT = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""How a turn of SPEED-Bench begins whose text is its source's and not published with the set."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as its source gives it; raises `InputError` when it is empty or not valid text."""

    text: str
    messages: tuple[Mapping[str, str], ...] = ()
    """The chat that `text` comes from, for a tokenizer with a chat template."""
    later: tuple[str, ...] = ()
    """What the user says next, each once the answer before it is there."""
    place: str = "the prompt"
    """How messages name it: FILE:LINE if it comes from a file."""
    stop: tuple[str, ...] = ()
    """Texts before which an answer ends. That of the bundled prompts is what follows a function or
    class, two empty lines: beyond them the bundled target begins to repeat itself."""

    def __post_init__(self) -> None:
        if not self.text:
            raise InputError("the prompt is empty")
        try:
            self.text.encode()
        except UnicodeEncodeError:
            raise InputError("the prompt is not valid UTF-8 text") from None

    def as_chat(self) -> "Prompt":
        """The prompt as a user's turn; one that is a chat already stays as it is."""
        turn = {"role": "user", "content": self.text}
        return self if self.messages else replace(self, messages=(turn,))

    def after(self, answer: str) -> "Prompt | None":
        """The conversation up to the user's next turn; None where there is none."""
        if not self.later:
            return None
        turn, *later = self.later
        said = {"role": "assistant", "content": answer}, {"role": "user", "content": turn}
        text = f"{self.text}\n{answer}\n{turn}"
        return replace(self, text=text, messages=(*self.messages, *said), later=tuple(later))

    def with_all_turns(self) -> "Prompt":
        """The whole conversation, with empty answers."""
        follows = self.after("")
        return self if follows is None else follows.with_all_turns()

    def is_chat(self, tokenizer: Any) -> bool:
        """Whether it is a conversation for this tokenizer, rather than a text to continue."""
        return bool(self.messages and tokenizer.chat_template)

    def token_ids(self, tokenizer: Any) -> list[int]:
        """Token ids, by the tokenizer's chat template if there are a chat and a template.

        Without transformers' warning of a long text: what the engine holds decides.
        """
        if not self.is_chat(tokenizer):
            return list(tokenizer(self.text, verbose=False).input_ids)
        text = render_chat(tokenizer, self.messages, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def load_sets(sources: Sequence[str], limit: int | None = None) -> dict[str, tuple[Prompt, ...]]:
    """The first `limit` prompts of each source, by the names of their files without endings.

    Raises `InputError` as `load_prompts`, and for two files of one name.
    """
    sets: dict[str, tuple[Prompt, ...]] = {}
    for source in sources:
        name = Path(source).name.partition(".")[0]
        if name in sets:
            raise InputError(f"two sets of prompts are called {name}; rename a file")
        sets[name] = tuple(load_prompts(source, limit))
    return sets


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, or of one of the package's own sets.

    JSON lines and the rows of a Parquet file hold `prompt` (as HumanEval; perhaps with `stop`, a
    list of texts), `turns` (as MT-Bench, Spec-Bench and SPEED-Bench) or `messages`; a .txt file
    holds one prompt per line. Raises `InputError` naming file and line.
    """
    if limit is not None and limit < 1:
        raise InputError(f"a limit of {limit} prompts leaves nothing to run")
    path = str(Path(__file__).with_name(SETS[source])) if source in SETS else source
    prompts = list(itertools.islice(_prompts(path), limit))
    if not prompts:
        raise InputError(f"{source} holds no prompt")
    return prompts


def _prompts(path: str) -> Iterator[Prompt]:
    for place, record in _records(path):
        with about(place):
            prompt = _from_record(record)
        yield replace(prompt, place=place)


def _records(path: str) -> Iterable[Record]:
    if path.endswith((".jsonl", ".jsonl.gz", ".parquet")):
        return read_records([path])
    if path.endswith(".txt"):
        return _lines(path)
    raise InputError(f"{path} is not named like a prompt file; give {FORMATS}, bundled or chat")


def _lines(path: str) -> Iterator[Record]:
    """The lines of a text that are not empty, as records."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", {"prompt": line}


def _from_record(record: Mapping[str, Any]) -> Prompt:
    match record:
        case {"prompt": str(text)}:
            return Prompt(text, stop=_texts("stop", record.get("stop", [])))
        case {"turns": [str(), *_] as turns}:
            return _from_turns(_texts("turns", turns))
        case {"messages": [_, *_] as messages}:
            return _from_messages(messages)
    raise InputError(
        "no prompt in it; peagle reads an object with prompt (text), turns (a list of texts) "
        "or messages (a list of role and content)"
    )


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{name} must be a list of texts, none of them empty")
    return tuple(texts)


def _from_turns(turns: Sequence[str]) -> Prompt:
    first, *later = turns
    if first.startswith(LEFT_OUT):
        raise InputError("its text is left out; SPEED-Bench's prepare_data.py makes the whole set")
    return Prompt(first, ({"role": "user", "content": first},), tuple(later))


def _from_messages(messages: list[Any]) -> Prompt:
    """A conversation; one of users' messages only is SPEED-Bench's turns, answered one by one."""
    for message in messages:
        match message:
            case {"role": str(), "content": str()}:
                pass
            case _:
                raise InputError("a message needs role and content, both text")
    contents = [message["content"] for message in messages]
    if all(message["role"] == "user" for message in messages):
        return _from_turns(_texts("messages", contents))
    return Prompt("\n".join(contents), tuple(messages))
