"""Training runs of a few seconds on a target that is easy to draft for."""

import errno
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from sweeps import at_night
from torch import Tensor

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.train.estimate import Estimate
from peagle.train.features import TargetFeatures
from peagle.train.initial import initial_drafter
from peagle.train.packing import Document, pack
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.snapshot import SNAPSHOT, kept_step, save_snapshot
from peagle.train.trainer import Telemetry, Trainer, rate

METHODS = ["peagle", "eagle3"]
TOKENS = [(7 * i + i * i) % tiny.MASK for i in range(40)]


@pytest.mark.parametrize("method", METHODS)
def test_a_short_run_learns(targets, trained, method: str):
    run = trained[method]
    estimates = [report.estimate for report in run.reports if report.estimate]
    assert run.reports[-1].loss < 0.6 * run.reports[0].loss
    assert estimates[-1].acceptance_length > estimates[0].acceptance_length
    assert all(
        late > early for late, early in zip(*(e.accuracy for e in estimates[::-2]), strict=True)
    )
    engine = Engine(targets["easy"].decoder, run.drafter, 4, tiny.engine_config())
    requests = tiny.run(engine, [[i, 3, i] for i in range(8)], SamplingParams(max_tokens=30))
    done = [request.speculation for request in requests]
    assert 1 + sum(d.accepted for d in done) / sum(d.cycles for d in done) > 1.3


@pytest.mark.parametrize("method", METHODS)
def test_the_output_is_the_best_checkpoint(targets, trained, method: str):
    run = trained[method]
    lengths = {r.step: r.estimate.acceptance_length for r in run.reports if r.estimate}
    assert sorted(lengths) == [20, 40, 60]
    best = max(lengths, key=lambda step: lengths[step])
    assert run.progress.best_step == best
    assert run.progress.best_acceptance_length == lengths[best]
    assert [r.best for r in run.reports if r.step == best][-1]
    tensors = load_file(run.output / "model.safetensors")
    assert ("embed_tokens.weight" in tensors) == (method == "peagle")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert json.loads((run.output / "config.json").read_text())["num_speculative_tokens"] == 4
    assert sorted(p.name for p in run.output.parent.iterdir()) == sorted(trained), (
        "nothing else is left"
    )


class InterruptionError(Exception):
    """Stands in for a lost machine."""


@pytest.mark.sweep
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [20, 30])
def test_a_resumed_run_equals_one_without_interruption(
    trained, recipe_for, tmp_path: Path, method: str, at: int
):
    """Bit for bit, whether it is lost right after a snapshot or between two."""

    def lost(report: Telemetry) -> None:
        if report.step == at:
            raise InterruptionError

    recipe = recipe_for(tmp_path / "out", method=method)
    with pytest.raises(InterruptionError):
        prepare(recipe).run(lost)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", f"out.{SNAPSHOT}"]
    trainer, reports = prepare(recipe), []
    progress = trainer.run(reports.append)
    whole = trained[method]
    assert reports[0].step == 30
    assert progress == whole.progress
    expected = whole.trainer.model.state_dict()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert reports[-1] == whole.reports[-1]


def test_a_drafter_that_somebody_removed_is_not_the_best(recipe_for, tmp_path: Path):
    """Though the snapshot says that there was one."""
    recipe = recipe_for(tmp_path / "out", steps=30, evaluate_every=10)
    trainer = prepare(recipe)
    trainer.run(lambda report: trainer.stop() if report.step == 20 else None)
    shutil.rmtree(tmp_path / "out")
    progress = prepare(recipe).run(lambda report: None)
    assert progress.best_step > 20
    assert (tmp_path / "out" / "config.json").exists()


def test_a_stopped_run_ends_with_a_snapshot(trained, recipe_for, tmp_path: Path):
    """Also between two evaluations; what resumes from it ends as if it had not stopped."""
    recipe = recipe_for(tmp_path / "out")
    trainer = prepare(recipe)
    assert trainer.run(lambda report: trainer.stop()).step == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"out.{SNAPSHOT}"]
    again = prepare(recipe)
    assert again.run(lambda report: None) == trained["peagle"].progress
    expected = trained["peagle"].trainer.model.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in again.model.state_dict().items())


def test_a_stop_neither_loses_a_loss_nor_moves_later_reports(recipe_for, tmp_path: Path):
    """The loss of steps 11 to 15 is reported at the stop, that of 16 to 20 where it would be."""
    recipe = recipe_for(tmp_path / "out", steps=30, evaluate_every=25)
    trainer = prepare(recipe)
    gradient, losses = trainer.gradient, []

    def stopping(step: int) -> Tensor:
        if step == 14:
            trainer.stop()
        losses.append(gradient(step))
        return losses[-1]

    trainer.gradient = stopping
    reports: list[Telemetry] = []
    trainer.run(reports.append)
    prepare(recipe).run(reports.append)
    assert [report.step for report in reports] == [10, 15, 20, 25, 30]
    missed = torch.stack(losses[10:]).sum(1).mean().item()
    assert reports[1] == Telemetry(15, missed, None, False)


@pytest.mark.parametrize("optimizer", ["muon", *at_night(["adamw"])])
def test_every_optimizer_learns_and_resumes(recipe_for, tmp_path: Path, optimizer: str):
    def recipe(name: str) -> Recipe:
        return recipe_for(tmp_path / name, optimizer=optimizer, steps=20, evaluate_every=5)

    def lost(report: Telemetry) -> None:
        if report.step == 10:
            raise InterruptionError

    reports: list[Telemetry] = []
    whole = prepare(recipe("whole"))
    whole.run(reports.append)
    assert reports[-1].loss < 0.8 * reports[0].loss
    with pytest.raises(InterruptionError):
        prepare(recipe("parts")).run(lost)
    resumed = prepare(recipe("parts"))
    resumed.run(reports.append)
    expected = whole.model.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in resumed.model.state_dict().items())


@pytest.mark.parametrize("method", ["eagle3", *at_night(["peagle"])])
def test_a_bfloat16_run_learns_and_resumes(targets, recipe_for, tmp_path: Path, method: str):
    """As a GPU computes. Bit for bit, since the masters are kept."""
    half = tiny.load_target(targets["easy"].directory, torch.bfloat16)
    rows = pack([Document.answered(tuple(TOKENS[i : i + 20]), 3) for i in range(20)], 96)

    def ready(name: str) -> Trainer:
        recipe = recipe_for(
            tmp_path / name, method=method, steps=20, evaluate_every=10, rows_per_step=2
        )
        model = initial_drafter(recipe, half, rows)
        return Trainer(recipe, half, model, rows, rows, TargetFeatures(half, model.config.taps))

    def lost(report: Telemetry) -> None:
        raise InterruptionError

    reports: list[Telemetry] = []
    whole, parts = ready("whole"), ready("parts")
    whole.run(reports.append)
    assert reports[-1].loss < 0.8 * reports[0].loss
    with pytest.raises(InterruptionError):
        parts.run(lost)
    resumed = ready("parts")
    resumed.run(reports.append)
    assert reports[-1] == reports[-2]
    expected = whole.optimizer.state()
    assert {value.dtype for value in expected.values()} == {torch.float32}
    for name, value in resumed.optimizer.state().items():
        assert torch.equal(value, expected[name]), name
    weights = whole.model.state_dict()
    assert {"embed.weight"} >= {n for n, v in weights.items() if v.dtype == torch.float32}
    assert all(torch.equal(v, weights[name]) for name, v in resumed.model.state_dict().items())


@pytest.mark.parametrize("method", ["peagle", *at_night(["eagle3"])])
def test_a_frozen_head_stays_the_targets(targets, recipe_for, tmp_path: Path, method: str):
    changes = {"train_head": False, "steps": 20, "evaluate_every": 20}
    trainer = prepare(recipe_for(tmp_path / "out", method=method, **changes))
    reports: list[Telemetry] = []
    trainer.run(reports.append)
    assert reports[-1].loss < 0.8 * reports[0].loss
    head = targets["easy"].decoder.head.weight
    assert torch.equal(trainer.model.readout.head.weight, head)
    assert not any(name.startswith("head.") for name in trainer.optimizer.state())
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], head.bfloat16()
    )


MEMORY = [
    {"rows_per_pass": 3},
    {"rows_per_pass": 1},
    {"elements_per_segment": 17},
    {"rows_per_pass": 4, "elements_per_segment": 50, "activation_checkpointing": True},
]
"""Keys that bound memory; with whole chains, since each pass draws its own."""
WHOLE = {"peagle": {"cod_ratio": 1.0}, "eagle3": {}}
"""Keys of whole chains."""


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *(("peagle", changes) for changes in MEMORY),
        *(("eagle3", changes) for changes in MEMORY[:2]),
    ],
    ids=str,
)
def test_what_bounds_memory_does_not_change_the_gradient(
    recipe_for, tmp_path: Path, method: str, changes
):
    losses, gradients = [], []
    for name, own in (("plain", {}), ("changed", changes)):
        own = {"depth_decay": 0.7, **WHOLE[method], **own}
        recipe = recipe_for(tmp_path / name, method=method, **own)
        trainer = prepare(recipe)
        losses.append(trainer.gradient(1).sum().item())
        gradients.append(trainer.optimizer.gradients())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert distance(gradients[1], gradients[0]) <= 1e-6 * distance(gradients[0])


def test_what_bounds_memory_does_not_change_a_run(recipe_for, tmp_path: Path):
    reports: list[Telemetry] = []
    runs = []
    for name, changes in (("plain", {}), ("changed", MEMORY[-1])):
        trainer = prepare(recipe_for(tmp_path / name, steps=10, cod_ratio=1.0, **changes))
        begun = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.run(reports.append)
        runs.append([p.detach() for p in trainer.model.parameters()])
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=1e-4)
    assert distance(*runs) <= 1e-3 * distance(runs[0], begun)


def distance(some: Sequence[Tensor], other: Sequence[Tensor] | None = None) -> float:
    """Norm of the difference, or of the tensors."""
    pairs = zip(some, other or [torch.zeros(())] * len(some), strict=True)
    return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5


def one_report(trainer: Trainer) -> Telemetry:
    reports: list[Telemetry] = []
    trainer.run(reports.append)
    return reports[-1]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", ["kl", "cross_entropy"])
def test_packed_documents_cost_what_they_cost_apart(
    targets, recipe_for, tmp_path: Path, method: str, loss: str
):
    """Two documents in one row, or in two: the same mean over the elements in the loss."""
    documents = [Document.answered(tuple(TOKENS[:15]), 3), Document.answered(tuple(TOKENS[15:]), 6)]
    losses = []
    for name, rows, length in (("packed", 1, 40), ("apart", 2, 26)):
        recipe = recipe_for(
            tmp_path / name,
            method=method,
            loss=loss,
            steps=1,
            rows_per_step=rows,
            row_length=length,
            depth_decay=0.7,
            **WHOLE[method],
        )
        data = pack(documents, length)
        assert len(data) == rows
        model = initial_drafter(recipe, targets["easy"].decoder, data)
        target = targets["easy"].decoder
        source = TargetFeatures(target, model.config.taps)
        trainer = Trainer(recipe, target, model, data, data, source)
        losses.append(one_report(trainer).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_eagle3_drops_nothing(recipe_for, tmp_path: Path):
    """Its loss is a mean over all its elements, whatever P-EAGLE's ratio."""
    recipe = recipe_for(tmp_path / "out", method="eagle3")
    losses = [
        prepare(recipe.model_copy(update={"cod_ratio": ratio})).gradient(0) for ratio in (0.3, 1.0)
    ]
    assert torch.equal(*losses)


def test_deep_tokens_can_weigh_less(recipe_for, tmp_path: Path):
    """With hardly any weight on the others, depth 0 alone is left."""

    def first_loss(k: int, decay: float) -> float:
        changes = {"num_speculative_tokens": k, "depth_decay": decay, "steps": 1}
        return one_report(prepare(recipe_for(tmp_path / f"{k}-{decay}", **changes))).loss

    alone = pytest.approx(first_loss(1, 1.0), rel=1e-4)
    assert first_loss(4, 1e-6) == alone
    assert first_loss(4, 1.0) != alone


def test_the_step_size_rises_and_falls(recipe_for, tmp_path: Path):
    recipe = recipe_for(tmp_path / "out", steps=10, warmup_steps=4)
    rates = [rate(recipe, step) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_the_step_size_of_a_run_shorter_than_the_warm_up_falls_too(recipe_for, tmp_path: Path):
    recipe = recipe_for(tmp_path / "out", steps=4, warmup_steps=50)
    assert [rate(recipe, step) for step in range(4)] == [0.5, 1.0, 1.0, 0.5]


def test_a_loss_that_is_no_number_is_reported(recipe_for, tmp_path: Path):
    with pytest.raises(InputError, match=r"the loss became .*lower learning_rate"):
        prepare(recipe_for(tmp_path / "out", learning_rate=1e30, gradient_clip=1e30)).run(print)


def test_a_document_that_the_target_cannot_read_is_named(targets, recipe_for, tmp_path: Path):
    target = tiny.load_target(targets["easy"].directory)
    target.embed.weight[3] = torch.inf
    documents = [Document((1, 2, 4, 5), ((1, 4),), "a:1"), Document((1, 2, 3, 5), ((1, 4),), "a:2")]
    rows = pack(documents, 8)
    recipe = recipe_for(tmp_path / "out", steps=1, rows_per_step=1)
    model = initial_drafter(recipe, target, rows)
    source = TargetFeatures(target, model.config.taps)
    trainer = Trainer(recipe, target, model, rows, rows, source)
    with pytest.raises(InputError, match=r"at step 1: .* of a:2 are not finite; leave it out"):
        trainer.run(print)


def test_a_reduced_vocabulary_is_trained_and_drafts_target_ids(targets, recipe_for, tmp_path: Path):
    recipe = recipe_for(tmp_path / "out", draft_vocab_size=48, steps=40)
    report = one_report(prepare(recipe))
    assert report.estimate is not None
    model = tiny.load_drafter(tmp_path / "out", targets["easy"].decoder)
    assert model.config.draft_vocab_size == 48
    engine = Engine(targets["easy"].decoder, drafter_for(model), 4, tiny.engine_config())
    requests = tiny.run(engine, [[i, 3, i] for i in range(8)], SamplingParams(max_tokens=30))
    assert sum(request.speculation.accepted for request in requests) > 10


@pytest.fixture
def interrupted(recipe_for, tmp_path: Path) -> Path:
    """The snapshot of a run that was lost at step 20."""

    def lost(report: Telemetry) -> None:
        raise InterruptionError

    with pytest.raises(InterruptionError):
        prepare(recipe_for(tmp_path / "out", steps=21, evaluate_every=5)).run(lost)
    return tmp_path / f"out.{SNAPSHOT}"


def test_a_snapshot_of_another_recipe_is_refused(recipe_for, interrupted: Path):
    recipe = recipe_for(interrupted.parent / "out", steps=22, evaluate_every=5)
    with pytest.raises(
        InputError, match=r"another recipe \(steps was 21, is 22\); go back to that, "
    ):
        prepare(recipe).run(print)


def test_a_snapshot_of_edited_data_is_refused(recipe_for, tmp_path: Path):
    lines = Path(recipe_for(tmp_path / "out").data[0]).read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(lines))
    recipe = recipe_for(tmp_path / "out", steps=21, evaluate_every=5, data=(str(data),))
    trainer = prepare(recipe)
    trainer.stop()
    trainer.run(lambda _: None)
    data.write_text("\n".join(lines[::-1]))
    with pytest.raises(InputError, match="is from other data; go back to that, change output"):
        prepare(recipe).run(print)


@pytest.mark.parametrize("writer", ["save_drafter", "save_snapshot"])
def test_a_full_disk_leaves_the_snapshot_before(
    recipe_for, interrupted: Path, monkeypatch: pytest.MonkeyPatch, writer: str
):
    before = interrupted.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recipe = recipe_for(interrupted.parent / "out", steps=21, evaluate_every=5)
    trainer = prepare(recipe)
    monkeypatch.setattr(f"peagle.train.trainer.{writer}", full)
    trainer.estimate = lambda: Estimate((1.0,) * 4, 9.0, (1.0,) * 4, 9.0)
    with pytest.raises(InputError, match="No space left on device; make room, and the same"):
        trainer.run(lambda _: None)
    assert interrupted.read_bytes() == before


def test_a_stopped_run_does_not_keep_what_is_no_number(recipe_for, tmp_path: Path):
    recipe = recipe_for(tmp_path / "out", learning_rate=1e30, gradient_clip=1e30, steps=9)
    trainer = prepare(recipe)
    step = trainer.gradient

    def stopping(index: int) -> Tensor:
        if index == 4:
            trainer.stop()
        return step(index)

    trainer.gradient = stopping
    with pytest.raises(InputError, match=r"the loss became .*lower learning_rate"):
        trainer.run(print)
    assert kept_step(tmp_path / f"out.{SNAPSHOT}") == 0


def test_a_run_lost_at_its_first_drafter_goes_on(
    recipe_for, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its drafter exists, its newer snapshot does not: it is not taken for a finished one."""
    recipe = recipe_for(tmp_path / "out", steps=9)
    trainer = prepare(recipe)
    drafter = tmp_path / "out" / "model.safetensors"

    def lost(path: Path, *given: object) -> None:
        if drafter.exists():
            raise InterruptionError
        save_snapshot(path, *given)

    with monkeypatch.context() as patch:
        patch.setattr("peagle.train.trainer.save_snapshot", lost)
        with pytest.raises(InterruptionError):
            trainer.run(print)
    assert drafter.exists()
    assert prepare(recipe).run(print).step == 9


def test_a_stop_in_the_last_step_is_the_end(recipe_for, tmp_path: Path):
    trainer = prepare(recipe_for(tmp_path / "out", steps=9))
    assert trainer.run(lambda _: trainer.stop()).step == 9
    assert not (tmp_path / f"out.{SNAPSHOT}").exists()


def test_a_damaged_snapshot_is_refused(recipe_for, interrupted: Path):
    interrupted.write_bytes(interrupted.read_bytes()[:1000])
    recipe = recipe_for(interrupted.parent / "out", steps=21, evaluate_every=5)
    with pytest.raises(InputError, match=r"is damaged or cut short .*remove it to start over"):
        prepare(recipe).run(print)


def test_a_flipped_bit_of_a_snapshot_is_noticed(recipe_for, interrupted: Path):
    content = bytearray(interrupted.read_bytes())
    content[-2] ^= 64
    interrupted.write_bytes(content)
    trainer = prepare(recipe_for(interrupted.parent / "out", steps=21, evaluate_every=5))
    with pytest.raises(InputError, match="is damaged: its checksum is another; remove it"):
        trainer.run(print)


def test_a_snapshot_of_another_target_is_refused(targets, recipe_for, tmp_path: Path):
    target = shutil.copytree(targets["easy"].directory, tmp_path / "target")
    recipe = recipe_for(tmp_path / "out", steps=9, target=str(target))
    trainer = prepare(recipe)
    trainer.stop()
    trainer.run(lambda _: None)
    tiny.save_target(target, seed=1, layer_std=0.03)
    with pytest.raises(InputError, match="is from other target weights; go back to that"):
        prepare(recipe)


def test_an_output_belongs_to_one_run_at_a_time(recipe_for, tmp_path: Path):
    trainers = [prepare(recipe_for(tmp_path / "out", steps=3)) for _ in range(2)]
    refused: list[str] = []

    def beside(report: Telemetry) -> None:
        with pytest.raises(InputError, match=r"another run is writing output .*out; wait") as told:
            trainers[1].run(print)
        refused.append(str(told.value))

    trainers[0].run(beside)
    assert len(refused) == 1
    assert not (tmp_path / "out.lock").exists()
    with pytest.raises(InputError, match=r"another run has finished output .*out meanwhile"):
        trainers[1].run(print)


class TestPrepare:
    def test_a_row_longer_than_the_context(self, recipe_for, tmp_path: Path):
        with pytest.raises(InputError, match="row_length 300 is above the target's context of 256"):
            prepare(recipe_for(tmp_path / "out", row_length=300))

    def test_too_few_documents(self, recipe_for, tmp_path: Path):
        with pytest.raises(InputError, match="leaves none of 64 documents in 64 samples"):
            prepare(recipe_for(tmp_path / "out", validation_documents=64))

    def test_responses_shorter_than_a_chain(self, recipe_for, tmp_path: Path):
        """Every estimate would be 1, and the first drafter would stay the best."""
        data = tmp_path / "data.jsonl"
        line = {"prompt_token_ids": [1, 2], "token_ids": [3, 4, 5]}
        data.write_text("\n".join([json.dumps(line)] * 20))
        short = recipe_for(tmp_path / "out", data=(str(data),))
        with pytest.raises(InputError, match="the longest chain has 3 of num_speculative_tokens 4"):
            prepare(short)
        estimate = prepare(short.model_copy(update={"num_speculative_tokens": 3})).estimate()
        assert estimate.acceptance_length >= 1.0

    def test_an_output_that_cannot_be_written(self, recipe_for, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match="cannot be written"):
            prepare(recipe_for(tmp_path / "file" / "out"))
        with pytest.raises(InputError, match="is a file; output is the drafter's directory"):
            prepare(recipe_for(tmp_path / "file"))

    def test_an_output_that_is_a_link(self, recipe_for, tmp_path: Path):
        (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match="is a link; name the directory itself"):
            prepare(recipe_for(tmp_path / "out"))

    def test_an_output_whose_name_is_too_long(self, recipe_for, tmp_path: Path):
        for length in (250, 300):
            with pytest.raises(InputError, match="cannot be written: File name too long"):
                prepare(recipe_for(tmp_path / ("x" * length)))

    def test_a_finished_drafter_is_not_trained_over(self, recipe_for, tmp_path: Path):
        (tmp_path / "out").mkdir()
        for name in ("config.json", "model.safetensors"):
            (tmp_path / "out" / name).touch()
        with pytest.raises(InputError, match="holds a finished drafter; name a new directory"):
            prepare(recipe_for(tmp_path / "out"))

    def test_a_target_that_is_none(self, recipe_for, tmp_path: Path):
        with pytest.raises(InputError, match="no such directory"):
            prepare(recipe_for(tmp_path / "out", target=str(tmp_path / "nowhere")))

    def test_tokens_of_another_vocabulary(self, recipe_for, tmp_path: Path):
        line = {"prompt_token_ids": [1], "token_ids": [2, 3, tiny.VOCAB]}
        (tmp_path / "data.jsonl").write_text(json.dumps(line))
        recipe = recipe_for(tmp_path / "out", data=(str(tmp_path / "data.jsonl"),))
        with pytest.raises(InputError, match="token id 96 is outside the target's vocabulary"):
            prepare(recipe)

    def test_text_for_a_target_without_a_tokenizer(self, targets, recipe_for, tmp_path: Path):
        (tmp_path / "data.jsonl").write_text(json.dumps({"text": "words"}))
        target = shutil.copytree(targets["easy"].directory, tmp_path / "target")
        recipe = recipe_for(
            tmp_path / "out", target=str(target), data=(str(tmp_path / "data.jsonl"),)
        )
        with pytest.raises(InputError, match="has no usable tokenizer"):
            prepare(recipe)


def test_embeddings_can_stay_the_targets(targets, recipe_for, tmp_path: Path):
    """P-EAGLE without embeddings of its own: its directory has none, and the target's are used."""
    recipe = recipe_for(tmp_path / "out", train_embeddings=False, steps=20)
    trainer, reports = prepare(recipe), []
    before = trainer.model.embed.weight.clone()
    trainer.run(reports.append)
    assert reports[-1].loss < reports[0].loss
    assert torch.equal(trainer.model.embed.weight, before)
    assert "embed_tokens.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    start = {"initial_drafter": str(tmp_path / "out"), "num_hidden_layers": 4, "taps": None}
    selector = {"train": "selector", "selector_rank": 8, "steps": 1}
    prepare(recipe_for(tmp_path / "more", **start, **selector)).run(reports.append)
    assert "embed_tokens.weight" not in load_file(tmp_path / "more" / "model.safetensors")


def corrected(recipe_for, trained, output: Path, **changes: object) -> Recipe:
    """A recipe that adds a selector to the half-trained P-EAGLE drafter."""
    start = {"initial_drafter": str(trained["peagle"].output), "selector_rank": 8}
    shape = {"num_hidden_layers": 4, "taps": None}
    return recipe_for(output, **shape, **start, **changes)


def test_a_selector_trained_alone_leaves_the_drafter_as_it_is(
    targets, trained, recipe_for, tmp_path: Path
):
    recipe = corrected(recipe_for, trained, tmp_path / "out", train="selector", steps=30)
    trainer = prepare(recipe)
    before = trainer.estimate()
    reports: list[Telemetry] = []
    trainer.run(reports.append)
    after = trainer.estimate()
    assert after.acceptance_length > 1.03 * before.acceptance_length
    assert after.drawn_acceptance_length > before.drawn_acceptance_length
    assert after.accuracy[0] == before.accuracy[0], "the first draft is not corrected"
    started = trained["peagle"].output
    one, other = (load_file(d / "model.safetensors") for d in (started, tmp_path / "out"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    model = tiny.load_drafter(tmp_path / "out", targets["easy"].decoder)
    engine = Engine(targets["easy"].decoder, drafter_for(model), 4, tiny.engine_config())
    plain = Engine(targets["easy"].decoder, trained["peagle"].drafter, 4, tiny.engine_config())
    params, prompts = SamplingParams(max_tokens=30), [[i, 3, i] for i in range(8)]
    lengths = [
        sum(r.speculation.accepted for r in done) / sum(r.speculation.cycles for r in done)
        for done in (tiny.run(engine, prompts, params), tiny.run(plain, prompts, params))
    ]
    assert lengths[0] > lengths[1]


def test_a_selector_is_trained_with_its_drafter(trained, recipe_for, tmp_path: Path):
    """By weights and a loss that follow acceptance, from a half-trained drafter on."""
    changes = {"dpace": 0.5, "loss": "cross_entropy", "steps": 20, "evaluate_every": 20}
    recipe = corrected(recipe_for, trained, tmp_path / "out", **changes)
    trainer = prepare(recipe)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.run(lambda _: None)
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    assert (tmp_path / "out" / "correction" / "model.safetensors").exists()
