"""Fields that we do not have: left out, named once in the log, or refused as misspelled."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from peagle.server import body
from peagle.server.body import near_miss
from peagle.server.messages import MessageBody
from peagle.server.protocol import ChatBody, CompletionBody, TokenizeBody

FOREIGN = [
    "cache_prompt",
    "extra_body",
    "keep_alive",
    "max_length",
    "max_new_tokens",
    "min_a",
    "mirostat_tau",
    "num_ctx",
    "num_predict",
    "nvext",
    "options",
    "plugins",
    "provider",
    "repeat_penalty",
    "session_id",
    "thinking_budget",
    "top_a",
    "transforms",
    "typical_p",
    "usage",
    "vllm_xargs",
]
"""Other servers' names."""


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has told nothing yet."""
    monkeypatch.setattr(body, "_told", set())


def chat(**fields: Any) -> ChatBody:
    turns = [{"role": "user", "content": "x"}]
    return ChatBody.model_validate_json(json.dumps({"messages": turns, **fields}))


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, TokenizeBody, MessageBody])
@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_servers_are_not_taken_for_ours(kind: type[body.Body], name: str):
    assert near_miss(kind, name) is None


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatur", "temperature"),
        ("temperatuer", "temperature"),
        ("temperrature", "temperature"),
        ("tempereture", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("stop_token_id", "stop_token_ids"),
        ("topP", "top_p"),
        ("TOP_K", "top_k"),
        ("presense_penalty", "presence_penalty"),
        ("tool_choise", "tool_choice"),
    ],
)
def test_slips_are_refused_with_what_was_meant(typed: str, meant: str):
    with pytest.raises(ValidationError, match=f"no such field; did you mean {meant}?"):
        chat(**{typed: 1})


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, TokenizeBody, MessageBody])
def test_no_name_of_ours_is_taken_for_another(kind: type[body.Body]):
    names = [name for name, field in kind.model_fields.items() if field.annotation is not Any]
    assert [near_miss(kind, name) for name in names] == names


@pytest.mark.parametrize("name", ["max_new_tokens", "max_output_tokens", "n_predict"])
def test_another_name_for_the_length_is_refused_unless_ours_is_there(name: str):
    """An answer of the whole context would surprise whoever asked for a short one."""
    with pytest.raises(ValidationError, match=r"did you mean max_tokens\?"):
        chat(**{name: 3})
    assert chat(**{name: 3, "max_completion_tokens": 3}).most_tokens(9) == 3
    assert chat(**{name: None}).most_tokens(9) == 9


def test_unknown_fields_are_told_once_at_every_level(caplog: pytest.LogCaptureFixture):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "u": 1}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "v": 1}]},
        {"role": "assistant", "content": "b", "tool_calls": [{**call, "w": 1}], "x": 1},
    ]
    tool = {"type": "function", "y": 1, "function": {"name": "f", "z": 1}}
    for _ in range(2):
        given = chat(messages=turns, tools=[tool], provider={"only": ["x"]}, nothing=None)
    assert sorted(line.split(": ignoring the unknown field ") for line in caplog.messages) == [
        ["ChatBody", "'provider'"],
        ["ContentPart", "'v'"],
        ["Function", "'z'"],
        ["FunctionCall", "'u'"],
        ["MessageBody", "'x'"],
        ["ToolBody", "'y'"],
        ["ToolCall", "'w'"],
    ]
    written = given.model_dump_json()
    assert not any(f'"{name}"' in written for name in "uvwxyz"), "nor does a template see them"


def test_the_log_names_a_bounded_number_of_fields_of_bounded_length(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(body, "MOST_TOLD", 3)
    chat(**{"forged\nline": 1, "x" * 100_000: 1, **{f"foreign {n}": 1 for n in range(10)}})
    assert len(caplog.messages) == 3
    assert "\n" not in caplog.messages[0]
    assert max(map(len, caplog.messages)) < 200


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"max_tokens": 0}, {"max_tokens": 0}),
        ({"max_tokens": None, "max_completion_tokens": 5.0}, {"max_completion_tokens": 5}),
        ({"top_k": 5.0, "seed": 1.0, "n": 2.0}, {"top_k": 5, "seed": 1, "n": 2}),
        ({"min_tokens": 3.0}, {"min_tokens": 3}),
        ({"logprobs": True, "top_logprobs": 2.0}, {"top_logprobs": 2}),
        ({"temperature": 1, "top_p": 0}, {"temperature": 1.0, "top_p": 0.0}),
    ],
)
def test_numbers_are_read_as_clients_write_them(given: dict[str, Any], read: dict[str, Any]):
    body = chat(**given)
    assert {name: getattr(body, name) for name in read} == read


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 5.5},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"max_tokens": -2},
        {"seed": 1e999},
        {"top_p": 1.5},
        {"n": 0},
    ],
)
def test_numbers_of_another_kind_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError):
        chat(**wrong)


HARMLESS: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "audio": None,
    "bad_words": [],
    "best_of": 1,
    "cache_salt": "tenant",
    "continue_final_message": False,
    "documents": [{"title": "a", "text": "b"}],
    "echo": False,
    "function_call": "auto",
    "functions": [],
    "guided_decoding_backend": "auto",
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "logits_processors": None,
    "moderation": {},
    "priority": 0,
    "prompt_cache_options": {},
    "request_id": "abc",
    "return_token_ids": False,
    "return_tokens_as_token_ids": None,
    "separate_reasoning": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "structured_outputs": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_clients_send_without_needing_it_is_taken_in_silence(
    name: str, caplog: pytest.LogCaptureFixture
):
    chat(**{name: HARMLESS[name]})
    assert not caplog.messages


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_embeds", "AAAA"),
        ("logits_processors", [{"qualname": "x"}]),
        ("use_beam_search", True),
        ("best_of", 4),
        ("lora_path", "x"),
        ("chat_template", "{{ 1 }}"),
        ("echo", True),
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
    ],
)
def test_what_would_change_the_answer_is_refused(name: str, value: Any):
    with pytest.raises(ValidationError, match="not supported"):
        chat(**{name: value})
