"""Outputs that end where they repeat themselves, as vLLM's `repetition_detection` has it."""

import pytest

from peagle import LLM, SamplingParams, SpeculativeConfig
from peagle.config import RepetitionDetection
from peagle.errors import ConfigError
from peagle.pair import bundled

CASES = [
    ((1, 2, 1, 2, 1, 2), (2, 0, 3), True),
    ((1, 2, 1, 2, 1, 2), (2, 0, 4), False),
    ((1, 2, 1, 2, 1, 2), (1, 0, 2), False),
    ((3, 1, 1), (4, 0, 2), True),
    ((3, 1, 1), (4, 2, 2), False),
    ((1, 1), (0, 0, 0), False),
]


@pytest.mark.parametrize(("tokens", "sizes", "found"), CASES)
def test_patterns_at_the_end(tokens: tuple[int, ...], sizes: tuple[int, ...], found: bool):
    names = "max_pattern_size", "min_pattern_size", "min_count"
    detection = RepetitionDetection(**dict(zip(names, sizes, strict=True)))
    assert detection.found_in(tokens) == found


@pytest.mark.parametrize("sizes", [{"max_pattern_size": 3}, {"min_pattern_size": 1}])
def test_sizes_that_detect_nothing_are_refused(sizes: dict[str, int]):
    with pytest.raises(ConfigError, match="min_"):
        RepetitionDetection(**sizes)


def test_outputs_end_within_accepted_drafts_but_not_below_the_least_length():
    llm = LLM(bundled("target"), SpeculativeConfig(method="ngram", num_speculative_tokens=6))
    same = {"logit_bias": {65: 100.0}, "max_tokens": 40, "ignore_eos": True}
    detection = RepetitionDetection(max_pattern_size=2, min_count=9)
    for least, count in ((0, 9), (20, 20)):
        params = SamplingParams(repetition_detection=detection, min_tokens=least, **same)
        [done] = llm.generate(["AAAA"], params)
        assert (done.finish_reason, len(done.token_ids)) == ("repetition", count)
