import contextlib
import os
from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.files import replacing, replacing_directory, rewritten_file, writing


def test_a_file_gets_its_name_once_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with replacing(file, ".7") as scratch:
        scratch.write_text("half")
        assert scratch.name == "file.7.part"
        assert file.read_text() == "before"
    assert file.read_text() == "half"
    assert [*tmp_path.iterdir()] == [file]


def test_after_an_error_the_one_before_stays_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError), replacing(file) as scratch:
        scratch.write_text("half, \ud800", encoding="utf-8")
    assert file.read_text() == "before"
    assert [*tmp_path.iterdir()] == [file]


def test_what_a_disk_refuses_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InputError, match=r"out cannot be written: .*; make room"),
        writing(Path("out"), "make room"),
    ):
        (tmp_path / "file" / "below").write_text("")


def test_a_directory_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    place = tmp_path / "below" / "place"
    with replacing_directory(place) as fresh:
        (fresh / "old").write_text("old")
    with replacing_directory(place) as fresh:
        (fresh / "new").write_text("new")
        assert [file.name for file in place.iterdir()] == ["old"]
    assert [file.name for file in place.iterdir()] == ["new"]
    with contextlib.suppress(KeyboardInterrupt), replacing_directory(place):
        raise KeyboardInterrupt
    assert [file.name for file in place.iterdir()] == ["new"]
    assert [*place.parent.iterdir()] == [place]


def test_a_signal_between_two_names_loses_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    with replacing_directory(place) as fresh:
        (fresh / "old").write_text("old")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        done = rename(path, target)
        if path == place:
            raise SystemExit
        return done

    with monkeypatch.context() as patched, pytest.raises(SystemExit), replacing_directory(place):
        patched.setattr(Path, "rename", interrupted)
    assert [file.name for file in place.iterdir()] == ["old"]
    assert [*tmp_path.iterdir()] == [place]


def interrupt(*_: object) -> None:
    """As Ctrl-C between writing a text and giving it its name."""
    raise KeyboardInterrupt


def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    with rewritten_file(out) as write:
        assert not out.exists()
        write("first")
        assert out.read_text() == "first"
    assert out.read_text() == "first"
    with contextlib.suppress(KeyboardInterrupt), rewritten_file(out) as write:
        monkeypatch.setattr(Path, "replace", interrupt)
        write("second")
    assert out.read_text() == "first"
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize("name", ["absent/out.json", "folder", "file/out.json", "n" * 300])
def test_a_place_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"), rewritten_file(tmp_path / name):
        pytest.fail("the block began")


def test_the_home_of_nobody_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path("~nobody-of-this-name/out.json")
    with pytest.raises(InputError, match="cannot be written: No such file"), rewritten_file(place):
        pytest.fail("the block began")


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real.json")
    with rewritten_file(tmp_path / "link") as write:
        write("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.json").read_text() == "x"
