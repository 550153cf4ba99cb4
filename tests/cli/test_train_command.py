"""`peagle train`: the dry run, what it shows and logs, how it stops and continues."""

import gc
import io
import json
import os
import shutil
import signal
import sys
import weakref
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny_pair import save_tokenizer

from peagle.cli.train import showing_reports
from peagle.cli.training_log import RUN_ID
from peagle.errors import InputError
from peagle.train.estimate import Estimate
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.trainer import Telemetry, Trainer, rate

STEPS, EVERY = 30, 20
SHORT = {"steps": STEPS, "evaluate_every": EVERY, "rows_per_step": 1}
REPORTED = [10, 20, 30]
LENGTHS = {"acceptance_length", "drawn_acceptance_length"}
FIGURES = {"loss", "learning_rate", "accuracy", "drawn_accuracy"} | LENGTHS
ENTRY = FIGURES | {"step", "best", "seconds", "time"}
FAKE_WANDB = """
class Error(Exception):
    pass

told = []

class Run:
    def __enter__(self):
        return self
    def __exit__(self, *_):
        told.append("finished")
    def log(self, figures, step):
        told.append((step, figures))

def init(**settings):
    if settings["project"] == "closed":
        raise Error("no key\\nlog in first")
    told.append(settings)
    return Run()
"""


@pytest.fixture
def recipe(recipe_for, tmp_path: Path) -> Path:
    """A recipe's file, in a directory that holds nothing else."""
    given = recipe_for(tmp_path / "out", **SHORT)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(given.model_dump(mode="json", exclude_defaults=True)))
    return path


@pytest.fixture(scope="module")
def whole(recipe_for, tmp_path_factory) -> list[Telemetry]:
    """The reports of a run that nothing stopped."""
    output = tmp_path_factory.mktemp("whole") / "out"
    reports: list[Telemetry] = []
    prepare(recipe_for(output, **SHORT)).run(reports.append)
    return reports


def entries(recipe: Path) -> list[dict]:
    lines = (recipe.parent / "out.run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def at_step(monkeypatch):
    """Does something once, when a step begins."""

    def arrange(step: int, act) -> None:
        gradient, waiting = Trainer.gradient, [act]

        def watched(self, at):
            if at + 1 == step and waiting:
                waiting.pop()()
            return gradient(self, at)

        monkeypatch.setattr(Trainer, "gradient", watched)

    return arrange


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class TestDryRun:
    def test_it_prints_what_the_run_would_take_and_writes_nothing(self, peagle, recipe):
        result = peagle("train", recipe, "--dry-run", "learning_rate=2e-3")
        assert (result.code, result.err) == (0, "")
        lines = [" ".join(line.split()) for line in result.out.splitlines()]
        assert {"learning_rate 0.002", "weight_decay 0.0 (default)", "cod_ratio 0.8 (default)"} < {
            *lines
        }
        assert "intermediate_size 128 (default)" in lines
        assert "taps [1, 2, 3]" in lines
        assert "the run 30 steps of 1 rows, 1.1 epochs" in lines
        assert any(line.startswith("read 64 documents, 3072 tokens, 2688") for line in lines)
        assert "held out 8 documents in 4 rows of 96, 100.0% full" in lines
        assert "embeddings 6,144 0" in lines
        for title in ("Recipe", "Data", "Elements of a step", "Memory on cpu", "Time on one cpu"):
            assert title in lines
        assert sorted(recipe.parent.iterdir()) == [recipe]

    def test_a_reduced_vocabulary(self, peagle, recipe):
        """Of the held-out tokens, not of those by which it was chosen."""
        result = peagle("train", recipe, "--dry-run", "draft_vocab_size=40")
        [told] = [line for line in result.out.splitlines() if line.startswith("drafted")]
        assert 0.3 < float(told.split()[3].rstrip("%")) / 100 < 1.0
        assert told.split()[1:3] == ["40", "ids,"]

    def test_frozen_parts_and_depths(self, peagle, recipe):
        result = peagle("train", recipe, "--dry-run", "train_head=false", "cod_ratio=0.5")
        lines = [line.split() for line in result.out.splitlines()]
        assert ["head", "64", "6,144"] in lines
        shares = [words[1] for words in lines if len(words) == 3 and words[0] in "0123"]
        assert shares == ["1.000", "0.500", "0.250", "0.125"]

    def test_cached_features(self, peagle, recipe):
        cache = recipe.parent / "cache"
        result = peagle("train", recipe, "--dry-run", "features=cached", f"feature_cache={cache}")
        lines = [" ".join(line.split()) for line in result.out.splitlines()]
        assert "features 1.50 MiB on disk" in lines
        assert any(line.startswith("features, once ") for line in lines)
        assert not cache.exists()

    def test_a_short_runs_warm_up(self, peagle, recipe):
        result = peagle("train", recipe, "--dry-run", "warmup_steps=50")
        assert "warmup_steps 15" in [" ".join(line.split()) for line in result.out.splitlines()]

    def test_flags_are_the_recipes_keys_under_the_commands_names(self, peagle, recipe):
        target = Recipe.load(recipe).target
        other = recipe.parent / "1e5"
        flags = ["--target", target, "--drafter", other, "--k", 3]
        result = peagle("train", recipe, "--dry-run", *flags)
        lines = [" ".join(line.split()) for line in result.out.splitlines()]
        assert {f"output {other}", "num_speculative_tokens 3", f"target {target}"} <= {*lines}
        assert "cod_ratio 0.8 (default)" in lines

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--k", "3", "num_speculative_tokens=3"], "num_speculative_tokens is given as a flag"),
            (["--k", "0"], "num_speculative_tokens: Input should be greater than 0"),
            (["--target", "1"], "1: no such directory"),
        ],
    )
    def test_flags_that_cannot_be_used(self, peagle, recipe, words, message):
        result = peagle("train", recipe, "--dry-run", *words)
        assert (result.code, result.out) == (2, "")
        assert message in result.err

    def test_in_a_narrow_terminal_values_stay_in_their_column(self, peagle, recipe, monkeypatch):
        monkeypatch.setenv("COLUMNS", "60")
        lines = peagle("train", recipe, "--dry-run").out.splitlines()
        assert max(map(len, lines)) <= 60
        assert not any("…" in line for line in lines)

    def test_beside_a_finished_drafter_it_says_what_the_run_would_say(self, peagle, recipe):
        output = Path(Recipe.load(recipe).output)
        output.mkdir()
        (output / "model.safetensors").touch()
        result = peagle("train", recipe, "--dry-run")
        assert result.code == 0
        last = result.out.splitlines()[-1]
        assert last.startswith(f"A run would be refused: {output} holds a finished drafter; name")
        assert "in all" in result.out
        assert last.split(": ")[1].split(";")[0] in peagle("train", recipe).err

    def test_what_the_run_would_refuse_is_refused(self, peagle, recipe):
        result = peagle("train", recipe, "--dry-run", "row_length=300")
        assert (result.code, result.out) == (2, "")
        assert "above the target's context" in result.err


class TestLog:
    def test_a_run_is_written_down_and_shown(self, peagle, recipe):
        result = peagle("train", recipe)
        assert (result.code, result.out) == (0, "")
        found = entries(recipe)
        assert [entry["step"] for entry in found] == REPORTED
        assert all(entry.keys() == ENTRY for entry in found)
        given = Recipe.load(recipe)
        for entry in found:
            assert entry["learning_rate"] == given.learning_rate * rate(given, entry["step"] - 1)
            assert (entry["accuracy"] is not None) == (entry["step"] in (20, 30))
        assert found[1]["best"]
        assert [len(entry["accuracy"]) for entry in found[1:]] == [4, 4]
        seconds = [entry["seconds"] for entry in found]
        assert seconds == sorted(seconds)
        directory = recipe.parent / "out.run"
        assert Recipe.load(directory / "recipe.yaml") == given
        assert (directory / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert {path.name for path in directory.iterdir()} == {
            "curves.png",
            "metrics.jsonl",
            "recipe.yaml",
        }
        lines, last = result.err.splitlines(), found[-1]
        assert lines[0].startswith("64 documents")
        drawn = f"({last['drawn_acceptance_length']:.3f} at temperature 1)"
        length = f"AL {last['acceptance_length']:.3f} {drawn}"
        assert lines[-3].startswith(f"step 30  loss {last['loss']:.4f}  {length}  accuracy per de")
        assert lines[-2].startswith(f"{recipe.parent / 'out'}: best estimated AL ")

    def test_another_run_begins_another_log(self, peagle, recipe):
        peagle("train", recipe, "steps=20")
        assert [entry["step"] for entry in entries(recipe)] == [10, 20]
        shutil.rmtree(recipe.parent / "out")
        peagle("train", recipe, "steps=10")
        assert [entry["step"] for entry in entries(recipe)] == [10]

    def test_a_snapshot_that_is_refused_leaves_the_log(self, peagle, recipe, at_step):
        at_step(25, interrupt)
        peagle("train", recipe)
        before = {path: path.read_bytes() for path in (recipe.parent / "out.run").iterdir()}
        result = peagle("train", recipe, "steps=40")
        assert result.code == 2
        assert "is from another recipe" in result.err
        assert {path: path.read_bytes() for path in (recipe.parent / "out.run").iterdir()} == before

    def test_a_directory_that_cannot_be_made(self, peagle, recipe):
        (recipe.parent / "out.run").touch()
        result = peagle("train", recipe)
        assert result.code == 2
        assert "out.run cannot be written" in result.err

    def test_other_ranks_are_silent(self, peagle, recipe, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        result = peagle("train", recipe, "steps=10")
        assert (result.code, result.out, result.err) == (0, "", "")
        assert (recipe.parent / "out" / "model.safetensors").exists()
        assert not (recipe.parent / "out.run").exists()

    def test_without_matplotlib_nothing_begins(self, peagle, recipe, monkeypatch):
        monkeypatch.setattr("peagle.cli.training_log.find_spec", lambda _: None)
        result = peagle("train", recipe)
        assert (result.code, result.err) == (
            2,
            "peagle: peagle train needs matplotlib; in peagle's checkout: pip install '.[train]'\n",
        )


class TestEngineLength:
    """At the end of a run, beside the estimate."""

    @pytest.fixture
    def recipe(self, recipe_for, targets, tmp_path: Path) -> Path:
        """As above, for a target with a tokenizer, which the engine needs."""
        target = tmp_path / "target"
        shutil.copytree(targets["easy"].directory, target)
        save_tokenizer(target)
        given = recipe_for(tmp_path / "out", target=str(target))
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(given.model_dump(mode="json", exclude_defaults=True)))
        return path

    def test_it_is_near_the_estimate_and_what_it_means_follows(self, peagle, recipe):
        *lines, meaning, following = peagle("train", recipe).err.splitlines()
        logged = entries(recipe)[-1]
        length = logged["engine_acceptance_length"]
        assert logged.keys() == {"step", "engine_acceptance_length", "seconds", "time"}
        assert lines[-1] == (
            f"the engine's AL {length:.3f} (8 held-out prompts, greedy, 128 tokens at most)"
        )
        estimated = max(e["acceptance_length"] or 0 for e in entries(recipe)[:-1])
        assert length == pytest.approx(estimated, rel=0.15)
        assert length > 1.3, "too weak a drafter to show anything"
        assert meaning.startswith(f"AL {length:.2f} of at most 5: ")
        assert following.startswith("next: peagle ")
        assert str(recipe.parent / "target") in following
        assert str(recipe.parent / "out") in following

    def test_it_is_measured_without_the_trainer(self, peagle, recipe, monkeypatch):
        """There is no room for two targets."""
        trainers = []

        def prepared(*arguments):
            trainer = prepare(*arguments)
            trainers.append(weakref.ref(trainer))
            return trainer

        def measured(recipe, prompts):
            gc.collect()
            assert [trainer() for trainer in trainers] == [None]
            raise InputError("enough")

        monkeypatch.setattr("peagle.train.prepare.prepare", prepared)
        monkeypatch.setattr("peagle.cli.engine_length.measure_engine", measured)
        result = peagle("train", recipe, "steps=10")
        assert result.err.endswith("the engine's AL was not measured: enough\n")

    def test_drafts_do_not_branch_in_it(self, peagle, recipe, monkeypatch):
        """As in the estimate, and on every machine."""
        asked = []

        def opened(target, speculation, config):
            asked.append(speculation.num_tree_nodes)
            raise InputError("enough")

        monkeypatch.setattr("peagle.cli.engine_length.LLM", opened)
        assert peagle("train", recipe, "steps=10").err.endswith("not measured: enough\n")
        assert asked == [0]

    def test_data_without_prompts(self, peagle, recipe, tmp_path: Path):
        path = tmp_path / "text.jsonl"
        lines = (json.dumps({"prompt_token_ids": [], "token_ids": [i + 2] * 40}) for i in range(60))
        path.write_text("\n".join(lines))
        result = peagle("train", recipe, f"data=[{path}]", "steps=10")
        assert result.code == 0
        assert result.err.splitlines()[-1] == (
            "the engine's AL was not measured: no held-out conversation has a prompt"
        )

    def test_a_target_without_a_tokenizer(self, peagle, recipe):
        for path in (recipe.parent / "target").glob("tokenizer*"):
            path.unlink()
        result = peagle("train", recipe, "steps=10")
        assert result.code == 0
        assert "the engine's AL was not measured" in result.err.splitlines()[-1]
        assert "has no usable tokenizer" in result.err.splitlines()[-1]
        assert "engine_acceptance_length" not in entries(recipe)[-1]


class TestStopping:
    def test_ctrl_c_keeps_the_step_it_is_at(self, peagle, recipe, at_step, whole):
        handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        at_step(25, interrupt)
        result = peagle("train", recipe)
        assert result.code == 130
        assert result.err.splitlines()[-2:] == [
            "the same command continues from the snapshot at step 25",
            "peagle: interrupted",
        ]
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
        again = peagle("train", recipe)
        assert again.code == 0
        assert again.err.splitlines()[1] == "goes on from the snapshot at step 25"
        found = entries(recipe)
        assert [entry["step"] for entry in found] == [10, 20, 25, 30]
        assert found[-1]["accuracy"] == list(whole[-1].estimate.accuracy)

    def test_sigterm_does_too(self, peagle, recipe, at_step):
        at_step(5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert "from the snapshot at step 5" in peagle("train", recipe).err

    def test_a_second_ctrl_c_ends_at_once(self, peagle, recipe, at_step):
        def twice() -> None:
            interrupt()
            interrupt()

        at_step(25, twice)
        result = peagle("train", recipe)
        assert result.code == 130
        assert "from the snapshot at step 20" in result.err

    def test_before_the_first_evaluation(self, peagle, recipe, at_step):
        def broken() -> None:
            raise KeyboardInterrupt

        at_step(5, broken)
        result = peagle("train", recipe)
        again = "the same command continues from the snapshot at step 0"
        assert result.err.splitlines()[-2] == again

    def test_what_a_lost_run_wrote_after_its_snapshot_is_dropped(
        self, peagle, recipe, at_step, monkeypatch, whole
    ):
        """It was lost at step 30 and in the middle of a line; the snapshot is from step 20."""

        def lost() -> None:
            raise RuntimeError

        at_step(STEPS, lost)
        with pytest.raises(RuntimeError):
            peagle("train", recipe)
        with (recipe.parent / "out.run" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(entries(recipe)[-1] | {"step": 29}) + '\n{"step": 30, "lo')
        monkeypatch.undo()
        assert peagle("train", recipe).code == 0
        found = entries(recipe)
        assert [entry["step"] for entry in found] == REPORTED
        assert [entry["loss"] for entry in found] == [report.loss for report in whole]
        assert found[2]["seconds"] > found[1]["seconds"] > 0


class TestTrackers:
    def test_tensorboard_has_every_figure_once(self, peagle, recipe, at_step):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        at_step(25, interrupt)
        peagle("train", recipe, "--tensorboard")
        peagle("train", recipe, "--tensorboard")
        events = EventAccumulator(str(recipe.parent / "out.run")).Reload()
        kinds = ("accuracy", "drawn_accuracy")
        depths = [f"{kind}/depth_{depth}" for kind in kinds for depth in range(4)]
        lengths = ["acceptance_length", "drawn_acceptance_length"]
        names = ["loss", "learning_rate", *lengths, *depths]
        assert sorted(events.Tags()["scalars"]) == sorted(names)
        found = entries(recipe)
        for name in ("loss", "acceptance_length"):
            told = {scalar.step: scalar.value for scalar in events.Scalars(name)}
            known = {entry["step"]: entry[name] for entry in found if entry[name] is not None}
            assert told == pytest.approx(known)

    @pytest.fixture
    def wandb(self, tmp_path_factory, monkeypatch):
        """A stand-in that remembers what it is sent."""
        site = tmp_path_factory.mktemp("site")
        (site / "wandb.py").write_text(FAKE_WANDB)
        monkeypatch.syspath_prepend(site)
        import wandb

        yield wandb
        sys.modules.pop("wandb")

    def test_wandb_is_told_and_told_on(self, peagle, recipe, at_step, wandb):
        at_step(15, interrupt)
        peagle("train", recipe, "--wandb", "mine")
        peagle("train", recipe, "--wandb", "mine")
        begun = [told for told in wandb.told if isinstance(told, dict)]
        assert [(told["project"], told["name"]) for told in begun] == [("mine", "out")] * 2
        assert begun[0]["config"] == Recipe.load(recipe).model_dump()
        assert begun[0]["id"] == begun[1]["id"]
        assert begun[0]["id"] == (recipe.parent / "out.run" / RUN_ID).read_text()
        logged = [told for told in wandb.told if isinstance(told, tuple)]
        assert [step for step, _ in logged] == [entry["step"] for entry in entries(recipe)]
        assert wandb.told.count("finished") == 2
        shutil.rmtree(recipe.parent / "out")
        peagle("train", recipe, "--wandb", "mine", "steps=10")
        assert wandb.told[-3]["id"] != begun[0]["id"]

    def test_what_a_refused_run_is_not_told_of(self, peagle, recipe, at_step, wandb):
        at_step(15, interrupt)
        peagle("train", recipe)
        shutil.rmtree(recipe.parent / "out.run")
        result = peagle("train", recipe, "steps=40", "--wandb", "mine", "--tensorboard")
        assert result.code == 2
        assert "is from another recipe" in result.err
        assert not wandb.told
        assert not (recipe.parent / "out.run").exists()

    def test_what_wandb_refuses_is_said(self, peagle, recipe, wandb):
        result = peagle("train", recipe, "--wandb", "closed")
        assert result.code == 2
        assert result.err.splitlines()[-1] == "peagle: --wandb closed: no key log in first"

    def test_without_wandb(self, peagle, recipe):
        result = peagle("train", recipe, "--wandb", "mine")
        assert result.code == 2
        assert result.err == "peagle: --wandb needs wandb; pip install wandb\n"
        assert list(recipe.parent.iterdir()) == [recipe]


def test_the_bar_tells_loss_time_left_and_the_last_acceptance_length():
    console = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    with showing_reports(console, steps=1000, start=100) as show:
        show(Telemetry(110, 1.5, Estimate((0.5, 0.25), 1.75, (0.25, 0.125), 1.25), True))
        show(Telemetry(120, 1.25, None, False))
    text = console.file.getvalue()
    assert (
        "step 110  loss 1.5000  AL 1.750 (1.250 at temperature 1)  accuracy per depth 0.5" in text
    )
    assert "120/1000" in text
    assert "loss 1.2500  AL 1.750" in text
    assert "0:00:0" in text


def test_a_targets_own_head_is_trained_measured_checked_and_compared(
    peagle, own_head, tmp_path: Path
):
    lines = [{"prompt": "the cat ", "response": "sat on the mat. " * 4}] * 12
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "recipe.yaml").write_text(
        f"target: {own_head}\ndata: [{tmp_path}/data.jsonl]\noutput: {tmp_path}/out\nmethod: mtp\n"
        "num_speculative_tokens: 2\nrow_length: 96\nsteps: 4\nvalidation_documents: 3\n"
    )
    result = peagle("train", tmp_path / "recipe.yaml")
    assert result.code == 0
    assert "the engine's AL " in result.err
    out = str(tmp_path / "out")
    assert f"next: peagle check {out} --target {own_head}" in result.err
    assert peagle("check", out, "--target", own_head).code == 0
    asked = json.dumps({"method": "mtp", "model": out})
    assert peagle("check", "--speculative-config", asked, "--target", own_head).code == 0
    size = ["--limit", 1, "--max-tokens", 8, "--rounds", 1, "--json", "-"]
    compared = peagle("bench", own_head, "--drafter", out, *size)
    runs = json.loads(compared.out)["runs"]
    assert [(found["method"], found["k"]) for found in runs] == [("none", 0), ("mtp", 2)]
