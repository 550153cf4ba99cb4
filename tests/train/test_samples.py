import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import assistant, user

from peagle.errors import InputError
from peagle.train.samples import (
    Chat,
    Continuation,
    Passage,
    TokenIds,
    parse_sample,
    read_samples,
)

AT = "f.jsonl:3"
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}
BARE = {"name": "look", "parameters": {}}
FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"messages": [user("a"), assistant("b")]}, Chat(AT, (user("a"), assistant("b")))),
    (
        {"messages": [user("a")], "tools": [TOOL], "id": 5, "prompt": "a"},
        Chat(AT, (user("a"),), [TOOL]),
    ),
    (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        Chat(AT, (user("a"), assistant("b"))),
    ),
    (
        {"conversations": [{"from": role, "value": "x"} for role in ("system", "tool")]},
        Chat(AT, tuple({"role": role, "content": "x"} for role in ("system", "tool"))),
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
        Chat(AT, (user("ab"),)),
    ),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL], "name": None}]},
        Chat(AT, (assistant("", tool_calls=[CALL]),)),
    ),
    (
        {"messages": [assistant("a", tool_calls=[])], "tools": [], "conversations": None},
        Chat(AT, (assistant("a"),)),
    ),
    ({"messages": [user("a"), assistant(None)]}, Chat(AT, (user("a"), assistant("")))),
    (
        {"messages": [{"role": "developer", "content": "s"}, {"role": "model", "content": "b"}]},
        Chat(AT, ({"role": "developer", "content": "s"}, assistant("b"))),
    ),
    (
        {"conversations": [{"from": "chatgpt", "value": "b"}], "tools": json.dumps([TOOL])},
        Chat(AT, (assistant("b"),), [TOOL]),
    ),
    (
        {"messages": [user("a")], "tools": [{"name": "look", "parameters": {}}]},
        Chat(AT, (user("a"),), [{"type": "function", "function": BARE}]),
    ),
    *(
        ({"messages": [user("a")], "tools": nothing}, Chat(AT, (user("a"),)))
        for nothing in ("", "[]", "null", " ")
    ),
    (
        {
            "messages": [
                assistant("", tool_calls=json.dumps([CALL])),
                assistant("a", tool_calls="[]"),
            ]
        },
        Chat(AT, (assistant("", tool_calls=[CALL]), assistant("a"))),
    ),
    (
        {"messages": [assistant(None, function_call=CALL["function"])]},
        Chat(AT, (assistant("", tool_calls=[CALL]),)),
    ),
    (
        {
            "conversations": [
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "r"},
                {"from": "function_call", "value": json.dumps([CALL["function"]] * 2)},
                {"from": "function_response", "value": None},
            ]
        },
        Chat(
            AT,
            (
                assistant("", tool_calls=[CALL]),
                {"role": "tool", "content": "r"},
                assistant("", tool_calls=[CALL, CALL]),
                {"role": "tool", "content": ""},
            ),
        ),
    ),
    *(
        (
            {"conversations": [{"from": "function_call", "value": text}]},
            Chat(AT, (assistant(text),)),
        )
        for text in ("{}", "I look.", "[1]", '"name"')
    ),
    (
        {"system": "s", "conversations": [{"from": "human", "value": "a"}]},
        Chat(AT, ({"role": "system", "content": "s"}, user("a"))),
    ),
    (
        {"system": "s", "messages": [user("a"), assistant("b", token_ids=[3])]},
        Chat(
            AT,
            ({"role": "system", "content": "s"}, user("a"), assistant("b")),
            token_ids=(None, None, (3,)),
        ),
    ),
    (
        {"system": "s", "messages": [{"role": "system", "content": "own"}, user("a")]},
        Chat(AT, ({"role": "system", "content": "own"}, user("a"))),
    ),
    (
        {"messages": [user("a"), assistant("b", token_ids=[3, 4]), user("c"), assistant("d")]},
        Chat(
            AT,
            (user("a"), assistant("b"), user("c"), assistant("d")),
            token_ids=(None, (3, 4), None, None),
        ),
    ),
    (
        {"messages": [user("a") | {"token_ids": [1]}, assistant("b", token_ids=None)]},
        Chat(AT, (user("a"), assistant("b"))),
    ),
    ({"prompt": "a", "response": "b", "text": "c"}, Continuation(AT, "a", "b")),
    ({"prompt": "a", "response": "b", "token_ids": [3]}, Continuation(AT, "a", "b", (3,))),
    ({"prompt": "a", "response": None}, Continuation(AT, "a", None)),
    ({"text": "c", "prompt": None}, Passage(AT, "c")),
    (
        {"prompt_token_ids": [], "token_ids": [3, 4], "messages": [user("a")]},
        TokenIds(AT, (3, 4), ((0, 2),)),
    ),
    (
        {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]},
        TokenIds(AT, (5, 6, 7, 8, 9), ((1, 3), (4, 5))),
    ),
]


@pytest.mark.parametrize(("record", "expected"), FORMS)
def test_every_form_of_a_line(record: dict[str, Any], expected: Any):
    assert parse_sample(AT, record) == expected


WRONG = "neither a text nor a list of parts of type text"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"question": "?"}, "needs messages, conversations, prompt"),
    ({"text": 5}, "text is not a string"),
    ({"prompt": 5}, "prompt is not a string"),
    ({"prompt": "a", "response": ["b"]}, "response is not a string"),
    ({"prompt_token_ids": "ab", "token_ids": [1]}, "prompt_token_ids is not a list of token ids"),
    ({"prompt_token_ids": [1], "token_ids": [1.5]}, "token_ids is not a list of token ids"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids and loss_mask are not equally long"),
    ({"prompt_token_ids": [1], "token_ids": [-1]}, "token_ids is not a list of token ids"),
    ({"prompt_token_ids": [1], "token_ids": [True]}, "token_ids is not a list of token ids"),
    ({"messages": [assistant("a", token_ids=[1.5])]}, "turn 1: token_ids is not a list of token"),
    ({"prompt": "a", "response": "b", "token_ids": "c"}, "token_ids is not a list of token ids"),
    ({"messages": "hi"}, "messages is not a list of objects"),
    ({"messages": ["hi"]}, "messages is not a list of objects"),
    ({"conversations": []}, "conversations is empty"),
    ({"messages": [user("a"), {"content": "b"}]}, "turn 2: role None is none of system, user"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "turn 1: role .* is none of"),
    ({"conversations": [{"from": "bing", "value": "a"}]}, "turn 1: from 'bing' is none of"),
    ({"messages": [{"role": "user"}]}, f"turn 1: content is {WRONG}"),
    ({"messages": [user(5)]}, f"turn 1: content is {WRONG}"),  # type: ignore[arg-type]
    ({"messages": [{"role": "user", "content": ["a"]}]}, f"turn 1: content is {WRONG}"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]},
        f"turn 1: content is {WRONG}",
    ),
    ({"conversations": [{"from": "human", "content": "a"}]}, f"turn 1: value is {WRONG}"),
    ({"messages": [user("a")], "tools": "look"}, "tools is not a list of objects"),
    ({"messages": [user("a")], "tools": "[1]"}, "tools is not a list of objects"),
    ({"messages": [assistant("a", tool_calls="f(x)")]}, "turn 1: tool_calls is not a list of"),
    ({"messages": [assistant("a", tool_calls=["f"])]}, "turn 1: tool_calls is not a list of"),
]


@pytest.mark.parametrize(("record", "message"), BAD)
def test_what_is_wrong_is_named(record: dict[str, Any], message: str):
    with pytest.raises(InputError, match=rf"^f\.jsonl:3: {message}"):
        parse_sample(AT, record)


def test_samples_come_in_order_with_their_places(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(json.dumps({"text": word}) for word in "ab"))
    assert list(read_samples([str(file)])) == [Passage(f"{file}:1", "a"), Passage(f"{file}:3", "b")]
