"""Prompts to run: the bundled ones, and the formats that prompt sets come in."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peagle.errors import InputError, reason
from peagle.models.chat_template import render_chat

BUNDLED = Path(__file__).with_name("prompts.jsonl")
FORMATS = ".jsonl, .jsonl.gz or .txt"


@dataclass(frozen=True)
class Prompt:
    """A prompt as its source gives it; raises `InputError` when it is empty or not valid text."""

    text: str
    messages: tuple[Mapping[str, str], ...] = ()
    """The chat that `text` comes from, for a tokenizer with a chat template."""
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


def load_prompts(source: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, or of the package's own set when it is "bundled".

    JSON lines hold `prompt` (as HumanEval; perhaps with `stop`, a list of texts), `turns` (as
    MT-Bench; the first one is used) or `messages`; a .txt file holds one prompt per line. Raises
    `InputError` naming file and line.
    """
    if limit is not None and limit < 1:
        raise InputError(f"a limit of {limit} prompts leaves nothing to run")
    path = BUNDLED if source == "bundled" else Path(source)
    prompts = list(itertools.islice(_prompts(path), limit))
    if not prompts:
        raise InputError(f"{source} holds no prompt")
    return prompts


def _prompts(path: Path) -> Iterator[Prompt]:
    parse = _parser(path)
    for number, raw in enumerate(_read(path).split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r")
            if line.strip():
                yield replace(parse(line), place=f"{path}:{number}")
        except UnicodeDecodeError:
            raise InputError(f"{path}:{number}: not valid UTF-8") from None
        except InputError as error:
            raise InputError(f"{path}:{number}: {error}") from None


def _parser(path: Path) -> Any:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _from_json
    if path.suffix == ".txt":
        return Prompt
    raise InputError(f"{path} is not named like a prompt file; give {FORMATS}, or bundled")


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None


def _from_json(line: str) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from None
    match record:
        case {"prompt": str(text)}:
            return Prompt(text, stop=_stop_texts(record))
        case {"turns": [str(text), *_]}:
            return Prompt(text, ({"role": "user", "content": text},))
        case {"messages": [_, *_] as messages}:
            return _from_messages(messages)
    raise InputError(
        "no prompt in it; peagle reads an object with prompt (text), turns (a list of texts) "
        "or messages (a list of role and content)"
    )


def _stop_texts(record: Mapping[str, Any]) -> tuple[str, ...]:
    stop = record.get("stop", [])
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise InputError("stop must be a list of texts, none of them empty")
    return tuple(stop)


def _from_messages(messages: list[Any]) -> Prompt:
    for message in messages:
        match message:
            case {"role": str(), "content": str()}:
                pass
            case _:
                raise InputError("a message needs role and content, both text")
    return Prompt("\n".join(message["content"] for message in messages), tuple(messages))
