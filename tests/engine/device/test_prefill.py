"""Prompts that are launched kernel by kernel."""

import pytest
import tiny

from peagle.config import SamplingParams
from peagle.engine.device import prefill
from peagle.engine.device.models import DeviceModels
from peagle.engine.device.prefill import PromptGraphs

HOW = SamplingParams(max_tokens=12)


@pytest.mark.parametrize("method", ["none", "peagle"])
def test_many_rows_come_in_whole_multiples_and_mean_the_same(targets, trained, monkeypatch, method):
    """Of rows that are nobody's nothing is read, and drafts are as good."""
    drafter = None if method == "none" else trained[method].drafter
    prompts = [[(3 * i + length) % tiny.MASK for i in range(length)] for length in (70, 9, 33)]
    engines = (
        tiny.engine(targets["easy"].decoder, drafter, 4 if drafter else 0, on, tiny.engine_config())
        for on in (False, True)
    )
    rows, fill = [], DeviceModels.fill
    monkeypatch.setattr(
        DeviceModels, "fill", lambda *given: rows.append(len(given[1].tokens)) or fill(*given)
    )
    monkeypatch.setattr(PromptGraphs, "fit", lambda *_: None)
    monkeypatch.setattr(prefill, "ROW_MULTIPLE", 32)
    monkeypatch.setattr(prefill, "MULTIPLE_FROM", 10)
    plain, resident = (
        [tiny.run(engine, some, HOW) for some in (prompts, prompts[1:2])] for engine in engines
    )
    assert rows == [128, 9]
    for expected, found in zip(plain, resident, strict=True):
        assert tiny.outputs(found) == tiny.outputs(expected)
        assert [r.speculation for r in found] == [r.speculation for r in expected]
