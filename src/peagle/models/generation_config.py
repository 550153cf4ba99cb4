"""What a target's `generation_config.json` asks for: how to sample, and where its text ends."""

from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from peagle.config import SamplingParams
from peagle.errors import ConfigError, InputError
from peagle.models.weights import read_json

SUGGESTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Suggestions(SamplingParams):
    """Sampling parameters by a target, which has to write them as what they are."""

    model_config = ConfigDict(strict=True)


def end_tokens(directory: Path, own: int | None) -> tuple[int, ...]:
    """The target's end-of-text ids: those of its generation config, those of its config or of the
    language model in it, and `own`, the tokenizer's, which may be all that a fine-tune has changed.
    """
    ends = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            values = read_json(directory / name)
            for part in (values, values.get("text_config")):
                ids = part.get("eos_token_id") if isinstance(part, dict) else None
                ends += [] if ids is None else _token_ids(ids, directory / name)
    return tuple(dict.fromkeys(ends))


def _token_ids(value: Any, path: Path) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise InputError(f"{path}: eos_token_id {value} must be a token id or a list of them")
    return [token for token in ids if token >= 0]  # -1 stands for none


def sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling parameters that a target suggests. Raises `InputError` for impossible ones."""
    path = directory / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    if config.get("do_sample") is False:  # what only a draw would use may then be anything
        config = {"temperature": 0.0, "repetition_penalty": config.get("repetition_penalty")}
    given: dict[str, Any] = {n: config[n] for n in SUGGESTED if config.get(n) is not None}
    try:
        return Suggestions(**given).model_dump(include={*given})
    except ConfigError as error:
        raise InputError(f"{path}: {error.told()}; correct or remove it") from None
