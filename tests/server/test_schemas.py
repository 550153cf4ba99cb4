"""Limits of schemas: the compiler takes time and memory for each state of a number."""

import json
from typing import Any

import pytest

from peagle.server.errors import APIError
from peagle.server.protocol import CompletionBody
from peagle.server.sampling import check_schema, structured_outputs
from peagle.server.settings import Limits


def properties(*steps: float) -> dict[str, Any]:
    return {"properties": {f"p{i}": {"multipleOf": step} for i, step in enumerate(steps)}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1_000_003},
        {"type": "integer", "multipleOf": -1_000_003},
        {"type": "number", "multipleOf": 100.0003},
        {"type": "number", "multipleOf": float("inf")},
        {"type": "number", "multipleOf": float("nan")},
        {"type": "integer", "multipleOf": 10**400},
        {"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]},
        {"anyOf": [{"type": "integer", "multipleOf": 10_007 + 2 * i} for i in range(10)]},
        properties(10_007, 0, 10_009),
    ],
)
@pytest.mark.parametrize("place", ["json", "text", "grammar"])
def test_numbers_of_many_states_are_refused(schema: dict[str, Any], place: str):
    text = json.dumps(schema)
    grammar = f"start: a | b\na: %json {{}}\nb: %json\n  {text}"
    form = {"json": {"json": schema}, "text": {"json": text}, "grammar": {"grammar": grammar}}
    body = CompletionBody.model_validate({"prompt": "x", "structured_outputs": form[place]})
    with pytest.raises(APIError, match="least common multiple of all is above 100000") as refused:
        structured_outputs(body, Limits())
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "schema",
    [
        properties(1, 2, 5, 10, 12, 15, 24, 60, 1000, 0.01, 0.25),
        properties(1e-9, 0),
        *map(properties, (0.07, 0.29, 0.57, 1.1, 2.675)),
        {"multipleOf": 86_400},
        {"properties": {"multipleOf": {"type": "string"}}},
    ],
)
def test_those_in_use_are_not(schema: dict[str, Any]):
    check_schema(schema, Limits(), "tools")
