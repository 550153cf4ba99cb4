"""A shape's target and P-EAGLE drafter with random weights, as directories to load from.

    python benchmarks/checkpoint.py --shape gpt-oss-20b --routing independent --out pair
    python benchmarks/serve.py pair/target --speculative-config '{"method": "eagle3", …}' …

The target is in the shape's published format, MXFP4 and FP8 included. It is made and written layer
by layer, so that GPT-OSS-120B needs its size on the disk, and a layer of memory. The tokenizer is
the bundled target's, with a word for each further id of the shape.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer

from peagle.bench.random_weights import Weights, random_ends, random_layers
from peagle.bench.shapes import Shape, random_drafter, random_mtp, shape_of
from peagle.cli.script import run
from peagle.device import resolve_device
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.model import DraftModel
from peagle.drafters.mtp import MTPHead, mtp_rules
from peagle.errors import InputError
from peagle.files import replacing_directory
from peagle.models.decoder import Decoder
from peagle.models.families import read_values
from peagle.models.weights import TensorRule
from peagle.pair import bundled
from peers.config_json import Values, config_json
from saving import save_target

TOKENIZER = "tokenizer.json"
BESIDE = ("tokenizer_config.json", "generation_config.json")


def main(
    out: Annotated[Path, typer.Option(help="Directory for target and drafter.")],
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    routing: Annotated[
        str | None,
        typer.Option(help="As in peagle bench: independent, half.", show_default="the shape's"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of what is not packed.")] = "bfloat16",
    drafter: Annotated[bool, typer.Option(help="Whether to write one.")] = True,
) -> None:
    """Write both directories, or nothing."""
    if out.exists():
        raise InputError(f"{out} exists; give another name")
    found, kind, device = shape_of(shape), getattr(torch, dtype), resolve_device("auto")
    weights = found.weights.routed(routing)
    with replacing_directory(out) as fresh:
        write_target(fresh / "target", found, weights, dtype, device)
        if drafter:
            model = random_drafter(found, "peagle", device, kind).model
            assert isinstance(model, DraftModel)
            save_drafter(fresh / "drafter", model, kind)


def write_target(
    directory: Path, shape: Shape, weights: Weights, dtype: str, device: torch.device
) -> None:
    """Write a target, the same as `random_target` makes on this device, with its own head."""
    directory.mkdir()
    source = shape.target, device, getattr(torch, dtype), weights
    values = config_json(shape.target, dtype, weights.quantization)
    ends = random_ends(*source)
    heads = [own_head(ends, values, weights)] if shape.target.recurrent else []
    save_target(directory, values, ends, random_layers(*source), heads)
    for name in BESIDE:
        shutil.copy(bundled("target") / name, directory / name)
    text = (bundled("target") / TOKENIZER).read_text()
    (directory / TOKENIZER).write_text(with_words(text, shape.target.vocab_size))


def own_head(ends: Decoder, values: Values, weights: Weights) -> tuple[MTPHead, list[TensorRule]]:
    """A random MTP head for a target's ends, and the rules of its tensors."""
    head = random_mtp(ends, weights).model
    assert isinstance(head, MTPHead)
    family, _ = read_values(values, "a shape")
    return head, mtp_rules(family, head.config)


def with_words(tokenizer: str, vocab_size: int) -> str:
    """A byte-level tokenizer whose further ids, up to a number, are words that it never makes."""
    values = json.loads(tokenizer)
    words = values["model"]["vocab"]
    known = {*words.values(), *(token["id"] for token in values["added_tokens"])}
    words |= {f"Ġw{number}": number for number in range(vocab_size) if number not in known}
    return json.dumps(values, ensure_ascii=False)


if __name__ == "__main__":
    run(main)
