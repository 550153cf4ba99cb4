"""Invariant 7: a request that fails, is cancelled or is malformed leaves the others alone."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
import tiny
from blocks import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pair import save_pair

from peagle import LLM, AsyncLLM, InputError, SamplingParams, SpeculativeConfig
from peagle.async_llm import EngineClosedError
from peagle.engine.engine import Engine
from peagle.engine.request import Request

NEW = 14
PROMPTS = [[(17 * i + j * j) % tiny.MASK for j in range(10 + 9 * i)] for i in range(5)]
GREEDY = SamplingParams(max_tokens=NEW)
MALFORMED = [
    ([], GREEDY),
    ([tiny.VOCAB], GREEDY),
    ([-1], GREEDY),
    ([1] * 500, GREEDY),
    ([1], SamplingParams(num_speculative_tokens=99)),
    ([1], SamplingParams(logit_bias={tiny.VOCAB: 1.0})),
    ([1], SamplingParams(stop_token_ids=(tiny.VOCAB,))),
]


def start(
    targets, trained, method: str, tight: bool, resident: bool = False, hosted: Sequence[int] = ()
) -> tuple[Engine, list[Request]]:
    room = {"kv_cache_memory": 130 * 640, "max_model_len": 64} if tight else {}
    config = tiny.engine_config(block_size=4, max_num_batched_tokens=40, **room)
    engine = tiny.engine(targets["easy"].decoder, trained[method].drafter, 4, resident, config)
    asked = GREEDY.model_copy(update={"logprobs": 1})
    return engine, [
        engine.add(f"r{i}", prompt, asked if i in hosted else GREEDY)
        for i, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def expected(targets) -> list[list[int]]:
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config())
    return tiny.outputs(tiny.run(engine, PROMPTS, GREEDY))


@pytest.mark.slow
@settings(max_examples=40)
@given(
    aborts=st.dictionaries(st.integers(0, 12), st.sets(st.integers(0, 4)), max_size=4),
    malformed=st.dictionaries(st.integers(0, 12), st.sampled_from(range(len(MALFORMED)))),
    method=st.sampled_from(["peagle", "eagle3"]),
    tight=st.booleans(),
    resident=st.booleans(),
    hosted=st.sets(st.integers(0, 4)),
)
def test_aborts_and_malformed_requests(
    targets, trained, expected, aborts, malformed, method: str, tight: bool, resident: bool, hosted
):
    engine, requests = start(targets, trained, method, tight, resident, hosted)
    for step in range(500):
        for index in aborts.get(step, ()):
            engine.abort(f"r{index}")
        if step in malformed:
            prompt, how = MALFORMED[malformed[step]]
            with pytest.raises(InputError):
                engine.add("bad", prompt, how)
        check_blocks(engine.blocks)
        if not engine.busy:
            break
        engine.step()
    tiny.finish(engine)
    for request, output in zip(requests, expected, strict=True):
        if request.finish_reason == "abort":
            assert request.output == output[: request.output_length]
        else:
            assert request.output == output


def test_an_id_in_use_is_refused_and_its_owner_goes_on(targets, trained, expected):
    engine, requests = start(targets, trained, "peagle", False)
    with pytest.raises(InputError, match="r0 is already running"):
        engine.add("r0", [1], GREEDY)
    tiny.finish(engine)
    assert tiny.outputs(requests) == expected


def test_aborting_twice_or_nobody_changes_nothing(targets, trained, expected):
    engine, requests = start(targets, trained, "peagle", False)
    engine.step()
    for request_id in ("r1", "r1", "nobody"):
        engine.abort(request_id)
    tiny.finish(engine)
    engine.abort("r0")
    assert requests[1].finish_reason == "abort"
    assert requests[0].finish_reason == "length"
    assert [r.output for r in requests if r.id != "r1"] == [expected[i] for i in (0, 2, 3, 4)]


TEXTS = ["def name(self):", "for item in", "return value", "print(", "x = 1"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    pair = save_pair(tmp_path_factory.mktemp("pair"))
    speculation = SpeculativeConfig(model=str(pair.peagle), num_speculative_tokens=3)
    return LLM(pair.target, speculation, tiny.engine_config(block_size=4))


@pytest.fixture
def whole(llm: LLM) -> Iterator[None]:
    """Afterwards nothing is left of any request."""
    yield
    assert not llm.engine.core.busy
    check_blocks(llm.engine.core.blocks)
    assert sum(llm.engine.core.blocks.free_by_group()) == llm.engine.core.blocks.num_blocks


LONG = SamplingParams(max_tokens=24, ignore_eos=True)


async def read(engine: AsyncLLM, text: str, chunks: int | None = None) -> tuple[int, ...]:
    """The tokens of a stream that is left after some chunks."""
    tokens: list[int] = []
    stream = engine.stream(text, LONG)
    async for chunk in stream:
        tokens += chunk.token_ids
        chunks = chunks - 1 if chunks is not None else None
        if chunks == 0:
            break
    await stream.aclose()
    return tuple(tokens)


@pytest.mark.usefixtures("whole")
def test_streams_left_cancelled_and_malformed(llm: LLM):
    expected = [completion.token_ids for completion in llm.generate(TEXTS, LONG)]

    async def everything() -> list[tuple[int, ...]]:
        engine = AsyncLLM(lambda: llm)
        kept = [asyncio.create_task(read(engine, text)) for text in TEXTS]
        left = [asyncio.create_task(read(engine, text, chunks=2)) for text in TEXTS]
        cancelled = [asyncio.create_task(read(engine, text)) for text in TEXTS]
        at_once = asyncio.create_task(read(engine, TEXTS[0]))
        await asyncio.sleep(0)
        at_once.cancel()
        with pytest.raises(InputError, match="empty"):
            await anext(engine.stream([]))
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in cancelled:
            task.cancel()
        tokens = await asyncio.gather(*kept)
        parts = await asyncio.gather(*left)
        assert all(e[: len(p)] == p for e, p in zip(expected, parts, strict=True))
        engine.close()
        return tokens

    assert asyncio.run(everything()) == expected


@pytest.mark.usefixtures("whole")
def test_a_step_that_fails_ends_its_streams_and_nothing_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    expected = llm.generate(TEXTS[:1], LONG)[0].token_ids

    def fail(work: object) -> None:
        raise RuntimeError("out of memory")

    async def everything() -> tuple[int, ...]:
        engine = AsyncLLM(lambda: llm)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.core.worker, "exchange", fail)
            results = await asyncio.gather(
                *(read(engine, text) for text in TEXTS), return_exceptions=True
            )
            assert [str(result) for result in results] == ["out of memory"] * len(TEXTS)
        tokens = await read(engine, TEXTS[0])
        engine.close()
        return tokens

    assert asyncio.run(everything()) == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_go_on_tells_all_streams_and_takes_no_more(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """As after an error of the device: whatever is asked of it raises, forgetting as well."""
    lost = LLM(save_pair(tmp_path).target, None, tiny.engine_config(block_size=4))

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    async def everything() -> None:
        engine = AsyncLLM(lambda: lost)
        streams = [asyncio.create_task(read(engine, text)) for text in TEXTS]
        await asyncio.sleep(0)
        monkeypatch.setattr(lost.engine.core.worker, "exchange", fail)
        monkeypatch.setattr(lost.engine.core.worker, "forget", fail)
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 240)
        assert all(isinstance(result, RuntimeError | EngineClosedError) for result in results)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(read(engine, TEXTS[0]), 240)
        engine.close()
        assert engine.failed
        assert not engine.alive

    asyncio.run(everything())


@pytest.mark.usefixtures("whole")
def test_a_stop_string_ends_one_request_only(llm: LLM):
    expected = llm.generate(TEXTS, LONG)
    stop = expected[1].text[6:9]
    params = [LONG, LONG.model_copy(update={"stop": (stop,)}), LONG, LONG, LONG]
    stopped = llm.generate(TEXTS, params)
    assert stopped[1].finish_reason == "stop"
    assert stopped[1].text == expected[1].text[: expected[1].text.index(stop)]
    assert [c.token_ids for i, c in enumerate(stopped) if i != 1] == [
        c.token_ids for i, c in enumerate(expected) if i != 1
    ]


@pytest.mark.usefixtures("whole")
def test_a_stream_left_early_is_cancelled(llm: LLM):
    for _ in llm.stream(TEXTS[0], LONG):
        break


@pytest.mark.usefixtures("whole")
def test_a_malformed_prompt_stops_a_batch_before_it_begins(llm: LLM):
    with pytest.raises(InputError, match="maximum context length"):
        llm.generate([TEXTS[0], [2] * 1000], LONG)


def test_too_little_memory_for_one_sequence(targets):
    """One sequence must fit: the engine refuses to start rather than to stall."""
    for memory in (1, 1000, 100_000):
        with pytest.raises(InputError, match="raise kv_cache_memory or lower max_model_len"):
            Engine(targets["easy"].decoder, None, 0, tiny.engine_config(kv_cache_memory=memory))


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_keys_that_are_no_numbers_reach_no_other_request(
    targets, trained, expected, method: str, resident: bool
):
    """The first request's keys turn into NaN; it has the first blocks, and they are used again."""
    embedding, bad = targets["easy"].decoder.embed.weight, tiny.VOCAB - 1
    engine, requests = start(targets, trained, method, False, resident)
    engine.abort("r0")
    with tiny.nan_row(embedding, bad):
        broken = engine.add("broken", [*PROMPTS[4], bad, *PROMPTS[4]], GREEDY)
        engine.scheduler.waiting.rotate(1)
        tiny.finish(engine)
    assert (broken.output, broken.finish_reason) == ([], "error")
    assert broken.failure is not None
    assert broken.failure.startswith("the target's logits are NaN")
    again = engine.add("again", PROMPTS[0], GREEDY)
    tiny.finish(engine)
    assert [request.output for request in (again, *requests[1:])] == expected


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("cancelled", [False, True])
def test_nan_behind_a_shared_prefix_fails_no_one_else(targets, resident: bool, cancelled: bool):
    """NaN reaches earlier rows of its pass: keys of the prefix, which others find by its hash."""
    decoder, bad = targets["easy"].decoder, tiny.VOCAB - 1
    prefix = [(5 * i + 3) % (bad - 1) for i in range(24)]
    config = tiny.engine_config(block_size=4, max_num_batched_tokens=32)
    engine = tiny.engine(decoder, None, 0, resident, config)
    with tiny.nan_row(decoder.embed.weight, bad):
        fresh = tiny.engine(decoder, None, 0, resident, config)
        expected = tiny.outputs(tiny.run(fresh, [[*prefix, 7, 8]], GREEDY))
        broken = engine.add("broken", [*prefix, bad, *prefix * 4], GREEDY)
        engine.step()
        engine.step()
        if cancelled:
            engine.abort("broken")
        healthy = engine.add("healthy", [*prefix, 7, 8], GREEDY)
        tiny.finish(engine)
        assert healthy.cached == 24
        assert [healthy.output] == expected
        assert broken.finish_reason == ("abort" if cancelled else "error")
        assert tiny.outputs(tiny.run(engine, [[*prefix, 7, 8]], GREEDY)) == expected


@pytest.mark.parametrize("resident", [False, True])
def test_what_a_cancelled_request_left_is_not_read(targets, trained, resident: bool):
    """Its keys are NaN; those behind it get its blocks, and end at different lengths."""
    config = tiny.engine_config(
        block_size=4, kv_cache_memory=75 * 640, max_model_len=32, max_num_batched_tokens=12
    )
    drafter, bad = trained["peagle"].drafter, tiny.VOCAB - 1
    prompts, how = [[1, 2, 3], PROMPTS[1][:14]], SamplingParams(max_tokens=8)
    engine = tiny.engine(targets["easy"].decoder, drafter, 4, resident, config)
    expected = tiny.outputs(tiny.run(engine, prompts, how))
    engine = tiny.engine(targets["easy"].decoder, drafter, 4, resident, config)
    with tiny.nan_row(targets["easy"].decoder.embed.weight, bad):
        engine.add("broken", [bad] * 30, how)
        engine.step()
        engine.step()  # 24 rows: two blocks of eight are left
        engine.abort("broken")
        assert tiny.outputs(tiny.run(engine, prompts, how)) == expected


def test_a_request_that_fails_without_a_token_is_delivered(llm: LLM):
    """Its logits are NaN from the first row on."""
    with tiny.nan_row(llm.engine.core.target.embed.weight, 5):
        [completion] = llm.generate([[5]], SamplingParams(max_tokens=4))
    assert (completion.finish_reason, completion.token_ids, completion.text) == ("error", (), "")
    assert completion.failure is not None
