"""The page of what runs names every family, and refuses what the code refuses."""

import re
from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.models.families import FAMILIES, read_values
from records.store import read_all
from records.support import support

PAGE = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
REFUSED = re.findall(r"`(\w+For\w+)`", PAGE.partition("## Refused")[2])


def test_every_family_has_a_row_and_no_real_weights_are_claimed_of_random_ones():
    table = support(read_all())
    assert all(f"| `{name}` |" in table for name in FAMILIES)
    for row in table.splitlines()[2:]:
        assert ("size |" in row) == ("random weights" in row)
    assert "tests only" in table


def test_a_later_result_takes_the_place_of_an_earlier_one():
    results = read_all()
    name = "qwen3-8b-fp8_2026-11-27"
    later = results[name].model_copy(update={"date": "2027-01-02", "command": "peagle bench"})
    assert "| [2027-01-02](../benchmarks/results/later.json) | `peagle bench` |" in support(
        {**results, "later": later}
    )


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_the_page_refuses_is_refused(architecture: str):
    with pytest.raises(InputError, match="is not supported"):
        read_values({"architectures": [architecture]}, "config.json")


def test_the_page_names_what_newcomers_bring():
    assert {"MixtralForCausalLM", "DeepseekV3ForCausalLM"} <= set(REFUSED)
