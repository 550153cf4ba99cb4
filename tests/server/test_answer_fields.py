"""What answers hold on request: times and seeds, and the form of structural tags."""

import json
import re
from typing import Any

import openai
import pytest
from openai import OpenAI

pytestmark = pytest.mark.usefixtures("_clean")
DIGITS = {"type": "regex", "pattern": "[0-9]{2}"}
TAG = {"type": "tag", "begin": "<f>", "content": DIGITS, "end": "</f>"}
OLD = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_tells_its_times_and_its_seed_if_asked(client: OpenAI, stream: bool):
    def choices(**more: Any) -> list[Any]:
        fields = {"prompt": "def area(self):\n", "max_tokens": 9, "n": 2, "temperature": 1.0}
        answer = client.completions.create(model="demo", stream=stream, **fields, extra_body=more)
        found = [one for part in answer for one in part.choices] if stream else answer.choices
        return [choice for choice in found if choice.finish_reason is not None]

    told = [one.model_extra["metrics"] for one in choices(return_metrics=True, seed=40)]
    assert sorted(one["seed"] for one in told) == [40, 41]
    for one in told:
        assert one["queue_time_ms"] >= 0 < one["time_to_first_token_ms"]
        assert one["mean_itl_ms"] == pytest.approx(one["generation_time_ms"] / 8)
        ran = one["time_to_first_token_ms"] + one["generation_time_ms"]
        assert one["tokens_per_second"] == pytest.approx(9 / ran * 1e3)
    drawn = choices(return_metrics=True)[0].model_extra["metrics"]["seed"]
    again, before = [choices(seed=drawn)[0].text for _ in range(2)]
    assert again == before
    assert not any("metrics" in (one.model_extra or {}) for one in choices())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"response_format": {"type": "structural_tag", "format": TAG}}, r"<f>\d\d</f>"),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}, r"<f>\d\d</f>"),
        ({"response_format": {"type": "structural_tag", **OLD}}, r"(?s:.*)"),
    ],
    ids=["format", "structured_outputs", "structures"],
)
def test_an_answer_keeps_to_a_structural_tag(
    client: OpenAI, asked: dict[str, Any], form: str, stream: bool
):
    answer: Any = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=30,
        stream=stream,
        extra_body=asked,
    )
    if stream:
        text = "".join(part.choices[0].delta.content or "" for part in answer)
    else:
        text = answer.choices[0].message.content
    assert re.fullmatch(form, text)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"type": "structural_tag"}, "structural_tag lacks a field, or has a wrong one: 'format'"),
        ({"type": "structural_tag", "format": {"type": "token", "token": 3}}, "cannot keep"),
        ({"type": "structural_tag", "structures": [], "triggers": ["<"]}, "no tag begins with '<'"),
    ],
)
def test_a_tag_that_cannot_be_kept_is_a_400(client: OpenAI, asked: dict[str, Any], told: str):
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(
            model="demo", prompt="x", max_tokens=4, extra_body={"response_format": asked}
        )
    assert told in refusal.value.message
