"""What a target's `generation_config.json` asks for: how to sample, and where its text ends."""

from pathlib import Path
from typing import Any

from peagle.models.weights import read_json

SUGGESTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling parameters for which a target may suggest a value."""


def end_tokens(directory: Path, own: int | None) -> tuple[int, ...]:
    """The target's end-of-text ids, as vLLM finds them: from its generation config, else its
    config, and `own`, the tokenizer's, which may be all that a fine-tune has changed."""
    ends: list[Any] = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            ids = read_json(directory / name).get("eos_token_id")
            if ids is not None:
                ends += ids if isinstance(ids, list) else [ids]
                break
    return tuple(dict.fromkeys(map(int, ends)))


def sampling_defaults(directory: Path) -> dict[str, float]:
    """The sampling parameters that a target suggests."""
    path = directory / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    numbers = ((name, config.get(name)) for name in SUGGESTED)
    found = {name: value for name, value in numbers if isinstance(value, int | float)}
    if config.get("do_sample") is False:
        return {**found, "temperature": 0.0}
    return found
