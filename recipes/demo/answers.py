"""The drafters' training text: the target's own continuations of the corpus's prompts.

Prompts are sorted by length and answered in large batches by transformers' `generate`: most of them
greedily, as the demo decodes, the others by sampling, so that the text is not all loops.
"""

import json
import lzma
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

LONGEST_PROMPT = 400  # tokens; longer prompts are left out
RESERVED = frozenset(range(1, 8))  # ids that the mask token is taken from: never in a document


def read_prompts(path: Path, count: int, seed: int) -> list[str]:
    """Up to `count` prompts of a JSONL file, plain or .xz, in an order drawn from the seed."""
    content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    prompts = [json.loads(line)["prompt"] for line in content.decode().splitlines()]
    random.Random(seed).shuffle(prompts)
    return prompts[:count]


def batches(encoded: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of prompts of similar length."""
    ordered = sorted((ids for ids in encoded if len(ids) <= LONGEST_PROMPT), key=len)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def left_padded(prompts: list[list[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both [prompts, longest]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@torch.inference_mode()
def answer(
    model: PreTrainedModel, prompts: list[list[int]], tokens: int, temperature: float
) -> list[list[int]]:
    """Each prompt's continuation, up to and including the end-of-text token."""
    end = model.generation_config.eos_token_id
    ids, mask = (part.to(model.device) for part in left_padded(prompts, end))
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        pad_token_id=end,
        **(sampling if temperature else {"do_sample": False}),
    )
    answers = out[:, ids.shape[1] :].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in answers]


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    prompts: Annotated[Path, typer.Option(help="prompts.jsonl, or its .xz.")],
    out: Annotated[Path, typer.Option(help="JSONL file of prompts and answers, as token ids.")],
    count: Annotated[int, typer.Option(help="Prompts to answer.")] = 140_000,
    tokens: Annotated[int, typer.Option(help="Longest answer.")] = 192,
    batch: Annotated[int, typer.Option(help="Prompts answered at once.")] = 2_048,
    greedy: Annotated[float, typer.Option(help="Share of batches answered greedily.")] = 0.75,
    temperature: Annotated[float, typer.Option(help="Of the others.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Draws the prompts and the sampled batches.")] = 0,
) -> None:
    """Let the target answer the prompts."""
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device)
    tokenizer = AutoTokenizer.from_pretrained(target)
    encoded = tokenizer(read_prompts(prompts, count, seed)).input_ids
    draw, begun, written = random.Random(seed), time.perf_counter(), 0
    documents = []
    for group in batches(encoded, batch):
        heat = 0.0 if draw.random() < greedy else temperature
        for prompt, response in zip(group, answer(model, group, tokens, heat), strict=True):
            if RESERVED.isdisjoint(prompt + response):
                documents.append({"prompt_token_ids": prompt, "token_ids": response})
                written += len(response)
        seconds = time.perf_counter() - begun
        print(f"{len(documents)} answers  {written / 1e6:.1f}M tokens  {seconds:.0f} s", flush=True)
    draw.shuffle(documents)
    with out.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(document) + "\n" for document in documents)


if __name__ == "__main__":
    typer.run(main)
