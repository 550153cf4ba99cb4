"""Drafts that branch change no token, here on a CPU, uncaptured."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import tiny
import torch
from grafted_trees import graft, redraw
from sweeps import at_night

from peagle.config import SamplingParams
from peagle.drafters import peagle
from peagle.drafters.selector import SelectorConfig
from peagle.engine.branching import Branching, num_tree_nodes
from peagle.engine.device.cycle import DeviceBatch
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.drafting import Drafting
from peagle.engine.engine import Engine
from peagle.engine.kv_cache import kv_bytes_per_token
from peagle.engine.pace import Pace
from peagle.errors import InputError
from peagle.ops.tree import grow
from peagle.set_acceptance import SetAcceptance
from peagle.speculative_config import TREE_NODES, SpeculativeConfig

K = 4
PROMPTS = [[(5 * i + j + j * j) % tiny.MASK for j in range(9 + 7 * i)] for i in range(6)]
MIXED = [
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=40, temperature=1.1, seed=3),
    SamplingParams(max_tokens=29, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(max_tokens=37, temperature=0.8, top_k=5, top_p=0.9, seed=4),
    SamplingParams(max_tokens=32, num_speculative_tokens=2),
    SamplingParams(max_tokens=35, temperature=0.9, min_p=0.05, frequency_penalty=0.3, seed=5),
]


def engine_of(target, drafter, nodes: int | None, **changes: object) -> Engine:
    config = tiny.engine_config(**{"max_num_seqs": 4, "draft_length": "fixed", **changes})
    k = K if drafter else 0
    with tiny.on_device(True):
        return Engine(target.decoder, drafter, k, config, num_tree_nodes=nodes)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests of each cycle with trees."""
    sizes, verify = [], DeviceBatch.verify

    def counted(batch, draft):
        sizes.extend([len(draft.tokens)] * (draft.tree is not None))
        return verify(batch, draft)

    monkeypatch.setattr(DeviceBatch, "verify", counted)
    return sizes


def limit_trees(engine: Engine, most: int) -> None:
    """Let drafts of so many requests at once branch."""
    pace = engine.scheduler.pace
    pace.branching = replace(pace.branching, most_requests=most)


def drafter_of(targets, trained, tmp_path, method: str):
    if method in trained:
        return trained[method].drafter
    config = tiny.drafter_config(True, selector=SelectorConfig(rank=8, candidates=12))
    return tiny.random_drafter_for(targets["easy"].decoder, tmp_path, config)


def accepted(requests: Sequence) -> int:
    return sum(request.speculation.accepted for request in requests)


@pytest.mark.sweep
@pytest.mark.parametrize("nodes", [5, 11, 30])
@pytest.mark.parametrize("method", ["peagle", "selector", "eagle3"])
@pytest.mark.parametrize("params", [MIXED[0], MIXED])
def test_texts_are_the_same(
    targets, trained, tmp_path, trees: list[int], nodes: int, method: str, params
):
    drafter = drafter_of(targets, trained, tmp_path, method)
    plain, branched = (
        tiny.run(engine_of(targets["easy"], drafter, each), PROMPTS, params) for each in (0, nodes)
    )
    assert tiny.outputs(branched) == tiny.outputs(plain)
    assert len(trees) > 20
    alone = tiny.run(engine_of(targets["easy"], None, 0), PROMPTS, _undrafted(params))
    assert tiny.outputs(branched) == tiny.outputs(alone)


def _undrafted(params):
    if isinstance(params, SamplingParams):
        return params
    return [how.model_copy(update={"num_speculative_tokens": None}) for how in params]


@pytest.mark.parametrize("seed", [0, 1, *at_night(range(2, 6))])
def test_any_tree_gives_the_same_text(
    targets, trained, trees: list[int], monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Random ones, with wrong drafts, and the same ones twice."""
    drafter, draw = trained["peagle"].drafter, random.Random(seed)
    expected = tiny.outputs(tiny.run(engine_of(targets["easy"], drafter, 0), PROMPTS, MIXED))

    def drawn(found, pairs, race, nodes, alone):
        grown = grow(found, pairs, race, nodes, alone)
        for request in (~alone.bool()).nonzero()[:, 0].tolist():
            redraw(grown, found, request, draw)
        return grown

    monkeypatch.setattr(peagle, "grow", drawn)
    found = tiny.run(engine_of(targets["easy"], drafter, 14), PROMPTS, MIXED)
    assert tiny.outputs(found) == expected
    assert accepted(found) > 20
    assert len(trees) > 20


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_drafts_are_accepted(
    targets, trained, trees: list[int], temperature: float, method: str
):
    """And some of them beside the likeliest."""
    how = SamplingParams(max_tokens=80, temperature=temperature, seed=1, ignore_eos=True)
    prompts = [[(7 * i + 3 * j) % tiny.MASK for j in range(6)] for i in range(8)]
    drafter = trained[method].drafter
    plain, branched = (
        tiny.run(engine_of(targets["easy"], drafter, each), prompts, how) for each in (0, 16)
    )
    assert accepted(branched) / sum(r.speculation.cycles for r in branched) > 1.1 * (
        accepted(plain) / sum(r.speculation.cycles for r in plain)
    )


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_windows",
        "gpt_oss",
        "gemma4_moe",
        *at_night(["gemma4", "gemma3", "ministral3", "phi3", "smollm3", "granite", "muse_glimmer"]),
    ],
)
def test_with_windows_and_sinks(
    targets, tmp_path, trees: list[int], monkeypatch: pytest.MonkeyPatch, family: str
):
    """Rows of a tree see as far back as their depth says, and a path's keys move in all tensors."""
    target, how = targets[family], SamplingParams(max_tokens=40, ignore_eos=True)
    drafter = tiny.random_drafter_for(target.decoder, tmp_path, tiny.drafter_config(parallel=True))
    draw = random.Random(family)
    for prompt in PROMPTS:
        expected = tiny.outputs(tiny.run(engine_of(target, None, 0), [prompt], how))[0]

        def mostly_right(found, pairs, race, nodes, alone, text=prompt + expected):
            """A way that is right, with others beside it in any order."""
            grown = grow(found, pairs, race, nodes, alone)
            position, path = int(race.newest[race.requests[0]]), 0
            for row in range(1, nodes + 1):
                depth = int(grown.tree.depths[0, path]) + 1
                right = draw.random() < 0.6 and depth <= K
                known = text[position + depth : position + depth + 1]
                token = known[0] if right and known else tiny.MASK
                graft(grown, 0, row, path if right else 0, token)
                path = row if right else path
            return grown

        monkeypatch.setattr(peagle, "grow", mostly_right)
        [branched] = tiny.run(engine_of(target, drafter, 6, block_size=4), [prompt], how)
        assert branched.output == expected
        assert branched.speculation.accepted > 1.5 * branched.speculation.cycles
    assert len(trees) > 20


def test_in_any_blocks_and_with_cached_prefixes(targets, trained, trees: list[int]):
    """A path's keys move across the edges of blocks, and are found there later."""
    drafter, how = trained["peagle"].drafter, SamplingParams(max_tokens=40)
    expected = tiny.outputs(tiny.run(engine_of(targets["easy"], drafter, 0), PROMPTS, how))
    engine = engine_of(
        targets["easy"], drafter, 12, block_size=4, enable_prefix_caching=True, max_num_seqs=2
    )
    assert tiny.outputs(tiny.run(engine, PROMPTS, how)) == expected
    longer = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    before = engine.scheduler.prefix_hits
    again = tiny.run(engine, longer, SamplingParams(max_tokens=20))
    assert engine.scheduler.prefix_hits > before + 60
    plain = tiny.run(engine_of(targets["easy"], None, 0), longer, SamplingParams(max_tokens=20))
    assert tiny.outputs(again) == tiny.outputs(plain)


def test_at_the_end_of_the_context_and_after_preemption(targets, trained, trees: list[int]):
    drafter, how = trained["peagle"].drafter, SamplingParams(max_tokens=200)
    limits = {"max_model_len": 64}
    narrow = engine_of(targets["easy"], drafter, 12, kv_cache_memory=1 << 17, **limits)
    wide = engine_of(targets["easy"], None, 0, kv_cache_memory=1 << 20, **limits)
    expected = tiny.outputs(tiny.run(wide, PROMPTS, how))
    assert tiny.outputs(tiny.run(narrow, PROMPTS, how)) == expected
    assert narrow.scheduler.preemptions > 0
    assert all(len(p) + len(text) == 64 for p, text in zip(PROMPTS, expected, strict=True))


def test_many_requests_draft_without_branches(targets, trained, trees: list[int]):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, 12)
    limit_trees(engine, 1)
    tiny.run(engine, PROMPTS, MIXED[0])
    assert set(trees) <= {1}


@pytest.mark.parametrize(
    ("family", "method", "nodes", "told"),
    [
        ("easy", "peagle", K, "not above K = 4"),
        ("gpt_oss", "peagle", 7, "not below the target's window of 7"),
    ],
)
def test_what_cannot_branch_is_refused(targets, tmp_path, family, method, nodes, told):
    decoder = targets[family].decoder
    config = tiny.drafter_config(parallel=method == "peagle")
    drafter = tiny.random_drafter_for(decoder, tmp_path, config)
    with pytest.raises(InputError, match=told):
        engine_of(targets[family], drafter, nodes)


@pytest.mark.parametrize(
    ("family", "method", "default"),
    [("easy", "peagle", TREE_NODES), ("easy", "eagle3", TREE_NODES), ("gpt_oss", "peagle", 0)],
)
def test_a_gpu_has_them_where_nothing_is_said_and_they_are_possible(
    targets, tmp_path, monkeypatch: pytest.MonkeyPatch, family: str, method: str, default: int
):
    decoder = targets[family].decoder
    config = tiny.drafter_config(parallel=method == "peagle")
    drafter = tiny.random_drafter_for(decoder, tmp_path, config)
    drafting = Drafting(drafter, (0, K))
    assert num_tree_nodes(decoder, drafting, captured=True) == 0
    assert engine_of(targets[family], drafter, None).facts.most_trees == 0
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    assert num_tree_nodes(decoder, drafting, captured=True) == default
    assert num_tree_nodes(decoder, drafting, captured=False) == 0
    others = [{"acceptance": SetAcceptance((1.0,))}, {"lengths": (TREE_NODES,)}]
    for change in [*others, {"num_tree_nodes": 0}, {"proposer": None, "lengths": (0,)}]:
        assert num_tree_nodes(decoder, replace(drafting, **change), captured=True) == 0


@pytest.mark.parametrize(("size", "nodes", "count", "length"), [(1, 30, 128, 40), (16, 15, 18, 70)])
def test_what_one_has_for_nodes_preempts_no_other(
    targets, trained, size: int, nodes: int, count: int, length: int
):
    """It came back into the same blocks again and again, and lost them a step later."""
    target, drafter = targets["easy"], trained["peagle"].drafter
    specs = target.decoder.spec, drafter.model.config.transformer
    each = sum(kv_bytes_per_token(spec, torch.float32) for spec in specs)
    longest = 80 if size == 1 else 160
    room = {"block_size": size, "max_num_seqs": 2, "kv_cache_memory": count * size * each}
    room |= {"max_model_len": longest, "enable_prefix_caching": False}
    prompts = [[(7 * i + 3 * j + 1) % tiny.MASK for j in range(length)] for i in range(2)]
    how = SamplingParams(max_tokens=longest - length, ignore_eos=True)
    found = {}
    for asked in (0, nodes):
        engine = engine_of(target, drafter, asked, **room)
        found[asked] = tiny.outputs(tiny.run(engine, prompts, how)), engine.scheduler.preemptions
    assert found[nodes][0] == found[0][0]
    assert found[nodes][1] <= found[0][1] + 1


def test_an_engine_knows_up_to_how_many_requests_they_branch(targets, trained):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, 12)
    assert engine.facts.most_trees == 4
    assert engine_of(targets["easy"], trained["peagle"].drafter, 0).facts.most_trees == 0


def test_slots_are_kept_for_them_where_they_are_used(targets, trained):
    engine = engine_of(targets["easy"], trained["peagle"].drafter, 12)
    branching = engine.worker.branching
    assert [branching.nodes_for(4, drafts) for drafts in (K, K - 1)] == [12, 0]
    assert branching.nodes_for(5, K) == 0
    assert replace(branching, most_requests=0).nodes_for(1, K) == 0


def test_a_worker_tells_which_cycles_branched(
    targets, trained, trees: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Not where the host takes part, where too many run, or where all ask for fewer drafts."""
    told, landed = [], Pace.landed

    def noted(pace, verified, time, branched):
        told.append(branched)
        landed(pace, verified, time, branched)

    monkeypatch.setattr(Pace, "landed", noted)
    few = SamplingParams(max_tokens=20, num_speculative_tokens=2)
    scored = SamplingParams(max_tokens=20, logprobs=1)
    penalized = SamplingParams(max_tokens=20, presence_penalty=0.5)
    plain = SamplingParams(max_tokens=20)
    for count, how in [(1, plain), (1, few), (2, plain), (1, scored), (1, penalized)]:
        engine = engine_of(targets["easy"], trained["peagle"].drafter, 12)
        limit_trees(engine, 1)
        tiny.run(engine, PROMPTS[:count], how)
        assert 0 <= len(trees) - told.count(True) <= 1, "the last one may have run ahead"
        assert len(told) > 5
        assert (len(trees) > 4) == (how is plain and count == 1)
        told.clear()
        trees.clear()


def test_with_batch_invariance_they_do_not_branch(targets, trained):
    """A tree's keys lie elsewhere, and are summed up in another order than a chain's."""
    own = tiny.load_target(targets["easy"].directory)
    own.make_batch_invariant()
    with tiny.on_device(True), pytest.raises(InputError, match="batch_invariant"):
        Engine(own, trained["peagle"].drafter, K, tiny.engine_config(), num_tree_nodes=12)


def test_trees_that_are_timed_branch(targets, trained, monkeypatch: pytest.MonkeyPatch):
    """Or rows of the same token would be timed, which read few experts."""
    engine, grown = engine_of(targets["easy"], trained["peagle"].drafter, 12), []

    def kept(*given):
        grown.append(grow(*given))
        return grown[-1]

    monkeypatch.setattr(peagle, "grow", kept)
    monkeypatch.setattr("peagle.engine.device.graphs._seconds", lambda replay: replay() or 1.0)
    with torch.inference_mode():
        engine.worker.graphs.measure_trees()
    tree = next(each for each in grown if len(each.tokens) == 2)
    assert (tree.tokens >= 0).all()
    assert (tree.tree.depths[:, 1:] == 1).sum() > 2


class Timed(CycleGraphs):
    """Of given times, by size: a chain's and a tree's, None where there is no memory. The first
    time of a tree is disturbed."""

    times: ClassVar = {1: (1.0, 1.02), 2: (1.0, 1.07), 4: (1.0, 1.3), 8: (1.0, 1.0)}
    long: ClassVar = {1: 1.0, 2: 1.05, 4: 1.0, 8: 1.0}

    def __init__(self) -> None:
        self.sizes, self.lengths = [*self.times], (0, K)
        self.branching = Branching(K, 12, 0)
        self.timed: Counter = Counter()
        self._side = SimpleNamespace(state=SimpleNamespace(slots=torch.zeros(1, 1000)))

    def _prepared(self, part, size, shape):
        return shape.nodes > 0, size

    def _timed(self, graph, size, count, context=1):
        tree, of = graph
        assert context in (1, 500)
        if context > 1:  # of a length, or where trees are not tried
            return self.long[of] if tree else 1.0
        time = self.times[of][tree]
        if time is None:
            raise torch.OutOfMemoryError
        self.timed[graph] += 1
        return 2 * time if tree and self.timed[graph] == 1 else time


def test_they_branch_up_to_where_it_costs_little():
    graphs = Timed()
    graphs.measure_trees()
    assert graphs.branching.most_requests == 2
    taken = {size: costs[K] for size, costs in graphs.seconds_by_length().items()}
    assert taken == {1: 1.02, 2: 1.07, 4: 1.0, 8: 1.0}


def test_they_branch_where_they_cost_little_in_long_contexts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Timed, "long", {1: 1.0, 2: 1.2, 4: 1.0})
    graphs = Timed()
    graphs.measure_trees()
    assert graphs.branching.most_requests == 1


def test_where_they_were_asked_for_those_of_one_request_branch_at_any_cost(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Timed, "times", {1: (1.0, 1.9), 2: (1.0, 1.9)})
    graphs = Timed()
    graphs.measure_trees()
    assert graphs.branching.most_requests == 0
    graphs.measure_trees(least=1)
    assert graphs.branching.most_requests == 1


def test_timing_leaves_nothing_behind(targets, trained, monkeypatch: pytest.MonkeyPatch):
    """Rows at long contexts have no slots of their own."""
    engine, limits = engine_of(targets["easy"], trained["peagle"].drafter, 12), []
    side = engine.worker.graphs._side
    state = side.state

    def once(replay):
        limits.append(int(state.limits.max()))
        replay()
        return 1.0

    monkeypatch.setattr("peagle.engine.device.graphs._seconds", once)
    with torch.inference_mode():
        engine.worker.graphs.measure_trees()
    assert set(limits) == {0, state.slots.shape[1]}
    assert engine.worker.graphs.branching.most_requests == 4
    assert not state.limits.any()
    for cache in side.models.caches:
        assert not any(tensor[:, :, -1].any() for tensor, _ in cache.tensors)


def test_they_branch_up_to_where_there_is_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Timed, "times", Timed.times | {2: (1.0, None)})
    graphs = Timed()
    graphs.measure_trees()
    assert graphs.branching.most_requests == 1


def test_the_key_is_bounded():
    given = {"model": "drafter", "num_tree_nodes": 15}
    assert SpeculativeConfig(**given).num_tree_nodes == 15
    for wrong in (-1, 31):
        with pytest.raises(InputError, match="num_tree_nodes"):
            SpeculativeConfig(**{**given, "num_tree_nodes": wrong})
    with pytest.raises(InputError, match="leave out num_tree_nodes"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=4, num_tree_nodes=12)
