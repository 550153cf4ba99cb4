"""Requests in whose choices the host takes part: on the device as on the host."""

from collections.abc import Sequence

import pytest
import tiny
import torch
from random_engine import random_engine
from torch import Tensor

from peagle.config import EngineConfig, SamplingParams
from peagle.engine.branching import Branching
from peagle.engine.cycle import Verified
from peagle.engine.cycle_times import MeasuredTimes
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.device.prefill import Prefill
from peagle.engine.draft_length import DraftLength
from peagle.engine.engine import Engine
from peagle.engine.logits_processor import Choice, LogitsProcessor
from peagle.engine.request import Request
from peagle.transfer import Download

PROMPTS = [[(5 * i + j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
WAYS = [
    {"logprobs": 3},
    {"logit_bias": {7: 4.0, 9: -3.0}},
    {"min_tokens": 12, "stop_token_ids": tuple(range(0, tiny.VOCAB, 3))},
    {"logprobs": 1, "temperature": 1.1, "seed": 5, "top_k": 20},
    {"logit_bias": {3: 2.0}, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "logprobs": 0},
    {"logprobs": 0, "num_speculative_tokens": 2},
]
"""Each alone, and all of them beside a request without any."""


class EvenOnly:
    """Allows even tokens, and odd ones after three of them."""

    failure = None

    def __init__(self, vocab: int = tiny.VOCAB) -> None:
        self.vocab = vocab
        self.taken: list[int] = []

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        rows = []
        for place in range(len(drafts) + 1):
            odd = 0b10101010 if (len(self.taken) + place) % 4 == 3 else 0b01010101
            rows.append([odd] * -(-self.vocab // 8))
        return torch.tensor(rows, dtype=torch.uint8)

    def advance(self, tokens: Sequence[int]) -> None:
        self.taken += tokens


def engine_of(targets, trained, method: str, resident: bool, **changes) -> Engine:
    drafter = None if method == "none" else trained[method].drafter
    config = tiny.engine_config(**changes)
    k = 4 if drafter else 0
    return tiny.engine(targets["easy"].decoder, drafter, k, resident, config)


def params_of(method: str) -> list[SamplingParams]:
    ways = [SamplingParams(**{"max_tokens": 20, **way}) for way in WAYS]
    if method == "none":
        ways = [way.model_copy(update={"num_speculative_tokens": None}) for way in ways]
    return ways


def assert_same(found: Request, expected: Request) -> None:
    assert (found.output, found.finish_reason) == (expected.output, expected.finish_reason)
    assert len(found.logprobs) == len(expected.logprobs)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.chosen == pytest.approx(other.chosen, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.sweep
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_tokens_and_log_probabilities_are_the_plain_runners(
    targets, trained, method: str, way: int
):
    params = params_of(method)[way]
    plain, device = (
        tiny.run(engine_of(targets, trained, method, on), PROMPTS, params) for on in (False, True)
    )
    for found, expected in zip(device, plain, strict=True):
        assert_same(found, expected)
        if params.temperature == 0:  # the plain runner's drafts share the target's draw
            assert found.speculation == expected.speculation
    free = tiny.run(
        engine_of(targets, trained, method, True), PROMPTS, SamplingParams(max_tokens=20)
    )
    if {"logit_bias", "temperature", "min_tokens"} & WAYS[way].keys():
        assert tiny.outputs(free) != tiny.outputs(device), "the way changes nothing here"


@pytest.mark.parametrize("method", ["none", "peagle"])
@pytest.mark.parametrize("chunk", [2048, 11])
def test_all_of_them_beside_one_another(targets, trained, method: str, chunk: int):
    """And beside requests that the device runs alone, with prompts in chunks or not."""
    params = [*params_of(method), SamplingParams(max_tokens=20), SamplingParams(max_tokens=20)]
    prompts = [PROMPTS[i % 4] for i in range(len(params))]
    plain, device = (
        tiny.run(
            engine_of(targets, trained, method, on, max_num_batched_tokens=chunk), prompts, params
        )
        for on in (False, True)
    )
    for found, expected in zip(device, plain, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_is_kept_along_the_drafts(targets, trained, method: str, temperature: float):
    how = SamplingParams(max_tokens=21, temperature=temperature, seed=2)
    outputs = []
    for resident in (False, True):
        engine = engine_of(targets, trained, method, resident)
        constraint = EvenOnly()
        request = engine.add("bound", PROMPTS[0], how, constraint)
        engine.add("free", PROMPTS[0], SamplingParams(max_tokens=9))
        tiny.finish(engine)
        assert [token % 2 for token in request.output] == [0, 0, 0, 1] * 5 + [0]
        assert constraint.taken == request.output
        outputs.append(request.output)
    assert outputs[0] == outputs[1]


def test_a_step_with_one_of_them_brings_its_results(targets, trained):
    """Those of the others in it, too, and what was in flight comes before: one result a step."""
    engine = engine_of(targets, trained, "peagle", True)
    device = engine.add("device", PROMPTS[1], SamplingParams(max_tokens=60))
    came = []
    for place in range(6):
        if place == 3:
            engine.add("hosted", PROMPTS[0], SamplingParams(max_tokens=2, logprobs=0))
        came.append([output.request_id for output in engine.step()])
    together = ["device", "hosted"]
    assert came == [[], ["device"], [], ["device"], together, together]
    assert device.ahead == 0
    tiny.finish(engine)


def test_one_that_waits_for_room_does_not_hold_up_the_device(targets, trained):
    engine = engine_of(targets, trained, "peagle", True, max_num_seqs=1)
    engine.add("device", PROMPTS[1], SamplingParams(max_tokens=60))
    engine.add("hosted", PROMPTS[0], SamplingParams(max_tokens=2, logprobs=0))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.in_flight
    came = [[output.request_id for output in engine.step()] for _ in range(4)]
    assert came == [["device"]] * 4
    tiny.finish(engine)


def test_one_that_waits_for_blocks_does_not_hold_up_the_device(targets, trained):
    small = {"kv_cache_memory": 1 << 17, "max_model_len": 64, "enable_prefix_caching": False}
    engine = engine_of(targets, trained, "peagle", True, **small)
    engine.add("device", [(7 * j) % tiny.MASK for j in range(34)], SamplingParams(max_tokens=30))
    for _ in range(3):
        engine.step()
    long = [j % tiny.MASK for j in range(62)]
    engine.add("hosted", long, SamplingParams(max_tokens=2, logprobs=0))
    came = [[output.request_id for output in engine.step()] for _ in range(7)]
    assert engine.stats.waiting == 1
    assert came == [["device"]] * 7
    tiny.finish(engine)


@pytest.mark.parametrize("first", [False, True])
def test_a_long_prompt_of_one_of_them_does_not_hold_up_the_device(targets, trained, first: bool):
    """Neither when it comes, nor by its chunks, nor while it waits behind those of another."""
    engine = engine_of(targets, trained, "peagle", True, max_num_batched_tokens=8)
    engine.add("device", PROMPTS[1], SamplingParams(max_tokens=60))
    for _ in range(3):
        engine.step()
    hosted = SamplingParams(max_tokens=2, logprobs=0)
    engine.add("one", [j % tiny.MASK for j in range(80)], hosted if first else SamplingParams())
    engine.add("another", PROMPTS[2], SamplingParams() if first else hosted)
    came = [[output.request_id for output in engine.step()] for _ in range(9)]
    assert came[0] == [], "nothing was in flight"
    assert all("device" in output for output in came[1:])
    tiny.finish(engine)


def test_the_device_goes_on_alone_once_enough_tokens_are_there(targets, trained, monkeypatch):
    lengths, verify = [], CycleGraphs.verify

    def noted(self: CycleGraphs, *args) -> Verified:
        lengths.append(request.output_length)
        return verify(self, *args)

    monkeypatch.setattr(CycleGraphs, "verify", noted)
    engine = engine_of(targets, trained, "peagle", True)
    how = SamplingParams(max_tokens=30, min_tokens=9, stop_token_ids=(1,))
    request = engine.add("one", PROMPTS[0], how)
    tiny.finish(engine)
    assert lengths[-1] < 9 <= request.output_length
    lengths.clear()
    request = engine.add("never ends early", PROMPTS[0], SamplingParams(min_tokens=9, max_tokens=9))
    tiny.finish(engine)
    assert lengths == []


@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_error_between_the_parts_loses_nobodys_tokens(targets, trained, call: int):
    class Failing(EvenOnly):
        calls = 0

        def allowed(self, drafts: Sequence[int]) -> Tensor:
            Failing.calls += 1
            if Failing.calls == call:
                raise RuntimeError
            return super().allowed(drafts)

    how = SamplingParams(max_tokens=20)
    engine = engine_of(targets, trained, "peagle", True)
    whole = engine.add("whole", PROMPTS[0], how, EvenOnly())
    [alone] = tiny.run(engine, PROMPTS[1:2], how)
    bound = engine.add("bound", PROMPTS[0], how, Failing())
    free = engine.add("free", PROMPTS[1], how)
    raised = 0
    while engine.busy:
        try:
            engine.step()
        except RuntimeError:
            raised += 1
    assert (bound.output, free.output, raised) == (whole.output, alone.output, 1)


@pytest.mark.parametrize("vocab", [8, 11, 31, 33])
def test_a_forms_bits_are_tokens_lowest_first(vocab: int):
    allowed = {0, 3, vocab - 1}

    class These(EvenOnly):
        def allowed(self, drafts: Sequence[int]) -> Tensor:
            bits = sum(1 << token for token in allowed)
            return torch.tensor([[*bits.to_bytes(-(-vocab // 8), "little")]], dtype=torch.uint8)

    settings = Request("", [1], SamplingParams(), 0, 0, These()).settings
    logits = torch.zeros(1, vocab)
    processor = LogitsProcessor(lambda _: These())
    processor.edit(logits, [Choice(settings, drafts=0, missing=0)], Download(torch.empty(0)))
    assert logits[0].isfinite().nonzero().flatten().tolist() == sorted(allowed)


def test_forms_look_at_the_drafts_while_the_target_does(targets, trained, monkeypatch):
    """Masks are computed after the verification was launched, and edits wait for nothing of it."""
    seen: list[str] = []
    verify, accept = CycleGraphs.verify, CycleGraphs.accept

    class Seeing(EvenOnly):
        def allowed(self, drafts: Sequence[int]) -> Tensor:
            seen.append(f"masks along {len(drafts)}")
            return super().allowed(drafts)

    def noted(name: str, run):
        return lambda *args: (seen.append(name), run(*args))[1]

    monkeypatch.setattr(CycleGraphs, "verify", noted("verify", verify))
    monkeypatch.setattr(CycleGraphs, "accept", noted("accept", accept))
    engine = engine_of(targets, trained, "peagle", True)
    engine.add("bound", PROMPTS[0], SamplingParams(max_tokens=2, ignore_eos=True), Seeing())
    tiny.finish(engine)
    assert seen[:4] == ["masks along 0", "verify", "masks along 4", "accept"]


def test_preempted_ones_continue_where_they_were(targets, trained):
    ways = [params_of("peagle")[way] for way in (1, 3, 4, 0)]
    params = [way.model_copy(update={"max_tokens": 40}) for way in ways]
    wide, narrow = (
        engine_of(targets, trained, "peagle", True, kv_cache_memory=size, max_model_len=64)
        for size in (1 << 20, 1 << 17)
    )
    expected = tiny.outputs(tiny.run(wide, PROMPTS, params))
    assert tiny.outputs(tiny.run(narrow, PROMPTS, params)) == expected
    assert narrow.scheduler.preemptions > 0


def test_draft_lengths_learn_from_them(targets, trained):
    seen: list[int] = []

    class Seeing(DraftLength):
        def verified(self, cycle: Sequence[tuple[int, int]], branched: bool = False) -> None:
            seen.extend(accepted for _, accepted in cycle)
            super().verified(cycle, branched)

    engine = engine_of(targets, trained, "peagle", True, draft_length="auto")
    times = MeasuredTimes({4: {1: 1.0, 3: 1.5, 4: 1.6}})
    engine.scheduler.pace.draft_length = Seeing(times, False, Branching(4, 0, 0))
    how = SamplingParams(max_tokens=30, logprobs=0)
    requests = tiny.run(engine, PROMPTS, how)
    done = [request.speculation for request in requests]
    assert sum(seen) == sum(did.accepted for did in done) > 0


def test_nan_ends_one_of_them_alone(targets, trained):
    target, bad = targets["easy"].decoder, 93  # which no request drafts
    how = SamplingParams(max_tokens=8, logprobs=2)
    prompts = [[t if t != bad else t + 1 for t in prompt] for prompt in PROMPTS]
    expected = tiny.outputs(tiny.run(engine_of(targets, trained, "peagle", True), prompts, how))
    engine = engine_of(targets, trained, "peagle", True)
    with tiny.nan_row(target.embed.weight, bad):
        first, *others = tiny.run(engine, [[bad, *prompts[0]], *prompts[1:]], how)
    assert (first.output, first.logprobs, first.finish_reason) == ([], [], "error")
    healthy = [pair for pair in zip(others, expected[1:], strict=True) if bad not in pair[1]]
    assert healthy
    for request, output in healthy:
        assert (request.output, request.finish_reason) == (output, "length")


def test_prompts_without_memory_come_in_smaller_chunks(targets, trained, monkeypatch):
    how = SamplingParams(max_tokens=6, logit_bias={5: 3.0})
    expected = tiny.outputs(tiny.run(engine_of(targets, trained, "peagle", True), PROMPTS, how))
    engine = engine_of(targets, trained, "peagle", True, enable_prefix_caching=False)
    run = Prefill.run

    def short_of_memory(self: Prefill, chunks: list, followed: bool) -> object:
        if sum(item.rows for item in chunks) > 30:
            raise torch.OutOfMemoryError
        return run(self, chunks, followed)

    monkeypatch.setattr(Prefill, "run", short_of_memory)
    with pytest.warns(UserWarning, match="no memory for"):
        assert tiny.outputs(tiny.run(engine, PROMPTS, how)) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_captured_parts_give_what_the_plain_runner_gives(method: str):
    """Batches of several sizes, requests that come and go, a prompt beyond the captured sizes."""
    k = 0 if method == "none" else 4
    params = [*params_of(method), SamplingParams(max_tokens=20), SamplingParams(max_tokens=7)]
    prompts = [PROMPTS[i % 4] for i in range(len(params))]
    prompts[2] = [(7 * j) % 500 for j in range(900)]
    config = EngineConfig(dtype="float32", device="cuda", max_num_seqs=6, kv_cache_memory=1 << 26)
    outputs = []
    for resident in (False, True):
        with tiny.on_device(resident):
            engine = random_engine("tiny", method, k, None, config)
        requests = tiny.run(engine, prompts, params)
        bound = engine.add(
            "bound", PROMPTS[0], SamplingParams(max_tokens=20), EvenOnly(engine.facts.vocab_size)
        )
        tiny.finish(engine)
        outputs.append([*tiny.outputs(requests), bound.output])
    assert outputs[0] == outputs[1]
