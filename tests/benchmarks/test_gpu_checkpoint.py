"""Directories of random weights in a shape's size."""

import subprocess
import sys
from pathlib import Path

import torch

from peagle.bench.random_weights import random_target
from peagle.bench.shapes import shape_of
from peagle.drafters.diagnosis import diagnose
from peagle.models.loading import load_decoder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "checkpoint.py"


def test_they_load_as_what_they_are(tmp_path: Path):
    out = tmp_path / "pair"
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--dtype", "float32"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    cpu, shape = torch.device("cpu"), shape_of("tiny")
    loaded = load_decoder(out / "target", torch.float32, cpu)
    wanted = random_target(shape.target, cpu, torch.float32)
    for (name, ours), theirs in zip(loaded.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert not diagnose(out / "drafter", out / "target", parallel=True).problems
