import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "start.py"


@pytest.mark.usefixtures("forked")
def test_without_a_gpu_it_says_so():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--shape", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 1
    assert "none is here" in done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_number_of_seats_starts_twice():
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--seats", "4,64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    starts = [line for line in done.stdout.splitlines() if line.startswith("Start(")]
    assert [line.split(",")[0] for line in starts] == ["Start(seats=4"] * 2 + ["Start(seats=64"] * 2
