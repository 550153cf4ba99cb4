import json
import resource
from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.regenerate.output import open_output


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    with open_output(path) as output:
        assert output.done == set()
        output.write({"source": "a:1", "prompt": "é\n"})
        assert path.read_text("utf-8") == '{"source": "a:1", "prompt": "é\\n"}\n'
        assert output.done == {"a:1"}


@pytest.mark.parametrize("torn", [b"", b'{"sour', b'{"source": "a:3", "prompt": ""}', b"\xff"])
def test_a_file_is_continued_without_its_torn_last_line(tmp_path: Path, torn: bytes):
    path = tmp_path / "out.jsonl"
    whole = b'{"source": "a:1"}\n{"source": "a:2"}\n'
    path.write_bytes(whole + torn)
    with open_output(path) as output:
        assert output.done == {"a:1", "a:2"}
        assert path.read_bytes() == whole
        output.write({"source": "a:3"})
    sources = [json.loads(line)["source"] for line in path.read_text().splitlines()]
    assert sources == ["a:1", "a:2", "a:3"]


@pytest.mark.parametrize("line", ["{}", "[]", "no JSON", '{"source": 1}', '{"messages": []}'])
def test_lines_of_another_kind_are_left_alone(tmp_path: Path, line: str):
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"source": "a:1"}}\n{line}\n')
    with (
        pytest.raises(InputError, match=r"out\.jsonl:2: not a line that peagle regenerate wrote"),
        open_output(path),
    ):
        pass
    assert path.read_text() == f'{{"source": "a:1"}}\n{line}\n'


@pytest.mark.parametrize("text", ["{}", '{"prompt": "mine"}', "a thesis"])
def test_a_file_of_another_kind_without_a_newline_is_left_alone(tmp_path: Path, text: str):
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with (
        pytest.raises(InputError, match=r"out\.jsonl:1: not a line that peagle regenerate wrote"),
        open_output(path),
    ):
        pass
    assert path.read_text() == text


def test_a_torn_first_line_is_begun_again(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"source": "a:1", "pro')
    with open_output(path) as output:
        assert output.done == set()
    assert path.read_bytes() == b""


def test_a_place_that_cannot_be_written(tmp_path: Path):
    for path in (tmp_path, tmp_path / "absent" / "out.jsonl"):
        with pytest.raises(InputError, match="cannot be written"), open_output(path):
            pass


def test_a_file_that_cannot_grow(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_output(tmp_path / "out.jsonl") as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            with pytest.raises(InputError, match=r"out\.jsonl cannot be written: File too large"):
                output.write({"source": "a:1", "prompt": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with open_output(tmp_path / "out.jsonl") as output:
        assert output.done == set()
