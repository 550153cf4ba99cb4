"""Sizes that do not fit are refused before anything is allocated."""

import pytest
import torch
from random_engine import random_engine

from peagle.bench import synthetic
from peagle.bench.case import Setup
from peagle.bench.random_weights import random_target
from peagle.bench.shapes import DRAFT_LAYERS, SHAPES, random_block, shape_of, weight_bytes
from peagle.bench.synthetic import SyntheticWorkload, require_room
from peagle.config import EngineConfig
from peagle.drafters.selector import SelectorConfig
from peagle.errors import InputError
from peagle.ops.draft import NO_DRAFT, Draft
from peagle.set_acceptance import SetAcceptance

GIB = 1 << 30


@pytest.fixture(params=[True, False], ids=["GPU", "CPU"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether torch sees a GPU; it is never touched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(synthetic, "free_memory", lambda _: pytest.fail("looked at the device"))
    return request.param


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_the_count_is_that_of_the_engines_weights(method: str):
    config = EngineConfig(device="cpu", max_num_seqs=1, kv_cache_memory=1 << 22)
    engine = random_engine("tiny", method, 0 if method == "none" else 3, None, config)
    weights = list(engine.target.parameters())
    if engine.proposer is not None:
        weights += engine.proposer.model.parameters()
    counted = weight_bytes("tiny", method, torch.float32)
    assert counted == sum(value.nbytes for value in weights)


def test_a_dflash_heads_own_weights_are_counted():
    """Its embeddings and its head are the target's."""
    shape = shape_of("tiny")
    target = random_target(shape.target, torch.device("cpu"), torch.float32)
    model = random_block(shape, target).model
    assert model.readout.head is target.head
    everything = {*target.parameters(), *model.parameters()}
    counted = weight_bytes("tiny", "dflash", torch.float32)
    assert counted == sum(value.nbytes for value in everything)


def test_a_published_size_has_about_the_parameters_of_its_name():
    sizes = {"qwen3-8b": 8.2e9, "qwen3-30b-a3b": 30.5e9, "gemma-4-31b": 30.7e9}
    for name, parameters in (sizes | {"gemma-4-26b-a4b": 25.2e9}).items():
        found = weight_bytes(name, "none", torch.bfloat16) / 2
        assert found == pytest.approx(parameters, rel=0.01)


def test_what_is_too_large_is_refused_with_what_it_takes_and_what_is_free(gpu: bool):
    if gpu:
        require_room("qwen3-8b", ["none"], "bfloat16", "auto", 16 * GIB)
        wanted = r"its weights take about 15.3 GiB, and 15.0 GiB of the GPU's are free"
        with pytest.raises(InputError, match=wanted):
            require_room("qwen3-8b", ["none"], "bfloat16", "auto", 15 * GIB)
    else:
        with pytest.raises(InputError, match=r"about 61.0 GiB, and 60.0 GiB of the machine's"):
            require_room("qwen3-8b", ["none"], "float32", "cpu", 60 * GIB)
        require_room("qwen3-8b", ["none"], "float32", "cpu", 62 * GIB)


def test_the_largest_method_counts(gpu: bool):
    with pytest.raises(InputError, match="does not fit" if gpu else "needs a GPU"):
        require_room("qwen3-8b", ["none", "peagle"], "bfloat16", "auto", 16 * GIB)


def test_only_a_small_shape_runs_on_a_cpu_that_was_not_asked_for(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for shape in SHAPES:
        if shape.startswith("tiny"):
            require_room(shape, DRAFT_LAYERS, "auto", "auto", GIB)
        else:
            with pytest.raises(InputError, match=f"shape {shape} needs a GPU, and torch sees none"):
                require_room(shape, DRAFT_LAYERS, "auto", "auto", 1 << 50)
            require_room(shape, DRAFT_LAYERS, "auto", "cpu", 1 << 50)


def test_a_shape_may_have_a_selector():
    selector = SelectorConfig(rank=8, candidates=16)
    workload = SyntheticWorkload("tiny", 2.5, 16, 16, EngineConfig(device="cpu"), selector=selector)
    model = workload.open(Setup("peagle", 3, "fixed"), 1).engine.core.proposer.model
    assert model.readout.selector.config == selector
    sequential = workload.open(Setup("eagle3", 3, "fixed"), 1).engine.core.proposer.model
    assert sequential.readout.selector is None


def test_what_is_no_draft_is_never_accepted():
    """Beside a request with more drafts one with fewer has rows that hold none."""
    accept = SetAcceptance((1.0, 1.0)).open(2, torch.device("cpu"))
    draft = Draft(torch.tensor([[5, 6], [7, NO_DRAFT]]))
    path = accept(draft, torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.arange(2))
    assert path.drafts.tolist() == [[5, 6], [7, NO_DRAFT]]
    assert path.chosen.tolist() == [[5, 6, 3], [7, 2, 3]]
