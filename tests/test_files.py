from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.files import replacing, writing


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
