"""A drafter's selector on disk: the sub-folder `correction`, which other engines do not read.

Its tensors have DFlash2's names. Without the folder the directory is the same drafter, uncorrected.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from peagle.drafters.kind import PEAGLE
from peagle.drafters.model import DrafterConfig
from peagle.drafters.network import NetworkConfig
from peagle.drafters.selector import Selector, SelectorConfig
from peagle.errors import InputError
from peagle.models.families.config import LARGEST
from peagle.models.weights import (
    TensorRule,
    disassemble,
    finite,
    mismatches,
    read_json,
    shortened,
    write_model,
)

FOLDER = "correction"
RANK, CANDIDATES = "selector_rank", "selector_top_k"
ADVICE = f"train it for this drafter, or remove {FOLDER}/"


def read_selector_config(directory: Path) -> SelectorConfig | None:
    """Sizes of the selector in a drafter's directory; None without one. Raises `InputError`."""
    folder = directory / FOLDER
    if not folder.is_dir():
        return None
    values = read_json(folder / "config.json")
    match values.get(RANK), values.get(CANDIDATES):
        case int(rank), int(candidates) if 1 <= rank < LARGEST and 2 <= candidates < LARGEST:
            if bool not in (type(rank), type(candidates)):
                return SelectorConfig(rank, candidates)
    raise InputError(
        f"{folder}/config.json needs {RANK}, a whole number from 1 on, and {CANDIDATES}, one from "
        f"2 on; {ADVICE}"
    )


def selector_rules(config: NetworkConfig) -> list[TensorRule]:
    """Every tensor of a selector's file."""
    assert config.selector is not None
    name, rank = "candidate_selector", config.selector.rank
    return [
        TensorRule(
            "predecessor", (f"{name}.predecessor_codebook",), (config.transformer.vocab_size,)
        ),
        TensorRule("successor", (f"{name}.successor_codebook",), (config.draft_vocab_size,)),
        TensorRule("projection.weight", (f"{name}.hidden_projection",), (rank,)),
    ]


def selector_problems(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """Everything in a selector that does not fit its drafter, with a fix. tensors: its own."""
    if config.kind is not PEAGLE:
        return [f"{FOLDER}/ corrects mask slots, and an EAGLE-3 drafter has none; remove it"]
    with torch.device("meta"):
        selector = config.new_selector()
    assert selector is not None
    problems = mismatches(selector, selector_rules(config), tensors)
    if selector.config.candidates > config.draft_vocab_size:
        problems.append(
            f"{CANDIDATES} {selector.config.candidates} is above the draft vocabulary of "
            f"{config.draft_vocab_size}"
        )
    broken = [name for name, value in tensors.items() if not finite(value)]
    problems += [f"NaN or infinite values in {shortened(broken)}"] if broken else []
    return [f"{FOLDER}/ does not fit: {'; '.join(problems)}; {ADVICE}"] if problems else []


def save_selector(
    directory: Path, selector: Selector, config: DrafterConfig, dtype: torch.dtype
) -> None:
    """Write a selector into its drafter's directory."""
    folder = directory / FOLDER
    folder.mkdir()
    tensors = disassemble(selector, selector_rules(config))
    values = {RANK: selector.config.rank, CANDIDATES: selector.config.candidates}
    write_model(folder, {name: own.to(dtype) for name, own in tensors.items()}, values)
