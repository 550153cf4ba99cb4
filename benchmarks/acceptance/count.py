"""What trees, lookup and a K for each request would add, counted before any of them is built.

    python benchmarks/acceptance/count.py --prompts HumanEval.jsonl.gz --temperature 0 --out FILE

The target writes its answers once. From the likeliest drafts of each slot at every place of them
follows what each way of drafting would have had accepted: tokens per cycle, and, for row costs
measured on a GPU or on this CPU, what that is worth in tokens per second at several loads.
"""

import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from slots import Slots, slots_of, walk

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.bench.environment import machine
from peagle.bench.prompts import load_prompts
from peagle.bench.result_file import result_file
from peagle.cli.script import new_app
from peagle.config import EngineConfig
from peagle.drafters.checkpoint import load_drafter
from peagle.models.loading import load_decoder
from peagle.pair import bundled
from peagle.train.packing import Document

app = new_app(__doc__)
CANDIDATES, K = 16, 7
NODES = (8, 16, 32)
MATCH = 3
"""Fewest tokens of the text's end that a lookup must find again."""
ROWS = {1: {8: 1.0, 16: 1.026, 32: 1.076}, 8: {8: 1.0, 16: 1.27, 32: 1.80}}
"""A cycle's time by rows of a request, over that of 8 rows, at some numbers of requests: Qwen3-8B's
size on an H200, drafter and target as measured when this was written."""
Scores = Sequence[Sequence[Sequence[float]]]
"""By slot, rank of the draft in the slot before (0 in the first slot), and rank."""


def chain(slots: Slots, cycle: int, k: int = K) -> int:
    """Tokens emitted with the likeliest draft of each slot."""
    return 1 + agreed(slots.drafts[cycle, :k].tolist(), slots.wanted[cycle].tolist())


def agreed(drafts: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(drafts, wanted, strict=False)
    return next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(drafts))


def oracle(slots: Slots, cycle: int) -> int:
    """Tokens emitted if the right candidate were always chosen."""
    hits = (slots.tokens[cycle] == slots.wanted[cycle][:, None]).any(dim=-1)
    return 1 + int(hits.long().cumprod(dim=0).sum())


def tree(scores: Scores, nodes: int) -> set[tuple[int, ...]]:
    """The most probable paths, best first. A path holds places in the slots' lists of candidates.

    Of siblings the most probable comes first, whatever order the slot's list has without them.
    """
    orders: dict[tuple[int, int], list[int]] = {}

    def ordered(depth: int, before: int) -> list[int]:
        row = scores[depth][before]
        return orders.setdefault(
            (depth, before), sorted(range(len(row)), key=lambda place: -row[place])
        )

    def pushed(cost: float, path: tuple[int, ...], rank: int) -> None:
        """The candidate of a rank after a path."""
        depth, before = len(path), path[-1] if path else 0
        order = ordered(depth, before)
        if rank < len(order):
            place = order[rank]
            score = scores[depth][before][place]
            heapq.heappush(queue, (cost - score, (*path, place), cost, rank))

    queue: list[tuple[float, tuple[int, ...], float, int]] = []
    found: set[tuple[int, ...]] = set()
    pushed(0.0, (), 0)
    while queue and len(found) < nodes:
        cost, path, before, rank = heapq.heappop(queue)
        found.add(path)
        pushed(before, path[:-1], rank + 1)
        if len(path) < len(scores):
            pushed(cost, path, 0)
    return found


def tree_length(slots: Slots, cycle: int, nodes: int) -> int:
    """Tokens emitted with a tree of so many nodes, the newest token's row not counted."""
    paths = tree(slots.after[cycle].tolist(), nodes)
    path: tuple[int, ...] = ()
    for tokens, wanted in zip(
        slots.tokens[cycle].tolist(), slots.wanted[cycle].tolist(), strict=True
    ):
        if wanted not in tokens or (*path, tokens.index(wanted)) not in paths:
            break
        path = (*path, tokens.index(wanted))
    return 1 + len(path)


def found_again(text: Sequence[int], k: int, least: int) -> list[int]:
    """Up to k tokens that followed the longest earlier match of the text's end."""
    best, place = 0, 0
    for stop in range(len(text) - 1, 0, -1):
        size = 0
        while size < stop and text[stop - 1 - size] == text[len(text) - 1 - size]:
            size += 1
        if size > best:
            best, place = size, stop
        if best >= 16:
            break
    return list(text[place : place + k]) if best >= least else []


def lookup_length(slots: Slots, cycle: int, least: int) -> int:
    """Tokens emitted where a match in prompt and output replaces the drafter's chain."""
    drafts = found_again(slots.text[: int(slots.newest[cycle])], K, least)
    return 1 + agreed(drafts, slots.wanted[cycle].tolist()) if drafts else chain(slots, cycle)


def oracle_lookup_length(slots: Slots, cycle: int) -> int:
    """The same with the better source known beforehand."""
    return max(chain(slots, cycle), lookup_length(slots, cycle, MATCH))


def per_request_rows(slots: Sequence[Slots], threshold: float) -> tuple[float, float]:
    """Tokens and rows per cycle if slots end where their running probability is below it."""
    tokens = rows = cycles = 0
    for each in slots:
        kept = (each.scores[..., 0].cumsum(dim=1).exp() >= threshold).sum(dim=1).tolist()
        lengths = [chain(each, cycle, kept[cycle]) for cycle in range(len(kept))]
        for cycle, emitted in walk(lengths):
            tokens, rows, cycles = tokens + emitted, rows + kept[cycle] + 1, cycles + 1
    return tokens / cycles, rows / cycles


def mean_length(slots: Sequence[Slots], length: Callable[[Slots, int], int]) -> float:
    """Tokens per cycle over all texts."""
    emitted = [
        tokens
        for each in slots
        for _, tokens in walk([length(each, cycle) for cycle in range(len(each.wanted))])
    ]
    return sum(emitted) / len(emitted)


def count(slots: Sequence[Slots]) -> dict[str, Any]:
    """Tokens per cycle of every way."""
    result: dict[str, Any] = {
        "chain": mean_length(slots, chain),
        "right candidate of 16": mean_length(slots, oracle),
        "lookup of 3": mean_length(slots, lambda s, c: lookup_length(s, c, 3)),
        "lookup of 6": mean_length(slots, lambda s, c: lookup_length(s, c, 6)),
        "better of chain and lookup": mean_length(slots, oracle_lookup_length),
    }
    for nodes in NODES:
        # the newest token has a row, too
        result[f"tree of {nodes} rows"] = mean_length(
            slots, lambda s, c, nodes=nodes: tree_length(s, c, nodes - 1)
        )
    for threshold in (0.5, 0.2, 0.05):
        tokens, rows = per_request_rows(slots, threshold)
        alike = round(rows) - 1
        fixed = mean_length(slots, lambda s, c, k=alike: chain(s, c, k))
        result[f"K by request, {threshold}"] = {"tokens": tokens, "rows": rows, "fixed K": fixed}
    return result


def net(result: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of trees over those of the chain."""
    return {
        f"tree of {rows} rows, {requests} requests": result[f"tree of {rows} rows"]
        / result["chain"]
        / cost
        for requests, costs in ROWS.items()
        for rows, cost in costs.items()
    }


def answers(
    prompts: Path, limit: int, temperature: float, max_tokens: int, target: Path, drafter: Path
) -> list[Document]:
    """What the target writes, end-of-text ignored as in the figures of the bundled pair."""
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=8)
    speculation = SpeculativeConfig(model=str(drafter), num_speculative_tokens=K)
    llm = LLM(str(target), speculation, config)
    asked = [prompt.token_ids(llm.tokenizer) for prompt in load_prompts(str(prompts), limit)]
    how = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True, seed=seed)
        for seed in range(len(asked))
    ]
    done = llm.generate(asked, how)
    return [
        Document.answered((*one.prompt_token_ids, *one.token_ids), len(one.prompt_token_ids))
        for one in done
    ]


@app.command()
def main(
    prompts: Annotated[Path, typer.Option(help="Prompt file.")],
    limit: Annotated[int, typer.Option(help="Only this many prompts.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the answers.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    target: Annotated[Path | None, typer.Option(help="Another target's directory.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="Another P-EAGLE drafter's.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Count."""
    place, of_drafter = target or bundled("target"), drafter or bundled("peagle")
    with result_file(out) as write:
        documents = answers(prompts, limit, temperature, max_tokens, place, of_drafter)
        decoder = load_decoder(place, torch.float32, torch.device("cpu"))
        model = load_drafter(of_drafter, decoder, parallel=True)
        slots = [slots_of(decoder, model, document, K, CANDIDATES) for document in documents]
        result = count(slots)
        result = machine() | {
            "prompts": prompts.name,
            "count": len(documents),
            "temperature": temperature,
            "tokens_per_cycle": result,
            "net": net(result),
        }
        print(json.dumps(result, indent=2))
        write(result)


if __name__ == "__main__":
    app()
