import json
import resource
from pathlib import Path
from typing import Any

import pytest

from peagle.errors import InputError
from peagle.regenerate.output import Output

BY = "me, greedy"


def line(asked: str, **more: str) -> dict[str, Any]:
    return {"source": "a:1", "asked": asked, "by": BY, **more}


def text(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    output = Output(path, BY, with_ids=False)
    assert output.done == set()
    assert not path.exists()
    output.write("f0", "a:1", {"prompt": "é\n"})
    whole = '{"source": "a:1", "asked": "f0", "by": "me, greedy", "prompt": "é\\n"}\n'
    assert path.read_text("utf-8") == whole
    assert output.done == {"f0"}
    shown = Output(path, BY, with_ids=False, variables={"think": False})
    shown.write("f1", "a:1", {})
    assert json.loads(path.read_text("utf-8").splitlines()[1]) == {
        **line("f1"),
        "chat_template_kwargs": {"think": False},
    }
    merged = {"chat_template_kwargs": {"think": False, "lang": "x"}}
    shown.write("f2", "a:1", merged)
    assert json.loads(path.read_text("utf-8").splitlines()[2]) == {**line("f2"), **merged}


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_answers_do_not_go_to_a_stream(name: str):
    with pytest.raises(InputError, match=f"^{name}: answers go to a plain file"):
        Output(Path(name), BY, with_ids=False)


@pytest.mark.parametrize("torn", ["", '{"sour', json.dumps(line("f2")), "\udcff"])
def test_a_file_is_continued_without_its_torn_last_line(tmp_path: Path, torn: str):
    path = tmp_path / "out.jsonl"
    whole = text(line("f0"), line("f1"))
    path.write_text(whole + torn, "utf-8", "surrogateescape")
    output = Output(path, BY, with_ids=False)
    assert output.done == {"f0", "f1"}
    assert path.read_text() == whole
    output.write("f2", "a:1", {})
    assert path.read_text() == whole + text(line("f2"))


FOREIGN = ["{}", "[]", "no JSON", '{"source": 1}', '{"source": "a:1"}', '{"messages": []}']


@pytest.mark.parametrize("foreign", FOREIGN)
def test_lines_of_another_kind_are_left_alone(tmp_path: Path, foreign: str):
    path = tmp_path / "out.jsonl"
    path.write_text(f"{text(line('f0'))}{foreign}\n")
    with pytest.raises(InputError, match=r"out\.jsonl:2: not a line written by peagle regenerate"):
        Output(path, BY, with_ids=False)
    assert path.read_text() == f"{text(line('f0'))}{foreign}\n"


REFUSED = [
    ({"source": "a:1", "messages": []}, "not a line written by peagle regenerate"),
    (line("f1") | {"by": "me, hot"}, "answered by me, hot, not by me, greedy; give another --out"),
]


@pytest.mark.parametrize(("other", "message"), REFUSED)
def test_answers_of_others_are_left_alone(tmp_path: Path, other: dict[str, str], message: str):
    path = tmp_path / "out.jsonl"
    path.write_text(text(line("f0"), other) + "torn")
    with pytest.raises(InputError, match=rf"out\.jsonl:2: {message}"):
        Output(path, BY, with_ids=False)
    assert path.read_text() == text(line("f0"), other) + "torn"


WITH_IDS = [
    {"messages": [{"role": "user"}, {"role": "assistant", "token_ids": [5]}]},
    {"prompt": "x", "response": "y", "token_ids": [5]},
]
WITHOUT = [{"messages": [{"role": "assistant"}]}, {"prompt": "x", "response": "y"}]


@pytest.mark.parametrize("written", WITH_IDS)
@pytest.mark.parametrize("earlier", WITHOUT)
def test_answers_without_their_ids_are_not_continued_with_them(
    tmp_path: Path, written: dict[str, Any], earlier: dict[str, Any]
):
    path = tmp_path / "out.jsonl"
    path.write_text(text(line("f0") | written))
    assert Output(path, BY, with_ids=True).done == {"f0"}
    path.write_text(text(line("f0") | written, line("f1") | earlier))
    with pytest.raises(InputError, match=r"out\.jsonl:2: its answers have no token ids; .* give"):
        Output(path, BY, with_ids=True)
    assert Output(path, BY, with_ids=False).done == {"f0", "f1"}


@pytest.mark.parametrize("written", ["{}", '{"prompt": "mine"}', "a thesis"])
def test_a_file_of_another_kind_without_a_newline_is_left_alone(tmp_path: Path, written: str):
    path = tmp_path / "out.jsonl"
    path.write_text(written)
    with pytest.raises(InputError, match=r"out\.jsonl:1: not a line written by peagle regenerate"):
        Output(path, BY, with_ids=False)
    assert path.read_text() == written


def test_a_torn_first_line_is_begun_again(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"source": "a:1", "pro')
    assert Output(path, BY, with_ids=False).done == set()
    assert path.read_bytes() == b""


def test_a_place_that_cannot_be_written(tmp_path: Path):
    absent = tmp_path / "absent" / "out.jsonl"
    for path, why in (
        (tmp_path, "Is a directory"),
        (absent, "No such file or directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(InputError, match=f"cannot be written: {why}"):
            Output(path, BY, with_ids=False)


def test_a_file_that_cannot_grow(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    output = Output(tmp_path / "out.jsonl", BY, with_ids=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(InputError, match=r"out\.jsonl cannot be written: File too large"):
            output.write("f0", "a:1", {"prompt": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert Output(tmp_path / "out.jsonl", BY, with_ids=False).done == set()
