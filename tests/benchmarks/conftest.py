"""The studies of training import one another by name, as scripts of one directory do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "training"))
