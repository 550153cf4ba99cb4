import pytest
import tiny
import torch

from peagle.train.optimizer import DraftOptimizer


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_who_updates_what(recipe_for, tmp_path, optimizer: str):
    """Muon takes the layers' matrices; frozen parameters are left alone."""
    model = tiny.random_drafter(tiny.drafter_config(parallel=True))
    model.embed.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    subject = DraftOptimizer(model, recipe_for(tmp_path, optimizer=optimizer), fused=False)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    subject.step(0.1)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == before.keys() - {"embed.weight"}
    assert all(p.grad is None for p in model.parameters())
    by_muon = {
        name.removesuffix(".momentum_buffer") for name in subject.state() if "moment" in name
    }
    assert by_muon == {
        name
        for name, p in model.named_parameters()
        if optimizer == "muon" and p.ndim == 2 and name not in ("embed.weight", "head.weight")
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_optimizer_goes_on_as_before(recipe_for, tmp_path, optimizer: str):
    recipe = recipe_for(tmp_path, optimizer=optimizer)
    models = [tiny.random_drafter(tiny.drafter_config(parallel=True, layers=1)) for _ in range(2)]
    first = DraftOptimizer(models[0], recipe, fused=False)

    def step(model, subject: DraftOptimizer, seed: int) -> None:
        torch.manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        subject.step(0.01)

    step(models[0], first, 1)
    models[1].load_state_dict(models[0].state_dict())
    second = DraftOptimizer(models[1], recipe, fused=False)
    second.restore({name: value.clone() for name, value in first.state().items()})
    for model, subject in zip(models, (first, second), strict=True):
        step(model, subject, 2)
    expected = dict(models[0].named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in models[1].named_parameters())
