"""What a run would take, against hand-computed numbers and against the run itself."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from peagle.errors import InputError
from peagle.models import weights
from peagle.models.loading import stored_bytes
from peagle.ops.weight import QuantizedWeight
from peagle.train import schedule
from peagle.train.packing import Document, pack
from peagle.train.plan import Forecast, part_of
from peagle.train.prepare import prepare

CHANGES = [
    {},
    {"method": "eagle3"},
    {"method": "dflash"},
    {"optimizer": "muon", "num_hidden_layers": 2, "qk_norm": False},
    {"draft_vocab_size": 40, "train_head": False},
]


@pytest.fixture
def by_hand(recipe_for, tmp_path: Path) -> Forecast:
    """One row of one document: 12 tokens, of which 3 are a prompt; whole chains of 3 depths."""
    recipe = recipe_for(
        tmp_path / "out", cod_ratio=1.0, num_speculative_tokens=3, rows_per_step=1, row_length=12
    )
    rows = pack([Document.answered(tuple(range(12)), 3)], 12)
    return dataclasses.replace(Forecast.of(recipe), training=rows, validation=rows)


def on_gpu(plan: Forecast) -> Forecast:
    """The same plan as it would be on a GPU."""
    plan.model.to(torch.bfloat16).embed.float()
    return dataclasses.replace(plan, device=torch.device("cuda"))


@pytest.mark.parametrize("changes", CHANGES)
def test_parameters_and_state_are_the_real_runs(recipe_for, tmp_path: Path, changes):
    recipe = recipe_for(tmp_path / "out", **changes)
    plan, trainer = Forecast.of(recipe), prepare(recipe)
    trainer.gradient(0)
    gradients = sum(gradient.nbytes for gradient in trainer.optimizer.gradients())
    trainer.optimizer.step(1e-3, 1.0)
    state = trainer.optimizer.state()
    for part, numbers in plan.parameters().items():
        of_part = [
            parameter
            for name, parameter in trainer.model.named_parameters()
            if part_of(name) == part
        ]
        assert numbers.trained == sum(p.numel() for p in of_part if p.requires_grad)
        assert numbers.trained + numbers.frozen == sum(p.numel() for p in of_part)
    memory = plan.memory()
    assert memory["weights"] == sum(p.nbytes for p in trainer.model.parameters())
    assert memory["gradients"] == gradients
    kept = sum(value.nbytes for name, value in state.items() if not name.endswith(".master"))
    assert memory["optimizer"] == kept
    assert memory["float32 weights"] == 0
    target = sum(p.nbytes for p in trainer.target.parameters())
    assert memory["target"] - target in (0, 40 * 64 * 4 if "draft_vocab_size" in changes else 0)


@pytest.mark.parametrize("changes", [{}, {"rows_per_pass": 3, "cod_floor": 0.5}])
def test_a_step_is_the_first_one_that_the_run_takes(
    recipe_for, tmp_path: Path, monkeypatch, changes
):
    recipe = recipe_for(tmp_path / "out", **changes)
    drawn = []

    def sample(*arguments):
        drawn.append(sample_chains(*arguments))
        return drawn[-1]

    sample_chains = schedule.sample_chains
    monkeypatch.setattr(schedule, "sample_chains", sample)
    prepare(recipe).gradient(0)
    lengths = torch.cat([chains.lengths for chains in drawn])
    step = Forecast.of(recipe).step
    assert step.loss_elements == tuple(int((lengths > depth).sum()) for depth in range(4))
    assert step.tokens == len(lengths)
    assert step.deeper == sum(step.loss_elements[1:])


def test_memory_by_hand(by_hand: Forecast):
    """12 tokens, 15 deeper elements; d = q = 64, kv = 32, m = 128; one layer with QK norm."""
    memory = on_gpu(by_hand).memory()
    trained = 96 * 64 + 3 * 64 * 64 + 3 * 64 + 64 + 96 * 64 + 45056 + 3 * 64 + 2 * 16
    kept = 4 * 64 + 3 * (64 + 32) + 3 * 128
    assert memory == {
        "weights": 2 * trained + 2 * 96 * 64,
        "float32 weights": 4 * (trained - 96 * 64),
        "gradients": 4 * trained,
        "optimizer": 8 * trained + 4 * len(list(by_hand.model.parameters())),
        "target": memory["target"],
        "features": 12 * 4 * 64 * 2,
        "activations at depth 0": 12 * (kept + 2 * 64) * 2 + 12 * 2 * 32 * 4,
        "activations deeper": 15 * (kept + 2 * 64) * 2,
        "logits": 2 * 15 * 96 * 2 + 2 * 96 * 64 * 4,
    }


def test_without_flex_attention_the_scores_are_kept(by_hand: Forecast):
    heads, scores = 4, 2
    kept = 6 * 64 + 4 * (64 + 32) + 4 * 128
    expected = 15 * (kept + 2 * 64) * 4 + scores * 15 * (12 + 15) * heads * 4
    assert by_hand.memory()["activations deeper"] == expected


def test_operations_by_hand(by_hand: Forecast):
    """Two per product forward, six with both gradients; attention has two products per pair."""
    layer = 64 * 128 + 64 * 64 + 3 * 64 * 128
    first = layer + 64 * 128
    pairs = 78 + 52 + 49
    head = 64 * 96
    plan = on_gpu(by_hand)
    assert plan.operations() == {
        "target": 2 * 12 * 4 * layer + 4 * 64 * 4 * 78,
        "draft layers": 6 * 27 * first + 12 * 64 * pairs + 4 * 12 * 3 * 64 * 64,
        "head and loss": 6 * 24 * head + 4 * 9 * head,
    }
    assert plan.evaluation_operations() == sum(
        (
            2 * 12 * 4 * layer + 4 * 64 * 4 * 78,
            2 * 27 * first + 4 * 64 * pairs,
            2 * 24 * head + 4 * 9 * head,
        )
    )
    assert plan.seconds(600, 1000.0) == 1.0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_target_s_experts_by_hand(recipe_for, targets, tmp_path: Path, family: str):
    """A token uses 3 of 8 experts, and all 8 are in memory."""
    directory = targets[family].directory
    plan = on_gpu(Forecast.of(recipe_for(tmp_path / "out", target=str(directory))))
    expert = 3 * 64 * (40 if family == "qwen3_moe" else 96)
    met = 64 * 128 + 64 * 64 + 8 * 64 + 3 * expert
    rows, work = 4 * 96, plan.step
    pairs = 4 * work.target_pairs
    if family == "gpt_oss":
        pairs = 2 * work.target_pairs + 2 * 7 * rows  # two layers see no more than 7 positions
    assert plan.operations()["target"] == 2 * rows * 4 * met + 4 * 64 * pairs
    tensors = load_file(directory / "model.safetensors").values()
    assert plan.memory()["target"] == sum(tensor.nbytes for tensor in tensors)


def test_packed_experts_count_as_what_they_are_in_memory(recipe_for, targets, tmp_path: Path):
    packed = tiny.pack_experts(shutil.copytree(targets["gpt_oss"].directory, tmp_path / "packed"))
    plain, other = (
        Forecast.of(recipe_for(tmp_path / "out", target=str(directory)))
        for directory in (targets["gpt_oss"].directory, packed)
    )
    before, after = (
        load_file(at / "model.safetensors") for at in (targets["gpt_oss"].directory, packed)
    )
    unpacked = sum(before[name].numel() * 4 for name in before.keys() - after.keys())
    parts = tiny.load_target(packed).modules()
    as_packed = sum(part.nbytes for part in parts if isinstance(part, QuantizedWeight))
    assert as_packed < unpacked / 5  # 17 bytes of 32 numbers, and scales that fill their columns
    kept, widened = (stored_bytes(packed, torch.float32, wide).layers for wide in (False, True))
    assert widened - kept == unpacked - as_packed
    assert plain.memory() == other.memory(), "a CPU widens them"
    assert plain.operations() == other.operations()


def test_cached_features_are_computed_once(targets, recipe_for, tmp_path: Path):
    """64 documents of 48 tokens are 32 rows of two; the target's layers are not kept in memory."""
    cache = str(tmp_path / "cache")
    online = Forecast.of(recipe_for(tmp_path / "out"))
    cached = Forecast.of(recipe_for(tmp_path / "out", features="cached", feature_cache=cache))
    assert (online.disk, online.caching_operations()) == (0, 0)
    assert cached.disk == 32 * 96 * 4 * 64 * 2
    assert cached.caching_operations() == online.operations()["target"] * 32 // 4
    assert cached.operations() == online.operations() | {"target": 0}
    layers = sum(part.nbytes for part in targets["easy"].decoder.layers.parameters())
    assert online.memory()["target"] - cached.memory()["target"] == layers
    assert list(tmp_path.iterdir()) == []


def test_recomputing_takes_less_memory_and_more_operations(recipe_for, tmp_path: Path):
    plans = [
        on_gpu(
            Forecast.of(
                recipe_for(tmp_path / "out", num_hidden_layers=4, activation_checkpointing=again)
            )
        )
        for again in (False, True)
    ]
    kept, recomputed = (plan.memory()["activations at depth 0"] for plan in plans)
    assert recomputed < 0.5 * kept
    fewer, more = (plan.operations()["draft layers"] for plan in plans)
    assert fewer < more < 1.34 * fewer


def test_the_recipe_with_what_the_run_takes_for_it(recipe_for, tmp_path: Path):
    recipe = recipe_for(tmp_path / "out", method="eagle3", taps=None)
    resolved = Forecast.of(recipe).resolved()
    assert list(resolved) == list(type(recipe).model_fields)
    found = {key: value for key, value in resolved.items() if value != getattr(recipe, key)}
    assert found == {
        "intermediate_size": 128,
        "qk_norm": True,
        "draft_vocab_size": 96,
        "taps": (1, 2),
        "train_embeddings": False,
        "train_head": True,
        "depth_decay": 1.0,
        "device": "cpu",
        "elements_per_segment": 6144,
    }


def test_a_rate_is_measured(by_hand: Forecast):
    assert by_hand.measure_rate(0.01) > 1e6


def test_the_weights_are_not_needed(recipe_for, targets, tmp_path: Path):
    target = shutil.copytree(targets["easy"].directory, tmp_path / "target")
    (target / "model.safetensors").unlink()
    plan = Forecast.of(recipe_for(tmp_path / "out", target=str(target)))
    tensors = load_file(targets["easy"].directory / "model.safetensors")
    assert plan.memory()["target"] == sum(tensor.nbytes for tensor in tensors.values())
    assert list(tmp_path.iterdir()) == [target]


def test_the_hub_is_not_asked_for_weights(recipe_for, targets, tmp_path: Path, monkeypatch):
    def answer(name: str, **wanted: list[str]) -> str:
        assert not [pattern for pattern in wanted["allow_patterns"] if "safetensors" in pattern]
        return str(targets["easy"].directory)

    monkeypatch.setattr(weights, "snapshot_download", answer)
    assert Forecast.of(recipe_for(tmp_path / "out", target="owner/name")).step.tokens == 4 * 96


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"row_length": 300},
            "row_length 300 is above the target's context of 256; lower it, or",
        ),
        ({"validation_documents": 64}, "leaves none of 64 documents in 64 samples"),
        (
            {"num_speculative_tokens": 43},
            "chain has 42 of num_speculative_tokens 43; lower",
        ),
        ({"taps": (9,)}, "aux layers"),
        (
            {"row_length": 300, "draft_vocab_size": 97, "mask_token_id": 96},
            "its mask token id 96 .*; its draft_vocab_size 97 .*; its row_length 300 is above",
        ),
    ],
)
def test_it_refuses_what_the_run_refuses(recipe_for, tmp_path: Path, changes, complaint: str):
    for begin in (Forecast.of, prepare):
        with pytest.raises(InputError, match=complaint):
            begin(recipe_for(tmp_path / "out", **changes))


def test_an_output_that_the_run_refuses(recipe_for, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    trainer = prepare(recipe_for(tmp_path / "begun"))
    trainer.stop()
    trainer.run(lambda _: None)
    outputs = {"link": "is a link", "begun": "another recipe"}
    for name, complaint in outputs.items():
        for begin in (Forecast.of, prepare):
            with pytest.raises(InputError, match=complaint):
                begin(recipe_for(tmp_path / name, seed=1))
    assert Forecast.of(recipe_for(tmp_path / "begun")).step.tokens
    with pytest.raises(InputError, match="holds a finished drafter"):
        prepare(recipe_for(tmp_path / "out"))
    assert Forecast.of(recipe_for(tmp_path / "out")).step.tokens  # writes nothing


def test_a_mask_token_in_the_data(recipe_for, tmp_path: Path):
    data = tmp_path / "data.jsonl"
    line = json.dumps({"prompt_token_ids": [1], "token_ids": [2, tiny.MASK, 3, 4, 5, 6]})
    data.write_text("\n".join([line] * 9))
    recipe = recipe_for(tmp_path / "out", data=(str(data),))
    for begin in (Forecast.of, prepare):
        with pytest.raises(InputError, match=r"occurs in the data .*; choose an unused id"):
            begin(recipe)


def test_every_parameter_has_its_part():
    config = tiny.drafter_config(True, fc_norm=True, norm_before_fc=True)
    parts = {name: part_of(name) for name, _ in tiny.random_drafter(config).named_parameters()}
    assert {parts[name] for name in parts if "norm" in name and "readout" not in name} >= {"fc"}
    assert set(parts.values()) == {"embeddings", "fc", "layers", "head"}


def test_a_step_of_blocks_by_hand(recipe_for, tmp_path: Path):
    """Nine anchors among 12 tokens, each with a block of 4 rows; the context makes keys and
    values, and go through no layer."""
    sizes = {"num_speculative_tokens": 3, "rows_per_step": 1, "row_length": 12}
    recipe = recipe_for(tmp_path / "out", method="dflash", num_hidden_layers=2, **sizes)
    rows = pack([Document.answered(tuple(range(12)), 3)], 12)
    plan = dataclasses.replace(Forecast.of(recipe), training=rows, validation=rows)
    assert plan.step.loss_elements == (9, 8, 7)
    assert plan.step.deeper == plan.through == 9 * 4
    assert plan.step.largest_segment == 9 * 4
    layer, qkv = 64 * 128 + 64 * 64 + 3 * 64 * 128, 64 * 128
    products = 6 * 2 * (9 * 4 * layer + 12 * qkv)
    pairs = on_gpu(plan).step.draft_pairs
    assert pairs == 4 * sum(range(2, 11)) + 9 * sum(range(1, 5))
    features = 4 * 12 * 3 * 64 * 64
    assert on_gpu(plan).operations()["draft layers"] == products + 12 * 2 * 64 * pairs + features
