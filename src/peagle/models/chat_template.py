"""Conversations as text: a chat template, and the messages in the form that it can show.

Templates differ in what they take. Some drop a message, or raise, where others show it. What one
does with a kind of message is found out by rendering a few words, once.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from peagle.errors import InputError

Turn = dict[str, Any]
SYSTEM = ("system", "developer")
"""Roles that instruct the model."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send back what the model thought."""
TAKEN = """
add_special_tokens chat_template continue_final_message conversation conversations documents
max_length messages padding return_assistant_tokens_mask return_dict return_tensors
sanitize_control_tokens self tokenize tokenizer_kwargs tools truncation"""
RESERVED = frozenset(TAKEN.split())
"""Names that are no variables of a template: arguments of ours and of transformers' function."""
EFFORT = "reasoning_effort"
NO_EFFORT = "none"
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""Further levels that clients know, ascending."""
PLAIN = [{"role": "user", "content": "Mark0"}]
"""A question."""
TAUGHT = ("low", "medium", "high")
"""Those that a model has learned whose template shows it any word."""
UNKNOWN_EFFORT = "Mark1"
PROBED = 64
"""Templates whose ways are remembered."""
NO_ARGUMENTS: Mapping[str, Any] = {}
NO_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
REASON_LENGTH = 300
"""Characters of a template's complaint that are told."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    /,
    **variables: Any,
) -> str:
    """Messages rendered as one text by the chat template, which transformers runs in a sandbox.

    `variables` are the template's, such as `tools`. Raises `InputError` when the tokenizer has no
    template and none is given, and when the template refuses the messages, naming the first that
    it refuses.
    """
    tools = variables.pop("tools", None) or None
    source = template_source(tokenizer, template, tools)
    if isinstance(variables.get(EFFORT), str):
        variables |= nearest_effort(source, variables.pop(EFFORT))
    shown = {"tools": template_tools(tools, source)} if tools else {}

    def render(count: int) -> str:
        """The first messages."""
        turns = template_turns(messages[:count], source)
        how = {"chat_template": source, "tokenize": False, **variables, **shown}
        return str(tokenizer.apply_chat_template(turns, **how))

    try:
        return render(len(messages))
    except Exception as error:  # whatever a template raises is about these messages
        what = _reason(error)
        place = _refused_message(render, len(messages), what)
        raise InputError(f"{place}the chat template refuses this: {what}") from None


def check_syntax(template: str) -> None:
    """Raise `InputError` for a text that is no template, whatever the messages."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    if not template.strip():
        raise InputError("it is empty")
    try:
        render_jinja_template([[]], chat_template=template)
    except TemplateSyntaxError as error:
        raise InputError(f"line {error.lineno}: {error.message}") from None
    except Exception:  # about there being no messages
        return


def template_source(tokenizer: Any, template: str | None, tools: Any) -> str:
    """The text of the template: `template`, or the tokenizer's own, perhaps one for tools."""
    if template is None and tokenizer.chat_template is None:
        raise InputError(
            f"{tokenizer.name_or_path} has no chat template; use a model with one, or plain-text "
            "prompts"
        )
    try:
        return str(tokenizer.get_chat_template(template, tools))
    except ValueError as error:
        raise InputError(f"{tokenizer.name_or_path}: {_reason(error)}") from None


def hides_tools(tokenizer: Any, template: str | None) -> bool:
    """Whether there is a chat template, and it tells the model nothing of its tools."""
    try:
        return not shows_tools(template_source(tokenizer, template, ["any"]))
    except InputError:
        return False


def template_turns(messages: Sequence[Mapping[str, Any]], source: str) -> list[Turn]:
    """Messages in the form that the template `source` shows; those are left as they are.

    The arguments of a tool call are an object, not OpenAI's text, unless the template shows text
    alone. Arguments that are no object stay text where the template shows that; elsewhere what can
    be read of them stands for them: a client repeats its history with every request. Thoughts have
    the names that templates read. Instructions stand at the start, as one message, unless the
    template shows later ones where they are. A message with several calls becomes several, each
    followed by its result, where the template takes one at a time.
    """
    turns = _instructions_first([_plain(message, source) for message in messages], source)
    several = any(len(_calls(turn)) > 1 for turn in turns)
    return _one_call_each(turns) if several and not shows_several_calls(source) else turns


def template_tools(tools: Sequence[Any], source: str) -> list[Any]:
    """Tools in the form that a template shows: some fail on one without a description."""
    if all(_described(tool) for tool in tools) or shows_undescribed_tools(source):
        return list(tools)
    return [
        tool if _described(tool) else {**tool, "function": {"description": "", **tool["function"]}}
        for tool in tools
    ]


@lru_cache(PROBED)
def shows_developer(source: str) -> bool:
    """Whether a template knows the role developer, as GPT-OSS's does."""
    turns = [{"role": "developer", "content": "Mark1"}, {"role": "user", "content": "Mark2"}]
    return "developer" in source and _shows(source, turns, "Mark1", "Mark2")


@lru_cache(PROBED)
def shows_later(source: str, role: str) -> bool:
    """Whether a template shows an instruction in the middle of a conversation."""
    roles = ("system", "user", "assistant", role, "user")
    turns = [{"role": role, "content": f"Mark{n}"} for n, role in enumerate(roles)]
    return _shows(source, turns, "Mark0", "Mark3", "Mark4")


@lru_cache(PROBED)
def shows_several_calls(source: str) -> bool:
    """Whether a template shows every call of a message, or at least not more if they are apart."""
    turns = [*_calling(_probe_call(1), _probe_call(2)), {"role": "user", "content": "Mark3"}]
    marks = ("Mark1", "Mark2", "Mark3")
    return _shows(source, turns, *marks) or not _shows(source, _one_call_each(turns), *marks)


@lru_cache(PROBED)
def shows_thoughts_beside_text(source: str) -> bool:
    """Whether a template takes a call with both thoughts and a text, which GPT-OSS's refuses."""
    call, thought = _probe_call(1), _thought("thought")
    both, alone = _calling(call, content="said", **thought), _calling(call, **thought)
    return _shows(source, both) or not _shows(source, alone)


@lru_cache(PROBED)
def nearest_effort(source: str, effort: str) -> dict[str, str]:
    """The effort that a template knows nearest to the one asked for, the lower of two, by the name
    of its variable; nothing where it knows none. One that is no level stays as it is."""
    if EFFORT not in source or effort not in (NO_EFFORT, *EFFORTS):
        return {EFFORT: effort}
    if effort == NO_EFFORT and _shows(source, PLAIN, **{EFFORT: effort}):
        return {EFFORT: effort}  # the switch for thoughts goes with it
    known = [level for level in EFFORTS if _knows_effort(source, level)]
    place = (NO_EFFORT, *EFFORTS).index(effort) - 1
    near = sorted(known, key=lambda level: abs(EFFORTS.index(level) - place))
    return {EFFORT: near[0]} if near else {}


def _knows_effort(source: str, level: str) -> bool:
    """Whether a template takes a level, and names it or is not the same without it."""
    if not _shows(source, PLAIN, **{EFFORT: level}):
        return False
    if re.search(rf"""["']{level}["']""", source):
        return True
    return level in TAUGHT and _shows(source, PLAIN, UNKNOWN_EFFORT, **{EFFORT: UNKNOWN_EFFORT})


@lru_cache(PROBED)
def shows_tools(source: str) -> bool:
    """Whether a template tells the model its tools, as far as that can be found out."""
    tools = _probe_tools(description="Mark2")
    named = any(_shows(source, PLAIN, mark, tools=tools) for mark in ("Mark1", "Mark2"))
    return named or not _shows(source, PLAIN, tools=tools)


@lru_cache(PROBED)
def shows_undescribed_tools(source: str) -> bool:
    """Whether a template takes a tool without a description."""
    return _shows(source, PLAIN, tools=_probe_tools())


@lru_cache(PROBED)
def shows_arguments(source: str, as_text: bool) -> bool:
    """Whether a template shows the arguments of a call as text, or as an object."""
    call = _probe_call(1, "Mark2" if as_text else {"Mark2": "Mark2"})
    return _shows(source, _calling(call), "Mark2")


def readable_object(text: str) -> dict[str, Any]:
    """The members of a JSON object that a text begins with, the last perhaps cut; else none."""
    try:
        found = from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _probe_call(number: int, arguments: Any = NO_ARGUMENTS) -> Turn:
    """A call with an id as Mistral's templates want it."""
    function = {"name": f"Mark{number}", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def _calling(*calls: Turn, content: str = "", **thought: Any) -> list[Turn]:
    """A question, calls in answer to it, and the result of each."""
    return [
        *PLAIN,
        {"role": "assistant", "content": content, **thought, "tool_calls": [*calls]},
        *({"role": "tool", "content": "done", "tool_call_id": call["id"]} for call in calls),
    ]


def _probe_tools(**description: str) -> list[Turn]:
    function = {"name": "Mark1", **description, "parameters": {"type": "object", "properties": {}}}
    return [{"type": "function", "function": function}]


def _shows(source: str, turns: Sequence[Turn], *marks: str, **variables: Any) -> bool:
    """Whether a template renders some turns, and the text has all the marks."""
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

    given: dict[str, Any] = {**NO_TOKENS, "add_generation_prompt": True, **variables}
    try:
        rendered: Any = render_jinja_template([list(turns)], chat_template=source, **given)
    except Exception:  # as in `render_chat`
        return False
    [[text], _] = rendered
    return all(mark in text for mark in marks)


def _plain(message: Mapping[str, Any], source: str) -> Turn:
    """A message of its own, with the names and values that templates read."""
    turn = {key: value for key, value in message.items() if key not in THOUGHTS}
    if turn.get("role") == "developer" and not shows_developer(source):
        turn["role"] = "system"
    turn["content"] = _text(turn.get("content"))
    thoughts = next((message[key] for key in THOUGHTS if message.get(key)), None)
    calls = turn.pop("tool_calls", None)
    if calls:  # some templates ask only whether the key is there
        turn["tool_calls"] = _shown_calls(calls, source)
    if thoughts is None:
        return turn
    if calls and turn.get("content") and not shows_thoughts_beside_text(source):
        return {**turn, "content": "", **_thought(f"{thoughts}\n\n{turn['content']}")}
    return {**turn, **_thought(thoughts)}


def _text(content: Any) -> Any:
    """Content as one text; where it has parts that are none, it stays."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    texts = [text for text in parts if isinstance(text, str)]
    return "".join(texts) if len(texts) == len(parts) else content


def _thought(text: Any) -> Turn:
    """Thoughts under the names that Qwen's and others' templates read, and GPT-OSS's."""
    return {"reasoning_content": text, "thinking": text}


def _shown_calls(calls: Any, source: str) -> Any:
    """Calls with their arguments in the form that the template shows."""
    if not isinstance(calls, list):
        return calls
    turned = []
    for call in calls:
        match call:
            case {"function": {**function}}:
                given = _arguments(function.get("arguments"), source)
                turned.append({**call, "function": {**function, "arguments": given}})
            case _:
                turned.append(call)
    return turned


def _arguments(given: Any, source: str) -> Any:
    is_text = isinstance(given, str)
    if given is None or (is_text and given.strip() in ("", "null")):
        given, is_text = {}, False
    try:
        found = from_json(given) if is_text else given
    except ValueError:
        found = None
    is_object = isinstance(found, dict)
    if shows_arguments(source, True) and not (is_object and shows_arguments(source, False)):
        return given if is_text else json.dumps(given, ensure_ascii=False)
    return found if is_object else readable_object(given) if is_text else {}


def _instructions_first(turns: list[Turn], source: str) -> list[Turn]:
    """One message with the instructions at the start, and those that the template shows later."""
    begun = list(itertools.takewhile(_instructs, turns))
    head: list[Turn] = list(begun)
    rest: list[Turn] = []
    for turn in turns[len(begun) :]:
        lost = _instructs(turn) and not shows_later(source, turn["role"])
        (head if lost else rest).append(turn)
    texts = [turn["content"] for turn in head if turn["content"]]
    if not head or not all(isinstance(text, str) for text in texts):
        return turns
    return [{**head[0], "content": "\n\n".join(texts)}, *rest]


def _instructs(turn: Turn) -> bool:
    return turn.get("role") in SYSTEM


def _calls(turn: Mapping[str, Any]) -> list[Any]:
    calls = turn.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """Call, result, call, result in place of all calls and then all results."""
    apart: list[Turn] = []
    at = 0
    while at < len(turns):
        turn, calls, stop = turns[at], _calls(turns[at]), at + 1
        while stop < len(turns) and turns[stop].get("role") == "tool":
            stop += 1
        results, at = turns[at + 1 : stop], stop
        if len(calls) < 2:
            apart += [turn, *results]
            continue
        before = turn
        for call, own in zip(calls, _results_of_each(calls, results), strict=True):
            apart += [{**before, "tool_calls": [call]}, *own]
            before = {"role": turn["role"], "content": ""}
    return apart


def _results_of_each(calls: Sequence[Any], results: Sequence[Turn]) -> list[list[Turn]]:
    """The results of each call: by its id, else in their order; what is left goes to the last."""
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    place_of: dict[Any, int] = {
        given: place for place, given in enumerate(ids) if isinstance(given, str)
    }
    groups: list[list[Turn]] = [[] for _ in calls]
    for number, result in enumerate(results):
        in_order = min(number, len(calls) - 1)
        groups[place_of.get(result.get("tool_call_id"), in_order)].append(result)
    return groups


def _described(tool: Any) -> bool:
    """Whether a tool has a description, or is no function that could get one."""
    match tool:
        case {"function": {**function}}:
            return "description" in function
    return True


def _reason(error: Exception) -> str:
    """The first line of what went wrong."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:REASON_LENGTH]


def _refused_message(render: Callable[[int], str], count: int, what: str) -> str:
    """The start of a sentence about the message with which rendering begins to fail like this."""
    fine, failing = 0, count
    while failing - fine > 1:
        middle = (fine + failing) // 2
        try:
            render(middle)
        except Exception as error:
            if _reason(error) == what:
                failing = middle
                continue
        fine = middle
    return f"messages.{failing - 1}: " if count > 1 else ""
