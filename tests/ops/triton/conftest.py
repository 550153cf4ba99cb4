"""The kernels run on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
