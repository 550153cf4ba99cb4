"""Drafts read from hidden states, corrected by the draft before, and drawn with the target."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from torch import Tensor

from peagle.config import SamplingParams
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.methods import drafter_for
from peagle.drafters.proposer import Drafter
from peagle.drafters.readout import Readout
from peagle.drafters.selector import SelectorConfig
from peagle.models.decoder import Decoder
from peagle.ops.candidates import earliest
from peagle.ops.products.normed import Normed
from peagle.ops.race import SHARPENING, Race
from peagle.ops.sampling import Sampling

SELECTOR = SelectorConfig(rank=8, candidates=5)
TOKENS = [5, 9, 3, 40, 2, 11]


@pytest.fixture(params=[tiny.VOCAB, 30], ids=["whole vocabulary", "reduced vocabulary"])
def corrected(request, target, tmp_path: Path) -> Drafter:
    """A P-EAGLE drafter whose selector changes its mind often, written and read."""
    config = tiny.drafter_config(True, draft_vocab=request.param, selector=SELECTOR)
    drafter = tiny.random_drafter_for(target.decoder, tmp_path / "drafter", config)
    drafter.model.readout.selector.predecessor.mul_(10)
    return drafter


def walk(readout: Readout, hidden: Tensor, newest: int) -> list[int]:
    """The drafts by the rule, slot by slot."""
    selector, drafts = readout.selector, [newest]
    assert selector is not None
    for slot, row in enumerate(hidden):
        h = readout.norm(row)
        logits = readout.head.weight @ h
        ids = logits.topk(SELECTOR.candidates).indices.tolist()
        gates = selector.projection.weight @ h
        scores = {}
        for draft in ids:
            pair = selector.predecessor[drafts[-1]] * gates @ selector.successor[draft]
            scores[draft + int(readout.d2t[draft])] = float(logits[draft] + pair * (slot > 0))
        drafts.append(max(scores, key=lambda token: scores[token]))
    return drafts[1:]


def proposed(drafter: Drafter, decoder: Decoder) -> tuple[list[int], Tensor]:
    """Six drafts after `TOKENS`, and the hidden states that they were read from."""
    norm = drafter.model.readout.norm
    with mock.patch.object(norm, "forward", wraps=norm.forward) as spy:
        drafts = tiny.propose(drafter, decoder, TOKENS, 6).drafts
    return drafts, spy.call_args_list[0].args[0]


@torch.no_grad()
def test_each_draft_is_corrected_by_the_one_before(corrected: Drafter, target):
    readout = corrected.model.readout
    drafts, hidden = proposed(corrected, target.decoder)
    assert drafts == walk(readout, hidden, TOKENS[-1])
    plain = readout.vocabulary[readout.logits(hidden).argmax(dim=-1)].tolist()
    assert drafts[0] == plain[0]
    assert drafts != plain, "the selector changes nothing"


@torch.no_grad()
def test_the_loss_reads_the_scores_that_the_engine_drafts_by(corrected: Drafter, target):
    """Row by row with a known token before, -1 where the slot has read it."""
    readout = corrected.model.readout
    drafts, hidden = proposed(corrected, target.decoder)
    found, scores = readout(hidden, torch.tensor([-1, *drafts[:-1]]))
    best = scores.argmax(dim=-1, keepdim=True)
    assert found.tokens.gather(-1, best)[:, 0].tolist() == drafts


@torch.no_grad()
@pytest.mark.parametrize("selector", [None, SELECTOR])
def test_greedy_requests_of_a_race_are_drafted_greedily(selector: SelectorConfig | None):
    model = tiny.random_drafter(tiny.drafter_config(True, selector=selector))
    hidden, race = normed(model.readout, torch.randn(2 * 4, 64)), race_of([0.9, 0.0])
    drawn = model.readout.draft(hidden, 4, race)
    greedy = model.readout.draft(hidden, 4)
    assert torch.equal(drawn[1], greedy[1])
    assert not torch.equal(drawn[0], greedy[0])


def normed(readout: Readout, hidden: Tensor) -> Normed:
    """Hidden states under the final norm, as a network's output is read."""
    return Normed(readout.norm(hidden), None, readout.norm.eps)


def race_of(temperatures: list[float]) -> Race:
    how = Sampling.empty(len(temperatures), tiny.CPU)
    how.temperature.copy_(torch.tensor(temperatures))
    how.seeds.copy_(torch.arange(len(temperatures)) * 7)
    rows = torch.arange(len(temperatures))
    return Race(how, rows + 3, rows)


@torch.no_grad()
def test_slots_one_by_one_race_as_slots_at_once():
    """Each at its own place, without a selector: as a sequential drafter's come."""
    model = tiny.random_drafter(tiny.drafter_config(True))
    readout, hidden = model.readout, torch.randn(3 * 4, 64)
    race = race_of([0.0, 0.8, 2.0])
    at_once = readout.draft(normed(readout, hidden), 4, race)
    for slot in range(4):
        rows = normed(readout, hidden.view(3, 4, -1)[:, slot])
        alone = readout.draft(rows, 1, race, depth=slot)
        assert torch.equal(alone[:, 0], at_once[:, slot])


@torch.no_grad()
@pytest.mark.parametrize("selector", [None, SELECTOR])
def test_greedy_requests_have_candidates_where_more_than_one_counts(
    selector: SelectorConfig | None,
):
    """For a selector, and for trees."""
    readout = tiny.random_drafter(tiny.drafter_config(True, selector=selector)).readout
    hidden, race = normed(readout, torch.randn(4, 64)), race_of([0.0])
    with mock.patch("peagle.drafters.readout.earliest", wraps=earliest) as asked:
        readout.draft(hidden, 4, race)
        readout.slots(hidden, 4, race)
    wholes = [call.args[-1] for call in asked.call_args_list]
    assert wholes == [selector is not None, True]


PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=14, temperature=0.7, seed=4, top_k=9, min_p=0.02),
    SamplingParams(max_tokens=14, ignore_eos=True, num_speculative_tokens=2, presence_penalty=0.3),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.3, num_speculative_tokens=1),
]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_selector_changes_no_token(corrected: Drafter, target, on_device: bool):
    """Greedy and sampled requests with several K in one batch, in both worlds."""
    config = tiny.engine_config(block_size=4)
    prompts = [[3 * i + j for j in range(2 + 3 * i)] for i in range(len(PARAMS))]
    plain = tiny.engine(target.decoder, None, 0, on_device, config)
    alone = [how.model_copy(update={"num_speculative_tokens": None}) for how in PARAMS]
    expected = tiny.outputs(tiny.run(plain, prompts, alone))
    engine = tiny.engine(target.decoder, corrected, 5, on_device, config)
    requests = tiny.run(engine, prompts, PARAMS)
    assert tiny.outputs(requests) == expected
    assert sum(request.speculation.drafted for request in requests) > 0


def test_both_worlds_draft_alike(corrected: Drafter, target):
    """Greedy drafts, read from the count of those accepted."""
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    config = tiny.engine_config(draft_length="fixed")
    accepted = [
        [
            request.speculation.accepted_per_position
            for request in tiny.run(
                tiny.engine(target.decoder, corrected, 4, on_device, config),
                [[1, 2], [7, 5, 3]],
                params,
            )
        ]
        for on_device in (False, True)
    ]
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_that_share_the_draw_are_accepted_more_often(targets, trained, on_device: bool):
    """Than the most likely ones: for the same text, with either method."""
    target = targets["easy"].decoder
    how = [
        SamplingParams(max_tokens=40, temperature=1.0, seed=s, ignore_eos=True) for s in range(12)
    ]
    for method in ("peagle", "eagle3"):
        lengths = {}
        for name, sharpening in {"greedy": 0.0, "drawn": SHARPENING}.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("peagle.ops.race.SHARPENING", sharpening)
                engine = tiny.engine(
                    target, trained[method].drafter, 4, on_device, tiny.engine_config()
                )
                done = [r.speculation for r in tiny.run(engine, [[i, 3] for i in range(12)], how)]
            lengths[name] = sum(d.accepted for d in done) / sum(d.cycles for d in done)
        assert lengths["drawn"] > 1.1 * lengths["greedy"]


def test_a_directory_with_a_correction_is_the_same_drafter_without_it(
    corrected: Drafter, target, tmp_path: Path
):
    model = corrected.model
    save_drafter(tmp_path / "saved", model, torch.float32)
    names = sorted(p.name for p in (tmp_path / "saved").iterdir())
    assert names == ["config.json", "correction", "model.safetensors"]
    again = tiny.load_drafter(tmp_path / "saved", target.decoder)
    assert again.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter)
    for file in (tmp_path / "saved" / "correction").iterdir():
        file.unlink()
    (tmp_path / "saved" / "correction").rmdir()
    plain = tiny.load_drafter(tmp_path / "saved", target.decoder)
    assert plain.config == replace(model.config, selector=None)
    with torch.no_grad():
        found = tiny.propose(drafter_for(plain), target.decoder, TOKENS, 4)
    best = plain.readout.vocabulary[found.logits.argmax(dim=-1)].tolist()
    assert found.drafts == best
