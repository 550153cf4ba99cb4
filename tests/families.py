"""Markers of the families, on tokenizers small enough for tests, and answers as they write them.

The markers are each family's own, special or not as in its tokenizer; all other text is bytes and
a few merges. Templates are ours: they say about markers and calls what the families' own say.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Calls = Sequence[tuple[str, dict[str, Any]]]
TEXT = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}',
    "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>",
    "assistant analysis commentary final to=functions.get_weather json",
    "The user asks for the weather in Paris. It is 4.\n\n",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One family's tokens, template and way of writing."""

    special: tuple[str, ...]
    ordinary: tuple[str, ...]
    """Added tokens that are not special."""
    ends: tuple[str, ...]
    template: str
    write: Callable[[str, str, Calls], str]
    """An answer from thoughts, content and calls, without its end."""
    thinks: bool = True
    talks: bool = True
    """Whether an answer may have content before calls."""

    @property
    def end_of_call(self) -> str:
        """The token that ends an answer with calls."""
        return self.ends[-1]


def _chatml(thoughts: str, content: str, calls: str) -> str:
    thinking = f"<think>\n{thoughts}\n</think>\n\n" if thoughts else ""
    return thinking + content + ("\n" if content and calls else "") + calls


def _hermes(thoughts: str, content: str, calls: Calls) -> str:
    written = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>'
        for name, given in calls
    )
    return _chatml(thoughts, content, "\n".join(written))


def _inside_thoughts(thoughts: str, content: str, calls: Calls) -> str:
    return _hermes(thoughts, content, calls).removeprefix("<think>\n")


def _coder(thoughts: str, content: str, calls: Calls) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given)

    written = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    ]
    return _chatml("", content, "\n".join(written))


def _llama(thoughts: str, content: str, calls: Calls) -> str:
    written = (f'{{"name": "{name}", "parameters": {json.dumps(given)}}}' for name, given in calls)
    return content + "; ".join(written)


def _pythonic(thoughts: str, content: str, calls: Calls) -> str:
    def one(name: str, given: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})"

    return content + (f"[{', '.join(one(*call) for call in calls)}]" if calls else "")


def _gemma(thoughts: str, content: str, calls: Calls) -> str:
    def value(given: Any) -> str:
        if isinstance(given, list):
            return f"[{','.join(map(value, given))}]"
        return f'<|"|>{given}<|"|>' if isinstance(given, str) else json.dumps(given)

    thinking = f"<|channel>thought\n{thoughts}\n<channel|>" if thoughts else ""
    written = (
        f"<|tool_call>call:{name}{{{','.join(f'{k}:{value(v)}' for k, v in given.items())}}}"
        "<tool_call|>"
        for name, given in calls
    )
    return thinking + content + "".join(written)


def _harmony(thoughts: str, content: str, calls: Calls) -> str:
    channel = "commentary" if calls else "final"
    parts = [f"<|channel|>analysis<|message|>{thoughts}"] if thoughts else []
    parts += [f"<|channel|>{channel}<|message|>{content}"] if content else []
    parts += [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(given)}"
        for name, given in calls
    ]
    return "<|end|><|start|>assistant".join(parts)


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
HEADERS = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HARMONY = (
    "<|endoftext|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
GEMMA = ("<eos>", "<|turn>", "<turn|>", "<|tool_response>", "<|channel>", "<channel|>")
FAMILIES = {
    "qwen3": Family(
        CHATML_TOKENS,
        QWEN,
        ("<|im_end|>",),
        "{# </think> <tool_call> #}" + CHATML,
        _hermes,
    ),
    "qwen3-thinking": Family(
        CHATML_TOKENS,
        QWEN,
        ("<|im_end|>",),
        CHATML.replace("assistant\n", "assistant\n<think>\n") + "{# <tool_call> #}",
        _inside_thoughts,
    ),
    "qwen3-coder": Family(
        CHATML_TOKENS,
        QWEN,
        ("<|im_end|>",),
        "{# <tool_call> <function= #}" + CHATML,
        _coder,
        thinks=False,
    ),
    "llama3.1": Family(
        (*LLAMA, "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),
        (),
        ("<|eom_id|>", "<|eot_id|>"),
        "{# dictionary of argument name #}" + HEADERS,
        _llama,
        thinks=False,
        talks=False,
    ),
    "llama3.2": Family(
        (*LLAMA, "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"),
        (),
        ("<|eot_id|>",),
        "{# [func_name1(a=1)] #}" + HEADERS,
        _pythonic,
        thinks=False,
        talks=False,
    ),
    "gemma4": Family(
        (*GEMMA, "<|tool_call>", "<tool_call|>", '<|"|>'),
        (),
        ("<eos>", "<turn|>"),
        "{# <|tool_call> <|channel> #}{% for message in messages %}<|turn>{{ message.role }}\n"
        "{{ message.content }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% endif %}",
        _gemma,
    ),
    "gpt-oss": Family(
        HARMONY,
        (),
        ("<|return|>", "<|call|>"),
        "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        "{# <|channel|>analysis #}",
        _harmony,
    ),
    "plain": Family(CHATML_TOKENS, (), ("<|im_end|>",), CHATML, _hermes, thinks=False),
}


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with a family's tokens."""
    family = FAMILIES[name]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(TEXT * 3, trainer)
    raw.add_special_tokens([AddedToken(text, special=True) for text in family.special])
    raw.add_tokens([AddedToken(text, special=False) for text in family.ordinary])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=family.ends[0])
    made.chat_template = family.template
    return made


def encode(name: str, text: str) -> list[int]:
    """Token ids of a text, markers included."""
    ids: list[int] = tokenizer(name).encode(text, add_special_tokens=False)
    return ids


def prompt(name: str) -> list[int]:
    """A rendered question."""
    question = [{"role": "user", "content": "What is 2+2?"}]
    text = tokenizer(name).apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    return encode(name, str(text))
