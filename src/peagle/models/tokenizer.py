"""A target's tokenizer."""

from pathlib import Path
from typing import Any

from peagle.errors import InputError


def load_tokenizer(directory: Path) -> Any:
    """Transformers' tokenizer of a directory. Raises `InputError` when it has no usable one."""
    from transformers import AutoTokenizer  # slow to import, and not always needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{directory} has no usable tokenizer: {reason}") from None
    if len(tokenizer) < 2:  # what transformers makes up for some families without any file
        raise InputError(f"{directory} has no usable tokenizer: it has no tokenizer.json")
    return tokenizer
