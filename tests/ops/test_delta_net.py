"""The gated delta rule: transformers' numbers, and a state that only accepted rows change."""

import pytest
import torch
from delta_spans import DRAFTS, HEADS, Span, inputs, memory, rows_of, weights
from torch import Tensor

from peagle.ops.delta_net import DeltaState, recur

LENGTH = 40
TEXT = inputs(LENGTH, seed=3)
GARBAGE = inputs(200, seed=4)


def settled(layer: DeltaState, position: int, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """The state behind a position, and the rows that the convolution sees next."""
    last = tuple(part[position : position + 1] for part in TEXT)
    recur(*last, weights(), layer, rows_of([(0, position, 1, 1)], accepted))
    return layer.state[0].clone(), layer.kept[0, : HEADS.window].clone()


def test_whole_texts_are_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    layer, given = memory(1), weights()
    found = recur(*TEXT, given, layer, rows_of([(0, 0, LENGTH, LENGTH)], torch.zeros(1).long()))
    mixed, gate = TEXT[0].split((HEADS.channels, HEADS.value_width), dim=1)
    padded = torch.nn.functional.pad(mixed.t()[None], (HEADS.window, 0))
    mixed = torch.nn.functional.conv1d(padded, given.conv[:, None], groups=HEADS.channels)
    mixed = torch.nn.functional.silu(mixed)[0].t()
    query, key, value = mixed.split((32, 32, HEADS.value_width), dim=1)
    query, key = (each.view(1, LENGTH, 2, 16).repeat_interleave(3, dim=2) for each in (query, key))
    write, decay = TEXT[1].chunk(2, dim=1)
    speed = given.decay.exp() * torch.nn.functional.softplus(decay + given.decay_bias)
    expected, state = torch_recurrent_gated_delta_rule(
        query,
        key,
        value.view(1, LENGTH, 6, 16),
        g=-speed[None],
        beta=write.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(layer.state[0], state[0], rtol=1e-5, atol=1e-5)
    expected = torch.nn.functional.rms_norm(expected[0], (16,), given.norm, 1e-6)
    expected = expected * torch.nn.functional.silu(gate.view(LENGTH, 6, 16))
    torch.testing.assert_close(found, expected.flatten(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1,), (3,), (4, 5, 6), (16, 17), (39,)], ids=str)
def test_a_text_may_be_cut_anywhere(cuts: tuple[int, ...]):
    accepted, whole, pieces = torch.zeros(1).long(), memory(1), memory(1)
    expected = recur(*TEXT, weights(), whole, rows_of([(0, 0, LENGTH, LENGTH)], accepted))
    found = []
    for start, stop in zip((0, *cuts), (*cuts, LENGTH), strict=True):
        own = tuple(part[start:stop] for part in TEXT)
        rows = rows_of([(0, start, stop - start, stop - start)], accepted)
        found.append(recur(*own, weights(), pieces, rows))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(pieces.state, whole.state)
    assert torch.equal(pieces.kept[:, : HEADS.window], whole.kept[:, : HEADS.window])


@pytest.mark.sweep
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("drafts", [0, 1, 3, DRAFTS])
@pytest.mark.parametrize("right", [0, 1, 2, DRAFTS], ids="{} right".format)
def test_state_and_results_have_the_same_bits_whatever_was_drafted(
    prompt: int, drafts: int, right: int
):
    """Each cycle drafts, of which the first are the text's own rows and accepted."""
    plain, layer, accepted = memory(1), memory(1), torch.tensor([7])
    none = torch.zeros(1).long()
    expected = recur(*TEXT, weights(), plain, rows_of([(0, 0, LENGTH, LENGTH)], none))
    prompt_rows = tuple(part[:prompt] for part in TEXT)
    recur(*prompt_rows, weights(), layer, rows_of([(0, 0, prompt, prompt)], accepted))
    accepted[0], position = 0, prompt
    while position + 1 + DRAFTS < LENGTH:
        good = min(right, drafts)
        own = [part[position : position + 1 + good] for part in TEXT]
        bad = [part[position : position + drafts - good] for part in GARBAGE]
        product, gates = (torch.cat(pair) for pair in zip(own, bad, strict=True))
        rows = rows_of([(0, position, 1 + drafts, 1)], accepted)
        found = recur(product, gates, weights(), layer, rows)
        assert torch.equal(found[: 1 + good], expected[position : position + 1 + good])
        accepted[0], position = good, position + 1 + good
    whole = memory(1)
    until = tuple(part[: position + 1] for part in TEXT)
    recur(*until, weights(), whole, rows_of([(0, 0, position + 1, position + 1)], none))
    state, window = settled(layer, position, accepted)
    assert torch.equal(state, whole.state[0])
    assert torch.equal(window, whole.kept[0, : HEADS.window])


def test_requests_of_a_pass_do_not_meet():
    """Drafts in one, none in another, a prompt of as many rows in the third, padding."""
    layer, accepted = memory(4), torch.zeros(4).long()
    first = rows_of([(0, 0, 5, 5), (2, 0, 3, 3)], accepted)
    recur(*(part[:8] for part in TEXT), weights(), layer, first)
    spans: list[Span] = [(0, 5, 1 + DRAFTS, 1), (1, 0, 0, 0), (2, 3, 1, 1), (3, 0, 1 + DRAFTS, 6)]
    together = DeltaState(layer.state.clone(), layer.kept.clone())
    rows = sum(span[2] for span in spans)
    product, gates = (part[:rows] for part in GARBAGE)
    found = recur(product, gates, weights(), together, rows_of(spans, accepted))
    place = 0
    for span in spans:
        own = slice(place, place + span[2])
        place += span[2]
        if span[2]:
            alone = recur(product[own], gates[own], weights(), layer, rows_of([span], accepted))
            assert torch.equal(found[own], alone)
    for row in (0, 2, 3):
        assert torch.equal(together.state[row], layer.state[row])
    assert together.state[1].isnan().all(), "padding touches nothing"


def test_twenty_thousand_tokens_do_not_drift():
    product, gates = (part.repeat(100, 1) for part in inputs(200, seed=9))
    layer, none = memory(1), torch.zeros(1).long()
    exact = DeltaState(layer.state.double(), layer.kept.double())
    rows = rows_of([(0, 0, len(product), len(product))], none)
    recur(product, gates, weights(), layer, rows)
    recur(product.double(), gates.double(), weights(dtype=torch.float64), exact, rows)
    assert (layer.state - exact.state).abs().max() < 1e-4
