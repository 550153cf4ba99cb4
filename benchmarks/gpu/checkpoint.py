"""A shape's target and P-EAGLE drafter with random weights, as directories to load from.

    python benchmarks/gpu/checkpoint.py --shape qwen3-8b --out pair
    python benchmarks/server/overhead.py --target pair/target --drafter pair/drafter \\
        --dtype bfloat16 --prompts HumanEval.jsonl.gz

The tokenizer is the bundled target's, whose ids are a subset of the shape's.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from vllm_peer import target_json

from peagle.bench.random_weights import random_target
from peagle.bench.shapes import random_drafter, shape_of
from peagle.bench.synthetic import DRAFT_LAYERS
from peagle.cli.script import run
from peagle.device import resolve_device
from peagle.drafters.checkpoint import save_drafter
from peagle.models.families import decoder_rules, read_values
from peagle.models.weights import disassemble
from peagle.pair import bundled

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def main(
    out: Annotated[Path, typer.Option(help="Directory for target and drafter.")],
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bfloat16",
) -> None:
    """Write both directories."""
    kind, device = getattr(torch, dtype), resolve_device("auto")
    found = shape_of(shape)
    target = random_target(found.target, device, kind)
    place = out / "target"
    place.mkdir(parents=True)
    config = target_json(found.target, dtype)
    tensors = disassemble(target, decoder_rules(*read_values(config, str(place))))
    own = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(own, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config, indent=2))
    for name in TOKENIZER:
        shutil.copy(bundled("target") / name, place / name)
    drafter = random_drafter(found, True, DRAFT_LAYERS["peagle"], device, kind)
    save_drafter(out / "drafter", drafter.model, kind)


if __name__ == "__main__":
    run(main)
