"""Penalties and bias under speculation, against one token at a time in numpy."""

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.engine import Engine

PROMPT = [(5 + 3 * i) % tiny.MASK for i in range(8)]


def reference(peer, how: SamplingParams) -> list[int]:
    """Greedy decoding by transformers' logits, penalized as OpenAI and vLLM define it."""
    output: list[int] = []
    while len(output) < how.max_tokens:
        logits = tiny.peer_logits(peer, [*PROMPT, *output])[-1].numpy()
        for token, value in how.logit_bias.items():
            logits[token] += value
        for token in {*PROMPT, *output}:
            factor = how.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= how.frequency_penalty * output.count(token) + how.presence_penalty
        output.append(int(np.argmax(logits)))
    return output


@pytest.mark.slow
@settings(max_examples=30)
@given(
    how=st.builds(
        SamplingParams,
        repetition_penalty=st.sampled_from([0.8, 1.0, 1.3]),
        presence_penalty=st.sampled_from([-0.5, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([-0.2, 0.0, 0.4]),
        logit_bias=st.sampled_from([{}, {4: 1.0, 30: -2.0}]),
        max_tokens=st.just(14),
    ),
    method=st.sampled_from(["peagle", "eagle3"]),
    k=st.integers(0, 4),
)
def test_penalties_see_the_drafts_before_them(targets, trained, how, method: str, k: int):
    drafter = trained[method].drafter if k else None
    engine = Engine(targets["easy"].decoder, drafter, k, tiny.engine_config())
    assert tiny.run(engine, [PROMPT], how)[0].output == reference(targets["easy"].peer, how)


def test_more_rows_than_are_sampled_at_once_are_drawn_as_alone(targets, trained):
    """Ten requests of up to five rows each."""
    how = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=12)
    prompts = [[(5 + i * j) % tiny.MASK for j in range(8)] for i in range(10)]

    def drawn(asked: list[list[int]]) -> list[list[int]]:
        engine = Engine(targets["easy"].decoder, trained["peagle"].drafter, 4, tiny.engine_config())
        return tiny.outputs(tiny.run(engine, asked, how))

    assert drawn(prompts) == [drawn([prompt])[0] for prompt in prompts]
