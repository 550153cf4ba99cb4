"""A drafter's acceptance length in the engine, beside the estimate from its training."""

from collections.abc import Sequence
from itertools import islice

import httpx2
import torch

from peagle.bench.rounds import give_back
from peagle.bench.server_metrics import DraftCounts
from peagle.completion import check_finished
from peagle.config import EngineConfig, SamplingParams, SpeculativeConfig
from peagle.errors import InputError
from peagle.llm import LLM
from peagle.server_url import authorized, server_url
from peagle.speculation import DraftTotals
from peagle.train.packing import PackedRows
from peagle.train.recipe import Recipe

PROMPTS, TOKENS = 32, 128
"""Most held-out prompts, and most tokens of each answer."""
SECONDS = 600.0
"""Longest wait for a server's answer."""
Prompts = Sequence[tuple[int, ...]]
"""Token ids of conversations before their first answers."""


def held_out_prompts(validation: PackedRows) -> Prompts:
    """The first held-out conversations' prompts: what comes before the first response."""
    documents = (document for row in validation.documents for document in row)
    return list(islice((document.prompt for document in documents if document.prompt), PROMPTS))


def measure_engine(recipe: Recipe, prompts: Prompts) -> float:
    """Answer prompts with the target and the drafter in the recipe's output, at K_train.

    Raises `InputError` if the engine cannot. The trainer must be freed before: there is no room
    for a large target twice.
    """
    give_back()
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
    return DraftTotals.pooled([each.speculation for each in done]).acceptance_length


def measure_server(url: str, prompts: Prompts) -> float:
    """The same by the counters of a running vLLM, which serves the target with the drafter.

    Raises `InputError` for a server that does not answer, or that counts no drafts.
    """
    root = server_url(url)
    try:
        with httpx2.Client(timeout=SECONDS, headers=authorized(), base_url=root) as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            before = DraftCounts.read(client.get("/metrics").text)
            for prompt in prompts:
                body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                client.post("/v1/completions", json=body).raise_for_status()
            after = DraftCounts.read(client.get("/metrics").text)
    except (httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
        told = error.response.text if isinstance(error, httpx2.HTTPStatusError) else error
        raise InputError(f"{url} does not answer as vLLM does: {told}") from None
    found = after.since(before) if after is not None and before is not None else None
    if found is None or not found.rates:
        raise InputError(f"{url} counts no drafts; start it with the drafter")
    return found.length
