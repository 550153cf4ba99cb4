"""Chat templates after those of published models, and a tokenizer that has their tokens."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if tools %}<|header|>tools<|/header|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}"
)
"""Ends the conversation once more, so no rendering is the beginning of a longer one."""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
    {%- set content, thoughts = m.content, '' %}
    {%- if '</think>' in content %}
        {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
        {{- '<think>\n' + thoughts + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in m.tool_calls or [] %}
        {{- '\n' if content or not loop.first }}
        {{- '<tool_call>\n' + call.function.name + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""As Qwen3's: earlier turns lose their thinking, and the last one has some, if only empty."""
SYSTEM_LAST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]"
    "{% if loop.index0 + 2 >= messages | length and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""As Mistral's: the system's message stands in the last question."""
COUNTED = "{% for m in messages %}{{ m.role }} {{ m.content | length }}\n{% endfor %}"
REPEATED = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}" + CHATML
"""Says everything twice, so that an answer has no one place."""
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}"
    + CHATML
)
NO_DEVELOPER = (
    "{% for m in messages %}{% if m.role in ['user', 'system'] %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content }}{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n[{{ m.content }}]<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen's: says nothing of roles it does not know."""
HARMONY = (
    "{% set ns = namespace(call=none) %}{% set all = messages %}"
    "{% if messages[0].role in ['developer', 'system'] %}"
    "<|header|>developer<|/header|>{{ messages[0].content }}<|eot|>{% set all = messages[1:] %}"
    "{% endif %}{% for t in tools or [] %}{{ '// ' + t.function.description }}\n{% endfor %}"
    "{% for m in all %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}"
    "{% if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif %}"
    "{% if m.content or m.thinking %}<|header|>analysis<|/header|>{{ m.content or m.thinking }}"
    "<|eot|>{% endif %}{% set call = m.tool_calls[0].function %}{% set ns.call = call.name %}"
    "<|header|>assistant to={{ call.name }}<|/header|>{{ call.arguments | tojson }}<|eot|>"
    "{% else %}<|header|>assistant<|/header|>{{ m.content }}<|eot|>{% endif %}"
    "{% elif m.role == 'tool' %}{% if ns.call is none %}{{ raise_exception('no call') }}{% endif %}"
    "<|header|>{{ ns.call }}<|/header|>{{ m.content }}<|eot|>"
    "{% elif m.role == 'user' %}<|header|>user<|/header|>{{ m.content }}<|eot|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant{% endif %}"
)
"""As GPT-OSS's: one instruction, at the start; the first call of each message; no call with both
thoughts and a text."""
SINGLE_CALL = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only single calls') }}{% endif %}{% set call = m.tool_calls[0].function %}"
    "<|header|>assistant<|/header|>{{ call.name }}{{ call.arguments | tojson }}<|eot|>{% else %}"
    "<|header|>{{ m.role }}<|/header|>{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>{% endif %}"
)
"""As Llama 3.1's."""
SPECIAL = (
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|header|>",
    "<|/header|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
)


def byte_tokenizer(template: str | None, trim_offsets: bool = False) -> Any:
    """A token a byte, but for a few merges over blank space, and special tokens.

    `trim_offsets`: as in Llama 3, offsets leave out the blank space around a token.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ċ", "Ġ"), ("h", "i"), ("Ġ", "hi")]
    vocabulary = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(vocabulary)}, merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(
                single="<|bos|> $A", special_tokens=[("<|bos|>", SPECIAL.index("<|bos|>"))]
            ),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        extra_special_tokens=list(SPECIAL[2:]),
        chat_template=template,
    )
    fast.name_or_path = "tiny"
    return fast


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}
