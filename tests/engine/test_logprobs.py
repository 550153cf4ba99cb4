"""Log-probabilities of outputs and of prompts, against transformers, on either runner."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import tiny
import torch
from random_engine import random_engine
from torch import Tensor

from peagle.config import EngineConfig, SamplingParams
from peagle.engine import logprobs
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.device.models import PromptEnds
from peagle.engine.device.prefill import Prefill, PromptGraphs
from peagle.engine.engine import Engine
from peagle.engine.logprobs import output_logprobs
from peagle.engine.request import Request
from peagle.engine.step import PromptChunk, TokenLogprobs
from peagle.errors import InputError
from peagle.ops.linear import Linear

PROMPT = [(5 + 3 * i) % tiny.MASK for i in range(8)]
PROMPTS = [[(5 * i + j + j * j) % tiny.MASK for j in range(9 + 4 * i)] for i in range(4)]
LONG = [(3 * i + i * i) % tiny.MASK for i in range(41)]
BOTH = pytest.mark.parametrize("resident", [False, True])
SMALL = {"block_size": 4, "max_num_batched_tokens": 6}


def asking(top: int = 2, **changes: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "prompt_logprobs": top, **changes})


def engine_of(
    targets, trained, method: str = "peagle", resident: bool = False, target="easy", **changes
) -> Engine:
    drafter = None if method == "none" else trained[method].drafter
    config = tiny.engine_config(**changes)
    return tiny.engine(targets[target].decoder, drafter, 4 if drafter else 0, resident, config)


def assert_scores(entries: Sequence[TokenLogprobs], peer, tokens: Sequence[int], top: int) -> None:
    """Of the tokens but the first, as transformers has them."""
    rows = tiny.peer_logits(peer, tokens).log_softmax(dim=-1)
    assert len(entries) == len(tokens) - 1
    for entry, row, token in zip(entries, rows, tokens[1:], strict=False):
        own = row[token].item()
        assert entry.chosen == pytest.approx(own, abs=1e-4)
        assert (row > own + 1e-4).sum() < entry.rank <= (row > own - 1e-4).sum()
        values, ids = row.topk(top)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def scored(targets, trained, method: str, how: SamplingParams) -> Request:
    return tiny.run(engine_of(targets, trained, method), [PROMPT], how)[0]


class TestOutputs:
    @pytest.mark.sweep
    @pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
    @pytest.mark.parametrize("count", [0, 1, 5])
    def test_they_are_the_targets(self, targets, trained, method: str, count: int):
        """One entry a token, before temperature, filters and penalties, drafted or not."""
        how = SamplingParams(
            max_tokens=15, logprobs=count, temperature=1.5, top_k=9, seed=3, frequency_penalty=0.5
        )
        request = scored(targets, trained, method, how)
        everything = scored(targets, trained, method, how.model_copy(update={"prompt_logprobs": 5}))
        assert everything.output == request.output
        cut = [replace(entry, top=entry.top[:count]) for entry in everything.prompt_logprobs]
        peer = targets["easy"].peer
        assert_scores([*cut, *request.logprobs], peer, request.tokens, count)

    def test_asking_for_them_changes_no_token(self, targets, trained):
        plain, asked = (
            scored(targets, trained, "peagle", SamplingParams(max_tokens=20, logprobs=n))
            for n in (None, 2)
        )
        assert plain.output == asked.output
        assert plain.logprobs == []

    def test_equal_ones_are_ranked_alike_beside_others(self):
        logits = torch.randint(4, (6, 500), generator=torch.Generator().manual_seed(0)).float()
        few, many, tokens = 3, 20, [1, 2, 3]
        [alone] = output_logprobs([few], [logits[:3]], [tokens])
        beside, other = output_logprobs([few, many], [logits[:3], logits[3:]], [tokens, tokens])
        assert beside == alone
        assert [len(entry.top) for entry in other] == [20] * 3
        assert [entry.rank for entry in alone] == [
            int((row >= row[token]).sum()) for row, token in zip(logits, tokens, strict=False)
        ]


class TestPrompts:
    @pytest.mark.sweep
    @BOTH
    @pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
    @pytest.mark.parametrize("chunk", [1, 2, 7, 2048])
    def test_they_are_the_targets(self, targets, trained, resident: bool, method: str, chunk: int):
        """Whatever chunks prompts come in, several in a pass; and outputs are as without."""
        engine = engine_of(targets, trained, method, resident, max_num_batched_tokens=chunk)
        how = [asking(top, logprobs=1) for top in (0, 3, 5, 1)]
        requests = tiny.run(engine, PROMPTS, how)
        for request, asked in zip(requests, how, strict=True):
            peer, top = targets["easy"].peer, asked.prompt_logprobs
            assert_scores(request.prompt_logprobs, peer, PROMPTS[int(request.id[1:])], top)
        engine = engine_of(targets, trained, method, resident, max_num_batched_tokens=chunk)
        plain = tiny.run(engine, PROMPTS, SamplingParams(max_tokens=6))
        assert tiny.outputs(requests) == tiny.outputs(plain)
        assert [r.speculation for r in requests] == [r.speculation for r in plain]

    @BOTH
    @pytest.mark.parametrize("target", ["qwen3", "qwen3_windows", "qwen3_moe", "llama", "gpt_oss"])
    def test_of_every_family(self, targets, trained, resident: bool, target: str):
        engine = engine_of(targets, trained, "none", resident, target, max_num_batched_tokens=9)
        [request] = tiny.run(engine, [LONG], asking())
        assert_scores(request.prompt_logprobs, targets[target].peer, LONG, 2)

    @pytest.mark.parametrize("taps", [(0, 4), (1, 2, 3)])
    def test_wherever_the_drafter_taps(self, targets, tmp_path, taps: tuple[int, ...]):
        """Behind the last layer, which else runs for the ends of prompts alone."""
        target = targets["easy"].decoder
        drafter = tiny.random_drafter_for(target, tmp_path, tiny.drafter_config(True, taps=taps))
        engine = tiny.engine(target, drafter, 4, True, tiny.engine_config())
        [request] = tiny.run(engine, [LONG], asking())
        assert_scores(request.prompt_logprobs, targets["easy"].peer, LONG, 2)

    @BOTH
    def test_requests_beside_them_are_as_alone(self, targets, trained, resident: bool):
        """In one pass with them, in the cycle meanwhile, and those that need the host."""
        ways = [SamplingParams(max_tokens=20), asking(max_tokens=20)]
        ways += [SamplingParams(max_tokens=20, logprobs=1), asking(max_tokens=0)]
        alone = [
            tiny.run(engine_of(targets, trained, resident=resident), [prompt], how)[0]
            for prompt, how in zip(PROMPTS, ways, strict=True)
        ]
        engine = engine_of(targets, trained, resident=resident, max_num_batched_tokens=11)
        beside = tiny.run(engine, PROMPTS, ways)
        assert tiny.outputs(beside) == tiny.outputs(alone)
        assert [r.speculation for r in beside] == [r.speculation for r in alone]
        for one, other in zip(beside, alone, strict=True):
            for part in ("logprobs", "prompt_logprobs"):
                found, wanted = ([e.chosen for e in getattr(r, part)] for r in (one, other))
                assert found == pytest.approx(wanted, abs=1e-5)

    def test_a_prompt_of_one_token_has_none(self, targets, trained):
        [request] = tiny.run(engine_of(targets, trained), [[7]], asking())
        assert (request.prompt_logprobs, request.output_length) == ([], 6)

    def test_a_captured_pass_takes_no_prompt_that_is_scored(self, targets, trained, monkeypatch):
        """It has the logits of ends alone; once scored, prompts are captured as others are."""
        captured: list[int] = []
        fit = PromptGraphs.fit

        def noted(self: PromptGraphs, chunks: list[PromptChunk], followed: bool) -> object:
            captured.append(sum(chunk.rows for chunk in chunks))
            return fit(self, chunks, followed)

        monkeypatch.setattr(PromptGraphs, "fit", noted)
        engine = engine_of(targets, trained, resident=True)
        engine.add("scored", PROMPTS[0], asking(max_tokens=9))
        engine.step()
        engine.add("other", PROMPTS[1], SamplingParams(max_tokens=9))
        engine.step()
        engine.step()
        assert captured == [len(PROMPTS[1])]
        scored = engine.scheduler.running[0]
        assert scored.id == "scored"
        engine.scheduler.preempt(scored)
        known = scored.total
        tiny.finish(engine)
        assert captured == [len(PROMPTS[1]), known - scored.reused]


class TestNothingGenerated:
    @BOTH
    @pytest.mark.parametrize("chunk", [1, 7, 2048])
    def test_the_prompt_is_all(self, targets, trained, monkeypatch, resident: bool, chunk: int):
        cycles = []
        monkeypatch.setattr(CycleGraphs, "run", lambda *_: cycles.append("run"))
        engine = engine_of(targets, trained, resident=resident, max_num_batched_tokens=chunk)
        requests = tiny.run(engine, PROMPTS, asking(max_tokens=0))
        for request, prompt in zip(requests, PROMPTS, strict=True):
            assert (request.output, request.finish_reason) == ([], "length")
            assert_scores(request.prompt_logprobs, targets["easy"].peer, prompt, 2)
        assert cycles == []

    @BOTH
    def test_a_prompt_may_fill_the_context(self, targets, trained, resident: bool):
        engine = engine_of(targets, trained, resident=resident, max_model_len=len(LONG))
        [request] = tiny.run(engine, [LONG], asking(max_tokens=0))
        assert_scores(request.prompt_logprobs, targets["easy"].peer, LONG, 2)
        for prompt, most in ((LONG, 1), ([*LONG, 1], 0)):
            with pytest.raises(InputError, match="maximum context length is 41 tokens"):
                engine.add("too long", prompt, asking(max_tokens=most))

    def test_without_log_probabilities_it_would_be_for_nothing(self):
        with pytest.raises(InputError, match="max_tokens: 0 generates nothing; give at least 1"):
            SamplingParams(max_tokens=0)


class TestPrefixCache:
    @BOTH
    def test_it_is_filled_but_not_read(self, targets, trained, resident: bool):
        engine = engine_of(targets, trained, resident=resident, **SMALL)
        plain = SamplingParams(max_tokens=6)
        requests = [tiny.run(engine, [LONG], how)[0] for how in (asking(), plain, asking(), plain)]
        assert [request.cached for request in requests] == [0, 40, 0, 40]
        for request in requests[::2]:
            assert_scores(request.prompt_logprobs, targets["easy"].peer, LONG, 2)
        assert tiny.outputs(requests) == tiny.outputs(requests[:1] * 4)

    @pytest.mark.sweep
    @BOTH
    @pytest.mark.parametrize("steps", range(1, 12))
    @pytest.mark.parametrize("caching", [True, False])
    def test_a_preempted_request_keeps_what_is_known(
        self, targets, trained, resident: bool, steps: int, caching: bool
    ):
        """It reads as much of its own prefix as is scored, and scores the rest once."""
        how = asking(max_tokens=12)
        alone = tiny.run(engine_of(targets, trained, resident=resident), [LONG], how)[0]
        engine = engine_of(
            targets, trained, resident=resident, enable_prefix_caching=caching, **SMALL
        )
        request = engine.add("one", LONG, how)
        for _ in range(steps):
            engine.step()
        known, blocks = list(request.prompt_logprobs), request.remembered
        readable = len(known) if len(known) < len(LONG) - 1 else request.total - 1
        engine.scheduler.preempt(request)
        tiny.finish(engine)
        assert all(one is other for one, other in zip(request.prompt_logprobs, known, strict=False))
        assert_scores(request.prompt_logprobs, targets["easy"].peer, LONG, 2)
        assert request.output == alone.output
        assert request.reused == (4 * min(readable // 4, blocks) if caching else 0)

    @BOTH
    def test_too_few_blocks_for_all(self, targets, trained, resident: bool):
        """Whoever is preempted goes on where it was."""
        how = asking(max_tokens=30)
        wide, narrow = (
            engine_of(
                targets,
                trained,
                resident=resident,
                max_model_len=64,
                max_num_batched_tokens=9,
                kv_cache_memory=size,
            )
            for size in (1 << 20, 1 << 17)
        )
        prompts = [[*LONG[:25], i] for i in range(4)]
        expected = tiny.outputs(tiny.run(wide, prompts, how))
        requests = tiny.run(narrow, prompts, how)
        assert tiny.outputs(requests) == expected
        assert narrow.scheduler.preemptions > 0
        for request, prompt in zip(requests, prompts, strict=True):
            assert_scores(request.prompt_logprobs, targets["easy"].peer, prompt, 2)


@pytest.fixture
def head_rows(targets, monkeypatch) -> list[int]:
    """Rows of every product with the target's head."""
    head, found = targets["easy"].decoder.head, []
    forward = Linear.forward

    def noted(self: Linear, x: Tensor) -> Tensor:
        found.extend([len(x)] * (self is head))
        return forward(self, x)

    monkeypatch.setattr(Linear, "forward", noted)
    return found


@BOTH
@pytest.mark.parametrize("strip", [1, 8, 1000])
def test_logits_of_a_prompt_exist_in_strips(
    targets, trained, monkeypatch, head_rows, resident: bool, strip: int
):
    """Of two prompts in one pass, the last rows aside, from which tokens are chosen."""
    monkeypatch.setattr(logprobs, "STRIP", strip)
    engine = engine_of(targets, trained, "none", resident)
    requests = tiny.run(engine, [LONG, PROMPT], asking(max_tokens=1))
    rows = len(LONG) + len(PROMPT) - 2
    strips = [strip] * (rows // strip) + [rows % strip] * (rows % strip > 0)
    assert sorted(head_rows) == sorted([2, *strips])
    for request, prompt in zip(requests, (LONG, PROMPT), strict=True):
        assert_scores(request.prompt_logprobs, targets["easy"].peer, prompt, 2)


class TestIsolation:
    @pytest.mark.sweep
    @BOTH
    @pytest.mark.parametrize("steps", range(1, 8))
    def test_one_cancelled_within_its_prompt(self, targets, trained, resident: bool, steps: int):
        engine = engine_of(targets, trained, resident=resident)
        others = [PROMPTS[1], PROMPTS[3]]
        expected = tiny.run(engine, others, asking())
        engine = engine_of(targets, trained, resident=resident, **SMALL)
        requests = [engine.add("a", others[0], asking()), engine.add("gone", LONG, asking())]
        requests.append(engine.add("b", others[1], asking()))
        for _ in range(steps):
            engine.step()
        engine.abort("gone")
        again = engine.add("again", LONG, asking())
        tiny.finish(engine)
        assert tiny.outputs(requests[::2]) == tiny.outputs(expected)
        for request, prompt in zip((requests[0], requests[2], again), (*others, LONG), strict=True):
            assert_scores(request.prompt_logprobs, targets["easy"].peer, prompt, 2)
        assert len(requests[1].prompt_logprobs) < len(LONG)

    @pytest.mark.sweep
    @BOTH
    @pytest.mark.parametrize("place", [0, 20, 39])
    @pytest.mark.parametrize("most", [0, 6])
    def test_nan_in_a_prompt_ends_its_request_alone(
        self, targets, trained, resident: bool, place: int, most: int
    ):
        """As soon as it is met; what is reported of the prompt before it are numbers."""
        target, bad = targets["easy"].decoder, tiny.MASK - 1
        prompt, other = ([token % bad for token in tokens] for tokens in (LONG, PROMPTS[1]))
        poisoned = [*prompt[:place], bad, *prompt[place + 1 :]]
        engine = engine_of(targets, trained, resident=resident, **SMALL)
        with tiny.nan_row(target.embed.weight, bad):
            how = asking(max_tokens=most)
            broken, healthy = tiny.run(engine, [poisoned, other], how)
        assert (broken.output, broken.finish_reason) == ([], "error")
        assert all(entry.chosen <= 0 for entry in broken.prompt_logprobs)
        assert len(broken.prompt_logprobs) <= place
        assert_scores(healthy.prompt_logprobs, targets["easy"].peer, other, 2)
        assert healthy.finish_reason == "length"

    @BOTH
    def test_nan_behind_a_prefix_that_it_reads_again_is_looked_at_once_more(
        self, targets, trained, resident: bool
    ):
        target, bad = targets["easy"].decoder, tiny.MASK - 1
        prompt = [token % bad for token in LONG]
        engine = engine_of(targets, trained, resident=resident, **SMALL)
        request = engine.add("one", prompt, asking())
        while len(request.prompt_logprobs) < 12:
            engine.step()
        engine.scheduler.preempt(request)
        with tiny.nan_row(target.embed.weight, prompt[30]):
            while engine.busy and not request.distrusts_cache:
                engine.step()
        tiny.finish(engine)
        assert_scores(request.prompt_logprobs, targets["easy"].peer, prompt, 2)
        assert request.finish_reason == "length"


def test_prompts_without_memory_are_scored_in_smaller_chunks(targets, trained, monkeypatch):
    run = Prefill.run

    def short_of_memory(self: Prefill, chunks: list[PromptChunk], followed: bool) -> PromptEnds:
        if sum(item.rows for item in chunks) > 30:
            raise torch.OutOfMemoryError
        return run(self, chunks, followed)

    monkeypatch.setattr(Prefill, "run", short_of_memory)
    engine = engine_of(targets, trained, resident=True, enable_prefix_caching=False)
    with pytest.warns(UserWarning, match="no memory for"):
        requests = tiny.run(engine, [LONG, *PROMPTS], asking())
    for request, prompt in zip(requests, [LONG, *PROMPTS], strict=True):
        assert_scores(request.prompt_logprobs, targets["easy"].peer, prompt, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_a_gpus_are_those_of_the_plain_runner(method: str, monkeypatch: pytest.MonkeyPatch):
    """In passes of one tile, of many, and of several strips."""
    monkeypatch.setattr(logprobs, "STRIP", 100)
    k = 0 if method == "none" else 4
    prompts = [[(i + 7 * j) % 500 for j in range(n)] for i, n in enumerate((5, 1000, 300))]
    config = EngineConfig(dtype="float32", device="cuda", max_num_seqs=6, kv_cache_memory=1 << 26)
    found = []
    for resident in (False, True):
        with tiny.on_device(resident):
            engine = random_engine("tiny", method, k, None, config)
        found.append(tiny.run(engine, prompts, asking(logprobs=1)))
    for one, other in zip(*found, strict=True):
        assert one.output == other.output
        assert len(one.prompt_logprobs) == one.prompt_length - 1
        for mine, theirs in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert mine.chosen == pytest.approx(theirs.chosen, abs=1e-4)


@pytest.mark.parametrize("strip", [1, 3, 5])
def test_strips_change_no_log_probability(monkeypatch: pytest.MonkeyPatch, strip: int):
    """Requests that want some, with several tokens each, and one among them that wants none."""
    logits = [torch.randn(4, tiny.VOCAB) for _ in range(5)]
    tokens = [[3, 1], [5], [2, 8, 9, 1], [7], [4, 4, 4]]
    wanted = output_logprobs([2, 0, None, 3, 1], logits, tokens)
    monkeypatch.setattr(logprobs, "STRIP", strip)
    assert output_logprobs([2, 0, None, 3, 1], logits, tokens) == wanted
    assert [len(entries) for entries in wanted] == [2, 1, 0, 1, 3]
