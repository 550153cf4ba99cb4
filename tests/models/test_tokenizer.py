import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import assistant, byte_tokenizer, user
from tiny_pair import save_tokenizer

from peagle.errors import InputError
from peagle.models.tokenizer import load_tokenizer, render_chat, template_turns


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"arguments": arguments, "name": "f"}}
    return assistant("", tool_calls=[call])


@pytest.mark.parametrize("text", ['{"x": [1], "y": "é"}', "{}"])
def test_what_a_tool_was_called_with_becomes_an_object(text: str):
    given = [user("a"), called(text), user("b")]
    turns = template_turns(given)
    assert turns == [user("a"), called({"x": [1], "y": "é"} if "x" in text else {}), user("b")]
    assert list(turns[1]["tool_calls"][0]["function"]) == ["arguments", "name"]
    assert given[1] == called(text), "what was given is as it was"


AS_GIVEN = [
    called({"x": 1}),
    called("no JSON"),
    called("[1]"),
    called("[" * 100_000),
    called(None),
    assistant("", tool_calls=None),
    assistant("", tool_calls="f"),
    assistant("", tool_calls=["f", {"function": "f"}, {"name": "f", "arguments": "{}"}]),
]


@pytest.mark.parametrize("message", AS_GIVEN, ids=lambda message: str(message)[:80])
def test_what_is_no_text_of_an_object_stays(message: dict[str, Any]):
    assert template_turns([message]) == [message]


def test_templates_see_the_object():
    template = (
        "{% for k, v in messages[0].tool_calls[0].function.arguments | items %}{{ k }}={{ v }} "
        "{% endfor %}"
    )
    assert render_chat(byte_tokenizer(template), [called('{"x": 1, "y": 2}')]) == "x=1 y=2 "
    with pytest.raises(InputError, match="the chat template refuses this: "):
        render_chat(byte_tokenizer(template), [called("no JSON")])


@pytest.mark.parametrize("kind", ["xlnet", ["llama"]])
def test_a_tokenizer_that_another_family_would_need(tmp_path: Path, kind: object):
    save_tokenizer(tmp_path)
    values = {"model_type": kind, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: model_type {kind} is not supported; peagle runs llama, qwen3, qwen3_moe, "
        "gpt_oss"
    )
