import pytest
import tiny
import torch

from peagle.config import SamplingParams
from peagle.engine.draft_temperatures import FACTORS, FIRST_CHOICE, DraftTemperatures
from peagle.ops.drafts import Drafts


def drafts(*requests: list[list[int]], tokens: int = 1) -> Drafts:
    """Of some requests: alternatives that are the target's token, 1, where a depth names their
    factor."""
    others = torch.tensor(
        [
            [[int(factor in named) for factor in range(len(FACTORS))] for named in right]
            for right in requests
        ]
    )
    return Drafts(torch.full(others.shape[:2], tokens), others)


def fitted(depths: int = 3) -> DraftTemperatures:
    return DraftTemperatures(depths, tiny.CPU)


ALL = torch.tensor([[1, 1, 1, 1]])
"""A target that accepts three drafts."""


def test_each_depth_takes_the_factor_that_would_have_been_right_most_often():
    found = fitted(5)
    assert found.chosen.tolist() == [FIRST_CHOICE] * 5
    for _ in range(20):
        found.record(drafts([[4, 5], [0], [2]]), ALL)
        found.record(drafts([[4], [1], [2]]), torch.tensor([[1, 5, 1, 1]]))
    assert found.chosen.tolist() == [4, 0, 2, FIRST_CHOICE, FIRST_CHOICE]


def test_requests_of_a_cycle_count_alike():
    found = fitted(1)
    for _ in range(3):
        found.record(drafts([[4]], [[0]], [[4]]), ALL[:, :2].expand(3, 2))
    assert found.chosen.tolist() == [4]


def test_depths_behind_the_first_miss_say_nothing():
    found = fitted()
    for _ in range(5):
        found.record(drafts([[0], [1], [2]]), torch.tensor([[7, 1, 1, 1]]))
        found.record(drafts([[1], [1], [2]], tokens=3), ALL)
    assert found.chosen.tolist() == [1, FIRST_CHOICE, FIRST_CHOICE]


def test_requests_without_alternatives_say_nothing():
    """They are greedy, or belong to nobody; nor do they make what is known fade."""
    found = fitted(1)
    known, greedy = drafts([[4]]), Drafts(torch.ones(1, 1), torch.full((1, 1, len(FACTORS)), -1))
    for _ in range(3):
        found.record(known, ALL[:, :2])
    for _ in range(5_000):
        found.record(greedy, ALL[:, :2])
    found.record(drafts([[0]]), ALL[:, :2])
    found.record(drafts([[0]]), ALL[:, :2])
    assert found.chosen.tolist() == [4]


def test_what_was_right_long_ago_is_forgotten():
    found = fitted(1)
    for _ in range(3000):
        found.record(drafts([[0]]), ALL[:, :2])
    for _ in range(3000):
        found.record(drafts([[5]]), ALL[:, :2])
    assert found.chosen.tolist() == [5]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
@pytest.mark.parametrize("factor", [0, 2, 5])
def test_no_temperature_changes_a_token(
    targets, trained, monkeypatch: pytest.MonkeyPatch, method: str, factor: int, on_device: bool
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

    def record(self: DraftTemperatures, *_: object) -> None:
        self.chosen.fill_(factor)

    monkeypatch.setattr(DraftTemperatures, "record", record)
    engine = tiny.engine(target, trained[method].drafter, 4, on_device, tiny.engine_config())
    assert tiny.outputs(tiny.run(engine, prompts, ways)) == expected
