"""Invariant 1: greedy output with speculation equals greedy output without it, in float32."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
import tiny
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from sweeps import at_night

from peagle.config import SamplingParams
from peagle.drafters.lookup import Lookup
from peagle.drafters.proposer import Drafter
from peagle.engine.engine import Engine
from peagle.engine.kv_cache import kv_bytes_per_token

LONGEST, NEW = 96, 16
FAMILIES = [*tiny.KINDS, "easy"]
SHARED = [[(11 * i + 3 * stream + i * i) % tiny.MASK for i in range(70)] for stream in range(2)]
Prompt = tuple[int, ...]

prompts = st.builds(
    lambda stream, length, tail: (*SHARED[stream][:length], *tail),
    st.integers(0, 1),
    st.integers(0, 70),
    st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=5),
)


@dataclass(frozen=True)
class Case:
    """A drafter, what it is asked, and how little room the engine has."""

    family: str
    parallel: bool
    layers: int
    qk_norm: bool
    draft_vocab: int
    k: int
    prompts: tuple[Prompt, ...]
    ks: tuple[int | None, ...]
    """Per-request K; None is the engine's."""
    block_size: int
    spare_blocks: int | None
    """Blocks beyond those of one longest sequence; None is plenty."""
    max_num_batched_tokens: int
    max_num_seqs: int
    prefix_caching: bool
    resident: bool
    """Whether the cycle runs as it does on a GPU, on state that stays on the device."""
    hosted: tuple[bool, ...]
    """Per request, whether the host takes part in the choice of its tokens."""
    lookup: bool = False
    """Whether drafts are looked up in the text, without a drafter."""
    pauses: bool = False
    """Whether most cycles draft nothing, and leave the drafter behind; on the device they come
    several to a step."""


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    k = draw(st.integers(1, 7))
    batch = draw(st.lists(prompts, min_size=1, max_size=5))
    own = st.none() | st.integers(0, k)
    return Case(
        family=family,
        parallel=draw(st.booleans()),
        layers=draw(st.integers(1, 2)),
        qk_norm=draw(st.booleans()),
        draft_vocab=draw(st.sampled_from([tiny.VOCAB, 40])),
        k=k,
        prompts=tuple(batch),
        ks=tuple(draw(st.lists(own, min_size=len(batch), max_size=len(batch)))),
        block_size=draw(st.sampled_from([2, 5, 16])),
        spare_blocks=draw(st.none() | st.integers(0, 4)),
        max_num_batched_tokens=draw(st.sampled_from([1, 5, 24, 2048])),
        max_num_seqs=draw(st.sampled_from([1, 3, 64])),
        prefix_caching=draw(st.booleans()),
        resident=draw(st.booleans()),
        hosted=tuple(draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))),
        lookup=draw(st.booleans()),
        pauses=draw(st.booleans()),
    )


def engine_of(target, drafter: Drafter, case: Case) -> Engine:
    per_token = sum(
        kv_bytes_per_token(spec, torch.float32)
        for spec in (target.decoder.spec, drafter.model.config.transformer)
    )
    blocks = -(-LONGEST // case.block_size) + (case.spare_blocks or 0)
    memory = 1 << 22 if case.spare_blocks is None else blocks * case.block_size * per_token
    engine = tiny.engine(
        target.decoder,
        Lookup(1, 4, tiny.CPU) if case.lookup else drafter,
        case.k,
        case.resident,
        tiny.engine_config(
            max_model_len=LONGEST,
            block_size=case.block_size,
            kv_cache_memory=memory,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens,
            enable_prefix_caching=case.prefix_caching,
            draft_length="auto" if case.pauses else "fixed",
        ),
    )
    if case.pauses:
        engine.scheduler.pace.draft_length = tiny.GivenLengths([case.k] + 8 * [0])
        if engine.scheduler.pace.repeats is not None:
            engine.scheduler.pace.repeats = tiny.MostRepeats()
    return engine


@pytest.fixture(autouse=True, scope="module")
def _short_prefixes_are_waited_for() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.engine.plan.WORTH_WAITING", 8)
        patch.setattr("peagle.engine.plan.WORTH_KEEPING", 8)
        yield


@pytest.fixture(scope="module")
def plain(targets) -> Callable[[str, Prompt], list[int]]:
    """Greedy output without speculation: one prompt, one engine, nothing cached."""

    @cache
    def output(family: str, prompt: Prompt) -> list[int]:
        config = tiny.engine_config(max_model_len=LONGEST, enable_prefix_caching=False)
        engine = Engine(targets[family].decoder, None, 0, config)
        return tiny.run(engine, [prompt], SamplingParams(max_tokens=NEW))[0].output

    return output


TIGHT = Case(
    family="easy",
    parallel=True,
    layers=1,
    qk_norm=True,
    draft_vocab=tiny.VOCAB,
    k=5,
    prompts=tuple((*SHARED[0][:length], 7) for length in (40, 44, 50)),
    ks=(None, 0, 3),
    block_size=5,
    spare_blocks=0,
    max_num_batched_tokens=24,
    max_num_seqs=64,
    prefix_caching=False,
    resident=False,
    hosted=(False, False, False),
)


@pytest.fixture
def changes_nothing(targets, trained, drafter_of, plain) -> Callable[[Case], None]:
    """Checks a case; the second round hits the cache."""

    def check(case: Case) -> None:
        if case.family == "easy":
            drafter = trained["peagle" if case.parallel else "eagle3"].drafter
        else:
            drafter = drafter_of(
                case.parallel,
                layers=case.layers,
                qk_norm=case.qk_norm,
                draft_vocab=case.draft_vocab,
            )
        engine = engine_of(targets[case.family], drafter, case)
        params = [
            SamplingParams(max_tokens=NEW, num_speculative_tokens=k, logprobs=0 if hosted else None)
            for k, hosted in zip(case.ks, case.hosted, strict=True)
        ]
        expected = [plain(case.family, prompt) for prompt in case.prompts]
        for _ in range(2):
            assert tiny.outputs(tiny.run(engine, case.prompts, params)) == expected

    return check


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *at_night([1, 2])])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_changes_no_token(changes_nothing, family: str, part: int):
    """Any drafter, K, batch, chunk size, room and cache state, others in each part and family."""

    @seed(3 * FAMILIES.index(family) + part)
    @settings(max_examples=5, phases=[Phase.generate])  # shrinking takes an hour
    @given(cases(family))
    def check(case: Case) -> None:
        changes_nothing(case)

    check()


@pytest.mark.parametrize(
    "case",
    [
        TIGHT,
        replace(TIGHT, resident=True),
        replace(TIGHT, resident=True, hosted=(True, False, True)),
        replace(
            TIGHT,
            family="gpt_oss",
            prompts=(tuple(SHARED[0]),),
            ks=(None,),
            max_num_batched_tokens=1,
            prefix_caching=True,
            hosted=(False,),
        ),
        replace(TIGHT, lookup=True),
        replace(TIGHT, resident=True, lookup=True),
        replace(TIGHT, resident=True, hosted=(True, False, True), lookup=True),
    ],
    ids=[
        "host",
        "resident",
        "resident and hosted",
        "windows of a prompt, token by token",
        "host, looked up",
        "resident, looked up",
        "resident and hosted, looked up",
    ],
)
def test_speculation_changes_no_token_in_little_room(changes_nothing, case: Case):
    changes_nothing(case)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(targets, plain, family: str):
    for length in (1, 2, 17, 64):
        prompt = tuple(SHARED[1][:length])
        ids = torch.tensor([prompt])
        generated = targets[family].peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert plain(family, prompt) == generated[0, length:].tolist()


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_the_trained_drafters_are_really_accepted(targets, trained, method: str):
    """Without this the invariant could hold because nothing is ever accepted."""
    engine = Engine(targets["easy"].decoder, trained[method].drafter, 4, tiny.engine_config())
    requests = tiny.run(engine, SHARED, SamplingParams(max_tokens=60))
    assert sum(r.speculation.accepted for r in requests) > 30


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_preempted_requests_continue_where_they_were(
    targets, trained, plain, method: str, resident: bool
):
    case = replace(TIGHT, resident=resident)
    engine = engine_of(targets["easy"], trained[method].drafter, case)
    how = SamplingParams(max_tokens=NEW)
    requests = [engine.add(str(i), prompt, how) for i, prompt in enumerate(TIGHT.prompts)]
    preempted = 0
    while engine.busy:
        engine.step()
        preempted += any(r.admissions and not (r.running or r.finish_reason) for r in requests)
    assert preempted, "the case leaves room enough; make it tighter"
    assert tiny.outputs(requests) == [plain("easy", prompt) for prompt in TIGHT.prompts]
