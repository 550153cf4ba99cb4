"""The kernels run on a GPU where there is one, else interpreted or emulated."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _language_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces Triton's language at each launch, and again at each call within it,
    which finds nothing to replace but takes a quarter of the time."""
    from triton import language
    from triton.runtime import interpreter

    plain, names = interpreter._patch_lang, (language, language.core)

    @cache
    def seen_by(function: Any) -> list[Any]:
        return [n for n in names if any(value is n for value in function.__globals__.values())]

    def replace(function: Any) -> Any:
        new = any(language.core.is_builtin(name.load) for name in seen_by(function))
        return plain(function) if new else interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", replace)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where kernels run that only Hopper has: there, else under the emulation beside this file."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9:
        return torch.device("cuda")
    import gluon_emulation

    from peagle.ops.triton import gluon, hopper_attention, hopper_product, layer_chain, product_call
    from peagle.ops.triton.hopper_attention import heads, narrow, parts, tiles
    from peagle.ops.triton.hopper_product import copies, few, sums
    from peagle.ops.triton.layer_chain import loads, products, signals

    chains = (layer_chain, loads, products, signals)
    attentions = (hopper_attention, heads, narrow, parts, tiles)
    packed = (hopper_product, copies, few, product_call, sums)
    modules = (gluon, *chains, *attentions, *packed)
    gluon_emulation.install(monkeypatch, modules, processors=12)
    return torch.device("cpu")


@pytest.fixture
def without_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are left out where processes share a GPU, which this machine may."""
    from peagle.ops.triton import layer_chain

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "none"))
    layer_chain.is_shared.cache_clear()
