import re
from types import SimpleNamespace
from typing import Any

import chat_templates as t
import pytest
from chat_templates import assistant, byte_tokenizer, user
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import InputError
from peagle.models.chat_template import render_chat
from peagle.train.packing import Document
from peagle.train.samples import Chat
from peagle.train.template import ChatTemplate, tokens_within

PLACE = "chats.jsonl:7"
THOUGHT = "<think>\nhm\n</think>\n\n"
TURNS = (
    {"role": "system", "content": "be kind"},
    user("hi"),
    assistant("hi you"),
    user("more"),
    assistant("no  more"),
)


def encode(template: str, *messages: dict[str, Any], **options: Any) -> tuple[Any, Document]:
    """The tokenizer, and how it encodes a conversation."""
    tokenizer = byte_tokenizer(template, **options)
    return tokenizer, ChatTemplate(tokenizer).encode([Chat(PLACE, messages)])[0]


def responses(tokenizer: Any, document: Document) -> list[str]:
    return [tokenizer.decode(document.tokens[a:b]) for a, b in document.responses]


FORMS = [
    (t.CHATML, "<|im_end|>", "<|im_end|>"),
    (t.LLAMA, "<|eot|>", "<|eot|>"),
    (t.PHI, "<|eot|>", "<|eot|>\n<|eos|>"),
    (t.MARKED, "<|im_end|>", "<|im_end|>"),
    (t.SYSTEM_LAST, "<|eos|>", "<|eos|>"),
]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(("template", "end", "last"), FORMS)
def test_responses_are_the_assistants_turns_with_their_end(
    template: str, end: str, last: str, trim_offsets: bool
):
    tokenizer, document = encode(template, *TURNS, trim_offsets=trim_offsets)
    found = responses(tokenizer, document)
    assert [text.lstrip() for text in found] == [f"hi you{end}", f"no  more{last}"]
    whole = tokenizer.apply_chat_template(list(TURNS), tokenize=False)
    assert list(document.tokens) == tokenizer(whole, add_special_tokens=False).input_ids


@pytest.mark.parametrize("template", [t.CHATML, t.MARKED])
def test_it_is_told_one_date_in_every_run_and_a_chats_own_variables(template: str):
    """Else a run could not go on tomorrow, and the target be shown what it was never asked."""
    told = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }} {{ mood }}{% endif %}"
    tokenizer = byte_tokenizer(told + template)
    chat = Chat(PLACE, (user("hi"), assistant("you")), variables={"mood": "calm"})
    ours = ChatTemplate(tokenizer)
    [document], [prompt] = ours.encode([chat]), ours.prompts([chat])
    for ids in (document.tokens, prompt):
        assert tokenizer.decode(ids).startswith("01 Jan 2026 calm")
    assert responses(tokenizer, document) == ["you<|im_end|>"]


@pytest.mark.parametrize("template", [t.HARMONY, t.SINGLE_CALL, t.NO_DEVELOPER])
def test_what_a_template_would_drop_or_refuse_is_trained_as_it_is_served(template: str):
    """Instructions of a developer, later ones, and several calls in one turn."""
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("look", "find")
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in ("look", "find")]
    turns = (
        {"role": "developer", "content": "be kind"},
        user("hi"),
        assistant("", tool_calls=calls),
        *results,
        {"role": "system", "content": "be brief"},
        assistant("done"),
    )
    tokenizer, document = encode(template, *turns)
    whole = render_chat(tokenizer, turns)
    assert tokenizer.decode(document.tokens) == whole
    assert all(word in whole for word in ("be kind", "be brief", "look", "find"))
    said = responses(tokenizer, document)
    assert "done" in said[-1]
    assert "".join(said).count("look") == 1
    assert "".join(said).count("find") == 1


def test_of_several_templates_the_one_for_tools_is_trained():
    tokenizer = byte_tokenizer(None)
    tool = {"type": "function", "function": {"name": "look", "description": ""}}
    tokenizer.chat_template = {
        "default": t.CHATML,
        "tool_use": "{{ tools[0].function.name }}" + t.MARKED,
    }
    turns = (user("hi"), assistant("a"))
    plain, used = ChatTemplate(tokenizer).encode([Chat(PLACE, turns), Chat(PLACE, turns, [tool])])
    assert tokenizer.decode(used.tokens) == "look" + tokenizer.decode(plain.tokens).rstrip()
    assert responses(tokenizer, plain) == responses(tokenizer, used) == ["a<|im_end|>"]


WORDS = st.text(st.characters(exclude_characters="<[|"), max_size=12)
END = re.compile(r"(<\|\w+\|>\s*)+$")


@given(
    st.sampled_from([t.CHATML, t.LLAMA, t.PHI, t.MARKED, t.SYSTEM_LAST, t.THINKING]),
    st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    st.booleans(),
)
def test_any_content_in_any_template(template: str, pairs: list[tuple[str, str]], trimmed: bool):
    """Whitespace at a response's start may share a token with the prompt's."""
    messages = [m for asked, said in pairs for m in (user(asked), assistant(said))]
    tokenizer, document = encode(template, *messages, trim_offsets=trimmed)
    found = responses(tokenizer, document)
    assert len(found) == len(pairs)
    for text, (_, said) in zip(found, pairs, strict=True):
        assert END.sub("", text.removeprefix("<think>\n\n</think>\n\n")).strip() == said.strip()
        assert END.search(text)


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_blank_space_in_a_marked_block_is_part_of_the_response(trim_offsets: bool):
    template = t.MARKED.replace("{% generation %}", "{% generation %}{{ '  ' }}")
    tokenizer, document = encode(template, *TURNS, trim_offsets=trim_offsets)
    found = [text.lstrip() for text in responses(tokenizer, document)]
    assert found == ["hi you<|im_end|>", "no  more<|im_end|>"]


def test_marked_blocks_that_hold_nothing():
    template = (
        "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(InputError, match="blocks contain nothing of this chat"):
        encode(template, *TURNS)


def test_the_generation_prompt_is_no_part_of_a_response():
    tokenizer, document = encode(t.LLAMA, user("hi"), assistant("hi"))
    (start, _), *_ = document.responses
    prompt = tokenizer.apply_chat_template([user("hi")], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(document.tokens[:start]) == prompt


def test_a_template_that_drops_the_thinking_of_earlier_turns():
    first, second = assistant(f"{THOUGHT}one"), assistant(f"{THOUGHT}two")
    tokenizer, document = encode(t.THINKING, user("a"), first, user("b"), second)
    assert responses(tokenizer, document) == ["one<|im_end|>", f"{THOUGHT}two<|im_end|>"]
    tokenizer, document = encode(t.THINKING, user("a"), assistant("one"), user("b"))
    assert responses(tokenizer, document) == ["<think>\n\n</think>\n\none<|im_end|>"]


def test_calls_of_tools_are_responses():
    """The first question's tool call is rendered differently while it is the newest turn."""
    call = [{"type": "function", "function": {"name": "look", "arguments": {}}}]
    result = {"role": "tool", "content": "seen"}
    said = [user("a"), assistant(THOUGHT, tool_calls=call), result, assistant(f"{THOUGHT}b")]
    tokenizer, document = encode(t.THINKING, *said)
    called = "<tool_call>\nlook\n</tool_call><|im_end|>"
    assert responses(tokenizer, document) == [THOUGHT + called, f"{THOUGHT}b<|im_end|>"]
    tokenizer, document = encode(t.THINKING, *said, user("c"), assistant("d"))
    assert responses(tokenizer, document) == [
        called.removeprefix("\n"),
        "b<|im_end|>",
        "<think>\n\n</think>\n\nd<|im_end|>",
    ]


def test_tools_reach_the_template():
    tokenizer = byte_tokenizer(t.LLAMA)
    chat = Chat(PLACE, (user("a"), assistant("b")), [{"type": "function", "name": "look"}])
    (document,) = ChatTemplate(tokenizer).encode([chat])
    assert '"name": "look"' in tokenizer.decode(document.tokens)


def test_a_conversation_that_the_assistant_begins():
    tokenizer, document = encode(t.CHATML, assistant("hello"), user("hi"), assistant("yes"))
    assert responses(tokenizer, document) == ["hello<|im_end|>", "yes<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out():
    _, with_question = encode(t.CHATML, *TURNS, user("and?"))
    assert with_question == encode(t.CHATML, *TURNS)[1]


def test_a_template_without_roles_or_end_tokens():
    """The bundled target's: what it adds after the content is still for the target to write."""
    template = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"
    tokenizer, document = encode(template, user("hi"), assistant("ho"), user("a"), assistant("b"))
    assert responses(tokenizer, document) == ["ho\n", "b\n"]


REFUSED = [
    (t.COUNTED, (user("a"), assistant("b")), "cannot mark assistant tokens; it does not show"),
    (t.REPEATED, TURNS, "cannot mark assistant tokens; turn 3 cannot be found"),
    (t.MARKED.replace("'assistant'", "'model'"), TURNS, "cannot mark .* contain nothing"),
    (t.STRICT, TURNS, "the chat template refuses this: begin with user"),
    (t.CHATML, (user("a"),), "the conversation has no assistant turn; peagle regenerate"),
    (None, TURNS, "tiny has no chat template"),
]


@pytest.mark.parametrize(("template", "messages", "message"), REFUSED)
def test_a_conversation_that_cannot_be_used_is_named(template, messages, message: str):
    with pytest.raises(InputError, match=rf"^chats\.jsonl:7: .*{message}") as caught:
        encode(template, *messages)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_offsets():
    slow = SimpleNamespace(is_fast=False, name_or_path="slow")
    with pytest.raises(InputError, match="slow: its tokenizer cannot tell the positions"):
        ChatTemplate(slow)


def test_tokens_end_within_the_characters():
    offsets = [(0, 3), (3, 5), (5, 8), (8, 9), (8, 9)]
    assert tokens_within(offsets, (3, 8)) == (1, 3)
    assert tokens_within(offsets, (4, 9)) == (1, 5)
    assert tokens_within(offsets, (6, 7)) == (2, 2)
    assert tokens_within(offsets, (9, 9)) == (5, 5)
    trimmed = [(0, 3), (5, 5), (5, 7), (9, 9)]
    assert tokens_within(trimmed, (5, 9)) == (2, 4)
