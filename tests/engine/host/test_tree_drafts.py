"""Drafts of a request that is alone branch on a CPU, and change no token."""

import random
from dataclasses import replace

import pytest
import tiny
import torch
from grafted_trees import redraw
from msgspec import structs
from sweeps import at_night

from peagle.config import SamplingParams
from peagle.drafters import peagle
from peagle.drafters.lookup import Lookup
from peagle.drafters.selector import SelectorConfig
from peagle.engine.branching import Branching, num_tree_nodes
from peagle.engine.drafting import Drafting
from peagle.engine.engine import Engine
from peagle.engine.host.batch import HostBatch
from peagle.engine.pace import Pace
from peagle.engine.plan import Plan
from peagle.errors import InputError
from peagle.ops.tree import grow

K = 4
PROMPTS = [[(5 * i + j + j * j) % tiny.MASK for j in range(9 + 7 * i)] for i in range(5)]
GREEDY = SamplingParams(max_tokens=30)
KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=40, temperature=1.1, seed=3),
    "top-p": SamplingParams(max_tokens=37, temperature=0.8, top_k=5, top_p=0.9, seed=4),
    "min-p": SamplingParams(max_tokens=35, temperature=0.9, min_p=0.05, seed=5),
    "fewer": SamplingParams(max_tokens=32, num_speculative_tokens=2),
}


def engine_of(target, drafter, nodes: int, **changes: object):
    changes = {"max_num_seqs": 1, "draft_length": "fixed", **changes}
    k = K if drafter else 0
    config = tiny.engine_config(**changes)
    return Engine(target.decoder, drafter, k, config, num_tree_nodes=nodes)


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The drafts that paths of cycles with trees may have."""
    seen, verify = [], HostBatch.verify

    def counted(batch, draft):
        seen.extend([draft.depth] * (draft.tree is not None))
        return verify(batch, draft)

    monkeypatch.setattr(HostBatch, "verify", counted)
    return seen


@pytest.mark.sweep
@pytest.mark.parametrize("nodes", [5, 11, 30])
@pytest.mark.parametrize("method", ["peagle", "selector", "eagle3"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_same(
    targets, trained, tmp_path, trees: list[int], nodes: int, method: str, kind: str
):
    target = targets["easy"]
    if method == "selector":
        config = tiny.drafter_config(True, selector=SelectorConfig(rank=8, candidates=12))
        drafter = tiny.random_drafter_for(target.decoder, tmp_path, config)
    else:
        drafter = trained[method].drafter
    plain, branched = (
        tiny.run(engine_of(target, drafter, each), PROMPTS, KINDS[kind]) for each in (0, nodes)
    )
    assert tiny.outputs(branched) == tiny.outputs(plain)
    assert len(trees) > 20 or kind == "fewer"
    assert set(trees) == (set() if kind == "fewer" else {K})


@pytest.mark.parametrize("seed", [0, *at_night(range(1, 4))])
def test_any_tree_gives_the_same_text(
    targets, trained, trees: list[int], monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Random ones, with wrong drafts, and the same ones twice."""
    target, drafter, draw = targets["easy"], trained["peagle"].drafter, random.Random(seed)
    expected = tiny.outputs(tiny.run(engine_of(target, drafter, 0), PROMPTS, GREEDY))

    def drawn(found, pairs, race, nodes, alone):
        grown = grow(found, pairs, race, nodes, alone)
        redraw(grown, found, 0, draw)
        return grown

    monkeypatch.setattr(peagle, "grow", drawn)
    found = tiny.run(engine_of(target, drafter, 14), PROMPTS, GREEDY)
    assert tiny.outputs(found) == expected
    assert sum(request.speculation.accepted for request in found) > 20


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_drafts_are_accepted(targets, trained, temperature: float):
    how = SamplingParams(max_tokens=80, temperature=temperature, seed=1, ignore_eos=True)
    prompts = [[(7 * i + 3 * j) % tiny.MASK for j in range(6)] for i in range(8)]
    shares = []
    for nodes in (0, 16):
        done = tiny.run(engine_of(targets["easy"], trained["peagle"].drafter, nodes), prompts, how)
        speculation = [request.speculation for request in done]
        shares.append(sum(s.accepted for s in speculation) / sum(s.cycles for s in speculation))
    assert shares[1] > 1.1 * shares[0]


def test_in_scattered_blocks_and_with_cached_prefixes(targets, trained, trees: list[int]):
    """A path's keys move across the edges of blocks, and are found there later."""
    target, drafter, how = targets["easy"], trained["peagle"].drafter, SamplingParams(max_tokens=40)
    expected = tiny.outputs(tiny.run(engine_of(target, drafter, 0), PROMPTS, how))
    sizes = {"block_size": 4, "enable_prefix_caching": True}
    engine = engine_of(target, drafter, 12, max_num_seqs=2, **sizes)
    assert tiny.outputs(tiny.run(engine, PROMPTS, how)) == expected
    longer = [prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)]
    again = tiny.run(engine, longer, GREEDY)
    assert engine.scheduler.prefix_hits > 60
    plain = tiny.run(engine_of(target, None, 0), longer, GREEDY)
    assert tiny.outputs(again) == tiny.outputs(plain)
    assert trees


def test_at_the_end_of_the_context(targets, trained, trees: list[int]):
    """Where a tree has no room, drafts are one behind another."""
    target, how = targets["easy"], SamplingParams(max_tokens=200)
    texts = [
        tiny.outputs(tiny.run(engine_of(target, drafter, nodes, max_model_len=64), PROMPTS, how))
        for drafter, nodes in ((trained["peagle"].drafter, 12), (None, 0))
    ]
    assert texts[0] == texts[1]
    assert all(len(p) + len(text) == 64 for p, text in zip(PROMPTS, texts[0], strict=True))


def test_several_requests_and_what_counts_drafts_do_not_branch(targets, trained, trees: list[int]):
    target, drafter = targets["easy"], trained["peagle"].drafter
    for how in ({"presence_penalty": 0.4}, {"logprobs": 2}, {"logit_bias": {3: 1.0}}):
        params = SamplingParams(max_tokens=20, **how)
        plain, found = (
            tiny.run(engine_of(target, drafter, nodes), PROMPTS, params) for nodes in (0, 11)
        )
        assert tiny.outputs(found) == tiny.outputs(plain)
    assert not trees
    together = engine_of(target, drafter, 11, max_num_seqs=5)
    alike = [SamplingParams(max_tokens=20, ignore_eos=True)] * len(PROMPTS)
    tiny.run(together, PROMPTS, alike)
    assert len(trees) < 10  # only who is left over is alone


@pytest.mark.parametrize(
    ("family", "method", "nodes", "told"),
    [
        ("easy", "peagle", K, "not above K = 4"),
        ("gpt_oss", "peagle", 6, "on a CPU for targets with windows or sinks"),
    ],
)
def test_what_cannot_branch_is_refused(targets, tmp_path, family, method, nodes, told):
    config = tiny.drafter_config(parallel=method == "peagle")
    drafter = tiny.random_drafter_for(targets[family].decoder, tmp_path, config)
    with pytest.raises(InputError, match=told):
        engine_of(targets[family], drafter, nodes)


def test_lookups_do_not_branch(targets):
    lookup = Lookup(2, 5, torch.device("cpu"))
    with pytest.raises(InputError, match="num_tree_nodes needs a drafter"):
        engine_of(targets["easy"], lookup, 12)


def test_a_gpu_whose_kernels_do_not_cover_the_model_has_none(
    targets, trained, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    given = targets["easy"].decoder, Drafting(trained["peagle"].drafter, (K,), num_tree_nodes=12)
    with pytest.raises(InputError, match="needs GPU kernels"):
        num_tree_nodes(*given, captured=False)
    assert num_tree_nodes(*given, captured=True) == 12


def test_keys_of_several_shapes_are_refused_on_a_cpu(targets, trained, monkeypatch):
    """A tree's attention reads one tensor."""
    target = targets["easy"].decoder
    first, *others = target.spec.layers
    wider = replace(first.attention, head_dim=2 * first.attention.head_dim)
    spec = replace(target.spec, layers=(replace(first, mixer=wider), *others))
    monkeypatch.setattr(target, "spec", spec)
    drafting = Drafting(trained["peagle"].drafter, (K,), num_tree_nodes=12)
    with pytest.raises(InputError, match="keys of several shapes"):
        num_tree_nodes(target, drafting, captured=False)
    assert num_tree_nodes(target, drafting, captured=True) == 12


def test_a_worker_tells_which_cycles_branched(
    targets, trained, trees: list[int], monkeypatch: pytest.MonkeyPatch
):
    told, landed = [], Pace.landed

    def noted(pace, verified, time, branched):
        told.append(branched)
        landed(pace, verified, time, branched)

    monkeypatch.setattr(Pace, "landed", noted)
    penalized = SamplingParams(max_tokens=20, repetition_penalty=1.2)
    for how in (GREEDY, penalized, SamplingParams(max_tokens=20, logprobs=1)):
        tiny.run(engine_of(targets["easy"], trained["peagle"].drafter, 11), PROMPTS[:1], how)
    assert told.count(True) == len(trees) > 5
    assert told.count(False) > 5


def test_nobody_is_preempted_for_nodes_beside_a_path(targets, trained):
    """A tree has what is left when everybody has what they need."""
    sizes = {"block_size": 4, "max_num_seqs": 3, "kv_cache_memory": 9 << 15, "max_model_len": 100}
    engine = engine_of(targets["easy"], trained["peagle"].drafter, 30, **sizes)
    pace, plan, preempted, wider = engine.scheduler.pace, engine.scheduler.plan, 0, 0

    def compared() -> Plan:
        nonlocal preempted, wider
        pace.branching = Branching(K, 0, 3)
        plain = plan()
        pace.branching = Branching(K, 30, 3)
        made = plan()
        assert made.preempted == plain.preempted
        assert [structs.replace(share, fresh=0) for share in made.work] == [
            structs.replace(share, fresh=0) for share in plain.work
        ]
        preempted += bool(made.preempted)
        wider += made != plain
        return made

    engine.scheduler.plan = compared
    tiny.run(engine, PROMPTS, SamplingParams(max_tokens=60))
    assert preempted
    assert wider > 5


def test_nobody_makes_room_for_nodes_beside_a_path(targets, trained, trees: list[int]):
    target, drafter, how = targets["easy"], trained["peagle"].drafter, SamplingParams(max_tokens=60)
    sizes = {"block_size": 4, "max_num_seqs": 3, "kv_cache_memory": 5 << 16, "max_model_len": 100}
    plain, found = (engine_of(target, drafter, nodes, **sizes) for nodes in (0, 30))
    expected = tiny.outputs(tiny.run(plain, PROMPTS, how))
    assert tiny.outputs(tiny.run(found, PROMPTS, how)) == expected
    assert found.scheduler.preemptions <= plain.scheduler.preemptions + 1
