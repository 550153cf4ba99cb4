"""The tools of a request, and how it wants them to be called."""

from collections.abc import Sequence

from peagle.dialects.tools import Tool, ToolUse
from peagle.server.errors import APIError
from peagle.server.protocol import ChatBody
from peagle.server.sampling import check_schema
from peagle.server.settings import Limits
from peagle.server.tool_body import Function, NamedTool


def tool_use(body: ChatBody, limits: Limits) -> ToolUse | None:
    """What the answer may call; None for nothing. Raises `APIError`."""
    functions, choice = [tool.function for tool in body.tools or ()], body.tool_choice
    if not functions:
        if choice not in (None, "none"):
            raise APIError(400, "tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    _check(functions, limits)
    known = tuple(Tool(one.name, one.parameters, one.strict is True) for one in functions)
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in known if tool.name == choice.function.name)
        if not named:
            raise APIError(400, f"no tool is called {choice.function.name}", "tool_choice")
        return ToolUse(named, required=True, most=1)
    most = 1 if body.parallel_tool_calls is False else None
    return ToolUse(known, choice == "required", most)


def _check(functions: Sequence[Function], limits: Limits) -> None:
    for function in functions:
        if function.parameters:
            check_schema(function.parameters, limits, "tools")
    if len({function.name for function in functions}) < len(functions):
        raise APIError(400, "two tools have the same name", "tools")
