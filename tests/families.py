"""Markers of the families, on tokenizers small enough for tests, and answers as they write them.

The added tokens are each family's own, special or not as in its tokenizer; all other text is bytes
and a few merges. Templates are ours: they say about markers and calls what the families' own say,
and show answers as those do, or not: earlier thoughts are left out, Llama 3.1 takes one call at a
time, and GPT-OSS is shown calls in another order than it writes them.
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
LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
IF_THOUGHT = "{% if message.reasoning_content and loop.index0 > ns.last %}"
THINK = IF_THOUGHT + "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
HERMES = (
    "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
CODER = (
    "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)


CHATML = (
    LAST_QUESTION + "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "THOUGHTS{{ message.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nBEGUN{% endif %}"
)


def chatml(calls: str, thoughts: str = "", begun: str = "") -> str:
    """The template of those who write ChatML; `begun`: what an answer's prompt begins it with."""
    return CHATML.replace("THOUGHTS", thoughts).replace("CALLS", calls).replace("BEGUN", begun)


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
    def begun(self) -> bool:
        """Whether the prompt begins the thoughts."""
        return "<think>" in self.template.rsplit("add_generation_prompt", 1)[-1]

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


def _coder_inside_thoughts(thoughts: str, content: str, calls: Calls) -> str:
    return _coder(thoughts, content, calls).removeprefix("<think>\n")


def _coder(thoughts: str, content: str, calls: Calls) -> str:
    def value(given: Any) -> str:
        return given if isinstance(given, str) else json.dumps(given)

    written = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in given.items())
        + "</function>\n</tool_call>"
        for name, given in calls
    ]
    return _chatml(thoughts, content, "\n".join(written))


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
        if isinstance(given, dict):
            return f"{{{','.join(f'{k}:{value(v)}' for k, v in given.items())}}}"
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
SEEN = (
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""Of Qwen3's table, for pictures."""
FILLED = (
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
"""Of Qwen3's table, for code with gaps."""
QWEN = (
    *("<tool_call>", "</tool_call>", *FILLED, "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>"),
    *("<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)
LLAMA_CALL = (
    "{# dictionary of argument name #}{% if message.tool_calls %}"
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}{% endif %}'
)
PYTHONIC = (
    "{# [func_name1(a=1)] #}{% if message.tool_calls %}[{% for call in message.tool_calls %}"
    "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    '{{ key }}={{ "\'" + value + "\'" if value is string else value }}'
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
)


HEADERS = (
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}CALLS<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>"),
    *("<|return|>", "<|constrain|>", "<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|reserved_200009|>", "<|reserved_200010|>", "<|reserved_200011|>"),
    *("<|call|>", *(f"<|reserved_{number}|>" for number in range(200_013, 200_018))),
    "<|endofprompt|>",
)
GPT_OSS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% set last = loop.last and not add_generation_prompt %}"
    "{% if message.thinking and (last or message.tool_calls) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "{% if message.tool_calls %}{% set function = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ function.name }}<|channel|>commentary json<|message|>"
    "{{ function.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}"
    "{{ '<|return|>' if last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
GEMMA = (
    *("<eos>", "<bos>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>"),
    *("<tool_response|>", '<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>"),
)
GEMMA4 = (
    LAST_QUESTION + "{% for message in messages %}"
    "<|turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    + IF_THOUGHT
    + "<|channel>thought\n{{ message.reasoning_content }}\n<channel|>{% endif %}"
    "{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<|tool_call>call:{{ call.function.name }}{{ '{' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ key }}:{{ '<|\"|>' + value + '<|\"|>' if value is string else value | tojson }}"
    "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
FAMILIES = {
    "qwen3": Family(
        (*CHATML_TOKENS, *SEEN),
        QWEN,
        ("<|im_end|>",),
        chatml(HERMES, THINK),
        _hermes,
    ),
    "qwen3-thinking": Family(
        (*CHATML_TOKENS, *SEEN),
        QWEN,
        ("<|im_end|>",),
        chatml(HERMES, THINK, begun="<think>\n"),
        _inside_thoughts,
    ),
    "qwen3-coder": Family(
        (*CHATML_TOKENS, *SEEN),
        QWEN,
        ("<|im_end|>",),
        chatml(CODER),
        _coder,
        thinks=False,
    ),
    "qwen3.5": Family(
        (*CHATML_TOKENS, *SEEN),
        QWEN,
        ("<|im_end|>",),
        chatml(CODER, THINK, begun="<think>\n"),
        _coder_inside_thoughts,
    ),
    "llama3.1": Family(
        LLAMA,
        (),
        ("<|eom_id|>", "<|eot_id|>"),
        HEADERS.replace("CALLS", LLAMA_CALL),
        _llama,
        thinks=False,
        talks=False,
    ),
    "llama3.2": Family(
        LLAMA,
        (),
        ("<|eot_id|>",),
        HEADERS.replace("CALLS", PYTHONIC),
        _pythonic,
        thinks=False,
        talks=False,
    ),
    "gemma4": Family(
        GEMMA,
        (),
        ("<eos>", "<turn|>"),
        GEMMA4,
        _gemma,
    ),
    "gpt-oss": Family(
        HARMONY,
        (),
        ("<|return|>", "<|call|>"),
        GPT_OSS,
        _harmony,
    ),
    "plain": Family(CHATML_TOKENS, (), ("<|im_end|>",), chatml(HERMES), _hermes, thinks=False),
}


def oddly_written(name: str, calls: Calls) -> str:
    """Calls in open thoughts, with line ends as they are in strings, and without `functions.`."""
    text = FAMILIES[name].write("", "", calls)
    text = text.replace("\\n", "\n").replace("\\t", "\t").replace("functions.", "")
    thoughts = {"qwen3": "<think>\n", "gemma4": "<|channel>thought\n"}
    return thoughts.get(name, "") + text


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
