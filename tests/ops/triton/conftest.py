"""The kernels run on a GPU where there is one, else under Triton's interpreter."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def without_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are left out where processes share a GPU, which this machine may."""
    from peagle.ops.triton import chain

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    chain.is_shared.cache_clear()
