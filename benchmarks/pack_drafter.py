"""A drafter whose products are packed integers with scales, in few megabytes.

    python benchmarks/pack_drafter.py smollm2/chat --out smollm2/chat-int4
    python benchmarks/pack_drafter.py pair/peagle --out pair/peagle-int8 --bits 8

The directory is in compressed-tensors' layout. Embeddings and norms stay as they are. With 8 bits
scales are powers of two, so that bfloat16 holds every number exactly, and float16 all but those of
the smallest scales. What the rounding costs in acceptance, `peagle bench TARGET --peagle …` tells
of the one and the other.
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
from peagle.errors import InputError
from peagle.files import replacing_directory
from peagle.models.formats.integers import Compressed
from peagle.models.formats.layout import Part, stem
from peagle.models.weights import WHOLE, read_json, read_tensors, save_tensors
from peagle.ops.weight import INT4, INT8
from peagle.ops.weight.integers import MIDDLE
from saving import stored

LAYOUTS = {4: Compressed(INT4, 64), 8: Compressed(INT8, 64)}
LARGEST = 127.49
"""The largest number of steps that eight bits hold, before it is rounded."""
STEPS = torch.linspace(6.5, 11.0, 19)
"""How many steps of rounding a group's largest number may be: beyond 7 it is cut, and the others
are rounded less."""
LEAST = 1e-12
"""What counts as the largest of numbers that are all zero."""


def settings(layout: Compressed) -> dict[str, Any]:
    """The `quantization_config`."""
    weights = {"num_bits": layout.bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": layout.group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    form = "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def main(
    drafter: Annotated[Path, typer.Argument(help="A drafter's directory, its weights in 16 bits.")],
    out: Annotated[Path, typer.Option(help="The directory to write.")],
    bits: Annotated[int, typer.Option(help="Bits of a number: 4, or 8.")] = 4,
) -> None:
    """Write the drafter, and say how large it was and is."""
    if bits not in LAYOUTS:
        raise InputError(f"--bits {bits}: give 4 or 8")
    tensors, layout = read_tensors(drafter), LAYOUTS[bits]
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        product = name.endswith(".weight") and tensor.ndim == 2 and name != EMBEDDINGS
        written |= packed(name, tensor, layout) if product else {name: tensor}
    values = {**read_json(drafter / "config.json"), "quantization_config": settings(layout)}
    with replacing_directory(out) as fresh:
        save_tensors(fresh / WHOLE, written)
        (fresh / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if (drafter / FOLDER).is_dir():
            shutil.copytree(drafter / FOLDER, fresh / FOLDER)
    sizes = (sum(each.nbytes for each in some.values()) / 1e6 for some in (tensors, written))
    print("{}: {:.2f} MB, packed {:.2f} MB".format(out, *sizes))


def packed(name: str, weight: Tensor, layout: Compressed) -> dict[str, Tensor]:
    """The tensors of a weight [outputs, depth]. Raises `InputError` for a depth without groups."""
    layout.shapes(tuple(weight.shape))
    part = rounded(weight, layout) if layout.bits == 4 else in_powers(weight, layout)
    tensors = stored(layout, part, high=1)
    return dict(zip((stem(name) + end for end in layout.ends), tensors, strict=True))


def in_powers(weight: Tensor, layout: Compressed) -> Part:
    """A weight in int8: of each group the least power of two as scale that cuts no number."""
    groups = weight.float().unflatten(1, (-1, layout.group))
    largest = groups.abs().amax(2, keepdim=True).clamp(min=LEAST)
    scales = torch.exp2(torch.ceil(torch.log2(largest / LARGEST)))
    codes = (groups / scales).round().to(torch.int8)
    return Part(codes.flatten(1).view(torch.uint8), scales.flatten(1).bfloat16())


def rounded(weight: Tensor, layout: Compressed) -> Part:
    """A weight in int4: of each group the scale with the least squares of what is rounded off."""
    groups = weight.float().unflatten(1, (-1, 1, layout.group))
    largest = groups.abs().amax(3).clamp(min=LEAST)
    trials = (largest / STEPS).bfloat16().float()[..., None]
    codes = (groups / trials).round().clamp(-MIDDLE, MIDDLE - 1)
    best = (codes * trials - groups).square().sum(3).argmin(2)[..., None, None]
    scales = trials.take_along_dim(best, 2).flatten(1).bfloat16()
    chosen = codes.take_along_dim(best, 2).flatten(1) + MIDDLE
    return Part(INT4.packed(chosen.to(torch.uint8)), scales)


if __name__ == "__main__":
    run(main)
