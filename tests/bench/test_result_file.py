import contextlib
import json
from pathlib import Path

import pytest

from peagle.bench.result_file import result_file
from peagle.errors import InputError


def test_the_file_is_whole_after_every_result(tmp_path):
    out = tmp_path / "out.json"
    with result_file(out) as write:
        assert not out.exists()
        for runs in ([1], [1, 2]):
            write({"runs": runs})
            assert json.loads(out.read_text()) == {"runs": runs}
    assert list(tmp_path.iterdir()) == [out]


def test_it_keeps_what_it_has_when_the_run_is_stopped(tmp_path):
    out = tmp_path / "out.json"
    with contextlib.suppress(KeyboardInterrupt), result_file(out) as write:
        write([1])
        raise KeyboardInterrupt
    assert json.loads(out.read_text()) == [1]
    assert list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    for place in (tmp_path, tmp_path / "absent" / "out.json"):
        with pytest.raises(InputError, match="cannot be written"), result_file(place):
            pytest.fail("the block ran")


def test_stdout_gets_the_last_result_however_it_ends(capsys):
    with contextlib.suppress(KeyboardInterrupt), result_file(Path("-")) as write:
        write([1])
        write([1, 2])
        raise KeyboardInterrupt
    assert json.loads(capsys.readouterr().out) == [1, 2]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with result_file(None) as write:
        write({"runs": []})
    assert not any(tmp_path.iterdir())
