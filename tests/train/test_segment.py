"""How many elements a segment has, and what each of them keeps."""

from dataclasses import replace

import pytest
import tiny
import torch
from torch import nn

from peagle.drafters.model import DraftModel
from peagle.models.spec import MLPSpec
from peagle.ops.rope import rotation_at
from peagle.train.segment import ELEMENTS, KEPT, elements_per_segment, kept_by_layer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_small_drafter_has_more_elements_in_the_same_memory(recipe_for, tmp_path):
    unset, config = recipe_for(tmp_path), tiny.drafter_config(parallel=True)
    found = elements_per_segment(unset, config, CUDA)
    assert 0.99 < found * kept_by_layer(config, compiled=True) / (ELEMENTS * KEPT) <= 1
    layer = replace(tiny.DRAFT_LAYER, feed_forward=MLPSpec(1 << 20))
    large = tiny.drafter_config(parallel=True, layer=layer)
    assert elements_per_segment(unset, large, CUDA) == ELEMENTS
    assert elements_per_segment(unset, config, CPU) == ELEMENTS
    assert elements_per_segment(recipe_for(tmp_path, elements_per_segment=9), config, CUDA) == 9


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_layer_keeps_what_the_formula_says(qk_norm: bool):
    config = tiny.drafter_config(parallel=True, qk_norm=qk_norm)
    model, rows = DraftModel(config, 256), 64
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    rotation = rotation_at(model.rotations, torch.arange(rows))
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *rotation[:2])}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    stream = torch.randn(rows, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.rest[0](stream, rotation, 1, tiny.causal)
    sizes = [t.untyped_storage().nbytes() for place, t in kept.items() if place not in known]
    numbers = sum(sizes) / stream.element_size() / rows
    assert numbers == pytest.approx(kept_by_layer(config, compiled=False), rel=0.03)
