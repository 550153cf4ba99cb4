"""A drafter's acceptance length in the engine, beside the estimate from its training."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.train.packing import PackedRows
    from peagle.train.recipe import Recipe

PROMPTS, TOKENS = 32, 128
"""Most held-out prompts, and most tokens of each answer."""


@dataclass(frozen=True)
class EngineLength:
    """What the engine measured."""

    acceptance_length: float
    prompts: int

    def __str__(self) -> str:
        return (
            f"the engine's AL {self.acceptance_length:.3f} "
            f"({self.prompts} held-out prompts, greedy, {TOKENS} tokens at most)"
        )


def held_out_prompts(validation: "PackedRows") -> list[tuple[int, ...]]:
    """The first held-out conversations' prompts: what comes before the first response."""
    documents = (document for row in validation.documents for document in row)
    return list(islice((document.prompt for document in documents if document.prompt), PROMPTS))


def measure_engine(recipe: "Recipe", prompts: Sequence[tuple[int, ...]]) -> EngineLength:
    """Answer prompts with the target and the drafter in the recipe's output, at K_train.

    Raises `InputError` if the engine cannot. The trainer must be freed before: there is no room
    for a large target twice.
    """
    import torch

    from peagle import LLM, SamplingParams, SpeculativeConfig
    from peagle.bench.measures import acceptance_length
    from peagle.completion import check_finished
    from peagle.config import EngineConfig

    if not prompts:
        raise InputError("no held-out conversation has a prompt")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    drafter = SpeculativeConfig(
        model=recipe.output,
        num_speculative_tokens=recipe.num_speculative_tokens,
        num_tree_nodes=0,  # as the estimate has it, and the same on every machine
    )
    try:
        config = EngineConfig(device=recipe.device, draft_length="fixed", lora=recipe.lora)
        llm = LLM(recipe.target, drafter, config)
        done = llm.generate(prompts, SamplingParams(max_tokens=TOKENS))
    except torch.OutOfMemoryError as error:
        raise InputError(str(error).partition(". ")[0]) from None
    check_finished(done)
    return EngineLength(acceptance_length(done), len(done))
