"""Tools of a request body, and which of them the model is to use."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from peagle.server.body import Body, Items
from peagle.server.variants import KNOWN_TYPE


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_./:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None


class ToolBody(Body):
    """A tool that the model may use."""

    type: Literal["function"] = "function"
    function: Function


Tools = Items[Annotated[ToolBody, KNOWN_TYPE]]


class NamedFunction(Body):
    """A function of the request, by its name."""

    name: str


class NamedTool(Body):
    """The tool to be used."""

    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _named_here(cls, value: Any) -> Any:
        """Some clients put the name beside the type."""
        if isinstance(value, dict) and "function" not in value and "name" in value:
            return {"type": value.get("type"), "function": {"name": value["name"]}}
        return value


class AllowedFunctions(Body):
    """Some of the functions, and whether one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedTool]


class AllowedTools(Body):
    """OpenAI's choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


class PlainChoice(Body):
    """A choice in a word, as an object."""

    type: Literal["none", "auto", "required", "any"]


ToolChoice = Literal["none", "auto", "required", "any"] | NamedTool | AllowedTools | PlainChoice
