"""Checkpoints with a response template of their own."""

import copy
import json
from itertools import pairwise

import pytest
from families import encode, prompt, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from peagle.config import ChatConfig
from peagle.detokenizer import detokenizers
from peagle.dialects.detection import find_dialect
from peagle.dialects.events import Message
from peagle.dialects.reader import Reader
from peagle.dialects.tools import Tool, ToolUse

TEMPLATE = {
    "version": 1,
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
USE = ToolUse((Tool("f", {"type": "object", "properties": {"x": {"type": "integer"}}}),))
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nIt is 4.\n{CALL}"
CHECKPOINT = copy.copy(tokenizer("qwen3"))
CHECKPOINT.response_template = TEMPLATE


def read(tokens: list[int], cuts: list[int], ended: bool = True) -> Message:
    dialect, before = find_dialect(CHECKPOINT, ChatConfig()), prompt("qwen3")
    assert "response template" in dialect.description
    reader = Reader(
        dialect.parser(before, USE),
        dialect.markers(USE),
        detokenizers(CHECKPOINT, skip_special=False)(before),
    )
    for start, end in pairwise([0, *sorted(cuts), len(tokens)]):
        reader.extend(tokens[start:end])
    reader.finish(ended)
    return reader.message


@given(st.lists(st.integers(0, 40), max_size=6))
def test_the_checkpoints_own_template_is_read_in_any_chunks(cuts: list[int]):
    tokens = encode("qwen3", ANSWER)
    message = read(tokens, [min(cut, len(tokens)) for cut in cuts])
    assert (message.reasoning, message.content) == ("Hm.", "It is 4.")
    assert [(c.name, json.loads(c.arguments)) for c in message.calls] == [("f", {"x": 1})]


def test_a_call_that_the_template_cannot_read_is_no_error(caplog: pytest.LogCaptureFixture):
    message = read(encode("qwen3", "Yes.<tool_call>{no JSON}</tool_call> No."), [])
    assert message.content.startswith("Yes.")
    assert not message.calls
    assert "does not fit" in caplog.text


def test_a_named_parser_goes_before_the_template():
    dialect = find_dialect(CHECKPOINT, ChatConfig(tool_call_parser="qwen3_coder"))
    assert dialect.description == "reasoning as qwen3, tool calls as qwen3_coder"


@pytest.mark.parametrize(
    ("text", "ended", "content"),
    [
        ("It is 4 < 5. a<", False, "It is 4 < 5. a<"),
        ("It is 4 <tool", False, "It is 4 <tool"),
        ('Yes.<tool_call>{"name": "f"', False, "Yes."),
        ("Yes.<tool_call>{no JSON}</tool_call> No.", True, "Yes.{no JSON}</tool_call> No."),
    ],
)
def test_what_was_written_stays(text: str, ended: bool, content: str):
    """Where a limit cuts it, too, but for a call; and where it cannot be read."""
    tokens = encode("qwen3", text)
    for cuts in ([], [*range(1, len(tokens))]):
        message = read(tokens, cuts, ended)
        assert (message.content, message.calls) == (content, [])
