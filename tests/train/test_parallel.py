"""Two ranks against one, on the same batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peagle.train.run import prepare

SCRIPT = """
import json, os, sys
from safetensors.torch import save_file
from peagle.train.recipe import Recipe
from peagle.train.run import prepare

trainer = prepare(Recipe(**json.loads(sys.argv[1])))
losses = trainer.gradient(0)
tensors = dict(zip(map(str, range(100)), trainer.optimizer.gradients()), losses=losses)
if int(os.environ["RANK"]) == int(sys.argv[3]):
    save_file(tensors, sys.argv[2])
"""


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_have_the_gradient_of_one(recipe_for, tmp_path: Path, method: str, rank: int):
    """Normalised per token, not per rank: loss and gradient within 1e-5."""
    recipe = recipe_for(tmp_path / "out", method=method, rows_per_step=3)
    script, found = tmp_path / "script.py", tmp_path / "found.safetensors"
    script.write_text(SCRIPT)
    plan = json.dumps(recipe.model_dump())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*launch, str(script), plan, str(found), str(rank)],
        check=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    tensors = load_file(found)
    alone = prepare(recipe)
    losses = alone.gradient(0)
    torch.testing.assert_close(tensors.pop("losses").sum(), losses.sum(), rtol=1e-5, atol=0)
    expected = alone.optimizer.gradients()
    assert len(tensors) == len(expected)
    norm = sum(float(g.square().sum()) for g in expected) ** 0.5
    error = sum(
        float((tensors[str(index)] - gradient).square().sum())
        for index, gradient in enumerate(expected)
    )
    assert error**0.5 <= 1e-5 * norm
