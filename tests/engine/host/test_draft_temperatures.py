import pytest
import tiny
import torch

from peagle.config import SamplingParams
from peagle.engine.host.draft_temperatures import FIRST_CHOICE, DraftTemperatures
from peagle.ops.race import FACTORS


def cycle(right: list[list[int]]) -> torch.Tensor:
    """Alternatives that are the target's token, 1, where a depth names their factor."""
    return torch.tensor(
        [[int(factor in named) for factor in range(len(FACTORS))] for named in right]
    )


def test_each_depth_takes_the_factor_that_would_have_been_right_most_often():
    fitted = DraftTemperatures(tiny.CPU)
    assert fitted.choose(3).tolist() == [FIRST_CHOICE] * 3
    for _ in range(20):
        fitted.record(cycle([[4, 5], [0], [2]]), [1, 1, 1, 1])
        fitted.record(cycle([[4], [1], [2]]), [1, 5])
    assert fitted.choose(3).tolist() == [4, 0, 2]
    assert fitted.choose(5).tolist() == [4, 0, 2, FIRST_CHOICE, FIRST_CHOICE]


def test_depths_behind_the_first_miss_say_nothing():
    fitted = DraftTemperatures(tiny.CPU)
    for _ in range(5):
        fitted.record(cycle([[0], [1], [2]]), [1])
    assert fitted.choose(3).tolist() == [0, FIRST_CHOICE, FIRST_CHOICE]


def test_what_was_right_long_ago_is_forgotten():
    fitted = DraftTemperatures(tiny.CPU)
    for _ in range(3000):
        fitted.record(cycle([[0]]), [1])
    for _ in range(3000):
        fitted.record(cycle([[5]]), [1])
    assert fitted.choose(1).tolist() == [5]


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("factor", [0, 2, 5])
def test_no_temperature_changes_a_token(
    targets, trained, monkeypatch: pytest.MonkeyPatch, method: str, factor: int
):
    """Whatever the fit says, alone and beside greedy requests, by seed."""
    target = targets["easy"].decoder
    ways = [
        SamplingParams(max_tokens=16, temperature=1.2, seed=1),
        SamplingParams(max_tokens=16),
        SamplingParams(max_tokens=16, temperature=0.8, seed=2, top_p=0.8, repetition_penalty=1.3),
        SamplingParams(max_tokens=16, temperature=0.9, seed=2, top_k=4, logit_bias={5: 3.0}),
    ]
    prompts = [[7, 3]] * len(ways)
    plain = tiny.engine(target, None, 0, False, tiny.engine_config())
    expected = tiny.outputs(tiny.run(plain, prompts, ways))

    def choose(_: DraftTemperatures, depths: int) -> torch.Tensor:
        return torch.full((depths,), factor)

    monkeypatch.setattr(DraftTemperatures, "choose", choose)
    engine = tiny.engine(target, trained[method].drafter, 4, False, tiny.engine_config())
    assert tiny.outputs(tiny.run(engine, prompts, ways)) == expected
