"""How many greedy outputs stay as they are under speculation, where rounding may decide.

    python benchmarks/gpu/equal.py --dtype bfloat16 --vllm-python vllm/bin/python --out equal.json

The bundled pair writes on the same prompts without a drafter and with each, here and in vLLM. In
float32 all outputs are equal; in bfloat16 a verification of K + 1 rows rounds otherwise than a row
alone does, and a near-tie may flip. From there on both texts are the target's own.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from sides import Vllm
from sides import run as run_command

from peagle import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from peagle.bench.load import drive
from peagle.bench.pair import bundled
from peagle.bench.prompts import load_prompts
from peagle.bench.report import hardware, machine, whole_file
from peagle.config import DType

PEER = Path(__file__).parent / "equal_peer.py"
METHODS: dict[str, bool | None] = {"none": None, "peagle": True, "eagle3": False}
"""Whether a drafter drafts in parallel."""
Outputs = Sequence[Sequence[int]]


def main(
    prompts: Annotated[str, typer.Option(help="As of peagle bench.")] = "bundled",
    limit: Annotated[int, typer.Option(help="How many prompts.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Of each output.")] = 128,
    k: Annotated[int, typer.Option("--k", help="Tokens to draft.")] = 7,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 8,
    dtype: Annotated[str, typer.Option(help="Of weights and activations.")] = "bfloat16",
    vllm_python: Annotated[Path, typer.Option(help="vLLM's interpreter.")] = Path(sys.executable),
    vllm_path: Annotated[Path | None, typer.Option(help="Directory of vLLM's packages.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds of vLLM's process.")] = 400,
    out: Annotated[Path | None, typer.Option(help="File of the result.")] = None,
) -> None:
    """Print, for each side and drafter, how many outputs equal those without one."""
    job = {"max_tokens": max_tokens, "k": k, "concurrency": concurrency, "dtype": dtype}
    shares = {"peagle": _shares(ours(job, tokens_of(prompts, limit)))}
    vllm = Vllm(vllm_python, vllm_path)
    if vllm.found():
        shares["vllm"] = _shares(theirs(job, tokens_of(prompts, limit), vllm, timeout))
    facts = machine() | hardware("auto", cast(DType, dtype)) | job | {"prompts": limit}
    print(json.dumps({"equal": shares, "of": limit, "dtype": dtype}))
    if out is not None:
        with whole_file(out) as file:
            file.write(json.dumps(facts | {"equal": shares}, indent=1) + "\n")


def tokens_of(prompts: str, limit: int) -> list[list[int]]:
    """Prompts as both sides get them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled("target"))
    return [prompt.token_ids(tokenizer) for prompt in load_prompts(prompts, limit)]


def speculation(method: str, k: int) -> dict[str, Any] | None:
    """vLLM's settings for a method, which are ours too."""
    parallel = METHODS[method]
    if parallel is None:
        return None
    drafter = {"method": "eagle3", "model": str(bundled(method))}
    return {**drafter, "num_speculative_tokens": k, "parallel_drafting": parallel}


def ours(job: dict[str, Any], prompts: list[list[int]]) -> dict[str, Outputs]:
    """Token ids of every output by method."""
    params = SamplingParams(max_tokens=job["max_tokens"], ignore_eos=True)
    found: dict[str, Outputs] = {}
    for method in METHODS:
        asked = speculation(method, job["k"])
        config = EngineConfig(
            dtype=job["dtype"], max_num_seqs=job["concurrency"], enable_prefix_caching=False
        )
        llm = LLM(bundled("target"), asked and SpeculativeConfig(**asked), config)
        done = drive(llm, prompts, params, job["concurrency"])
        found[method] = [completion.token_ids for completion in done]
        del llm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def theirs(
    job: dict[str, Any], prompts: list[list[int]], vllm: Vllm, timeout: float
) -> dict[str, Outputs]:
    """The same of vLLM, which runs in a process of its own; exits with its last lines."""
    trials = {method: speculation(method, job["k"]) for method in METHODS}
    asked = {**job, "target": str(bundled("target")), "prompts": prompts, "trials": trials}
    with tempfile.TemporaryDirectory() as scratch:
        given, result = Path(scratch) / "job.json", Path(scratch) / "result.json"
        given.write_text(json.dumps(asked))
        command = [str(vllm.python), str(PEER), str(given), str(result)]
        failure = run_command(command, vllm.environment(), timeout)
        if failure:
            sys.exit(f"vLLM failed: {failure}")
        found: dict[str, Outputs] = json.loads(result.read_text())
        return found


def _shares(outputs: dict[str, Outputs]) -> dict[str, int]:
    """Of each drafter, how many outputs equal those without one."""
    alone = [list(output) for output in outputs["none"]]
    return {
        method: sum(list(one) == other for one, other in zip(of_method, alone, strict=True))
        for method, of_method in outputs.items()
        if method != "none"
    }


if __name__ == "__main__":
    typer.run(main)
