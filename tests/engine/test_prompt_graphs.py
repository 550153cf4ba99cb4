"""Prompts in passes of fixed sizes, uncaptured: the same keys and tokens as launched one by one."""

import pytest
import tiny
import torch

from peagle.config import SamplingParams
from peagle.drafters.resident import resident_drafter
from peagle.engine.batch import Scheduled
from peagle.engine.engine import Engine
from peagle.engine.prompt_graphs import CHUNKS, MOST_PAIRS, SIZES, PromptGraphs
from peagle.engine.request import Request
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import ResidentCycle

HOW = SamplingParams(max_tokens=16)
SLOTS = 64
"""Of a cache, before the one that is nobody's."""


def prompt(length: int, seed: int) -> list[int]:
    return [(seed + 5 * i + i * i) % tiny.MASK for i in range(length)]


def engine_of(targets, drafter, resident: bool = True, **changes) -> Engine:
    k = 4 if drafter else 0
    return tiny.engine(targets["easy"].decoder, drafter, k, resident, tiny.engine_config(**changes))


@pytest.fixture
def passes(monkeypatch) -> list[bool]:
    """Whether each pass had a size of its own."""
    found: list[bool] = []
    fit = PromptGraphs.fit

    def noted(self, chunks):
        graph = fit(self, chunks)
        found.append(graph is not None)
        return graph

    monkeypatch.setattr(PromptGraphs, "fit", noted)
    return found


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
@pytest.mark.parametrize("count", [1, CHUNKS, CHUNKS + 1])
def test_tokens_and_accepted_drafts_of_the_plain_runner(targets, trained, passes, method, count):
    """Drafts are as good only where the drafter's keys are right."""
    drafter = None if method == "none" else trained[method].drafter
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 17, 33, 2, 40, 64, 5)[-count:]]
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
    plain, resident = (
        tiny.run(engine_of(targets, drafter, on, **sizes), prompts, HOW) for on in (False, True)
    )
    assert tiny.outputs(resident) == tiny.outputs(plain)
    assert [r.speculation for r in resident] == [r.speculation for r in plain]
    assert passes == [count <= CHUNKS]


def test_chunks_behind_others_and_behind_cached_prefixes(targets, trained, passes):
    """Rows that begin within a context, several of which end no prompt."""
    drafter = trained["peagle"].drafter
    shared = prompt(70, 1)
    prompts = [shared + prompt(9, seed) for seed in range(3)]
    expected = tiny.outputs(tiny.run(engine_of(targets, drafter, False), prompts, HOW))
    engine = engine_of(targets, drafter, max_num_batched_tokens=64)
    assert tiny.outputs(tiny.run(engine, prompts, HOW)) == expected
    again = tiny.run(engine, prompts, HOW)
    assert tiny.outputs(again) == expected
    assert engine.load.prefix_hits >= 3 * 64
    assert passes.count(True) >= len(passes) - 1


def graphs_of(most: int, max_length: int, cycle: ResidentCycle | None = None) -> PromptGraphs:
    """Passes over a table whose row 1 holds a request of two blocks, and row 0 none."""
    table = RequestTable(2, max_length, 16, torch.device("cpu"), nowhere=SLOTS)
    spare, row = (table.admit() for _ in range(2))
    table.append(row, 0, [2, 1])
    table.flush()
    return PromptGraphs(cycle, table, spare, most)


def test_only_the_rows_of_requests_write_keys(targets, trained):
    target, drafter = targets["easy"].decoder, trained["peagle"].drafter
    shapes = (target.config, drafter.model.config.transformer)
    caches = tuple(
        torch.zeros(s.num_hidden_layers, 2, SLOTS + 1, s.num_key_value_heads, s.head_dim)
        for s in shapes
    )
    graphs = graphs_of(64, 64, ResidentCycle(target, resident_drafter(drafter), caches))
    request = Request("one", prompt(19, 3), HOW, 0, 4, None)
    request.row = 1
    chunk = Scheduled(request, 19, 0, 0, completes=True)
    with torch.inference_mode():
        ends = graphs.fit([chunk]).run([chunk])
    assert ends.logits.shape == (1, target.config.vocab_size)
    for cache in caches:
        for layer in cache.flatten(0, 1):
            written = layer.flatten(1).any(dim=1).nonzero().flatten().tolist()
            assert written == [*range(16, 19), *range(32, 48)]


class Chunk:
    """As much of a scheduled chunk as its fit depends on."""

    def __init__(self, rows: int, start: int = 0) -> None:
        self.rows, self.stop = rows, start + rows


@pytest.mark.parametrize(
    ("chunks", "fits"),
    [
        ([Chunk(SIZES[-1])], True),
        ([Chunk(SIZES[-1] - 16), Chunk(1)], True),
        ([Chunk(SIZES[-1] - 15), Chunk(1)], False),
        ([Chunk(SIZES[-1] + 1)], False),
        ([Chunk(1)] * CHUNKS, True),
        ([Chunk(1)] * (CHUNKS + 1), False),
        ([Chunk(8, MOST_PAIRS // 16 - 8)], True),
        ([Chunk(9, MOST_PAIRS // 16 - 8)], False),
        ([Chunk(8, MOST_PAIRS // 32 - 8), Chunk(1)], True),
        ([Chunk(8, MOST_PAIRS // 32), Chunk(1)], False),
    ],
)
def test_few_short_chunks_that_see_little_fit(chunks, fits: bool):
    assert (graphs_of(8192, 8192).fit(chunks) is not None) == fits


@pytest.mark.parametrize(("most", "max_length"), [(100, 1024), (1024, 96)])
def test_no_size_is_above_what_a_step_or_a_request_may_have(most: int, max_length: int):
    graphs = graphs_of(most, max_length)
    assert graphs.fit([Chunk(64)]) is not None
    assert graphs.fit([Chunk(65)]) is None
