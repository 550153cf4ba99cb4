"""The tools of a request, and how it wants them to be called."""

from peagle.dialects.tools import Tool, ToolUse
from peagle.server.errors import APIError
from peagle.server.protocol import ChatBody
from peagle.server.sampling import check_schema
from peagle.server.settings import Limits
from peagle.server.tool_body import NamedTool, ToolBody


def tool_use(body: ChatBody, limits: Limits) -> ToolUse | None:
    """What the answer may call; None for nothing. Raises `APIError`."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise APIError(400, "tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    _check(tools, limits)
    known = tuple(map(_tool, tools))
    if isinstance(choice, NamedTool):
        named = tuple(tool for tool in known if tool.name == choice.name)
        if not named:
            raise APIError(400, f"no tool is called {choice.name}", "tool_choice")
        return ToolUse(named, required=True, most=1)
    most = 1 if body.parallel_tool_calls is False else None
    return ToolUse(known, choice == "required", most)


def _tool(tool: ToolBody) -> Tool:
    function = tool.function
    return Tool(function.name, function.parameters, function.strict is True)


def _check(tools: list[ToolBody], limits: Limits) -> None:
    for tool in tools:
        if tool.function.parameters:
            check_schema(tool.function.parameters, limits, "tools")
    names = [tool.function.name for tool in tools]
    if len({*names}) < len(names):
        raise APIError(400, "two tools have the same name", "tools")
