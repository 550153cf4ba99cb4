"""Small weights that their writers packed (`write_formats.py`), read as by their writers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peagle.errors import InputError
from peagle.models.formats import fp4
from peagle.models.formats.integers import Awq, Compressed, Gptq
from peagle.models.formats.layout import Layout, PackedRule
from peagle.models.weights import TensorRule
from peagle.ops.weight import INT4, INT8, QuantizedWeight
from saving import packed_tensors

WRITTEN = load_file(Path(__file__).parent / "formats.safetensors")
LAYOUTS: dict[str, Layout] = {
    "int4": Compressed(INT4, 128),
    "int4_32": Compressed(INT4, 32),
    "int4_64_asym": Compressed(INT4, 64),
    "int4_channel": Compressed(INT4),
    "int8_packed": Compressed(INT8, 128),
    "int8_packed_asym": Compressed(INT8),
    "int8": Compressed(INT8),
    "nvfp4_compressed": fp4.COMPRESSED,
    "mxfp4_compressed": fp4.COMPRESSED_MXFP4,
    "nvfp4_modelopt": fp4.MODELOPT,
    "awq": Awq(INT4, 64),
    "gptq": Gptq(INT4, 64),
    "gptq_v2": Gptq(INT4, 32, True, less=0),
    "gptq_8": Gptq(INT8, 64),
}


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    """As in a file, of a weight X."""
    begin = f"{case}."
    return {
        f"X.{name.removeprefix(begin)}": tensor
        for name, tensor in WRITTEN.items()
        if name.startswith(begin)
    }


def rule_for(case: str, parts: int = 1) -> PackedRule:
    tensors = tensors_of(case)
    layout = LAYOUTS[case].stored("X.", tensors)
    assert layout is not None
    plain = TensorRule("x", ("X.weight",) * parts, (len(tensors["X.dense"]),) * parts)
    return PackedRule.of(plain, layout)


def read(case: str, rule: PackedRule) -> QuantizedWeight:
    tensors = tensors_of(case)
    shape = (len(tensors["X.dense"]) * len(rule.sizes), tensors["X.dense"].shape[1])
    wanted = rule.shapes(shape)
    assert [rule.unfit(name, tensors[name], wanted[name]) for name in rule.theirs] == [
        None for _ in rule.theirs
    ]
    weight = rule.join([tensors[name] for name in rule.theirs], shape, torch.float32)
    assert isinstance(weight, QuantizedWeight)
    assert weight.nbytes == rule.nbytes(shape, torch.float32)
    return weight


@pytest.mark.parametrize("case", LAYOUTS)
def test_its_numbers_are_those_of_its_writers_reader(case: str):
    """To the last bit; parts of a product, too."""
    dense = tensors_of(case)["X.dense"]
    assert torch.equal(read(case, rule_for(case)).dense(), dense)
    assert torch.equal(read(case, rule_for(case, parts=2)).dense(), dense.repeat(2, 1))


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_is_written_again_are_its_bytes(case: str):
    """Or it is refused."""
    rule, tensors = rule_for(case, parts=2), tensors_of(case)
    weight = read(case, rule)
    if case.startswith(("awq", "gptq")):
        with pytest.raises(InputError, match="weights are not written in"):
            packed_tensors(rule, weight)
        return
    for name, found in zip(rule.theirs, packed_tensors(rule, weight), strict=True):
        assert (found.dtype, found.shape) == (tensors[name].dtype, tensors[name].shape), name
        same = (x.contiguous().flatten().view(torch.uint8) for x in (found, tensors[name]))
        assert torch.equal(*same), name
