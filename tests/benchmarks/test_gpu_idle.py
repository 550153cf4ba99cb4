import os
import subprocess
import sys
from pathlib import Path

import pytest
from idle import idle

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "idle.py"
pytestmark = pytest.mark.usefixtures("forked")


def test_pauses_are_times_in_which_no_kernel_runs():
    """Kernels may overlap, come in any order, and end in another than they began."""
    found = idle([(100.0, 110.0), (0.0, 40.0), (10.0, 20.0), (45.0, 60.0)])
    assert found.microseconds == 110.0
    assert found.kernels == 4
    assert found.between_cycles == pytest.approx(40 / 110)
    assert found.within_cycles == pytest.approx(5 / 110)
    assert found.longest_us == [40.0, 5.0]


def test_without_a_gpu_it_says_so():
    command = [sys.executable, str(SCRIPT), "--shape", "tiny"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 1
    assert "there is none" in done.stderr
