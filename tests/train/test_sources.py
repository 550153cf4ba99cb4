import gzip
import json
import sys
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from peagle.errors import InputError
from peagle.train.sources import read_records

ROWS = [{"text": "one", "n": 1}, {"text": "two", "n": 2}]


def test_lines_keep_their_numbers(tmp_path: Path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\n  \n{"n": "\\u2028\xe2\x80\xa8"}\n')
    second.write_text('{"n": 3}')
    assert list(read_records([str(first), str(second)])) == [
        (f"{first}:1", {"n": 1}),
        (f"{first}:4", {"n": "\u2028\u2028"}),
        (f"{second}:1", {"n": 3}),
    ]


def test_a_compressed_file(tmp_path: Path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(whole := gzip.compress(b'{"n": 1}\n{"n": 2}\n'))
    assert list(read_records([str(file)])) == [(f"{file}:1", {"n": 1}), (f"{file}:2", {"n": 2})]
    for damaged in (whole[:-9], whole[:10] + b"?" + whole[11:], b'{"n": 1}\n'):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.jsonl\.gz cannot be read: ") as caught:
            list(read_records([str(file)]))
        assert "\n" not in str(caught.value)


def test_a_null_in_a_line_stays(tmp_path: Path):
    """There it was written by somebody."""
    (file := tmp_path / "a.jsonl").write_text('{"given": {"x": null}}')
    assert list(read_records([str(file)])) == [(f"{file}:1", {"given": {"x": None}})]


BAD = [
    (b"{", "not JSON: "),
    (b'{"a": 1', r"not JSON: .* at column 8$"),
    (b"[" * 100_000, "not JSON: "),
    (b"[1]", "not a JSON object"),
    (b'{"text": "\xff"}', "not valid UTF-8 text: "),
    (b'{"text": "\\ud800 half a character"}', "not valid UTF-8 text: "),
    (b'{"deep": [{"text": "\\udfff"}]}', "not valid UTF-8 text: "),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    records = read_records([str(file)])
    next(records)
    with pytest.raises(InputError, match=rf"data\.jsonl:2: {message}") as caught:
        next(records)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match="absent cannot be read: No such file"):
        list(read_records([str(tmp_path / "absent")]))


class TestDatasets:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        """As the hub stores a dataset: a file for each split."""
        data = tmp_path / "set" / "data"
        data.mkdir(parents=True)
        parquet.write_table(pa.Table.from_pylist(ROWS), data / "train-00000-of-00001.parquet")
        parquet.write_table(pa.Table.from_pylist(ROWS[:1]), data / "test-00000-of-00001.parquet")
        return tmp_path / "set"

    def test_a_directory_and_its_splits(self, directory: Path):
        found = list(read_records([f"hf:{directory}", f"hf:{directory}:test"]))
        assert found == [
            (f"hf:{directory}:1", ROWS[0]),
            (f"hf:{directory}:2", ROWS[1]),
            (f"hf:{directory}:test:1", ROWS[0]),
        ]

    def test_single_files(self, directory: Path):
        file = directory / "data" / "train-00000-of-00001.parquet"
        lines = directory / "rows.jsonl"
        lines.write_text("\n".join(map(json.dumps, ROWS)))
        for source in (f"hf:{file}", f"hf:{lines}", f"hf:{lines}:all"):
            assert [record for _, record in read_records([source])] == ROWS

    def test_objects_have_only_their_own_keys(self, tmp_path: Path):
        """In a table's columns each has the keys of all."""
        rows = [
            {"tools": [{"x": {"type": "integer"}}], "given": {"x": 0}, "words": ["a", None]},
            {"tools": [{"city": {"type": "string"}}], "given": {"city": "Paris"}},
            {"tools": [], "given": {}},
        ]
        table, lines = tmp_path / "a.parquet", tmp_path / "a.jsonl"
        parquet.write_table(pa.Table.from_pylist(rows), table)
        lines.write_text("\n".join(map(json.dumps, rows)))
        for source in (f"hf:{table}", f"hf:{lines}", str(table)):
            assert [record for _, record in read_records([source])] == rows

    def test_times_are_text(self, tmp_path: Path):
        table = pa.Table.from_pylist([{"turns": [{"at": datetime(2026, 1, 2, 3)}]}])
        parquet.write_table(table, tmp_path / "a.parquet")
        [(_, record)] = read_records([f"hf:{tmp_path / 'a.parquet'}"])
        assert record == {"turns": [{"at": "2026-01-02T03:00:00"}]}

    def test_what_cannot_be_read_is_named(self, directory: Path):
        (directory / "notes.txt").touch()
        bad = [("notes.txt", "give a directory, or a file of"), ("absent", "Couldn't find")]
        for name, message in bad:
            with pytest.raises(InputError, match=rf"^hf:.*{name} cannot be read: .*{message}"):
                list(read_records([f"hf:{directory / name}"]))
        with pytest.raises(InputError, match="Bad split: dev"):
            list(read_records([f"hf:{directory}:dev"]))

    def test_without_the_extra(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(InputError, match=r"needs datasets; .* pip install '.\[data\]'"):
            list(read_records([f"hf:{directory}"]))
