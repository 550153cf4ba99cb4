"""Which targets vLLM runs with a P-EAGLE or EAGLE-3 drafter."""

from pathlib import Path

SUPPORTED = frozenset(Path(__file__).with_name("vllm_supported.txt").read_text().split())
"""Targets in the registry of vLLM 0.33.0 whose classes have `SupportsEagle3`, with those that it
gives to transformers by itself, but without peagle's own families."""


def vllm_runs(architecture: str) -> str:
    """Whether vLLM 0.33 runs a target with a drafter: yes, in which other way, or no.

    Its way through transformers takes any model there whose attention it can replace and which
    keeps no other state.
    """
    import transformers

    if architecture in SUPPORTED:
        return "yes"
    model = getattr(transformers, architecture, None)
    if model is None or model._is_stateful or not model.is_backend_compatible():
        return "no"
    return "with --model-impl transformers"
