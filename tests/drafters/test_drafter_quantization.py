"""A drafter rounded to FP8 when it is loaded."""

from pathlib import Path

import pytest
import tiny
import torch

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.ops.linear import Linear
from peagle.ops.weight import QuantizedWeight, weights_of

PROMPTS = [[5, 6, 7, 8, 9], [30, 31, 32]]


@pytest.mark.parametrize("parallel", [True, False])
def test_the_answer_stays_and_the_target_too(targets, tmp_path: Path, parallel: bool):
    decoder, how = targets["easy"].decoder, SamplingParams(max_tokens=24)
    drafter = tiny.random_drafter_for(decoder, tmp_path, tiny.drafter_config(parallel))
    model = drafter.model
    before = sum(
        weight.nbytes for weight in weights_of(model.first, model.rest, model.readout.head)
    )
    plain = tiny.run(Engine(decoder, None, 0, tiny.engine_config()), PROMPTS, how)
    head = decoder.head.weight
    model.quantize()
    after = sum(weight.nbytes for weight in weights_of(model.first, model.rest, model.readout.head))
    assert after < 0.3 * before  # of float32
    drafted = tiny.run(Engine(decoder, drafter_for(model), 4, tiny.engine_config()), PROMPTS, how)
    assert tiny.outputs(drafted) == tiny.outputs(plain)
    assert decoder.head.weight is head
    assert isinstance(head, torch.Tensor)


def test_everything_read_in_every_pass_is_rounded(targets, tmp_path: Path):
    decoder = targets["easy"].decoder
    model = tiny.random_drafter_for(decoder, tmp_path, tiny.drafter_config(True)).model
    model.quantize()
    plain = {
        name
        for name, part in model.named_modules()
        if isinstance(part, Linear) and not isinstance(part.weight, QuantizedWeight)
    }
    assert plain == {"fc"}
