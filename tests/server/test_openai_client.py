"""The official client against the server: every field, streaming and not."""

import json
import math
from copy import copy
from typing import Any

import openai
import pytest
from conftest import Running
from openai import OpenAI

from peagle import LLM, SamplingParams
from peagle.config import ChatConfig
from peagle.models.chat_template import render_chat
from peagle.server.chat import render
from peagle.server.messages import MessageBody
from peagle.server.service import Service
from peagle.train.samples import Chat, parse_sample
from peagle.train.template import ChatTemplate

pytestmark = pytest.mark.usefixtures("_clean")
PROMPT = "def fibonacci(n):\n"
OTHER = "class Stack:\n"
MESSAGES = [{"role": "user", "content": "def is_prime(n):"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "set_flag",
        "description": "Sets the flag.",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


def expected(offline: LLM, prompt: Any, **params: Any) -> Any:
    [completion] = offline.generate([prompt], SamplingParams(**params))
    return completion


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**{"model": "demo", "prompt": PROMPT, **fields})


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "demo", "messages": MESSAGES, **fields})


def test_completion_equals_the_engine(client: OpenAI, offline: LLM):
    wanted = expected(offline, PROMPT, max_tokens=40)
    answer = complete(client, max_tokens=40)
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert answer.usage.completion_tokens == len(wanted.token_ids)
    did = wanted.speculation
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == did.accepted
    details = answer.usage.model_extra["speculation"]
    assert details["drafted"] == did.drafted
    assert details["accepted_per_position"] == did.accepted_per_position
    assert math.isclose(details["acceptance_length"], 1 + did.accepted / did.cycles)


def test_no_more_tokens_are_predicted_than_there_are(client: OpenAI):
    """A cycle may have accepted more than the limit leaves."""
    for prompt in (PROMPT, "x = 1\n" * 7 + "x ="):
        usage = complete(client, prompt=prompt, max_tokens=2, temperature=0).usage
        # the first token is no draft
        assert usage.completion_tokens_details.accepted_prediction_tokens <= 1


def test_completion_takes_16_tokens_by_default(client: OpenAI):
    assert complete(client).usage.completion_tokens == 16


def test_streamed_completion_equals_the_whole(client: OpenAI):
    whole = complete(client, max_tokens=40)
    options = {"include_usage": True}
    chunks = list(complete(client, max_tokens=40, stream=True, stream_options=options))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.model_extra["speculation"] == whole.usage.model_extra["speculation"]
    assert len({c.id for c in chunks}) == 1


def test_a_stream_counts_as_it_goes(client: OpenAI):
    """vLLM's option, which load generators use."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    how = {"prompt": [PROMPT, OTHER], "n": 2, "max_tokens": 12, "temperature": 0.9, "seed": 5}
    *chunks, last = complete(client, stream=True, stream_options=options, **how)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == last.usage.completion_tokens
    assert {c.usage.prompt_tokens for c in chunks} == {last.usage.prompt_tokens}
    assert all(
        c.usage.total_tokens - c.usage.prompt_tokens == counts[i] for i, c in enumerate(chunks)
    )


def test_stream_without_usage_has_none(client: OpenAI):
    assert all(c.usage is None for c in complete(client, max_tokens=4, stream=True))


@pytest.mark.parametrize("k", [0, 3, 7])
def test_k_is_chosen_by_the_request(client: OpenAI, offline: LLM, k: int):
    how = {"speculation": {"num_speculative_tokens": k}}
    answer = complete(client, max_tokens=24, extra_body=how)
    wanted = expected(offline, PROMPT, max_tokens=24, num_speculative_tokens=k)
    assert answer.choices[0].text == wanted.text
    assert answer.usage.model_extra["speculation"]["drafted"] == wanted.speculation.drafted
    assert len(answer.usage.model_extra["speculation"]["accepted_per_position"]) == k


def test_trace_tells_drafts_from_target_tokens(client: OpenAI, offline: LLM):
    wanted = expected(offline, PROMPT, max_tokens=40)
    how = {"speculation": {"trace": True}}
    chunks = list(complete(client, max_tokens=40, stream=True, extra_body=how))
    cycles = [c.choices[0].model_extra["speculation"] for c in chunks]
    assert [t for cycle in cycles for t in cycle["token_ids"]] == list(wanted.token_ids)
    assert "".join(text for cycle in cycles for text in cycle["texts"]) == wanted.text
    accepted = [sum(cycle["drafted"]) for cycle in cycles[1:-1]]  # not prefill, nor the cut end
    assert accepted == wanted.speculation.accepted_per_cycle[: len(accepted)]
    refused = sum(cycle["refused"] for cycle in cycles)
    assert refused == wanted.speculation.drafted - wanted.speculation.accepted > 0


def test_several_prompts_and_choices(client: OpenAI, offline: LLM):
    how = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
    answer = complete(client, prompt=[PROMPT, OTHER], n=3, **how)
    wanted = [
        expected(offline, prompt, **(how | {"seed": 5 + i})).text
        for prompt in (PROMPT, OTHER)
        for i in range(3)
    ]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == wanted
    assert len({*wanted}) > 2
    prompts = [len(offline.encode(prompt)) for prompt in (PROMPT, OTHER)]
    assert answer.usage.prompt_tokens == sum(prompts)


def test_streamed_choices_are_told_apart(client: OpenAI):
    how = {"max_tokens": 12, "temperature": 0.9, "seed": 5, "n": 3}
    whole = complete(client, **how)
    texts = ["", "", ""]
    for chunk in complete(client, stream=True, **how):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_token_ids_as_prompt(client: OpenAI, offline: LLM):
    ids = offline.encode(PROMPT)
    assert complete(client, prompt=ids).choices[0].text == complete(client).choices[0].text
    assert len(complete(client, prompt=[ids, ids]).choices) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7, "seed": 1, "top_p": 0.9},
        {"temperature": 1.1, "seed": 2, "extra_body": {"top_k": 20, "min_p": 0.05}},
        {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "seed": 4, "extra_body": {"repetition_penalty": 1.2}},
        {"extra_body": {"min_tokens": 5, "ignore_eos": True}},
    ],
)
def test_sampling_fields_reach_the_engine(client: OpenAI, offline: LLM, fields: dict[str, Any]):
    answer = complete(client, max_tokens=24, **fields)
    flat = {name: value for name, value in fields.items() if name != "extra_body"}
    wanted = expected(offline, PROMPT, max_tokens=24, **flat, **fields.get("extra_body", {}))
    assert answer.choices[0].text == wanted.text


def test_filters_beside_temperature_0_have_no_effect(client: OpenAI):
    plain = complete(client, temperature=0)
    assert complete(client, temperature=0, top_p=0.1).choices[0].text == plain.choices[0].text


def test_stop_strings_end_the_text(client: OpenAI, offline: LLM):
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[10:13]
    answer = complete(client, max_tokens=40, stop=[stop, "never there"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    ids = expected(offline, PROMPT, max_tokens=4).token_ids
    ended = complete(client, max_tokens=40, extra_body={"stop_token_ids": [ids[-1]]})
    assert ended.choices[0].finish_reason == "stop"


def test_logit_bias(client: OpenAI, offline: LLM):
    token = offline.encode(" zip")[-1]
    answer = complete(client, max_tokens=3, logit_bias={str(token): 100})
    assert answer.choices[0].text == offline.tokenizer.decode([token] * 3)


def test_logprobs_of_a_completion(client: OpenAI, offline: LLM):
    wanted = expected(offline, PROMPT, max_tokens=6, logprobs=2)
    found = complete(client, max_tokens=6, logprobs=2).choices[0].logprobs
    assert "".join(found.tokens) == wanted.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(6)]
    for index, one in enumerate(wanted.logprobs):
        assert math.isclose(found.token_logprobs[index], one.chosen, rel_tol=1e-4, abs_tol=1e-5)
        assert max(found.top_logprobs[index].values()) == pytest.approx(one.top[0][1], rel=1e-4)


def test_echo_puts_the_prompt_first(client: OpenAI):
    answer = complete(client, max_tokens=4, echo=True)
    assert answer.choices[0].text.startswith(PROMPT)
    chunks = list(complete(client, max_tokens=4, echo=True, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == answer.choices[0].text


def test_echo_is_what_was_said(client: OpenAI):
    """Special tokens are part of the text."""
    said = "a<|endoftext|>b"
    answer = complete(client, prompt=said, max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith(said)


def with_template(service: Service, template: str) -> Service:
    """The same service with another chat template."""
    other = copy(service)
    other.llm = copy(service.llm)
    other.llm.chat_config = ChatConfig(chat_template=template)
    return other


def test_templates_get_what_a_tool_was_called_with_as_an_object(server: Running):
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    template += "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    called = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x": [1]}', "no JSON")
    ]
    service = with_template(server.service, template)
    messages = [MessageBody(role="assistant", content=None, tool_calls=called)]
    tokens = render(service.llm, messages, {}, False)
    assert service.llm.tokenizer.decode(tokens) == '{"x": [1]}"no JSON"'


def test_a_tool_call_is_the_same_text_in_every_rendering(server: Running):
    """Training and regeneration render a conversation as the server does."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for key, value in c.function.arguments | items %}({{ key }}: {{ value | tojson }})"
        "{% endfor %}{% endfor %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"x": [1], "y": "é"}'}
    call = {"id": "1", "type": "function", "function": function}
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]})
    service, tokenizer = with_template(server.service, template), copy(server.service.llm.tokenizer)
    served = render(service.llm, [MessageBody(**turn) for turn in turns], {}, False)
    text = tokenizer.decode(served)
    assert '(x: [1])(y: "é")' in text
    tokenizer.chat_template = template
    chat = parse_sample("a:1", {"messages": list(turns)})
    assert isinstance(chat, Chat)
    [document] = ChatTemplate(tokenizer).encode([chat])
    assert list(document.tokens) == served
    tokenizer.chat_template = template.replace("{% for c", "{% generation %}{% for c").replace(
        "{% endfor %}{% endfor %}{% if", "{% endfor %}{% endfor %}{% endgeneration %}{% if"
    )
    [marked] = ChatTemplate(tokenizer).encode([chat])
    assert tokenizer.decode(marked.tokens[slice(*marked.responses[0])]) == '(x: [1])(y: "é")'
    tokenizer.chat_template = template
    assert render_chat(tokenizer, chat.messages, tools=None, add_generation_prompt=True) == text


def test_chat_equals_its_rendered_prompt(client: OpenAI, offline: LLM):
    text = offline.tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    answer = chat(client, max_tokens=24)
    wanted = expected(offline, text, max_tokens=24)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].message.role == "assistant"
    parts = [{"role": "user", "content": [{"type": "text", "text": "def is_prime(n):"}]}]
    same = chat(client, messages=parts, max_completion_tokens=24)
    assert same.choices[0].message.content == wanted.text


def test_chat_fills_the_context_unless_told(client: OpenAI):
    answer = chat(client, stop="return")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens > 16 or answer.choices[0].finish_reason == "stop"


def test_streamed_chat(client: OpenAI):
    whole = chat(client, max_tokens=24)
    chunks = list(chat(client, max_tokens=24, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_logprobs_of_a_chat(client: OpenAI):
    answer = chat(client, max_tokens=5, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(one.token for one in content) == answer.choices[0].message.content
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob <= 0
        assert bytes(one.bytes).decode() == one.token


def test_characters_of_several_tokens_are_told_byte_by_byte(client: OpenAI):
    text = "日本語 ok"
    how = {
        "max_tokens": 30,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    found = chat(client, logprobs=True, **how).choices[0].logprobs.content
    assert len(found) > len(text)
    assert b"".join(bytes(one.bytes) for one in found).startswith(text.encode())
    told = complete(client, logprobs=0, **how).choices[0].logprobs
    for token, place in zip(told.tokens, told.text_offset, strict=True):
        assert token not in text or place == text.index(token)
    assert told.text_offset[:4] == [0, 0, 0, 1]


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["on", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("k", [0, 7])
def test_json_schema_is_kept_to(client: OpenAI, k: int):
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    answer = chat(
        client,
        max_tokens=200,
        response_format=form,
        extra_body={"speculation": {"num_speculative_tokens": k}},
    )
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["on"], bool)
    assert found["kind"] in ("a", "b")
    assert answer.choices[0].finish_reason == "stop"


def test_choice_of_texts(client: OpenAI):
    how = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert complete(client, extra_body=how).choices[0].text in ("yes", "no")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_flag"}}]
)
def test_required_tool_calls(client: OpenAI, choice: Any):
    how = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(client, max_tokens=200, **how)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "set_flag"
    assert isinstance(json.loads(call.function.arguments)["on"], bool)
    chunks = list(chat(client, max_tokens=200, stream=True, **how))
    streamed = [t for c in chunks for t in c.choices[0].delta.tool_calls or []]
    assert {t.index for t in streamed} == {0}
    assert [t.function.name for t in streamed if t.id] == ["set_flag"]
    assert "".join(t.function.arguments for t in streamed) == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_may_stay_unused(client: OpenAI):
    plain = chat(client, max_tokens=24).choices[0].message.content
    assert chat(client, max_tokens=24, tools=[TOOL]).choices[0].message.content == plain
    unused = chat(client, max_tokens=24, tools=[TOOL], tool_choice="none")
    assert unused.choices[0].message.content == plain


def test_results_of_tools_are_part_of_the_conversation(client: OpenAI):
    call = {"id": "1", "type": "function", "function": {"name": "set_flag", "arguments": "{}"}}
    turns = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "1", "content": "done"}]
    assert chat(client, messages=turns, max_tokens=4).usage.completion_tokens == 4


def test_an_answer_goes_back_as_the_client_has_it(client: OpenAI):
    """As an object, as a dictionary, and as the client's streaming helper assembles it."""
    how = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    how |= {"max_tokens": 200, "temperature": 0}
    message = chat(client, **how).choices[0].message
    with client.chat.completions.stream(model="demo", messages=MESSAGES, **how) as stream:
        helped = stream.get_final_completion().choices[0].message
    done = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    found = [
        chat(client, messages=[*MESSAGES, mine, done], max_tokens=4).usage.prompt_tokens
        for mine in (message, message.model_dump(), helped, helped.model_dump())
    ]
    assert len({*found}) == 1


def test_models(client: OpenAI):
    models = {model.id: model for model in client.models.list().data}
    assert set(models) == {"demo", "alias"}
    assert models["demo"].model_extra["num_speculative_tokens"] == 7
    assert client.models.retrieve("alias").id == "alias"
    assert complete(client, model="alias", max_tokens=2).model == "demo"


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "nobody"),
        ({"prompt": ""}, openai.BadRequestError, "empty"),
        ({"prompt": []}, openai.BadRequestError, "empty"),
        ({"prompt": [4096]}, openai.BadRequestError, "4096"),
        ({"prompt": "x " * 5000}, openai.BadRequestError, "context"),
        ({"max_tokens": -2}, openai.BadRequestError, "max_tokens"),
        ({"n": 1000}, openai.BadRequestError, "choices"),
        ({"n": 0}, openai.BadRequestError, "n: "),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"stop": ["a"] * 17}, openai.BadRequestError, "stop"),
        ({"stop": "a" * 1025}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"x": 1}}, openai.BadRequestError, "token id"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"best_of": 4}, openai.BadRequestError, "best_of"),
        ({"extra_body": {"max_token": 1}}, openai.BadRequestError, "did you mean max_tokens?"),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "use_beam_search"),
        ({"extra_body": {"bad_words": ["a"] * 1025}}, openai.BadRequestError, "bad words"),
        ({"extra_body": {"allowed_token_ids": [4096]}}, openai.BadRequestError, "4096"),
        (
            {"extra_body": {"speculation": {"num_speculative_tokens": 8}}},
            openai.BadRequestError,
            "8",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, openai.BadRequestError, "regex"),
    ],
)
def test_refusals(client: OpenAI, fields: dict[str, Any], kind: type, words: str):
    with pytest.raises(kind) as caught:
        complete(client, **fields)
    assert words in caught.value.body["message"]
    assert set(caught.value.body) == {"message", "type", "param", "code"}


def test_wrong_key(server: Any):
    stranger = OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        complete(stranger)


def test_only_allowed_tokens_are_written(client: OpenAI, offline: LLM):
    allowed = offline.encode(" zip zap")
    answer = complete(client, max_tokens=6, extra_body={"allowed_token_ids": allowed})
    assert {*offline.encode(answer.choices[0].text)} <= {*allowed}
    assert answer.usage.completion_tokens == 6


def test_bad_words_are_not_written(client: OpenAI, offline: LLM):
    plain = expected(offline, PROMPT, max_tokens=40).token_ids
    words = {token: offline.tokenizer.decode([token]).strip(" ") for token in plain}
    bad = [token for token in plain if words[token].isalpha()][:3]
    how = {"bad_words": [words[token] for token in bad], "return_token_ids": True}
    found = complete(client, max_tokens=40, extra_body=how).choices[0].model_extra["token_ids"]
    assert bad
    assert not {*bad} & {*found}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_be_shown(client: OpenAI, stream: bool):
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[10:13]
    how = {"max_tokens": 40, "stop": [stop], "extra_body": {"include_stop_str_in_output": True}}
    answer = complete(client, stream=stream, **how)
    chunks = list(answer) if stream else [answer]
    said = "".join(chunk.choices[0].text for chunk in chunks)
    assert said == text[: text.index(stop) + 3]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_special_tokens_stop_and_show(client: OpenAI, offline: LLM):
    """By their text as a stop string, though no text shows them; and in the text on request."""
    end = offline.tokenizer.eos_token
    how = {"max_tokens": 3, "logit_bias": {str(offline.tokenizer.eos_token_id): 100}}
    ignoring = {"ignore_eos": True}
    assert complete(client, **how, extra_body=ignoring).choices[0].finish_reason == "length"
    stopped = complete(client, **how, stop=[end], extra_body=ignoring)
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 1)
    shown = complete(client, **how, extra_body={"skip_special_tokens": False, **ignoring})
    assert shown.choices[0].text == end * 3
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert complete(client, **how, extra_body=both).choices[0].text == end


def test_a_prompt_is_cut_at_its_start(client: OpenAI, offline: LLM):
    ids = offline.encode(PROMPT * 2)
    for keep in (3, -1, 10_000):
        cut = complete(client, prompt=PROMPT * 2, extra_body={"truncate_prompt_tokens": keep})
        kept = 3 if keep == 3 else len(ids)
        assert cut.usage.prompt_tokens == kept
        assert cut.choices[0].text == complete(client, prompt=ids[-kept:]).choices[0].text
    long = [5] * (offline.engine.max_length + 7)
    cut = complete(client, prompt=long, max_tokens=4, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == offline.engine.max_length - 4
    assert cut.usage.completion_tokens == 4


def test_token_ids_are_told_on_request(client: OpenAI, offline: LLM):
    wanted = expected(offline, PROMPT, max_tokens=8)
    how = {"max_tokens": 8, "extra_body": {"return_token_ids": True}}
    whole = complete(client, **how).choices[0].model_extra
    assert whole["prompt_token_ids"] == list(wanted.prompt_token_ids)
    assert whole["token_ids"] == list(wanted.token_ids)
    chunks = [chunk.choices[0].model_extra for chunk in complete(client, stream=True, **how)]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        whole["prompt_token_ids"],
        *[None] * (len(chunks) - 1),
    ]
    told = chat(client, **how)
    assert len(told.model_extra["prompt_token_ids"]) == told.usage.prompt_tokens
    assert len(told.choices[0].model_extra["token_ids"]) == told.usage.completion_tokens
    first = next(iter(chat(client, stream=True, **how)))
    assert first.model_extra["prompt_token_ids"] == told.model_extra["prompt_token_ids"]
    assert "token_ids" not in chat(client, max_tokens=1).choices[0].model_extra


def test_log_probabilities_name_tokens_by_id_on_request(client: OpenAI, offline: LLM):
    wanted = [f"token_id:{token}" for token in expected(offline, PROMPT, max_tokens=4).token_ids]
    how = {"max_tokens": 4, "extra_body": {"return_tokens_as_token_ids": True}}
    found = complete(client, logprobs=2, **how).choices[0].logprobs
    assert found.tokens == wanted
    assert all(name.startswith("token_id:") for top in found.top_logprobs for name in top)
    plain = complete(client, logprobs=2, max_tokens=4).choices[0].logprobs
    assert found.text_offset == plain.text_offset
    said = chat(client, logprobs=True, **how).choices[0].logprobs.content
    shown = chat(client, logprobs=True, max_tokens=4).choices[0].logprobs.content
    assert [one.bytes for one in said] == [one.bytes for one in shown]
    assert all(one.token.startswith("token_id:") for one in said)


def test_other_names_of_forms(client: OpenAI):
    schema = {"type": "object", "properties": {"on": {"const": 1}}, "required": ["on"]}
    exact = {**schema, "additionalProperties": False}
    lark, gbnf = 'start: "yes"', 'root ::= "yes"'
    for fields, text in (
        ({"guided_choice": ["yes"]}, "yes"),
        ({"guided_regex": "y(e)s"}, "yes"),
        ({"regex": "y(e)s"}, "yes"),
        ({"guided_grammar": lark}, "yes"),
        ({"guided_grammar": gbnf}, "yes"),
        ({"ebnf": gbnf}, "yes"),
        ({"structured_outputs": {"grammar": gbnf}}, "yes"),
        ({"guided_json": exact}, '{"on":1}'),
        ({"guided_json": json.dumps(exact)}, '{"on":1}'),
        ({"json_schema": json.dumps(exact)}, '{"on":1}'),
        ({"response_format": {"type": "json_object", "schema": exact}}, '{"on":1}'),
        ({"response_format": {"type": "json_schema", "schema": exact}}, '{"on":1}'),
    ):
        answer = complete(client, max_tokens=60, extra_body=fields).choices[0]
        assert (answer.text.replace(" ", ""), answer.finish_reason) == (text, "stop"), fields
    with pytest.raises(openai.BadRequestError, match="give only one of guided_choice, regex"):
        complete(client, extra_body={"guided_choice": ["a"], "regex": "a"})


def test_no_tokens_and_no_filters_are_the_default(client: OpenAI):
    """As clients write it that always send every field."""
    plain = complete(client, temperature=0)
    for fields in ({"max_tokens": 0}, {"max_tokens": -1}, {"stop": [""]}, {"stop": ""}):
        answer = complete(client, **{"temperature": 0, **fields})
        assert answer.choices[0].text == plain.choices[0].text
    assert complete(client, temperature=1, top_p=0).choices[0].text == plain.choices[0].text
    greedy = {"temperature": 0, "top_p": 0.1, "extra_body": {"top_k": 3, "min_p": 0.1}}
    assert complete(client, **greedy).choices[0].text == plain.choices[0].text
    told = chat(client, max_tokens=2, extra_body={"top_logprobs": 0})
    assert told.choices[0].logprobs is None


def test_least_lengths_do_not_hinder_tools(client: OpenAI):
    how = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    extra = {"min_tokens": 3, "ignore_eos": True}
    answer = chat(client, max_tokens=200, extra_body=extra, **how)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_beginning_of_an_answer_goes_on(client: OpenAI, offline: LLM):
    begun = [*MESSAGES, {"role": "assistant", "content": "def is_prime"}]
    text = offline.tokenizer.apply_chat_template(begun, tokenize=False, continue_final_message=True)
    wanted = expected(offline, text, max_tokens=8)
    how = {"messages": begun, "max_tokens": 8}
    answer = chat(client, extra_body={"continue_final_message": True}, **how)
    assert answer.choices[0].message.content == wanted.text
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="give only one"):
        chat(client, extra_body=both, **how)


def test_variables_of_templates(server: Running, client: OpenAI, monkeypatch: Any):
    template = (
        "{{ reasoning_effort }}|{{ enable_thinking }}|{{ verbosity }}|{{ extra }}|"
        "{{ documents | map(attribute='text') | join(',') if documents else '' }}|"
        "{{ add_generation_prompt }}"
    )
    monkeypatch.setattr(server.service.llm.tokenizer, "chat_template", template)
    for fields, said in (
        ({}, "|||||True"),
        ({"add_generation_prompt": False}, "|||||False"),
        ({"reasoning_effort": "high", "verbosity": "low"}, "high|True|low|||True"),
        ({"reasoning_effort": "none"}, "none|False||||True"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "none|True||||True",
        ),
        ({"chat_template_kwargs": {"extra": {"a": [1, None]}}}, "|||{'a': [1, None]}||True"),
        ({"chat_template_kwargs": {"extra": None}}, "|||None||True"),
        ({"documents": [{"text": "a"}, {"text": "b"}]}, "||||a,b|True"),
    ):
        found = server.service.llm.tokenizer(said).input_ids
        told = chat(client, max_tokens=1, extra_body=fields)
        assert told.usage.prompt_tokens == len(found), fields
        asked = {"messages": MESSAGES, **fields}
        told = client.post("../tokenize", body=asked, cast_to=dict)  # type: ignore[type-var]
        assert told["tokens"] == found, fields


UNSUPPORTED = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "more": {"propertyNames": {"minLength": 1}}},
    "required": ["on"],
    "additionalProperties": False,
}


def tool_of(parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "set", "parameters": parameters, **more}}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_keyword_that_no_grammar_keeps_refuses_only_what_is_strict(client: OpenAI, choice: str):
    how = {"tools": [TOOL, tool_of(UNSUPPORTED)], "tool_choice": choice, "max_tokens": 200}
    answer = chat(client, parallel_tool_calls=False, **how).choices[0]
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "length")
    how["tools"] = [TOOL, tool_of(UNSUPPORTED, strict=True)]
    with pytest.raises(openai.BadRequestError, match=r"tool set: no grammar can keep properties\."):
        chat(client, **how)


def test_a_response_form_is_weakened_unless_it_is_strict(client: OpenAI):
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "it"}}
    form["json_schema"]["schema"] = UNSUPPORTED
    answer = chat(client, response_format=form, max_tokens=200).choices[0]
    assert isinstance(json.loads(answer.message.content)["on"], bool)
    form["json_schema"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"keep properties\.more\.propertyNames"):
        chat(client, response_format=form)
