"""Commands whose parameters are made from several options."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from peagle.cli.groups import fields, flattened, group
from peagle.cli.script import new_app
from peagle.config import Config, PositiveInt


class Sizes(Config):
    rows: PositiveInt | None = None
    width: PositiveInt = 3
    cached: bool = True
    quick: bool = False


@dataclass(frozen=True)
class Named:
    name: Annotated[str, typer.Option(help="Any.")] = "none"
    times: Annotated[int, typer.Option("--times", help="Often.")] = 1


HELPS = {"rows": ("How many.", "all"), "width": "How wide.", "cached": "Kept.", "quick": "Fast."}


def run(*arguments: str) -> list[Any]:
    """What a command with two groups gets."""
    seen: list[Any] = []

    def command(
        *,
        named: Annotated[Named, group(Named)],
        sizes: Annotated[dict[str, Any], fields(Sizes, HELPS, width=5)],
        word: str = "-",
    ) -> None:
        seen.extend([named, sizes, word])

    app = new_app("A test.")
    app.command()(flattened(command))
    app(arguments, standalone_mode=False)
    return seen


def test_a_group_is_made_from_its_options():
    named, sizes, word = run("--name", "x", "--rows", "2", "--no-cached", "--quick", "--word", "w")
    assert (named, word) == (Named("x", 1), "w")
    assert sizes == {"rows": 2, "width": 5, "cached": False, "quick": True}


def test_what_is_left_out_is_the_configurations_or_the_commands_default():
    named, sizes, _ = run()
    assert named == Named()
    assert Sizes(**sizes) == Sizes(width=5)
    assert "rows" not in sizes


def test_help_has_every_option_and_default(capsys: pytest.CaptureFixture[str]):
    run("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--rows <int> How many. [default: (all)]" in text
    assert "--width <int> How wide. [default: 5]" in text
    assert "--cached / --no-cached Kept." in text
    assert "--times <int> Often." in text
