"""A request's fields -> `SamplingParams`, within the server's limits."""

import contextlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any

from peagle.config import SamplingParams, StructuredOutputs
from peagle.server.errors import APIError
from peagle.server.protocol import GenerationBody, ResponseFormat
from peagle.server.service import Service
from peagle.server.settings import Limits

FIELDS = SamplingParams.model_fields.keys() & GenerationBody.model_fields.keys()
"""Fields with the same name in both."""
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Other names of forms, vLLM's former ones and SGLang's."""
TAG = {"format", "structures", "triggers"}
"""What a structural tag of `response_format` consists of."""
LENGTHS = ("min_tokens", "ignore_eos")
"""Fields without effect on an output that ends where its form is complete."""


def sampling_params(
    service: Service,
    body: GenerationBody,
    most: int,
    logprobs: int | None,
    form: StructuredOutputs | None,
) -> SamplingParams:
    """The sampling parameters of all choices, with the seed of the first.

    most: tokens of an answer. Raises `APIError` or `InputError`.
    """
    limits = service.settings.limits
    words = body.bad_words or ()
    _check_size(len(words), limits.bad_words, "bad words", "bad_words")
    _check_size(sum(map(len, words)), limits.bad_word_letters, "characters", "bad_words")
    if body.stream and body.prompt_logprobs is not None:
        raise APIError(400, "a stream has no prompt_logprobs", "prompt_logprobs")
    values: dict[str, Any] = {"temperature": 1.0, **service.sampling_defaults}
    given = {name: getattr(body, name) for name in FIELDS}
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("top_p") == 0.0:
        values |= {"temperature": 0.0, "top_p": 1.0}
    if form is not None:
        values = {name: value for name, value in values.items() if name not in LENGTHS}
    values |= {
        "cache_salt": body.cache_salt or None,
        "stop": _stop_strings(body.stop, limits),
        "logit_bias": _logit_bias(body.logit_bias or {}, limits),
        "max_tokens": most,
        "logprobs": logprobs,
        "prompt_logprobs": body.prompt_top,
        "structured_outputs": form,
        "num_speculative_tokens": body.k,
    }
    return SamplingParams(**values)


def structured_outputs(body: GenerationBody, limits: Limits) -> StructuredOutputs | None:
    """The form that a request asks for, if any, by whichever of the fields for it."""
    asked = {name: form for name, form in _forms(body) if form is not None}
    if not asked:
        return None
    name, *more = asked
    if more:
        raise APIError(400, f"give only one of {', '.join(asked)}", name)
    return _checked(asked[name], limits, name)


def _forms(body: GenerationBody) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The fields that may ask for a form, each with vLLM's field for it."""
    yield "response_format", _response_form(body.response_format)
    given = body.structured_outputs
    if given is not None:
        yield "structured_outputs", given.model_dump(by_alias=True, exclude_none=True)
    for name, kind in ALIASES.items():
        value = getattr(body, name)
        yield name, None if value is None else {kind: value}


def _response_form(asked: ResponseFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "structural_tag":
        return {"structural_tag": asked.model_dump(include=TAG, exclude_none=True)}
    schema = asked.schema_ if asked.json_schema is None else asked.json_schema.schema_
    if asked.type == "json_object":
        return {"json_object": True} if schema is None else {"json": schema}
    if schema is None:
        raise APIError(400, "json_schema needs a schema", "response_format.json_schema")
    strict = asked.json_schema is not None and asked.json_schema.strict is True
    return {"json": schema, "strict": strict}


def check_schema(schema: Any, limits: Limits, param: str) -> None:
    """Refuse a schema that is too large, too deep, or whose `multipleOf` needs too many states."""
    if _is_deeper(schema, limits.schema_depth):
        raise APIError(400, f"nested more than {limits.schema_depth} deep", param)
    _check_size(len(json.dumps(schema)), limits.grammar_length, "characters", param)
    most = limits.common_multiple
    steps = [abs(step) for step in _steps(schema)]
    if not all(step <= most for step in steps) or math.lcm(*map(_digits, steps)) > most:
        raise APIError(400, f"multipleOf: the least common multiple of all is above {most}", param)


def _check_size(size: int, most: int, what: str, param: str) -> None:
    """Refuse a field that holds more of something than the server takes."""
    if size > most:
        raise APIError(400, f"more than {most} {what}", param)


def _checked(values: dict[str, Any], limits: Limits, param: str) -> StructuredOutputs:
    for value in values.values():
        if isinstance(value, dict):
            check_schema(value, limits, param)
        elif isinstance(value, str | list):
            _check_size(len("".join(value)), limits.grammar_length, "characters", param)
    for schema in _schemas_within(values.get("grammar", "")):
        check_schema(schema, limits, param)
    for name in ("json", "structural_tag"):
        if isinstance(values.get(name), str):
            values[name] = _parsed(name, values[name], limits, param)
    if "choice" in values:
        values["choice"] = tuple(values["choice"])
    return StructuredOutputs(**values)


def _parsed(name: str, text: str, limits: Limits, param: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise APIError(400, f"{name} is not valid JSON", param) from None
    if not isinstance(schema, dict):
        raise APIError(400, f"{name} must be an object", param)
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
    for child in _children(schema):
        yield from _steps(child)


def _digits(step: float) -> int:
    """A step without its decimal point, the number of remainders to distinguish. Never 0."""
    digits = Decimal(str(step)).normalize()
    return int(digits.scaleb(-min(int(digits.as_tuple().exponent), 0))) or 1


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects are nested more than `most` deep."""
    children = _children(value)
    return bool(children) and (most == 0 or any(_is_deeper(one, most - 1) for one in children))


def _children(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _stop_strings(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    given = (stop,) if isinstance(stop, str) else tuple(stop or ())
    strings = tuple(string for string in given if string)
    _check_size(len(strings), limits.stop_strings, "stop strings", "stop")
    longest = max(map(len, strings), default=0)
    _check_size(longest, limits.stop_length, "characters of a stop string", "stop")
    return strings


def _logit_bias(given: Mapping[str, float], limits: Limits) -> dict[int, float]:
    _check_size(len(given), limits.logit_biases, "biases", "logit_bias")
    try:
        return {int(token): value for token, value in given.items()}
    except ValueError:
        raise APIError(400, "keys must be token ids", "logit_bias") from None
