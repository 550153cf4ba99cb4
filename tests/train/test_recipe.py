import math
from pathlib import Path

import pytest
import yaml

from peagle.errors import InputError
from peagle.train.recipe import IDLE, Recipe

ENOUGH = "target: t\ndata: [a.jsonl]\noutput: out\nmask_token_id: 1\nsteps: 10\n"


EAGLE3 = ENOUGH.replace("mask_token_id: 1", "method: eagle3")


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    return Recipe.load(tmp_path / "recipe.yaml", overrides)


def test_a_recipe_and_its_overrides(tmp_path: Path):
    recipe = load(tmp_path, ENOUGH, "steps=20", "learning_rate=2e-3", "taps=[1, 2]", "qk_norm=true")
    assert (recipe.steps, recipe.learning_rate, recipe.taps) == (20, 0.002, (1, 2))
    assert recipe.qk_norm is True
    assert recipe.data == ("a.jsonl",)


@pytest.mark.parametrize("path", sorted(Path("recipes").rglob("*.yaml")), ids=str)
def test_the_projects_own_recipes_are_valid(path: Path):
    assert Recipe.load(path).steps > 1000


@pytest.mark.parametrize("beside", IDLE)
def test_keys_that_decide_nothing_are_keys(beside: str):
    assert {*IDLE[beside]} < Recipe.model_fields.keys()


def test_who_shares_the_targets_embeddings(tmp_path: Path):
    """P-EAGLE learns its own, because of the mask token; EAGLE-3 need not."""
    assert not load(tmp_path, ENOUGH).shares_embeddings
    assert load(tmp_path, EAGLE3).shares_embeddings
    assert not load(tmp_path, EAGLE3, "train_embeddings=true").shares_embeddings


def test_a_recipe_that_repeats_defaults_is_the_same(tmp_path: Path):
    """As the one that is written beside a run does."""
    for text in (ENOUGH, EAGLE3, DFLASH, MTP):
        recipe = load(tmp_path, text)
        assert load(tmp_path, yaml.safe_dump(recipe.model_dump(mode="json"))) == recipe


def test_dflash_shares_what_is_the_targets_and_weighs_rows_by_their_place(tmp_path: Path):
    recipe = load(tmp_path, DFLASH, "num_speculative_tokens=15")
    assert recipe.shares_embeddings
    assert not recipe.trains_head
    assert recipe.decay == pytest.approx(math.exp(-1 / 7))
    assert load(tmp_path, DFLASH, "depth_decay=1", "train_head=true").decay == 1
    assert load(tmp_path, ENOUGH).decay == 1
    assert load(tmp_path, ENOUGH).trains_head
    assert not load(tmp_path, MTP).trains_head


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (10, 5), (50, 25), (51, 50)])
def test_a_short_run_warms_up_for_half_of_its_steps(tmp_path: Path, steps: int, warmup: int):
    assert load(tmp_path, ENOUGH, f"steps={steps}").warmup == warmup


def test_the_repositorys_recipes_are_valid():
    recipes = sorted(Path(__file__).parents[2].glob("recipes/*/*.yaml"))
    methods = {Recipe.load(path).method for path in recipes}
    assert methods == {"peagle", "eagle3", "dflash"}


DFLASH = ENOUGH + "method: dflash\n"
MTP = EAGLE3.replace("eagle3", "mtp")
SELECTOR = ENOUGH + "initial_drafter: d\ntrain: selector\n"
BAD = [
    ("steps: [", (), "cannot be read as YAML"),
    ("- a", (), "must hold keys and values, one per line"),
    ("target: t", (), "data: Field required"),
    (ENOUGH + "colour: red", (), r"recipe\.yaml: Recipe: colour: no such key$"),
    (ENOUGH + "steps: 3", (), "YAML: steps stands there twice, again in line 6"),
    (ENOUGH, ("setps=3",), "and overrides: Recipe: setps: no such key; did you mean steps?"),
    (ENOUGH + "5: 6", (), "5 is not a key of a recipe"),
    (ENOUGH, ("data=a.jsonl",), r"data: give a list: \[a\.jsonl\]$"),
    (ENOUGH, ("data=[]",), "data: "),
    (ENOUGH, ("output=.",), "output '.' has no name"),
    (ENOUGH, ("seed=100000000000000000000000",), "seed: "),
    (ENOUGH, ("learning_rate=.inf",), "learning_rate: "),
    (ENOUGH, ("steps",), "override 'steps' is not of the form key=value"),
    (ENOUGH, ("steps=[",), r"override 'steps=\['"),
    (ENOUGH, ("steps=0",), "steps: "),
    (ENOUGH, ("selector_candidates=32",), "selector_candidates needs selector_rank"),
    (
        SELECTOR,
        ("loss=cross_entropy", "train_head=false"),
        "makes no use of loss, train_head; leave that out",
    ),
    (SELECTOR, ("num_speculative_tokens=1",), "train selector needs num_speculative_tokens above"),
    (EAGLE3, ("elements_per_segment=8",), "eagle3 makes no use of elements_per_segment"),
    (DFLASH, ("mask_token_id=null",), "dflash needs mask_token_id"),
    (
        DFLASH,
        ("cod_ratio=0.7", "qk_norm=false"),
        "dflash makes no use of cod_ratio, qk_norm; leave",
    ),
    (ENOUGH, ("anchors=8",), "method peagle makes no use of anchors; leave that out"),
    (ENOUGH, ("cod_ratio=1.5",), "cod_ratio: "),
    (ENOUGH, ("cod_ratio=0",), "cod_ratio: "),
    (ENOUGH, ("num_speculative_tokens=0",), "num_speculative_tokens: "),
    (ENOUGH, ("rows_per_pass=0",), "rows_per_pass: "),
    (ENOUGH, ("elements_per_segment=0",), "elements_per_segment: "),
    (ENOUGH, ("overlong=wrap",), "overlong: "),
    (ENOUGH, ("method=medusa",), "method: "),
    (ENOUGH, ("taps=[]",), "taps: "),
    (ENOUGH + "seed: 2024-13-45", (), "cannot be read as YAML: month must be in 1..12"),
    (ENOUGH, ("seed=2024-13-45",), "override 'seed=2024-13-45': '2024-13-45' is not YAML"),
    (EAGLE3, ("cod_ratio=0.7",), "method eagle3 makes no use of cod_ratio; leave"),
    (EAGLE3, ("cod_floor=0.1", "activation_checkpointing=true"), "of cod_floor, activation_checkp"),
    (ENOUGH, ("features=cached",), "cached features need feature_cache, a directory"),
    (ENOUGH, ("feature_cache=c",), "has no effect on online features"),
    (ENOUGH, ("feature_dtype=fp8",), "has no effect on online features"),
    (ENOUGH, ("features=cached", "feature_cache=c", "feature_dtype=int8"), "feature_dtype: "),
    (ENOUGH, ("method=eagle3",), "eagle3 has no mask slots; leave mask_token_id out"),
    (ENOUGH, ("mask_token_id=null",), "peagle needs mask_token_id"),
    (ENOUGH, ("loss=l2",), "loss: "),
    (ENOUGH, ("full_attention_layers=[0]",), "full_attention_layers needs sliding_window"),
    (ENOUGH, ("sliding_window=8", "full_attention_layers=[4]"), "names layer 4 of 4, counted"),
    (EAGLE3, ("sliding_window=2",), "sliding_window hides drafts from one another; give at least"),
    (ENOUGH, ("dpace=0",), "dpace: "),
    (ENOUGH, ("selector_candidates=1",), "selector_candidates: "),
    (ENOUGH, ("train=selector",), "train selector needs initial_drafter, the drafter that it"),
    (ENOUGH, ("initial_drafter=d", "taps=[1]"), "taps cannot be chosen: initial_drafter decides"),
    (EAGLE3, ("dpace=0.5", "selector_rank=8"), "makes no use of dpace, selector_rank; leave"),
    (ENOUGH, ("method=mtp",), "mtp has no mask slots; leave mask_token_id out"),
    (MTP, ("taps=[1]", "train_head=true"), "mtp makes no use of taps, train_head; leave"),
    (EAGLE3, ("initial_drafter=d", "train=selector"), "eagle3 has no mask slots that a selector"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), BAD)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, overrides, message: str):
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, text, *overrides)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"recipe\.yaml cannot be read: No such file"):
        Recipe.load(tmp_path / "recipe.yaml")
