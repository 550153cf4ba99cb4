import torch

from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.packing import pack


def test_every_part_of_a_module_is_packed():
    module = torch.nn.Sequential(RMSNorm(8, 1e-6), torch.nn.Sequential(Linear(8, 4)))
    pack(module.requires_grad_(False))
    norm, linear = module[0], module[1][0]
    assert norm.folded is not None
    assert (linear.packed is not None) == torch.backends.mkl.is_available()
