from pathlib import Path

import pytest
from tiny_pair import TinyPair, save_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def data() -> Path:
    """Public prompt sets, which are beside the repository where it is developed."""
    place = Path(__file__).parents[3] / "shared" / "data"
    if not place.is_dir():
        pytest.skip(f"no prompt sets at {place}")
    return place
