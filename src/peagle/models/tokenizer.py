"""A target's tokenizer."""

from pathlib import Path
from typing import Any

from peagle.errors import InputError
from peagle.models.families import FAMILIES, refuse_drafter
from peagle.models.weights import read_json


def load_tokenizer(directory: Path) -> Any:
    """Transformers' tokenizer of a directory, whose own code is never run.

    Raises `InputError` when it has no usable one.
    """
    from transformers import AutoTokenizer  # slow to import, and not always needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds for damaged files
        _refuse_other_family(directory)
        first, *further = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join([first, *further[: first.endswith(":")]])  # a wrong key, then how
        raise _unusable(directory, " ".join(reason.split())) from None
    template = directory / "chat_template.json"  # where only processors look
    if tokenizer.chat_template is None and template.is_file():
        tokenizer.chat_template = read_json(template).get("chat_template")
    if len(tokenizer) < 2:  # for some families transformers invents one without any file
        _refuse_other_family(directory)
        raise _unusable(directory, "it has no tokenizer.json")
    return tokenizer


def _unusable(directory: Path, reason: str) -> InputError:
    """reason: what is said where neither code nor a missing file is the cause."""
    settings = directory / "tokenizer_config.json"
    has_code = settings.is_file() and "auto_map" in read_json(settings)
    if has_code and not (directory / "tokenizer.json").is_file():
        reason = (
            "it is code of its own (auto_map in tokenizer_config.json), which peagle never runs; "
            "convert it to a tokenizer.json, or serve the model with vLLM's --trust-remote-code"
        )
    elif not any(directory.glob("tokenizer.[jm]*")):
        reason = "it has no tokenizer.json"
    return InputError(f"{directory} has no usable tokenizer: {reason}")


def _refuse_other_family(directory: Path) -> None:
    """Raise `InputError` for a drafter, which has no tokenizer, and for a model type by which
    transformers looks for another one."""
    values = read_json(directory / "config.json")
    refuse_drafter(values, str(directory))
    kind = values.get("model_type")
    known = [family.model_type for family in FAMILIES.values()]
    if kind is not None and kind not in known:
        raise InputError(
            f"{directory}: model_type {kind} is not supported; peagle runs {', '.join(known)}"
        )
