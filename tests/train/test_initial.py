from pathlib import Path

import pytest
import tiny
import torch

from peagle.drafters.checkpoint import save_drafter
from peagle.errors import InputError
from peagle.models.loading import load_decoder
from peagle.ops.rope import RopeConfig
from peagle.train.initial import initial_drafter
from peagle.train.packing import Document, pack

ROWS = pack(
    [Document.answered((1, 2, 2, 3, 3, 3, 9), 1), Document.answered((8, 8, 8, 8, 4, 4), 4)], 20
)


def test_embeddings_and_head_begin_as_the_targets(targets, recipe_for, tmp_path: Path):
    target = targets["easy"].decoder
    model = initial_drafter(recipe_for(tmp_path / "out"), target, ROWS)
    assert torch.equal(model.embed.weight, target.embed.weight)
    assert torch.equal(model.readout.head.weight, target.head.weight)
    assert model.config.mask_token_id == tiny.MASK
    assert model.config.trained_tokens == 4
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert 0.8 < model.mask_hidden.std().item() < 1.2
    assert model.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_seed_decides_the_rest(targets, recipe_for, tmp_path: Path):
    target = targets["easy"].decoder
    weights = [
        initial_drafter(recipe_for(tmp_path / "out", seed=seed), target, ROWS).fc.weight
        for seed in (1, 1, 2)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("family", tiny.KINDS)
def test_a_drafter_for_every_family_is_read_as_it_was_written(
    targets, recipe_for, tmp_path: Path, family: str
):
    target = targets[family].decoder
    model = initial_drafter(recipe_for(tmp_path / "out"), target, ROWS)
    save_drafter(tmp_path / "drafter", model, torch.float32)
    assert tiny.load_drafter(tmp_path / "drafter", target).config == model.config
    layer = model.config.layer
    assert layer.norms.eps == pytest.approx(
        targets[family].peer.config.get_text_config().rms_norm_eps
    )
    assert layer.attention.rope.kind in ("default", "yarn")


def test_a_drafter_rotates_as_the_first_layer_that_does(recipe_for, tmp_path: Path):
    changes = {"no_rope_layers": [0, 1, 0, 1], "rope_parameters": {"rope_theta": 500.0}}
    target = tiny.load_target(tiny.save_target(tmp_path / "target", "smollm3", **changes))
    model = initial_drafter(recipe_for(tmp_path / "out"), target, ROWS)
    assert model.config.layer.attention.rope == RopeConfig(500.0, original_max_position=256)


@pytest.mark.parametrize(
    ("changes", "frozen"),
    [
        ({}, set()),
        ({"train_head": False}, {"readout.head.weight"}),
        ({"train_embeddings": False}, {"embed.weight"}),
        ({"method": "eagle3"}, {"embed.weight"}),
        (
            {"method": "eagle3", "train_embeddings": True, "train_head": False},
            {"readout.head.weight"},
        ),
    ],
    ids=str,
)
def test_what_is_frozen(targets, recipe_for, tmp_path: Path, changes, frozen: set[str]):
    model = initial_drafter(recipe_for(tmp_path / "out", **changes), targets["easy"].decoder, ROWS)
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == frozen


def test_the_layers_that_slide_are_written_as_they_train(targets, recipe_for, tmp_path: Path):
    keys = {"num_hidden_layers": 3, "sliding_window": 8, "full_attention_layers": (1,)}
    model = initial_drafter(recipe_for(tmp_path / "out", **keys), targets["easy"].decoder, ROWS)
    save_drafter(tmp_path / "drafter", model)
    written = tiny.load_drafter(tmp_path / "drafter", targets["easy"].decoder).config
    assert [heads.window for heads in written.transformer.attention.values()] == [8, None, 8]


@pytest.mark.parametrize("train_embeddings", [True, False])
def test_it_computes_in_the_targets_dtype(
    targets, recipe_for, tmp_path: Path, train_embeddings: bool
):
    """All except trained embeddings."""
    target = tiny.load_target(targets["easy"].directory, torch.bfloat16)
    recipe = recipe_for(tmp_path / "out", train_embeddings=train_embeddings)
    model = initial_drafter(recipe, target, ROWS)
    whole = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert whole == ({"embed.weight"} if train_embeddings else set())
    assert {p.dtype for p in model.parameters()} <= {torch.float32, torch.bfloat16}
    assert torch.equal(model.embed.weight, target.embed.weight.to(model.embed.weight.dtype))


def test_a_reduced_vocabulary_is_that_of_the_responses(targets, recipe_for, tmp_path: Path):
    """Prompts do not count: 8 is the most frequent token of all."""
    target = targets["easy"].decoder
    model = initial_drafter(recipe_for(tmp_path / "out", draft_vocab_size=3), target, ROWS)
    assert (torch.arange(3) + model.readout.d2t).tolist() == [2, 3, 4]
    assert torch.equal(model.readout.head.weight, target.head.weight[[2, 3, 4]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_token_id": 3}, r"mask_token_id 3 occurs in the data \(\); choose an unused id"),
        ({"draft_vocab_size": 97}, "97 is above the target's vocabulary of 96; lower it"),
        ({"mask_token_id": 96}, "outside the vocabulary of 96; set mask_token_id to"),
        ({"taps": (1, 5)}, r"aux layers \[1, 5\] are not all within .*; correct taps$"),
        ({"taps": (1, 1)}, r"aux layers \[1, 1\] repeat"),
        (
            {"selector_rank": 4, "draft_vocab_size": 15},
            "selector_candidates 16 is above the 15 tokens that the drafter drafts; lower it",
        ),
    ],
)
def test_recipes_that_do_not_fit(targets, recipe_for, tmp_path: Path, changes, message: str):
    with pytest.raises(InputError, match=message):
        initial_drafter(recipe_for(tmp_path / "out", **changes), targets["easy"].decoder, ROWS)


def test_a_drafter_to_train_on_from(targets, trained, recipe_for, tmp_path: Path):
    """With what it was, a new selector that corrects nothing yet, and the target untouched."""
    target, shape = targets["easy"].decoder, {"num_hidden_layers": 4, "taps": None}
    for method, run in trained.items():
        start = {"initial_drafter": str(run.output), "method": method}
        more = {"selector_rank": 8} if method == "peagle" else {}
        model = initial_drafter(
            recipe_for(tmp_path / "out", **shape, **start, **more), target, ROWS
        )
        kept = dict(tiny.load_drafter(run.output, target).named_parameters())
        for name, parameter in model.named_parameters():
            if "selector" not in name:
                assert torch.equal(parameter, kept[name]), name
                assert parameter.requires_grad == (name != "embed.weight" or method == "peagle")
        assert (model.readout.selector is not None) == (method == "peagle")
        assert model.embed is not target.embed
        assert not target.embed.weight.requires_grad
    hidden, previous = torch.randn(5, 64), torch.arange(5)
    model = initial_drafter(
        recipe_for(tmp_path / "out", **shape, **start_of(trained), selector_rank=8), target, ROWS
    )
    found, scores = model.readout(hidden, previous)
    assert torch.equal(found.scores, scores)
    assert 0.1 < model.readout.selector.successor.std().item() < 0.3


def start_of(trained) -> dict[str, str]:
    return {"initial_drafter": str(trained["peagle"].output)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mask_token_id": 5},
            "the mask token 95, the recipe has mask_token_id 5; give the drafter",
        ),
        ({"train": "selector"}, "initial_drafter has no selector to train; set selector_rank"),
        ({"method": "eagle3"}, "initial_drafter is P-EAGLE's; set method to peagle"),
    ],
)
def test_a_drafter_that_cannot_be_trained_on(
    targets, trained, recipe_for, tmp_path: Path, changes, message: str
):
    values = {"num_hidden_layers": 4, "taps": None, **start_of(trained), **changes}
    with pytest.raises(InputError, match=message):
        initial_drafter(recipe_for(tmp_path / "out", **values), targets["easy"].decoder, ROWS)


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_what_a_drafter_shares_with_a_tied_target_is_two_parameters(
    recipe_for, tmp_path: Path, method: str
):
    """A head of its own, which computes with its weight: the target's may be packed."""
    tiny.save_target(tmp_path / "target", tie_word_embeddings=True)
    target = load_decoder(tmp_path / "target", torch.float32, torch.device("cpu"))
    assert target.head.packed is not None
    drafter = tiny.random_drafter(tiny.drafter_config(method == "peagle"))
    shared = frozenset({"embed_tokens.weight", "lm_head.weight"})
    save_drafter(tmp_path / "drafter", drafter, torch.float32, shared)
    shape = {"num_hidden_layers": 4, "taps": None, "method": method, "row_length": 200}
    start = {"initial_drafter": str(tmp_path / "drafter"), "num_speculative_tokens": 6}
    model = initial_drafter(recipe_for(tmp_path / "out", **shape, **start), target, ROWS)
    head = model.readout.head
    assert torch.equal(head.weight, model.embed.weight)
    assert head.weight is not model.embed.weight
    assert head.weight.requires_grad
    assert model.embed.weight.requires_grad == (method == "peagle")
    with torch.no_grad():
        head.weight.zero_()
        assert not head(torch.ones(1, head.weight.shape[1])).any()
    assert target.head.weight.any()
    assert model.config.trained_tokens == 6, "the recipe's"


def test_padding_is_not_the_mask_token(targets, recipe_for, tmp_path: Path):
    recipe, target = recipe_for(tmp_path / "out", mask_token_id=0), targets["easy"].decoder
    assert not ROWS.tokens.all(), "no padding"
    assert initial_drafter(recipe, target, ROWS).config.mask_token_id == 0
    data = pack([Document.answered((1, 2), 1), Document((3, 0), ((1, 2),), "a:2")], 3)
    with pytest.raises(InputError, match=r"mask_token_id 0 occurs in the data \(a:2\)"):
        initial_drafter(recipe, target, data)
