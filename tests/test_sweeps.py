"""Of a sweep's combinations few are kept, and no value is lost."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import representatives


def combinations(*sizes: int) -> list[frozenset[tuple[int, str]]]:
    values = ([f"value {place}" for place in range(size)] for size in sizes)
    return [frozenset(enumerate(of)) for of in itertools.product(*values)]


@pytest.mark.parametrize("sizes", [(4, 3, 2), (1,), (1, 5)])
def test_every_value_is_kept_in_as_few_as_there_are_of_one_parameter(sizes: tuple[int, ...]):
    given = combinations(*sizes)
    kept = [given[place] for place in representatives(given)]
    assert frozenset().union(*kept) == frozenset().union(*given)
    assert len(kept) == max(sizes)


def test_the_values_of_others_take_turns():
    given = combinations(6, 2)
    kept = [given[place] for place in representatives(given)]
    assert [sum((1, f"value {value}") in one for one in kept) for value in range(2)] == [3, 3]


def test_what_is_never_combined_is_not_waited_for():
    given = [one for one in combinations(3, 3) if one != {(0, "value 1"), (1, "value 1")}]
    kept = [given[place] for place in representatives(given)]
    assert frozenset().union(*kept) == frozenset().union(*given)


SWEPT = """
import pytest
from sweeps import at_night

@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 5, *at_night([7])])
@pytest.mark.parametrize("form", "ab")
def test_swept(rows, form): pass

@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", "ab")
def test_whole(rows, form): pass
"""
HOOK = """
import pytest
from sweeps import leave_to_the_night

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items): leave_to_the_night(items)
"""


def test_what_is_left_out_is_for_the_night(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(SWEPT)
    (tmp_path / "conftest.py").write_text(HOOK)

    def collected(markers: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", markers]
        env = os.environ | {
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    whole = [f"test_whole[{form}-{rows}]" for form in "ab" for rows in (1, 5)]
    assert collected("not nightly") == ["test_swept[a-1]", "test_swept[b-5]", *whole]
    assert collected("nightly") == [
        *("test_swept[a-5]", "test_swept[a-7]", "test_swept[b-1]", "test_swept[b-7]")
    ]
