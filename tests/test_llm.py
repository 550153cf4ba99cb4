"""Prompts in, texts out: the public names."""

import asyncio
import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch
from blocks import check_blocks
from tiny_pair import TinyPair, save_pair

from peagle import (
    LLM,
    AsyncLLM,
    EngineConfig,
    InputError,
    SamplingParams,
    SpeculativeConfig,
    async_llm,
)
from peagle.async_llm import EngineClosedError
from peagle.completion import Chunk
from peagle.dialects.reader import Reader
from peagle.engine_client.client import EngineStepError

PROMPTS = ["def name(self):", "for item in items:\n", "é世🙂", "x"]
END = 0
HOW = SamplingParams(max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return save_pair(tmp_path_factory.mktemp("pair"))


def made(pair: TinyPair, method: str = "peagle", k: int | None = 3, **config) -> LLM:
    speculation = None
    if method != "none":
        model = str(getattr(pair, method))
        speculation = SpeculativeConfig(model=model, num_speculative_tokens=k)
    return LLM(pair.target, speculation, tiny.engine_config(**config))


@pytest.fixture(scope="module")
def llm(pair: TinyPair) -> LLM:
    return made(pair)


@pytest.fixture(autouse=True)
def _whole(llm: LLM) -> Iterator[None]:
    """No test leaves anything behind in the engine."""
    yield
    assert not llm.engine.core.busy
    check_blocks(llm.engine.core.blocks)
    assert sum(llm.engine.core.blocks.free_by_group()) == llm.engine.core.blocks.num_blocks


@pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
def test_texts_and_tokens_agree(pair: TinyPair, method: str):
    llm = made(pair, method)
    completions = llm.generate(PROMPTS, HOW)
    peer = tiny.load_peer(pair.target)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = llm.tokenizer(prompt).input_ids
        assert list(completion.prompt_token_ids) == ids
        best = tiny.peer_logits(peer, [*ids, *completion.token_ids]).argmax(dim=-1).tolist()
        assert list(completion.token_ids) == best[len(ids) - 1 : -1]
        assert completion.text == llm.tokenizer.decode(
            completion.token_ids, skip_special_tokens=True
        )
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 20)
        assert len(completion.token_times) == 20
        assert list(completion.token_times) == sorted(completion.token_times)
        assert (completion.speculation.cycles > 0) == (method != "none")


def test_completions_come_in_order_as_they_are_finished(llm: LLM):
    """The second prompt's is ready first and waits for the first's."""
    params = [HOW.model_copy(update={"max_tokens": n}) for n in (5, 1, 20, 2)]
    expected = llm.generate(PROMPTS, params)
    found = []
    for completion in llm.completions(PROMPTS, params):
        found.append(completion)
        assert llm.engine.core.busy == (len(found) < 3)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_leaving_completions_early_cancels_the_others(llm: LLM):
    some = llm.completions(
        PROMPTS, [HOW.model_copy(update={"max_tokens": n}) for n in (1, 9, 9, 9)]
    )
    assert len(next(some).token_ids) == 1
    assert llm.engine.core.busy
    some.close()
    assert not llm.engine.core.busy


def test_token_ids_are_a_prompt_too(llm: LLM):
    text, ids = llm.generate([PROMPTS[0], llm.tokenizer(PROMPTS[0]).input_ids], HOW)
    assert text.token_ids == ids.token_ids


def test_each_prompt_may_have_its_own_parameters(llm: LLM):
    params = [HOW.model_copy(update={"max_tokens": n}) for n in (1, 2, 3, 4)]
    assert [len(c.token_ids) for c in llm.generate(PROMPTS, params)] == [1, 2, 3, 4]
    with pytest.raises(InputError, match="2 sampling parameters for 4 prompts"):
        llm.generate(PROMPTS, params[:2])


def test_chunks_make_up_the_completion(llm: LLM):
    (expected,) = llm.generate([PROMPTS[0]], HOW)
    chunks = list(llm.stream(PROMPTS[0], HOW))
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == expected.token_ids
    assert [chunk.completion is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    last = chunks[-1].completion
    assert last is not None
    assert (last.text, last.token_ids) == (expected.text, expected.token_ids)
    assert sum(chunk.accepted for chunk in chunks) <= last.speculation.accepted
    assert all(chunk.accepted < len(chunk.token_ids) for chunk in chunks[:-1])


class LateEngine:
    """An engine whose steps are read only once there are some."""

    def __init__(self, engine, steps: int) -> None:
        self._engine, self._steps = engine, steps

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self) -> list:
        """What several steps gave, one after the other."""
        return [output for _ in range(self._steps) for output in self._engine.step()]


@pytest.mark.parametrize("steps", [2, 5, 100])
@pytest.mark.parametrize(
    "values",
    [{}, {"stop": ("e",)}, {"temperature": 1.0, "logprobs": 2, "ignore_eos": True}],
    ids=["greedy", "stop", "sampled"],
)
def test_steps_that_are_read_together_say_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, steps: int, values
):
    """The same text, tokens, scores and drafts, in fewer chunks."""
    how = SamplingParams(max_tokens=30, seed=1, **values)
    alone = list(llm.stream(PROMPTS[0], how))
    monkeypatch.setattr(llm, "engine", LateEngine(llm.engine, steps))
    together = list(llm.stream(PROMPTS[0], how))
    assert len(together) < max(len(alone), 2)
    for name in ("token_ids", "sections", "drafted", "logprobs"):
        found = (sum((getattr(c, name) for c in chunks), ()) for chunks in (alone, together))
        assert next(found) == next(found), name
    assert "".join(c.text for c in together) == "".join(c.text for c in alone)
    last, expected = together[-1].completion, alone[-1].completion
    assert (last.text, last.token_ids, last.finish_reason, last.stop_string) == (
        expected.text,
        expected.token_ids,
        expected.finish_reason,
        expected.stop_string,
    )
    if "stop" not in values:  # else it ran on before anyone had looked for the stop string
        assert last.speculation == expected.speculation


def test_whom_nobody_follows_comes_in_one_chunk(llm: LLM):
    """With all that a stream's chunks bring."""
    how = HOW.model_copy(update={"logprobs": 1})
    parts = list(llm.stream(PROMPTS[0], how))
    request_id = llm.submit(llm.prepare(PROMPTS[0], how), followed=False)
    chunks = [chunk for _ in range(100) if llm.engine.core.busy for chunk in llm.step()]
    assert [chunk.request_id for chunk in chunks] == [request_id]
    (whole,) = chunks
    assert whole.token_ids == sum((part.token_ids for part in parts), ())
    assert whole.text == "".join(part.text for part in parts)
    assert len(whole.sections) == len(whole.logprobs) == HOW.max_tokens
    assert whole.accepted == sum(part.accepted for part in parts)
    assert whole.completion is not None


@pytest.mark.parametrize("most", [0, 20])
def test_log_probabilities_of_a_prompt_come_with_its_first_chunk(
    pair: TinyPair, llm: LLM, most: int
):
    how = HOW.model_copy(update={"prompt_logprobs": 1, "max_tokens": most})
    (completion,) = llm.generate([PROMPTS[0]], how)
    ids, (nothing, *found) = completion.prompt_token_ids, completion.prompt_logprobs
    rows = tiny.peer_logits(tiny.load_peer(pair.target), ids).log_softmax(dim=-1)
    wanted = [row[token].item() for row, token in zip(rows, ids[1:], strict=False)]
    assert nothing is None
    assert [entry.chosen for entry in found if entry] == pytest.approx(wanted, abs=1e-4)
    first, *others = llm.stream(PROMPTS[0], how)
    assert len(first.prompt_logprobs) == len(ids)
    assert not any(chunk.prompt_logprobs for chunk in others)
    last = [first, *others][-1].completion
    assert last is not None
    assert last.prompt_logprobs == first.prompt_logprobs
    (plain,) = llm.generate([PROMPTS[0]], HOW)
    assert plain.prompt_logprobs == ()
    assert plain.token_ids[:most] == completion.token_ids


def test_streams_side_by_side_lose_nothing(llm: LLM):
    """Each step serves every request, whoever called it."""
    expected = llm.generate(PROMPTS[:3], HOW)
    streams = [llm.stream(prompt, HOW) for prompt in PROMPTS[:2]]
    chunks: list[list[Chunk]] = [[next(stream)] for stream in streams]
    (other,) = llm.generate(PROMPTS[2:3], HOW)
    for part, stream in zip(chunks, streams, strict=True):
        part += stream
    assert other.token_ids == expected[2].token_ids
    for part, completion in zip(chunks, expected[:2], strict=True):
        assert "".join(chunk.text for chunk in part) == completion.text
        assert sum((chunk.token_ids for chunk in part), ()) == completion.token_ids
        assert part[-1].completion is not None


def test_an_answer_that_cannot_be_read_disturbs_no_other(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Whatever is wrong with what reads it."""
    expected = llm.generate(PROMPTS, HOW)
    extend = Reader.extend

    def fail(reader: Reader, tokens: list[int]) -> int | None:
        if list(tokens) == list(expected[1].token_ids):
            raise TypeError("unheard of")
        return extend(reader, tokens)

    monkeypatch.setattr(Reader, "extend", fail)
    found = llm.generate(PROMPTS, HOW)
    assert found[1].finish_reason == "error"
    assert found[1].failure == "its text cannot be read; the log says why"
    assert "unheard of" in caplog.text
    for place in (0, 2, 3):
        assert found[place].text == expected[place].text


def test_a_step_that_fails_ends_all_that_run(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Also those of another caller, who does not wait for ever."""
    stream = llm.stream(PROMPTS[0], HOW)
    next(stream)
    with monkeypatch.context() as patched:
        broken = Mock(side_effect=RuntimeError("broken"))
        patched.setattr(llm.engine.core.worker, "exchange", broken)
        with pytest.raises(RuntimeError, match="broken"):
            llm.generate(PROMPTS[1:], HOW)
    with pytest.raises(EngineStepError):
        list(stream)
    assert [done.finish_reason for done in llm.generate(PROMPTS, HOW)] == ["length"] * 4


class TestStopping:
    @pytest.mark.parametrize("method", ["none", "peagle", "eagle3"])
    @pytest.mark.parametrize("which", [0, 1, -1])
    @pytest.mark.parametrize("size", [1, 3])
    def test_a_stop_string(self, pair: TinyPair, llm: LLM, method: str, which: int, size: int):
        """Text ends before it; tokens end with the one that completed it."""
        (whole,) = llm.generate([PROMPTS[0]], HOW)
        parts = (whole.text[place : place + size] for place in range(1, len(whole.text) - size))
        stop = [part for part in parts if part.isascii()][which]
        how = HOW.model_copy(update={"stop": (stop, "never seen")})
        subject = made(pair, method)
        (cut,) = subject.generate([PROMPTS[0]], how)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        decode = subject.tokenizer.decode
        assert stop in decode(cut.token_ids)
        assert stop not in decode(cut.token_ids[:-1])
        assert len(cut.token_times) == len(cut.token_ids)
        streamed = "".join(chunk.text for chunk in subject.stream(PROMPTS[0], how))
        assert streamed == cut.text

    def test_a_stop_token_is_no_text(self, llm: LLM):
        (whole,) = llm.generate([PROMPTS[0]], HOW)
        stop = whole.token_ids[7]
        how = HOW.model_copy(update={"stop_token_ids": (stop,)})
        (cut,) = llm.generate([PROMPTS[0]], how)
        first = whole.token_ids.index(stop)
        assert cut.token_ids == whole.token_ids[: first + 1]
        expected = llm.tokenizer.decode(cut.token_ids[:-1], skip_special_tokens=True)
        assert cut.text == expected.rstrip("\N{REPLACEMENT CHARACTER}")

    def test_the_targets_end_of_text(self, llm: LLM):
        """Forced by a bias: the first token ends it all."""
        how = SamplingParams(max_tokens=5, logit_bias={END: 100.0})
        (completion,) = llm.generate([PROMPTS[0]], how)
        assert (completion.text, completion.token_ids) == ("", (END,))
        assert completion.finish_reason == "stop"

    def test_log_probabilities_stop_with_the_tokens(self, llm: LLM):
        (whole,) = llm.generate([PROMPTS[0]], HOW)
        how = HOW.model_copy(update={"stop": (whole.text[4:6],), "logprobs": 2})
        (cut,) = llm.generate([PROMPTS[0]], how)
        assert len(cut.logprobs) == len(cut.token_ids) < 20


BAD_PROMPTS = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ("\ud800", "the text is not valid Unicode"),
    ([1.0], "a prompt is text or a list of token ids"),
    (["a"], "a prompt is text or a list of token ids"),
    ([9999], "token id 9999 is outside the vocabulary of 300"),
    ([1] * 512, "too long: 512 tokens > 511; this model's maximum context length is 512 tokens"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_prompts_that_cannot_be_used(llm: LLM, prompt, message: str):
    with pytest.raises(InputError, match=message):
        llm.generate([PROMPTS[0], prompt], HOW)
    with pytest.raises(InputError, match=message):
        next(llm.stream(prompt, HOW))

    @pytest.mark.parametrize("method", ["none", "peagle"])
    @pytest.mark.parametrize("arrival", range(1, 7))
    def test_in_a_step_in_flight_when_another_begins_that_needs_the_host(
        self, pair: TinyPair, method: str, arrival: int
    ):
        whole = made(pair, method).generate([PROMPTS[3]], HOW)[0]
        how = HOW.model_copy(update={"stop": (whole.text[1:3],)})
        expected = made(pair, method).generate([PROMPTS[3]], how)[0]
        with tiny.on_device(True):
            llm = made(pair, method)
        chunks: list[Chunk] = []
        ids = [llm.submit(llm.prepare(PROMPTS[3], how))]
        for _ in range(arrival):
            chunks += llm.step()
        ids.append(llm.submit(llm.prepare("y", HOW.model_copy(update={"logprobs": 0}))))
        while llm.engine.core.busy:
            chunks += llm.step()
        done = {chunk.request_id: chunk.completion for chunk in chunks if chunk.completion}
        assert [done[name].finish_reason for name in ids] == ["stop", "length"]
        assert (done[ids[0]].text, done[ids[0]].token_ids) == (expected.text, expected.token_ids)


class TestPair:
    @pytest.mark.parametrize(("trained", "k"), [(5, 5), (None, 7)])
    def test_k_is_what_the_drafter_was_trained_for(
        self, pair: TinyPair, tmp_path: Path, trained: int | None, k: int
    ):
        drafter = shutil.copytree(pair.peagle, tmp_path / "drafter")
        config = json.loads((drafter / "config.json").read_text())
        (drafter / "config.json").write_text(
            json.dumps({**config, "num_speculative_tokens": trained})
        )
        speculation = SpeculativeConfig(model=str(drafter))
        assert LLM(pair.target, speculation, tiny.engine_config()).k == k

    def test_a_k_beyond_training_is_worth_a_warning(self, pair: TinyPair):
        assert made(pair, k=8).beyond_training is None
        assert made(pair, "none").beyond_training is None
        warning = made(pair, k=9).beyond_training
        assert warning == "K = 9 is beyond the 8 tokens the drafter was trained for"

    def test_a_drafter_run_the_wrong_way(self, pair: TinyPair):
        for model, parallel in ((pair.peagle, False), (pair.eagle3, True)):
            config = SpeculativeConfig(model=str(model), parallel_drafting=parallel)
            with pytest.raises(InputError, match="set parallel_drafting to"):
                LLM(pair.target, config, tiny.engine_config())

    def test_a_drafter_of_another_target(self, pair: TinyPair, tmp_path: Path):
        other = tiny.save_random_drafter(tmp_path / "other", tiny.drafter_config(parallel=True))
        with pytest.raises(InputError, match="vocabulary has 96 tokens, the target's 300"):
            LLM(pair.target, SpeculativeConfig(model=str(other)), tiny.engine_config())

    def test_directories_that_are_no_models(self, pair: TinyPair, tmp_path: Path):
        with pytest.raises(InputError, match=r"it has no config\.json"):
            LLM(tmp_path)
        with pytest.raises(InputError, match="is a whole language model, not a drafter"):
            LLM(pair.target, SpeculativeConfig(model=str(pair.target)), tiny.engine_config())
        with pytest.raises(InputError, match="no such directory"):
            LLM(pair.target, SpeculativeConfig(model=str(tmp_path / "nowhere")))

    @pytest.mark.parametrize("family", ["qwen3", "llama"])
    def test_a_target_without_a_tokenizer(self, tmp_path: Path, family: str):
        """For some families transformers makes up an empty one."""
        with pytest.raises(InputError, match=r"has no usable tokenizer: it has no tokenizer\.json"):
            LLM(tiny.save_target(tmp_path / "bare", family), None, tiny.engine_config())

    def test_a_damaged_tokenizer(self, pair: TinyPair, tmp_path: Path):
        target = shutil.copytree(pair.target, tmp_path / "target")
        (target / "tokenizer.json").write_text('{"version": "1.0"}')
        with pytest.raises(InputError, match="target has no usable tokenizer: "):
            LLM(target, None, tiny.engine_config())

    def test_an_unknown_device(self, pair: TinyPair):
        for device in ("tpu-9", "meta"):
            with pytest.raises(InputError, match=f"device {device} is"):
                LLM(pair.target, config=EngineConfig(device=device))

    def test_bfloat16(self, pair: TinyPair):
        llm = made(pair, dtype="bfloat16")
        assert llm.engine.core.target.embed.weight.dtype == torch.bfloat16
        assert len(llm.generate(PROMPTS, HOW)) == 4


class TestAsync:
    def test_concurrent_streams_equal_the_batch(self, llm: LLM):
        params = [
            HOW,
            HOW.model_copy(update={"temperature": 0.9, "seed": 4}),
            HOW.model_copy(update={"num_speculative_tokens": 0}),
            HOW.model_copy(update={"max_tokens": 3}),
        ]
        expected = llm.generate(PROMPTS, params)

        async def read(engine: AsyncLLM, prompt: str, how: SamplingParams) -> list[Chunk]:
            return [chunk async for chunk in engine.stream(prompt, how)]

        async def everything() -> list[list[Chunk]]:
            engine = AsyncLLM(lambda: llm)
            streams = (read(engine, p, h) for p, h in zip(PROMPTS, params, strict=True))
            results = await asyncio.gather(*streams)
            engine.close()
            return results

        for chunks, completion in zip(asyncio.run(everything()), expected, strict=True):
            assert "".join(chunk.text for chunk in chunks) == completion.text
            assert sum((chunk.token_ids for chunk in chunks), ()) == completion.token_ids
            assert chunks[-1].completion is not None
            assert chunks[-1].completion.finish_reason == completion.finish_reason

    @pytest.mark.parametrize("ahead", [False, True])
    def test_who_waits_has_a_turn_before_the_next_step(
        self, pair: TinyPair, monkeypatch, ahead: bool
    ):
        """For first tokens, and for all while the device works on another step."""
        monkeypatch.setattr(async_llm, "PATIENCE", 3.0)  # of which a last wait takes all
        with tiny.on_device(ahead):
            llm = made(pair)
        handed: list[Chunk] = []
        read: list[Chunk] = []
        seen: list[tuple[int, int]] = []
        step = llm.step

        def noted_step() -> list[Chunk]:
            seen.append((len(handed), len(read)))
            chunks = step()
            handed.extend(chunks)
            return chunks

        monkeypatch.setattr(llm, "step", noted_step)

        async def everything() -> None:
            engine = AsyncLLM(lambda: llm)
            async for chunk in engine.stream(PROMPTS[0], HOW):
                time.sleep(0.01)  # as long as a step
                read.append(chunk)
            engine.close()

        asyncio.run(everything())
        assert len(seen) > 5
        begun = next(index for index, (before, _) in enumerate(seen) if before)
        assert all(before == after for before, after in (seen if ahead else seen[: begun + 1]))

    def test_what_came_meanwhile_is_handed_over_in_one_piece(self, llm: LLM, monkeypatch):
        """To a reader that was busy elsewhere; and in order."""
        stepped: list[list[Chunk]] = []
        step = llm.step

        def noted_step() -> list[Chunk]:
            stepped.append(step())
            return stepped[-1]

        async def read() -> list[list[Chunk]]:
            prepared = await engine.prepare(PROMPTS[0], HOW)
            async with engine.run([prepared]) as batches:
                while len(stepped) < 4:  # the loop is busy
                    time.sleep(0.01)
                return [[chunk for _, chunk in batch] async for batch in batches]

        (expected,) = llm.generate([PROMPTS[0]], HOW)
        monkeypatch.setattr(llm, "step", noted_step)
        with contextlib.closing(AsyncLLM(lambda: llm)) as engine:
            first, *others = asyncio.run(read())
        assert len(first) > 1
        chunks = sum(others, first)
        assert sum((chunk.token_ids for chunk in chunks), ()) == expected.token_ids

    def test_a_completion_of_which_nothing_is_told_before(self, llm: LLM):
        (expected,) = llm.generate([PROMPTS[0]], HOW)

        async def ask() -> str:
            done = await engine.complete(await engine.prepare(PROMPTS[0], HOW))
            return done.text

        with contextlib.closing(AsyncLLM(lambda: llm)) as engine:
            assert asyncio.run(ask()) == expected.text

    def test_a_loop_that_is_gone_disturbs_nobody(self, llm: LLM):
        engine = AsyncLLM(lambda: llm)
        loop = asyncio.new_event_loop()
        abandoned = engine.stream(PROMPTS[0], HOW)
        loop.run_until_complete(anext(abandoned))
        loop.close()

        async def read() -> list[Chunk]:
            return [chunk async for chunk in engine.stream(PROMPTS[1], HOW)]

        last = asyncio.run(read())[-1].completion
        assert last is not None
        while llm.engine.core.busy:  # the engine's thread brings the abandoned request to its end
            time.sleep(0.01)
        engine.close()
        assert last.token_ids == llm.generate([PROMPTS[1]], HOW)[0].token_ids

    def test_a_bad_prompt_raises_where_it_was_asked(self, llm: LLM):
        async def ask() -> None:
            engine = AsyncLLM(lambda: llm)
            try:
                for prompt, message in BAD_PROMPTS:
                    with pytest.raises(InputError, match=message):
                        await anext(engine.stream(prompt, HOW))
            finally:
                engine.close()

        asyncio.run(ask())

    def test_closing_ends_what_is_open(self, llm: LLM):
        async def close_early() -> None:
            engine = AsyncLLM(lambda: llm)
            stream = engine.stream(PROMPTS[0], HOW.model_copy(update={"max_tokens": 60}))
            await anext(stream)
            engine.close()
            with pytest.raises(EngineClosedError):
                async for _ in stream:
                    pass
            with pytest.raises(EngineClosedError):
                await anext(engine.stream(PROMPTS[0], HOW))

        asyncio.run(close_early())
        assert not llm.engine.core.busy


def test_drafts_may_be_looked_up_without_a_drafter(pair: TinyPair):
    asked = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
    looked_up = LLM(pair.target, asked, tiny.engine_config()).generate(PROMPTS, HOW)
    plain = made(pair, "none").generate(PROMPTS, HOW)
    assert [found.token_ids for found in looked_up] == [found.token_ids for found in plain]
    assert sum(found.speculation.drafted for found in looked_up) > 0


def test_drafts_are_accepted_at_given_rates_for_measuring_time(pair: TinyPair):
    how = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": (1.0, 0.0)}
    asked = SpeculativeConfig(model=str(pair.peagle), num_speculative_tokens=2, **how)
    found = LLM(pair.target, asked, tiny.engine_config()).generate(PROMPTS[:1], HOW)[0]
    assert found.speculation.acceptance_length == 2.0
