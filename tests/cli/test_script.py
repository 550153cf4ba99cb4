"""A script as a command.

This line is not part of its help.
"""

import sys

import pytest

from peagle.cli.script import new_app, run


def main(size: int = 3) -> None:
    """Told less."""


def first(app, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script.py", "--help"])
    with pytest.raises(SystemExit):
        app()
    return capsys.readouterr().out.splitlines()


def test_the_help_is_plain_and_begins_with_the_scripts_first_line(monkeypatch, capsys):
    lines = first(lambda: run(main), monkeypatch, capsys)
    assert lines[1:5] == ["", "  A script as a command.", "", "Options:"]


def test_so_does_that_of_several_commands(monkeypatch, capsys):
    app = new_app(__doc__)
    app.command("one")(main)
    app.command("two")(main)
    assert first(app, monkeypatch, capsys)[2] == "  A script as a command."
