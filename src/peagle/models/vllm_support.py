"""Which targets vLLM runs with a P-EAGLE or EAGLE-3 drafter."""

from pathlib import Path

from peagle.models.families import has_family
from peagle.models.families.config import architecture_of
from peagle.models.weights import read_json

SUPPORTED = frozenset(Path(__file__).with_name("vllm_supported.txt").read_text().split())
"""Targets in the registry of vLLM 0.33.0 whose classes have `SupportsEagle3`, with those that it
gives to transformers by itself, but without peagle's own families."""


def serving_flags(directory: Path) -> tuple[str, ...] | None:
    """The flags with which vLLM 0.33 runs a target with a drafter; None where it runs none.

    Its way through transformers takes any model there whose attention it can replace and which
    keeps no other state.
    """
    import transformers

    architecture = architecture_of(read_json(directory / "config.json"))
    if has_family(directory) or architecture in SUPPORTED:
        return ()
    model = getattr(transformers, architecture, None)
    if model is None or model._is_stateful or not model.is_backend_compatible():
        return None
    return ("--model-impl", "transformers")
