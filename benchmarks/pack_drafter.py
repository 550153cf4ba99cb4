"""A drafter in int4: what its products read as packed integers with scales, in few megabytes.

    python benchmarks/pack_drafter.py smollm2/chat --out smollm2/chat-int4

The directory is in compressed-tensors' layout. Embeddings and norms stay as they are. What the
rounding costs in acceptance, `peagle bench TARGET --peagle …` tells of the one and the other.
"""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from peagle.cli.script import run
from peagle.drafters.checkpoint import EMBEDDINGS
from peagle.drafters.correction import FOLDER
from peagle.files import replacing_directory
from peagle.models.formats.integers import Compressed
from peagle.models.formats.layout import Part, stem
from peagle.models.weights import WHOLE, read_json, read_tensors, save_tensors
from peagle.ops.weight import INT4
from peagle.ops.weight.integers import MIDDLE
from saving import stored

LAYOUT = Compressed(INT4, 64)
STEPS = torch.linspace(6.5, 11.0, 19)
"""How many steps of rounding a group's largest number may be: beyond 7 it is cut, and the others
are rounded less."""
LEAST = 1e-12
"""What counts as the largest of numbers that are all zero."""
GROUP: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": LAYOUT.group,
    "symmetric": True,
}
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
}
"""The `quantization_config`."""


def main(
    drafter: Annotated[Path, typer.Argument(help="A drafter's directory, its weights in 16 bits.")],
    out: Annotated[Path, typer.Option(help="The directory to write.")],
) -> None:
    """Write the drafter, and say how large it was and is."""
    tensors = read_tensors(drafter)
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        product = name.endswith(".weight") and tensor.ndim == 2 and name != EMBEDDINGS
        written |= packed(name, tensor) if product else {name: tensor}
    values = {**read_json(drafter / "config.json"), "quantization_config": SETTINGS}
    with replacing_directory(out) as fresh:
        save_tensors(fresh / WHOLE, written)
        (fresh / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if (drafter / FOLDER).is_dir():
            shutil.copytree(drafter / FOLDER, fresh / FOLDER)
    sizes = (sum(each.nbytes for each in some.values()) / 1e6 for some in (tensors, written))
    print("{}: {:.2f} MB, packed {:.2f} MB".format(out, *sizes))


def packed(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a weight [outputs, depth]. Raises `InputError` for a depth without groups."""
    LAYOUT.shapes(tuple(weight.shape))
    tensors = stored(LAYOUT, rounded(weight), high=1)
    return dict(zip((stem(name) + end for end in LAYOUT.ends), tensors, strict=True))


def rounded(weight: Tensor) -> Part:
    """A weight in int4: of each group the scale with the least squares of what is rounded off."""
    groups = weight.float().unflatten(1, (-1, 1, GROUP["group_size"]))
    largest = groups.abs().amax(3).clamp(min=LEAST)
    trials = (largest / STEPS).bfloat16().float()[..., None]
    codes = (groups / trials).round().clamp(-MIDDLE, MIDDLE - 1)
    best = (codes * trials - groups).square().sum(3).argmin(2)[..., None, None]
    scales = trials.take_along_dim(best, 2).flatten(1).bfloat16()
    chosen = codes.take_along_dim(best, 2).flatten(1) + MIDDLE
    return Part(INT4.packed(chosen.to(torch.uint8)), scales)


if __name__ == "__main__":
    run(main)
