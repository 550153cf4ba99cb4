"""What a GPU's memory allows, with a fake GPU."""

from pathlib import Path

import pytest
import torch

from peagle.config import EngineConfig
from peagle.device import (
    batched_tokens,
    free_memory,
    kv_cache_memory,
    prompt_tokens,
    require_memory,
)
from peagle.errors import InputError

CPU, GPU, GIB = torch.device("cpu"), torch.device("cuda"), 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB, of which 6 are free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 10 * GIB))


def test_weights_that_do_not_fit_are_refused_with_what_is_missing(gpu: None) -> None:
    require_memory(6 * GIB, GPU, "the weights")
    require_memory(60 * GIB, CPU, "the weights")
    with pytest.raises(InputError, match=r"take 8.5 GiB and 6.0 .* 2.5 GiB are missing"):
        require_memory(8 * GIB + GIB // 2, GPU, "the weights")


def test_the_cache_gets_what_weights_and_steps_leave(gpu: None) -> None:
    config = EngineConfig(gpu_memory_utilization=0.9)
    assert kv_cache_memory(config, GPU, 2 * GIB) == pytest.approx(3 * GIB)
    assert kv_cache_memory(EngineConfig(kv_cache_memory=7), GPU, 2 * GIB) == 7
    with pytest.raises(InputError, match=r"1.0 above gpu_memory_utilization 0.9"):
        kv_cache_memory(config, GPU, 6 * GIB)


@pytest.mark.parametrize(("limit", "free"), [("max", 4), ("6442450944", 2)])
def test_a_cpus_memory_is_what_the_system_and_the_container_leave(
    limit: str, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{4 * GIB}\n")
    monkeypatch.setattr("peagle.device.MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr("peagle.device.CGROUP", tmp_path)
    assert free_memory(CPU) == free * GIB


def test_free_memory_elsewhere(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.device.MEMORY", tmp_path / "absent")
    assert free_memory(CPU) > GIB // 4
    assert free_memory(GPU) == 6 * GIB


def test_a_gpu_takes_more_rows_a_step(gpu: None) -> None:
    assert batched_tokens(EngineConfig(), GPU) > batched_tokens(EngineConfig(), CPU)
    assert batched_tokens(EngineConfig(max_num_batched_tokens=5), GPU) == 5


def test_prompts_get_half_of_a_cpus_rows_unless_told_how_many(gpu: None) -> None:
    assert 2 * prompt_tokens(EngineConfig(), CPU) == batched_tokens(EngineConfig(), CPU)
    assert prompt_tokens(EngineConfig(), GPU) == batched_tokens(EngineConfig(), GPU)
    assert prompt_tokens(EngineConfig(max_num_batched_tokens=5), CPU) == 5
