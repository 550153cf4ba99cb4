"""Hostile bodies against a server: only 2xx and 4xx, and afterwards it answers as before.

A grammar that fails in the middle of an answer is a 500, and counts apart.

    python benchmarks/server/fuzz.py --bodies 20000

Valid requests with some fields replaced, random JSON, and bytes that are not JSON go to every route
that reads a body. A body that is answered otherwise, or not at all, is printed, and the exit code
is then 1.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from process import serve

from peagle.bench.http import Address, ask
from peagle.bench.result_file import result_file
from peagle.cli.script import run
from peagle.server.anthropic.body import MessagesBody
from peagle.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from peagle.server.responses.body import ResponsesBody

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/invocations",
    "/tokenize",
    "/detokenize",
)
TYPES = ("application/json",) * 9 + ("text/plain", "", "application/json; charset=utf-16")
GRAMMAR_FAILED = b"structured outputs: "
"""In the error of an answer whose grammar failed."""
SECONDS = 120
"""After which a body has no answer."""
LIMITS = ("max_tokens", "max_output_tokens")
NORMAL = {"prompt": "def fibonacci(n):\n", "max_tokens": 32, "temperature": 0}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/invocations": {"prompt": "x", "max_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
FIELDS = {
    "/v1/completions": tuple(CompletionBody.model_fields),
    "/v1/chat/completions": tuple(ChatBody.model_fields),
    "/v1/responses": tuple(ResponsesBody.model_fields),
    "/v1/messages": tuple(MessagesBody.model_fields),
    "/v1/messages/count_tokens": tuple(MessagesBody.model_fields),
    "/invocations": tuple(CompletionBody.model_fields),
    "/tokenize": tuple(TokenizeBody.model_fields),
    "/detokenize": tuple(DetokenizeBody.model_fields),
}
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    8,
    20,
    21,
    1000,
    4095,
    4096,
    2**31,
    2**63,
    -(2**63),
    10**40,
    0.5,
    -0.0,
    1e308,
)
TEXTS = (
    "",
    "x",
    "\x00",
    "é世🙂",
    "\ud800",
    "{{ 7 * 7 }}",
    "a" * 20_000,
    "<|end|>",
    "(",
    "[a-",
    "a{1,9999}",
)
SCHEMAS: tuple[Any, ...] = (
    {"type": "object"},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"$ref": "#"},
    {"$ref": "http://localhost/schema"},
    {"enum": []},
    {"type": "nonsense"},
    {"pattern": "(a+)+$", "type": "string"},
    {"type": "array", "minItems": 10**9, "items": {"type": "array", "minItems": 10**9}},
    {"anyOf": [{"const": i} for i in range(300)]},
    {"properties": {f"p{i}": {"type": "string", "maxLength": 10**9} for i in range(50)}},
    {"type": "integer", "multipleOf": 1_000_003},
    {"type": "number", "multipleOf": 1e-300},
    {"allOf": [{"type": "integer", "multipleOf": 1009}, {"multipleOf": 1013}]},
    {"anyOf": [{"type": "integer", "multipleOf": 10_007 + 2 * i} for i in range(10)]},
    {"properties": {f"p{i}": {"type": "integer", "multipleOf": i} for i in range(300)}},
    {"type": "number", "minimum": -1e300, "maximum": 1e300},
    {"type": "string", "pattern": "^((a{100}){100}){100}$"},
)
GRAMMARS = (
    "start: start",
    "start: /(/",
    'start: "a"~1..100000',
    "start: %json {",
    "",
    "start: undefined",
    'start: %json {"type": "integer", "multipleOf": 1000003}',
)
Body = bytes


def main(
    bodies: Annotated[int, typer.Option(help="Number of bodies.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of the bodies.")] = 0,
    connections: Annotated[int, typer.Option(help="Bodies in flight.")] = 8,
    out: Annotated[Path | None, typer.Option(help="Result file to write.")] = None,
) -> None:
    """Send the bodies and print how they were answered."""
    draw = random.Random(seed)
    with result_file(out) as write:
        with serve([]) as server:
            counts, failures, same = asyncio.run(_run(server.address, draw, bodies, connections))
        result = {
            "bodies": bodies,
            "answers": {route: dict(sorted(found.items())) for route, found in counts.items()},
            "failures": failures,
            "answers_as_before": same,
        }
        print(json.dumps(result, indent=2))
        write(result)
    raise typer.Exit(1 if failures or not same else 0)


async def _run(
    address: Address, draw: random.Random, bodies: int, connections: int
) -> tuple[dict[str, Counter[str]], list[dict[str, str]], bool]:
    before = await _normal(address)
    counts: dict[str, Counter[str]] = {route: Counter() for route in ROUTES}
    failures: list[dict[str, str]] = []
    left = iter(range(bodies))

    async def send() -> None:
        for number in left:
            route, body, kind = draw.choice(ROUTES), b"", draw.choice(TYPES)
            body = _body(draw, route)
            try:
                async with asyncio.timeout(SECONDS):
                    status, answer = await ask(address, "POST", route, body, kind)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                failures.append({"route": route, "body": repr(body[:500]), "error": repr(error)})
                continue
            grammar = status == 500 and GRAMMAR_FAILED in answer
            counts[route]["500, a grammar" if grammar else str(status)] += 1
            if not (200 <= status < 300 or 400 <= status < 500 or grammar):
                failures.append({"route": route, "body": repr(body[:500]), "error": str(status)})
            if number % 2000 == 0:
                print(f"{number} bodies, {len(failures)} failures", file=sys.stderr)

    await asyncio.gather(*(send() for _ in range(connections)))
    return counts, failures, await _normal(address) == before


async def _normal(address: Address) -> Any:
    status, body = await ask(address, "POST", "/v1/completions", json.dumps(NORMAL).encode())
    return status, json.loads(body)["choices"]


def _body(draw: random.Random, route: str) -> Body:
    makers: tuple[Callable[[random.Random, str], Body], ...] = (_mutated, _mutated, _wild, _broken)
    return draw.choice(makers)(draw, route)


def _mutated(draw: random.Random, route: str) -> Body:
    """A valid request with one to three fields replaced."""
    body = dict(VALID[route])
    for _ in range(draw.randint(1, 3)):
        field = draw.choice(FIELDS[route] if draw.random() < 0.95 else ("unknown", "tokens"))
        body[field] = _likely(draw, field) if draw.random() < 0.6 else _value(draw, 0)
    for limit in LIMITS:
        if isinstance(body.get(limit), int) and body[limit] > 64:
            body["ignore_eos"] = False
            body[limit] = draw.choice((64, 10**30)) if draw.random() < 0.02 else 3
    return _encoded(body)


def _wild(draw: random.Random, route: str) -> Body:
    """Random JSON."""
    return _encoded(_value(draw, 0))


def _broken(draw: random.Random, route: str) -> Body:
    """A request that is truncated, flipped, nested too deeply, repeated, or not text."""
    body = bytearray(_encoded(VALID[route]))
    match draw.randint(0, 5):
        case 0:
            return bytes(body[: draw.randint(0, len(body))])
        case 1:
            body[draw.randrange(len(body))] = draw.randrange(256)
            return bytes(body)
        case 2:
            opening = draw.choice((b"[", b'{"a":', b'{"prompt":['))
            return opening * draw.choice((100, 5000, 100_000))
        case 3:
            return draw.randbytes(draw.randint(0, 300))
        case 4:
            return (
                b'{"prompt":"a","prompt":'
                + draw.choice((b"NaN", b"Infinity", b"1e999", b"0x1"))
                + b"}"
            )
        case _:
            return b'{"prompt":"x","seed":' + b"9" * draw.choice((20, 400, 5000)) + b"}"


def _likely(draw: random.Random, field: str) -> Any:
    """A value that looks right for a field and often is not."""
    text, number = draw.choice(TEXTS), draw.choice(NUMBERS)
    shaped: dict[str, Any] = {
        "prompt": draw.choice((text, [text] * 3, [number], [[5], [number]], [], [[]])),
        "messages": [
            {
                "role": draw.choice(("user", "assistant", "tool", "x")),
                "content": draw.choice((text, [_block(draw, text)])),
            }
            for _ in range(draw.randint(0, 3))
        ],
        "input": draw.choice((text, [_item(draw, text) for _ in range(draw.randint(0, 3))])),
        "system": draw.choice((text, [_block(draw, text)])),
        "tools": [_tool(draw, text) for _ in range(draw.randint(0, 2))],
        "tool_choice": draw.choice(
            (
                "auto",
                "required",
                "none",
                {"type": draw.choice(("function", "tool", "any", "allowed_tools")), "name": "f"},
            )
        ),
        "text": {"format": {"type": "json_schema", "name": text, "schema": draw.choice(SCHEMAS)}},
        "output_config": {"format": {"type": "json_schema", "schema": draw.choice(SCHEMAS)}},
        "reasoning": {"effort": text, "summary": draw.choice((text, None, number))},
        "thinking": {"type": draw.choice(("disabled", text))},
        "stop_sequences": [text],
        "max_output_tokens": 3,
        "response_format": {
            "type": draw.choice(("json_schema", "json_object", "text", "x")),
            "json_schema": {"name": "n", "schema": draw.choice(SCHEMAS)},
        },
        "structured_outputs": draw.choice(
            (
                {"json": draw.choice(SCHEMAS)},
                {"regex": text},
                {"choice": [text, "b"]},
                {"grammar": draw.choice(GRAMMARS)},
            )
        ),
        "logit_bias": {str(number): draw.choice(NUMBERS)},
        "stop": [text] * draw.choice((1, 4, 17)),
        "stop_token_ids": [number],
        "tokens": [number] * draw.choice((1, 5000)),
        "speculation": {"num_speculative_tokens": number, "trace": draw.choice((True, 1))},
        "stream_options": {"include_usage": draw.choice((True, "yes"))},
        "chat_template_kwargs": {draw.choice(("x", "tokenize", "messages")): text},
    }
    plain = (number, number, text, True, None, draw.random())
    return shaped.get(field, draw.choice(plain))


def _block(draw: random.Random, text: str) -> Any:
    """A part of a message in one of the forms of the routes."""
    kind = draw.choice(("text", "input_text", "thinking", "tool_use", "tool_result", "image", text))
    given = draw.choice((text, [{"type": "text", "text": text}], {"x": text}))
    return {
        "type": kind,
        "text": text,
        "thinking": text,
        "id": text,
        "name": text,
        "input": given,
        "tool_use_id": text,
        "content": given,
    }


def _item(draw: random.Random, text: str) -> Any:
    """An item of a response's input."""
    kinds = ("message", "reasoning", "function_call", "custom_tool_call", "function_call_output")
    parts = draw.choice((text, [_block(draw, text)]))
    return {
        "type": draw.choice((*kinds, "item_reference", "web_search_call", text, None)),
        "role": draw.choice(("user", "assistant", "developer", text)),
        "content": parts,
        "summary": [_block(draw, text)],
        "encrypted_content": draw.choice((text, "peagle:" + text, "peagle:/w==")),
        "call_id": text,
        "name": text,
        "namespace": draw.choice((text, None)),
        "arguments": text,
        "input": text,
        "output": parts,
    }


def _tool(draw: random.Random, text: str) -> Any:
    """A tool in one of the forms of the routes."""
    schema, name = draw.choice(SCHEMAS), draw.choice((text, "f"))
    function = {"name": name, "parameters": schema, "input_schema": schema, "strict": True}
    kind = draw.choice(("function", "custom", "namespace", "web_search", text))
    return {"type": kind, **function, "function": function, "tools": [{"type": "x", **function}]}


def _value(draw: random.Random, depth: int) -> Any:
    """Any JSON."""
    kind = draw.randint(0, 5 if depth < 4 else 3)
    if kind == 4:
        return [_value(draw, depth + 1) for _ in range(draw.randint(0, 4))]
    if kind == 5:
        keys = [draw.choice((*FIELDS[ROUTES[0]], *TEXTS)) for _ in range(draw.randint(0, 4))]
        return {key: _value(draw, depth + 1) for key in keys}
    return draw.choice((draw.choice(NUMBERS), draw.choice(TEXTS), True, False, None))


def _encoded(value: Any) -> Body:
    return json.dumps(value).encode()


if __name__ == "__main__":
    run(main)
