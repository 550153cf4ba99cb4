"""A target's tokenizer and chat template."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.errors import InputError
from peagle.models.families import FAMILIES
from peagle.models.weights import read_json


def load_tokenizer(directory: Path) -> Any:
    """Transformers' tokenizer of a directory. Raises `InputError` when it has no usable one."""
    from transformers import AutoTokenizer  # slow to import, and not always needed

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:  # transformers raises all kinds for damaged files
        _refuse_other_family(directory)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"{directory} has no usable tokenizer: {reason}") from None
    if len(tokenizer) < 2:  # for some families transformers invents one without any file
        raise InputError(f"{directory} has no usable tokenizer: it has no tokenizer.json")
    return tokenizer


def _refuse_other_family(directory: Path) -> None:
    """Raise `InputError` for a model type by which transformers looks for another tokenizer."""
    kind = read_json(directory / "config.json").get("model_type")
    known = [family.MODEL_TYPE for family in FAMILIES.values()]
    if kind is not None and kind not in known:
        raise InputError(
            f"{directory}: model_type {kind} is not supported; peagle runs {', '.join(known)}"
        )


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    /,
    **variables: Any,
) -> str:
    """Messages rendered as one text by the chat template, which transformers runs in a sandbox.

    `variables` are the template's, such as `tools`. Raises `InputError` when the tokenizer has no
    template and none is given, and when the template refuses the messages.
    """
    if template is None and tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path} has no chat template; use a model with one, or plain-text "
            "prompts"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            template_turns(messages), chat_template=template, tokenize=False, **variables
        )
    except Exception as error:  # whatever a template raises is about these messages
        raise InputError(f"the chat template refuses this: {error}") from None
    return text


def template_turns(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: the arguments of a tool call are an object, not text.

    In OpenAI's form they are text. Text that is not a JSON object is kept.
    """
    return [
        {**message, "tool_calls": [_template_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else dict(message)
        for message in messages
    ]


def _template_call(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(text)} as function}:
            with contextlib.suppress(ValueError, RecursionError):
                given = json.loads(text)
                if isinstance(given, dict):
                    return {**call, "function": {**function, "arguments": given}}
    return call
