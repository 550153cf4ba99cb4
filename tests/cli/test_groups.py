"""Commands whose parameters are made from several options."""

from typing import Annotated, Any

import pytest

from peagle.cli.groups import Flags, Several, fields, flattened
from peagle.cli.script import new_app
from peagle.configuration import Config, PositiveInt
from peagle.errors import InputError


class Sizes(Config):
    rows: PositiveInt | None = None
    """How many. Each is
    a line. Default: all"""
    width: PositiveInt = 3
    """How wide."""
    cached: bool = True
    """Kept."""
    quick: bool = False
    """Fast."""


class Named(Flags):
    name: str = "none"
    """Any."""
    times: PositiveInt | None = None
    """Often, which
    is more than once. Default: once"""
    sizes_of: Several[PositiveInt] = (1,)
    """One or several."""


def run(*arguments: str) -> list[Any]:
    """What a command with two groups gets."""
    seen: list[Any] = []

    def command(
        *,
        named: Named,
        sizes: Annotated[dict[str, Any], fields(Sizes, "rows width cached quick", width=5)],
        word: str = "-",
    ) -> None:
        seen.extend([named, sizes, word])

    app = new_app("A test.")
    app.command()(flattened(command))
    app(arguments, standalone_mode=False)
    return seen


def test_a_group_is_made_from_its_options():
    flags = "--name x --sizes-of 3,4,3 --rows 2 --no-cached --quick --word w"
    named, sizes, word = run(*flags.split())
    assert (named, word) == (Named(name="x", sizes_of=(3, 4)), "w")
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
    assert "--times <int> Often, which is more than once. [default: (once)]" in text
    assert "--sizes-of <str> One or several. [default: 1]" in text


def test_a_value_that_cannot_be_is_told_by_its_flag():
    told = r"^--sizes-of: Input should be greater than 0; '0' was given$"
    with pytest.raises(InputError, match=told):
        run("--sizes-of", "3,0")
