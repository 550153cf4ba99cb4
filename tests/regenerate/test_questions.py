"""Questions that a target writes itself: different, and the same in every run."""

import asyncio
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peagle.errors import InputError
from peagle.regenerate.questions import QuestionFile, write_questions
from peagle.regenerate.run import read_conversations

SAID = ["Why?", "How  so?", None, "why?", "When?", "how so?", "Who?", None, "Where?"]
"""What the target writes, number by number, again and again."""
DIFFERENT = ["Why?", "How  so?", "When?", "Who?", "Where?"]


def run(path: Path, wanted: int, in_flight: int = 3, seed: int = 0) -> int:
    """Write questions, whose answers come in any order; how many were new."""
    draw, told = random.Random(seed), []

    async def ask(number: int) -> str | None:
        for _ in range(draw.randrange(5)):
            await asyncio.sleep(0)
        return SAID[number % len(SAID)]

    file = QuestionFile(path, "target, seed 0")
    asyncio.run(write_questions(ask, file, wanted, in_flight, lambda: told.append(1)))
    return len(told)


def questions(path: Path) -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()]


@given(st.integers(1, 5), st.integers(1, 9), st.integers())
def test_they_are_different_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, wanted: int, in_flight: int, seed: int
):
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    assert run(path, wanted, in_flight, seed) == wanted
    assert questions(path) == DIFFERENT[:wanted]
    assert len(read_conversations([str(path)])) == wanted


def test_a_later_run_goes_on_where_one_was_stopped(tmp_path: Path):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "questions.jsonl"
    run(whole, 5)
    for end in range(0, whole.stat().st_size, 7):
        path.write_bytes(whole.read_bytes()[:end])
        run(path, 5)
        assert path.read_bytes() == whole.read_bytes()
    assert run(path, 5) == 0


def test_too_many_that_are_alike(tmp_path: Path):
    with pytest.raises(InputError, match="5 different questions in 88 tries"):
        run(tmp_path / "questions.jsonl", 6)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": [{"content": "a"}], "number": 0, "by": "other"}', "written by other"),
        ('{"prompt": "a"}', "not a question"),
        ("no JSON", "not a question"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, line: str, complaint: str):
    path = tmp_path / "questions.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=f"questions.jsonl:1: {complaint}"):
        QuestionFile(path, "target, seed 0")
    assert path.read_text() == line + "\n"
