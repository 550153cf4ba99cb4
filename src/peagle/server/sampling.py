"""A request's fields -> `SamplingParams`, within the server's limits."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from peagle.config import SamplingParams, StructuredOutputs
from peagle.server.errors import APIError
from peagle.server.protocol import GenerationBody
from peagle.server.settings import Limits

FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "min_tokens",
)
"""Fields with the same name in both."""
FILTERS = ("top_p", "top_k", "min_p")
"""Fields without effect at temperature 0, with which clients send them nevertheless."""


def sampling_params(
    body: GenerationBody,
    defaults: Mapping[str, float],
    limits: Limits,
    max_tokens: int,
    logprobs: int | None,
    structured: StructuredOutputs | None,
) -> SamplingParams:
    """The sampling parameters of the first choice. Raises `APIError` or `InputError`."""
    if body.stream and body.prompt_logprobs is not None:
        raise APIError(400, "a stream has no prompt_logprobs", "prompt_logprobs")
    values: dict[str, Any] = {"temperature": 1.0, **defaults}
    given = {name: getattr(body, name) for name in FIELDS}
    values |= {name: value for name, value in given.items() if value is not None}
    if values["temperature"] == 0.0:
        values = {name: value for name, value in values.items() if name not in FILTERS}
    return SamplingParams(
        **values,
        seed=body.seed,
        stop=_stop_strings(body.stop, limits),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}, limits),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_top,
        structured_outputs=structured,
        num_speculative_tokens=body.k,
    )


def each_choice(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of n choices, each with its own seed, so that sampled ones differ."""
    if params.seed is None:
        return [params] * n
    return [params.model_copy(update={"seed": params.seed + index}) for index in range(n)]


def structured_outputs(body: GenerationBody, limits: Limits) -> StructuredOutputs | None:
    """The form required by `response_format` or `structured_outputs`, if any."""
    form, given = body.response_format, body.structured_outputs
    free = form is None or form.type == "text"
    if given is not None:
        if not free:
            raise APIError(400, "give response_format or structured_outputs", "response_format")
        return _checked(given.model_dump(by_alias=True, exclude_none=True), limits)
    if form is None or free:
        return None
    if form.type == "json_object":
        return StructuredOutputs(json_object=True)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise APIError(400, "json_schema needs a schema", "response_format.json_schema")
    return _checked({"json": form.json_schema.schema_}, limits)


def check_schema(schema: Any, limits: Limits, param: str) -> None:
    """Refuse a schema that is too large, too deep, or whose `multipleOf` needs too many states."""
    if _depth(schema, limits.schema_depth) > limits.schema_depth:
        raise APIError(400, f"nested more than {limits.schema_depth} deep", param)
    if len(json.dumps(schema)) > limits.grammar_length:
        raise APIError(400, f"longer than {limits.grammar_length} characters", param)
    most = limits.common_multiple
    steps = [abs(step) for step in _steps(schema)]
    if not all(step <= most for step in steps) or math.lcm(*map(_digits, steps)) > most:
        raise APIError(400, f"multipleOf: the least common multiple of all is above {most}", param)


def _checked(values: dict[str, Any], limits: Limits) -> StructuredOutputs:
    param = "structured_outputs"
    for value in values.values():
        if isinstance(value, dict):
            check_schema(value, limits, param)
        elif isinstance(value, str | list) and len("".join(value)) > limits.grammar_length:
            raise APIError(400, f"longer than {limits.grammar_length} characters", param)
    for schema in _schemas_within(values.get("grammar", "")):
        check_schema(schema, limits, param)
    if isinstance(values.get("json"), str):
        values["json"] = _parsed(values["json"], limits, param)
    if "choice" in values:
        values["choice"] = tuple(values["choice"])
    return StructuredOutputs(**values)


def _parsed(text: str, limits: Limits, param: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise APIError(400, "json is not valid JSON", param) from None
    if not isinstance(schema, dict):
        raise APIError(400, "json must be an object", param)
    check_schema(schema, limits, param)
    return schema


def _schemas_within(grammar: str) -> Iterator[Any]:
    """The schemas within a grammar in Lark's notation; invalid ones are left to its compiler."""
    for place in re.finditer(r"%json\s*", grammar):
        with contextlib.suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(grammar, place.end())[0]


def _steps(schema: Any) -> Iterator[float]:
    """Every number that a schema names in `multipleOf`."""
    if isinstance(schema, dict) and isinstance(schema.get("multipleOf"), int | float):
        yield schema["multipleOf"]
    if isinstance(schema, dict | list):
        for child in schema.values() if isinstance(schema, dict) else schema:
            yield from _steps(child)


def _digits(step: float) -> int:
    """A step without its decimal point, the number of remainders to distinguish. Never 0."""
    while step % 1:
        step *= 10
    return int(step) or 1


def _depth(value: Any, most: int) -> int:
    """Nesting depth of lists and objects, counted no further than one past `most`."""
    level, depth = [value], 0
    while depth <= most:
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            break
        depth += 1
    return depth


def _stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.stop_strings:
        raise APIError(400, f"more than {limits.stop_strings} stop strings", "stop")
    if any(len(string) > limits.stop_length for string in strings):
        raise APIError(400, f"a stop string longer than {limits.stop_length}", "stop")
    return strings


def _logit_bias(given: Mapping[str, float], limits: Limits) -> dict[int, float]:
    if len(given) > limits.logit_biases:
        raise APIError(400, f"more than {limits.logit_biases} biases", "logit_bias")
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise APIError(400, "keys must be token ids", "logit_bias") from None
