from typing import Any

import chat_templates as t
import pytest
from chat_templates import assistant, byte_tokenizer, user
from families import FAMILIES, prompt, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import ChatConfig
from peagle.detokenizer import detokenizers
from peagle.dialects.detection import find_dialect
from peagle.dialects.reader import Reader
from peagle.dialects.tools import Tool, ToolUse
from peagle.errors import InputError
from peagle.train.own_answers import check_ids, joined, own_documents
from peagle.train.packing import Document
from peagle.train.samples import Chat, Message
from peagle.train.template import ChatTemplate

THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = assistant(THOUGHT, tool_calls=[{"type": "function", "function": {"name": "look"}}])
RESULT = {"role": "tool", "content": "seen"}
Turn = Message | tuple[Message, str]
"""A message, and what the target wrote if it wrote it."""


def shown(template: str, *turns: Turn, letters: bool = False) -> list[str]:
    """The documents of a conversation as texts, with brackets around what is learned."""
    tokenizer = byte_tokenizer(template)

    def encode(text: str) -> tuple[int, ...]:
        parts = [*text] if letters else [text]
        ids = tokenizer(parts, add_special_tokens=False).input_ids
        return tuple(token for part in ids for token in part)

    pairs = [turn if isinstance(turn, tuple) else (turn, None) for turn in turns]
    messages = tuple(message for message, _ in pairs)
    ids = tuple(None if text is None else encode(text) for _, text in pairs)
    chat = Chat("chats.jsonl:7", messages, None, ids)
    (found,) = own_documents([chat], ChatTemplate(tokenizer), tokenizer)
    return [marked(tokenizer, document) for document in found]


def marked(tokenizer: Any, document: Document) -> str:
    text, end = "", 0
    for start, stop in document.responses:
        before, said = document.tokens[end:start], document.tokens[start:stop]
        text, end = f"{text}{tokenizer.decode(before)}[{tokenizer.decode(said)}]", stop
    return text + tokenizer.decode(document.tokens[end:])


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def asked(*turns: str) -> str:
    return "".join(turns) + "<|im_start|>assistant\n"


def test_answers_that_are_shown_as_written_share_a_document():
    said = [user("a"), (assistant("b"), "b<|im_end|>"), user("c"), (assistant("d"), "d<|im_end|>")]
    first = asked(turn("user", "a")) + "[b<|im_end|>]\n"
    assert shown(t.CHATML, *said) == [first + asked(turn("user", "c")) + "[d<|im_end|>]"]


def test_an_answer_in_other_tokens_has_a_document_of_its_own():
    """The template shows its text, which is encoded otherwise."""
    said = [user("a"), (assistant("hi"), "hi"), user("c"), (assistant("d"), "d")]
    one, two = shown(t.CHATML, *said, letters=True)
    assert one == asked(turn("user", "a")) + "[hi]"
    assert two == asked(turn("user", "a"), turn("assistant", "hi"), turn("user", "c")) + "[d]"


def test_thoughts_that_are_left_out_later_are_learned_where_the_target_had_them():
    def own(text: str) -> Turn:
        return assistant(THOUGHT + text), f"{THOUGHT}{text}<|im_end|>"

    assert shown(t.THINKING, user("a"), own("b"), user("c"), own("d")) == [
        asked(turn("user", "a")) + f"[{THOUGHT}b<|im_end|>]",
        asked(turn("user", "a"), turn("assistant", "b"), turn("user", "c"))
        + f"[{THOUGHT}d<|im_end|>]",
    ]


def test_what_the_template_cannot_express_is_learned_all_the_same():
    odd = "<|header|>b<|eos|>"
    assert shown(t.CHATML, user("a"), (assistant("b"), odd)) == [
        asked(turn("user", "a")) + f"[{odd}]"
    ]


MARKED = t.MARKED.replace("endgeneration %}", "endgeneration %}{{ '' }}")
"""With the end of line after an answer."""


@pytest.mark.parametrize("template", [t.CHATML, MARKED])
def test_answers_whose_ids_are_unknown_are_learned_as_they_are_shown(template: str):
    said = [user("a"), assistant("b"), user("c"), (assistant("d"), "d<|im_end|>"), user("e")]
    parts = [f"{asked(turn('user', q))}[{a}<|im_end|>]" for q, a in ("ab", "cd", "ef")]
    assert shown(template, *said, assistant("f"), user("g")) == ["\n".join(parts)]


def test_calls_in_the_data_are_learned_beside_the_targets_own_answer():
    written = f"{THOUGHT}b<|im_end|>"
    (text,) = shown(t.THINKING, user("a"), CALL, RESULT, (assistant(THOUGHT + "b"), written))
    called = f"[{THOUGHT}<tool_call>\nlook\n</tool_call><|im_end|>]\n"
    assert text == asked(turn("user", "a")) + called + asked(turn("tool", "seen")) + f"[{written}]"


def test_each_conversation_has_its_own_documents():
    tokenizer = byte_tokenizer(t.CHATML)
    b, d = (tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in "bd")
    chats = [
        Chat("a:1", (user("a"), assistant("b"), user("c"), assistant("d")), None, ids)
        for ids in ((None, b, None, d), (None, None, None, d), (None, b, None, None))
    ]
    template = ChatTemplate(tokenizer)
    together = own_documents(chats, template, tokenizer)
    assert together == [own_documents([chat], template, tokenizer)[0] for chat in chats]
    assert own_documents([], template, tokenizer) == []


SAYING = [
    assistant("  h i\n"),
    assistant("i", reasoning_content="h"),
    assistant("", tool_calls=[{"function": {"name": "hi", "arguments": "{}"}}]),
    assistant("", tool_calls="hi", reasoning_content=None),
]
SAYING_MORE = [
    assistant("hi!"),
    assistant("ih"),
    assistant("hi", reasoning_content="why"),
    assistant("", tool_calls=[{"function": {"name": "look"}}]),
]


@pytest.mark.parametrize("message", SAYING)
def test_ids_may_say_more_than_a_message(message: Message):
    assert len(shown(t.CHATML, user("a"), (message, "<think>h</think>i<|im_end|>"))) == 1


@pytest.mark.parametrize("message", SAYING_MORE)
def test_ids_that_say_something_else_are_refused_by_name(message: Message):
    told = r"^chats\.jsonl:7: turn 2: token_ids say something else by the tokenizer of tiny; use"
    with pytest.raises(InputError, match=told):
        shown(t.CHATML, user("a"), (message, "<call>hi</call><|im_end|>"))


def test_a_prompt_that_the_template_refuses_is_named():
    with pytest.raises(InputError, match=r"^chats\.jsonl:7: .* refuses this: begin with user"):
        shown(t.STRICT, RESULT, (assistant("b"), "b"))


def test_documents_are_joined_only_where_one_begins_the_next():
    a, b = Document((1, 2, 3), ((1, 3),)), Document((1, 2, 3, 4, 5), ((4, 5),))
    c = Document((1, 2), ((0, 2),))
    assert joined([a, b, c]) == [Document((1, 2, 3, 4, 5), ((1, 3), (4, 5))), c]
    assert joined([]) == []


@pytest.mark.parametrize("name", FAMILIES)
@given(st.data())
@settings(max_examples=60)
def test_whatever_a_target_writes_its_ids_say_its_message(name: str, data: st.DataObject):
    """Also half characters, and markers where none belongs."""
    own = tokenizer(name)
    size, added = len(own), [*own.get_added_vocab().values()]
    token = st.one_of(st.sampled_from(added), st.integers(0, size - 1))
    ids = data.draw(st.lists(token, max_size=30))
    use = data.draw(st.sampled_from([None, ToolUse((Tool("f"), Tool("get_weather")))]))
    before, dialect = prompt(name), find_dialect(own, ChatConfig())
    reader = Reader(
        dialect.parser(before, use),
        dialect.markers(use),
        detokenizers(own, skip_special=True)(before),
    )
    reader.extend(ids)
    reader.finish(ended=True)
    said = reader.message
    texts = [said.reasoning, said.content, *(call.name for call in said.calls)]
    check_ids(ids, texts, own, "chats.jsonl:7")
