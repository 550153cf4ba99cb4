"""The worker on a CPU, as a GPU without kernels for a model uses it too."""

import pytest
import tiny
import torch
from torch import Tensor

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.engine.step import Outcome, Step

PROMPTS = [[5, 9, 30, 2], [7 * j % 90 for j in range(50)]]
HOW = SamplingParams(max_tokens=24)


def finished(engine: Engine) -> list[list[int]]:
    """The outputs of a request, and of one whose prompt comes while it writes."""
    first = engine.add("first", PROMPTS[0], HOW)
    engine.step()
    second = engine.add("second", PROMPTS[1], HOW)
    tiny.finish(engine)
    return tiny.outputs([first, second])


@pytest.mark.parametrize("place", [1, 2])
def test_memory_that_lacks_beside_a_prompt_changes_nothing(
    targets, trained, place: int, monkeypatch: pytest.MonkeyPatch
):
    """The step is as if it had not been, however far it came."""
    target, drafter = targets["easy"].decoder, trained["peagle"].drafter
    with tiny.on_device(False):
        each = [Engine(target, drafter, 3, tiny.engine_config()) for _ in range(2)]
    engine, expected = each[0], finished(each[1])
    exchange, clone = engine.worker.exchange, Tensor.clone
    failures = []

    def short(step: Step) -> Outcome:
        if not (step.chunks and step.cycles) or failures:
            return exchange(step)
        copies = []

        def counted(tensor: Tensor) -> Tensor:
            copies.append(tensor)
            if len(copies) == place:
                failures.append(place)
                raise torch.OutOfMemoryError
            return clone(tensor)

        with monkeypatch.context() as patched:
            patched.setattr(Tensor, "clone", counted)
            patched.setattr(torch.cuda, "empty_cache", lambda: None)
            return exchange(step)

    monkeypatch.setattr(engine.worker, "exchange", short)
    with pytest.warns(UserWarning, match="no memory for"):
        assert finished(engine) == expected
    assert failures == [place]
