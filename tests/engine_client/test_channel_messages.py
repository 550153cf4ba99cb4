"""Plain data comes out as it went in."""

import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from peagle import grammar
from peagle.config import SamplingParams, StructuredOutputs
from peagle.engine.engine import EngineStats
from peagle.engine.request import Beginning, RequestOutput
from peagle.engine.step import TokenLogprobs
from peagle.engine_client.messages import (
    IN_FORM,
    Channel,
    FromEngine,
    Stepped,
    read_params,
    written_params,
)

NUMBERS = st.integers(0, 1 << 70)
SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 1 << 70)},
        optional={
            "temperature": st.floats(0, 100),
            "top_p": st.floats(0.01, 1),
            "seed": st.integers(),
            "logit_bias": st.dictionaries(NUMBERS, st.floats(-100, 100)),
            "stop_token_ids": st.lists(NUMBERS).map(tuple),
            "cache_salt": st.text(st.characters()),  # halves of surrogate pairs too
            "bad_words": st.lists(st.text()).map(tuple),
            "priority": st.integers(),
        },
    )
)
def test_sampling_parameters(values):
    params = SamplingParams(**values)
    in_form = {name: SamplingParams.model_fields[name].default for name in IN_FORM}
    assert read_params(written_params(params)) == params.model_copy(update=in_form)


@settings(max_examples=30)
@given(st.dictionaries(st.text(st.characters()), SCHEMAS))
def test_schemas(schema):
    """Where 1 is not true, and properties keep their order."""
    wanted = StructuredOutputs(json=schema)
    read = grammar.read(grammar.written(wanted))
    assert read == wanted
    assert repr(read.json_schema) == repr(schema)


def test_outputs_as_the_scheduler_makes_them():
    score = TokenLogprobs(float("-inf"), 3, ((7, -0.1), (1 << 20, -2.5)))
    outputs = [
        RequestOutput("1", (5, 6), 1, None, 3, 2, (score, score), Beginning(0.5, 16, (score,))),
        RequestOutput("2", (), 0, "error", failure="no memory"),
    ]
    stats = EngineStats(1, 2, 0.25, 3, 40, 16, "wrong drafts")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        front: Channel[FromEngine] = Channel(ours.detach(), FromEngine)
        Channel(theirs.detach(), FromEngine).send(Stepped(outputs, stats))
        assert front.receive() == Stepped(outputs, stats)
        front.close()
