"""The engine: when requests end, what they report, and what is refused."""

import pytest
import tiny

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.errors import InputError

PROMPT = [(3 + i * i) % tiny.MASK for i in range(12)]
MODES = ["none", "peagle", "eagle3"]


@pytest.fixture(scope="module")
def engine_for(targets, trained):
    def make(mode: str, k: int = 4, end_tokens: tuple[int, ...] = (), **room) -> Engine:
        drafter = None if mode == "none" else trained[mode].drafter
        config = tiny.engine_config(**room)
        return Engine(targets["easy"].decoder, drafter, k if drafter else 0, config, end_tokens)

    return make


@pytest.fixture(scope="module")
def greedy(engine_for) -> list[int]:
    return tiny.run(engine_for("none"), [PROMPT], SamplingParams(max_tokens=60))[0].output


@pytest.mark.parametrize("mode", MODES)
class TestEnds:
    @pytest.mark.sweep
    @pytest.mark.parametrize("most", [1, 2, 5, 16])
    def test_max_tokens(self, engine_for, greedy, mode: str, most: int):
        (request,) = tiny.run(engine_for(mode), [PROMPT], SamplingParams(max_tokens=most))
        assert request.output == greedy[:most]
        assert request.finish_reason == "length"

    @pytest.mark.sweep
    @pytest.mark.parametrize("room", [13, 14, 17, 25])
    def test_the_context(self, engine_for, greedy, mode: str, room: int):
        """Down to a context that holds one output token; drafts never reach beyond it."""
        engine = engine_for(mode, max_model_len=room)
        (request,) = tiny.run(engine, [PROMPT], SamplingParams(max_tokens=99))
        assert request.output == greedy[: room - len(PROMPT)]
        assert request.finish_reason == "length"

    @pytest.mark.sweep
    @pytest.mark.parametrize("place", [0, 1, 6, 7])
    def test_a_stop_id_ends_the_output_with_itself(self, engine_for, greedy, mode: str, place: int):
        stop = greedy[place]
        how = SamplingParams(max_tokens=40, stop_token_ids=(stop,))
        (request,) = tiny.run(engine_for(mode), [PROMPT], how)
        assert request.output == greedy[: greedy.index(stop) + 1]
        assert request.finish_reason == "stop"

    def test_the_end_of_text_and_how_to_ignore_it(self, engine_for, greedy, mode: str):
        engine = engine_for(mode, end_tokens=(greedy[3],))
        (request,) = tiny.run(engine, [PROMPT], SamplingParams(max_tokens=40))
        assert request.output == greedy[: greedy.index(greedy[3]) + 1]
        (request,) = tiny.run(engine, [PROMPT], SamplingParams(max_tokens=40, ignore_eos=True))
        assert request.output == greedy[:40]

    @pytest.mark.sweep
    @pytest.mark.parametrize("least", [2, 5, 9])
    def test_min_tokens_bans_stops_until_then(self, engine_for, greedy, mode: str, least: int):
        how = SamplingParams(max_tokens=30, min_tokens=least, stop_token_ids=tuple(greedy[:3]))
        (request,) = tiny.run(engine_for(mode), [PROMPT], how)
        (plain,) = tiny.run(engine_for("none"), [PROMPT], how)
        assert request.output == plain.output
        assert not set(request.output[:least]) & set(greedy[:3])
        assert request.output_length >= least

    def test_a_tokens_logit_can_be_biased(self, engine_for, greedy, mode: str):
        never = SamplingParams(max_tokens=20, logit_bias={greedy[0]: -100.0, greedy[4]: -100.0})
        always = SamplingParams(max_tokens=20, logit_bias={7: 100.0})
        requests = tiny.run(engine_for(mode), [PROMPT, PROMPT], [never, always])
        assert not {greedy[0], greedy[4]} & set(requests[0].output)
        assert requests[1].output == [7] * 20


@pytest.mark.parametrize("mode", ["peagle", "eagle3"])
class TestSpeculation:
    def test_what_it_did_is_reported(self, engine_for, mode: str):
        """Counts per cycle and per position agree with the tokens that each step gave."""
        engine = engine_for(mode)
        request = engine.add("r", PROMPT, SamplingParams(max_tokens=41))
        steps = []
        while engine.busy:
            (output,) = tiny.step(engine)
            steps.append(output)
        done = request.speculation
        assert [len(step.new_tokens) for step in steps[:-1]] == [
            1,
            *(accepted + 1 for accepted in done.accepted_per_cycle[:-1]),
        ]
        assert [step.accepted for step in steps[1:-1]] == done.accepted_per_cycle[:-1]
        assert done.cycles == len(steps) - 1
        assert done.accepted == sum(done.accepted_per_position) > 0
        assert done.drafted == 4 * done.cycles
        assert done.accepted_per_position == [
            sum(accepted > place for accepted in done.accepted_per_cycle) for place in range(4)
        ]

    def test_each_request_has_its_own_k(self, engine_for, greedy, mode: str):
        params = [SamplingParams(max_tokens=30, num_speculative_tokens=k) for k in (0, 1, 4)]
        requests = tiny.run(engine_for(mode), [PROMPT] * 3, params)
        assert tiny.outputs(requests) == [greedy[:30]] * 3
        drafted = [r.speculation.drafted / max(r.speculation.cycles, 1) for r in requests]
        assert drafted == [0, 1, 4]
        assert requests[0].speculation.cycles == 0


def test_an_engine_seed_stands_in_for_the_requests_own(engine_for):
    how = SamplingParams(max_tokens=10, temperature=2.0)
    first, same, other = (
        tiny.outputs(tiny.run(engine_for("none", seed=seed), [PROMPT] * 2, how))
        for seed in (1, 1, 50)
    )
    assert first == same
    assert first != other
    assert first[0] != first[1], "each request has a seed of its own"


BAD = [
    ([], {}, "the prompt is empty"),
    (
        [1] * 256,
        {},
        "256 tokens > 255; this model's maximum context length is 256 tokens",
    ),
    ([1, tiny.VOCAB], {}, "token id 96 is outside the vocabulary of 96"),
    ([-5], {}, "token id -5 is outside the vocabulary of 96"),
    ([1], {"logit_bias": {500: 1.0}}, "token id 500 is outside"),
    ([1], {"stop_token_ids": (96,)}, "token id 96 is outside"),
    ([1], {"allowed_token_ids": (96, 1)}, "token id 96 is outside"),
    ([1], {"num_speculative_tokens": 5}, "num_speculative_tokens 5 is above the engine's 4; ask"),
]


@pytest.mark.parametrize(("prompt", "how", "message"), BAD)
def test_requests_that_cannot_run_are_refused(engine_for, prompt, how, message: str):
    engine = engine_for("peagle")
    with pytest.raises(InputError, match=message):
        engine.add("r", prompt, SamplingParams(**how))
    assert not engine.busy


def test_a_prompt_that_just_fits(engine_for):
    (request,) = tiny.run(engine_for("peagle"), [[1] * 255], SamplingParams(max_tokens=9))
    assert request.output_length == 1


def test_more_context_than_the_target_has(engine_for):
    with pytest.raises(InputError, match="max_model_len 257 is above the target's 256; lower it"):
        engine_for("none", max_model_len=257)


def test_memory_for_one_sequence_decides(engine_for):
    """4 layers x 2 x 2 heads x 16 x 4 bytes = 1 KiB a token."""
    with pytest.raises(InputError, match=r"holds 96 tokens, one sequence needs 100 \(about 0 MiB"):
        engine_for("none", max_model_len=100, kv_cache_memory=100 * 1024)
    engine = engine_for("none", max_model_len=100, kv_cache_memory=112 * 1024)
    assert (engine.facts.max_length, engine.blocks.num_blocks) == (100, 7)


def test_ends_outside_of_the_vocabulary_end_nothing(targets):
    engine = Engine(targets["easy"].decoder, None, 0, tiny.engine_config(), (3, tiny.VOCAB))
    assert engine.facts.end_tokens == (3,)
    (request,) = tiny.run(engine, [PROMPT], SamplingParams(max_tokens=4, min_tokens=2))
    assert request.finish_reason in ("stop", "length")


def test_an_idle_engine_does_nothing(engine_for):
    assert engine_for("peagle").step() == []


def test_more_drafts_than_the_context_holds_are_refused(engine_for):
    message = "K = 25 drafts do not fit into a context of 25 tokens; lower K"
    with pytest.raises(InputError, match=message):
        engine_for("peagle", k=25, max_model_len=25)
    assert engine_for("peagle", k=24, max_model_len=25).k == 24
