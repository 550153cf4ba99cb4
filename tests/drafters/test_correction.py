"""A selector's folder: what does not fit its drafter is said on one line, with a fix."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from peagle.drafters.diagnosis import diagnose
from peagle.drafters.selector import SelectorConfig
from peagle.errors import InputError

CONFIG = tiny.drafter_config(True, draft_vocab=30, selector=SelectorConfig(rank=4, candidates=6))


def change_config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


def change_tensor(folder: Path, name: str, value: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {f"candidate_selector.{name}": value}, file)


SIZES = (
    r"correction/config\.json needs selector_rank, a whole number from 1 on, and selector_top_k, "
    "one from 2 on; train it for this drafter, or remove correction/"
)
MISFITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another vocabulary": (
        lambda folder: change_tensor(folder, "successor_codebook", torch.ones(40, 4)),
        r"correction/ does not fit: candidate_selector.successor_codebook has shape \[40, 4\], "
        r"expected \[30, 4\]; train it for this drafter, or remove correction/",
    ),
    "another rank": (
        lambda folder: change_config(folder, selector_rank=5),
        r"predecessor_codebook has shape \[96, 4\], expected \[96, 5\].*; train it",
    ),
    "not finite": (
        lambda folder: change_tensor(folder, "hidden_projection", torch.full((4, 64), torch.nan)),
        "NaN or infinite values in candidate_selector.hidden_projection; train it",
    ),
    "no rank": (
        lambda folder: change_config(folder, selector_rank=0),
        SIZES,
    ),
    "no sizes": (lambda folder: (folder / "config.json").write_text("{}"), SIZES),
    "half a rank": (lambda folder: change_config(folder, selector_rank=4.5), SIZES),
    "no number": (lambda folder: change_config(folder, selector_top_k="six"), SIZES),
    "more candidates than drafts": (
        lambda folder: change_config(folder, selector_top_k=31),
        "correction/ does not fit: selector_top_k 31 is above the draft vocabulary of 30; train it",
    ),
    "no description": (
        lambda folder: (folder / "config.json").unlink(),
        r"correction is not a model directory: it has no config\.json",
    ),
    "cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 20),
        "is damaged or cut short",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_selector_that_does_not_fit(target, tmp_path: Path, name: str):
    directory = tiny.save_random_drafter(tmp_path / "drafter", CONFIG)
    tiny.load_drafter(directory, target.decoder)
    change, message = MISFITS[name]
    change(directory / "correction")
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_drafter(directory, target.decoder)
    assert "\n" not in str(caught.value)
    found = diagnose(directory, target.directory)
    assert len(found.problems) == 1
    assert message.split(".*")[0].replace("\\", "") in found.problems[0]


def test_an_eagle3_drafter_has_nothing_to_correct(target, tmp_path: Path):
    sequential = tiny.save_random_drafter(tmp_path / "eagle3", tiny.drafter_config(False))
    corrected = tiny.save_random_drafter(tmp_path / "drafter", CONFIG)
    shutil.copytree(corrected / "correction", sequential / "correction")
    message = "correction/ corrects mask slots, and an EAGLE-3 drafter has none; remove it"
    with pytest.raises(InputError, match=message):
        tiny.load_drafter(sequential, target.decoder)
    assert message in diagnose(sequential).problems


def test_a_selector_is_described(tmp_path: Path):
    found = diagnose(tiny.save_random_drafter(tmp_path / "drafter", CONFIG))
    assert found.problems == ()
    assert found.facts["correction"] == "a selector of rank 4 over 6 drafts (correction/)"
