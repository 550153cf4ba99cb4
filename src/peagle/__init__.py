"""Lossless P-EAGLE speculative decoding: train a drafter, check it, serve it, measure it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
    from peagle.errors import InputError
    from peagle.llm import LLM

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "InputError", "SamplingParams", "SpeculativeConfig"]
MODULES = {"LLM": "peagle.llm", "AsyncLLM": "peagle.async_llm", "InputError": "peagle.errors"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: `peagle --help` needs no torch, and Ctrl-C must be handled first.

    Those that `MODULES` does not name are the configuration's.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(MODULES.get(name, "peagle.config")), name)
