"""Lossless P-EAGLE speculative decoding: train a drafter, check it, serve it, measure it."""

from typing import TYPE_CHECKING, Any

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.llm import LLM

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "InputError", "SamplingParams", "SpeculativeConfig"]


def __getattr__(name: str) -> Any:
    """Import the engine on first use, so that `peagle --help` does not import torch."""
    if name == "LLM":
        from peagle.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from peagle.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
