"""Scripts of one directory import one another by name, and so do their tests."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / name) for name in ("training", "gpu", "acceptance", "cpu")]
