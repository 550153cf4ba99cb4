from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.train.optimizer import DraftOptimizer
from peagle.train.snapshot import Progress, load_snapshot, save_snapshot

OPTIMIZERS = ["adamw", "muon"]
DTYPES = [torch.float32, torch.bfloat16]
CLIP = 1e9


def drafter(dtype: torch.dtype = torch.float32) -> DraftModel:
    return tiny.random_drafter(tiny.drafter_config(parallel=True, layers=1)).to(dtype)


def backward(model: DraftModel, seed: int, size: float = 1.0) -> dict[str, Tensor]:
    """Backpropagate random gradients, which are also returned."""
    torch.manual_seed(seed)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: torch.randn_like(p) * size for name, p in trained.items()}
    torch.autograd.backward(list(trained.values()), list(gradients.values()))
    return gradients


def values(model: DraftModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_who_updates_what(recipe_for, tmp_path: Path, optimizer: str, dtype: torch.dtype):
    """Muon takes the layers' matrices; frozen parameters are left alone."""
    model = drafter(dtype)
    model.embed.requires_grad_(False)
    before = values(model)
    subject = DraftOptimizer(model, recipe_for(tmp_path, optimizer=optimizer))
    backward(model, 1)
    subject.step(0.1, CLIP)
    after = values(model)
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == before.keys() - {"embed.weight"}
    assert all(p.grad is None for p in model.parameters())
    assert not any(gradient.any() for gradient in subject.gradients())
    state = subject.state()
    assert {n.removesuffix(".master") for n in state if n.endswith(".master")} == changed
    by_muon = {name.removesuffix(".momentum_buffer") for name in state if "moment" in name}
    assert by_muon == {
        name
        for name, p in model.named_parameters()
        if optimizer == "muon"
        and p.ndim == 2
        and name not in ("embed.weight", "readout.head.weight")
    }


@pytest.mark.parametrize("clip", [0.5, CLIP])
def test_gradients_are_clipped_together(recipe_for, tmp_path: Path, clip: float):
    """AdamW's first moment is a tenth of the gradient."""
    model = drafter()
    subject = DraftOptimizer(model, recipe_for(tmp_path))
    given = backward(model, 1)
    norm = sum(float(gradient.square().sum()) for gradient in given.values()) ** 0.5
    subject.step(0.1, clip)
    state = subject.state()
    for name, gradient in given.items():
        wanted = gradient * 0.1 * min(1.0, clip / norm)
        torch.testing.assert_close(state[f"{name}.exp_avg"], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_as_before(
    recipe_for, tmp_path: Path, optimizer: str, dtype: torch.dtype
):
    """Bit for bit, masters and all; the model is restored with it."""
    recipe = recipe_for(tmp_path, optimizer=optimizer)
    models = [drafter(dtype) for _ in range(2)]
    first, second = (DraftOptimizer(model, recipe) for model in models)
    backward(models[0], 1)
    first.step(0.01, 1.0)
    save_snapshot(tmp_path / "snapshot", first, Progress(step=1), {"another recipe": "a"})
    assert load_snapshot(tmp_path / "snapshot", second, {"another recipe": "a"}) == Progress(step=1)
    assert_same(second.state(), first.state())
    assert_same(values(models[1]), values(models[0]))
    for model, subject in zip(models, (first, second), strict=True):
        backward(model, 2)
        subject.step(0.01, 1.0)
    assert_same(second.state(), first.state())
    assert_same(values(models[1]), values(models[0]))


class TestMasters:
    """Those of a model that computes in bfloat16."""

    def test_they_are_float32_and_published(self, recipe_for, tmp_path: Path):
        model = drafter(torch.bfloat16)
        subject = DraftOptimizer(model, recipe_for(tmp_path))
        begun = values(model)
        for seed in range(3):
            backward(model, seed)
            subject.step(0.01, 1.0)
        kept, published = subject.state(), values(model)
        assert {value.dtype for value in kept.values()} == {torch.float32}
        for name, before in begun.items():
            master = kept[f"{name}.master"]
            assert torch.equal(published[name], master.bfloat16())
            assert not torch.equal(master.bfloat16(), before)
            assert not torch.equal(master, master.bfloat16().float()), "no more than bfloat16"

    def test_they_take_steps_too_small_for_bfloat16(self, recipe_for, tmp_path: Path):
        model = drafter(torch.bfloat16)
        subject = DraftOptimizer(model, recipe_for(tmp_path))
        torch.nn.init.ones_(model.readout.norm.weight)
        before = subject.state()["readout.norm.weight.master"].clone()
        for _ in range(100):
            model.readout.norm.weight.sum().backward()
            subject.step(1e-4, CLIP)
        moved = before - subject.state()["readout.norm.weight.master"]
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-2), rtol=1e-2, atol=0.0)

    def test_gradients_of_several_passes_add_up_in_float32(self, recipe_for, tmp_path: Path):
        """A bfloat16 sum would lose addends 500 times smaller than itself."""
        model = drafter(torch.bfloat16)
        subject = DraftOptimizer(model, recipe_for(tmp_path))
        passes = [backward(model, 1), *(backward(model, 2, 1e-3) for _ in range(500))]
        assert all(p.grad is None for p in model.parameters())
        for found, name in zip(subject.gradients(), passes[0], strict=True):
            assert found.dtype == torch.float32
            wanted = sum(gradients[name].double() for gradients in passes)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_they_step_as_a_float32_model_does(self, recipe_for, tmp_path: Path, optimizer: str):
        """From the same weights and gradients; Muon works in bfloat16 whatever it is given."""
        half = drafter(torch.bfloat16)
        whole = drafter(torch.bfloat16).float()
        recipe = recipe_for(tmp_path, optimizer=optimizer)
        subjects = [DraftOptimizer(model, recipe) for model in (half, whole)]
        for seed in range(2):
            given = backward(half, seed)
            for name, p in whole.named_parameters():
                p.grad = given[name].float()
            for subject in subjects:
                subject.step(0.01, 1.0)
        assert_same(subjects[0].state(), subjects[1].state())


@pytest.mark.parametrize("dtype", DTYPES)
def test_there_are_gradients_of_all_that_learns(recipe_for, tmp_path: Path, dtype: torch.dtype):
    """Zero where no backward pass reached, so that processes can sum theirs."""
    model = drafter(dtype)
    subject = DraftOptimizer(model, recipe_for(tmp_path))
    model.readout.norm.weight.sum().backward()
    for gradient, (name, p) in zip(subject.gradients(), model.named_parameters(), strict=True):
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, torch.full(p.shape, float(name == "readout.norm.weight")))
