"""Lossless P-EAGLE speculative decoding: train a drafter, check it, serve it, measure it."""

from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import InputError
from peagle.llm import LLM, AsyncLLM

__all__ = ["LLM", "AsyncLLM", "EngineConfig", "InputError", "SamplingParams", "SpeculativeConfig"]
