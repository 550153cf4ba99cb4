"""Shared by all tests: one thread, fixed randomness, tiny models made once a session."""

import functools
import gc
import logging
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401 (before anything imports Triton)
import pytest
import tiny
import torch
from filelock import FileLock
from forks import Popen, Zygote, can_fork
from hypothesis import HealthCheck, settings
from sweeps import leave_to_the_night
from transformers.utils import logging as transformers_logging

from peagle.drafters.methods import drafter_for
from peagle.drafters.proposer import Drafter
from peagle.models.decoder import Decoder
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.snapshot import Progress
from peagle.train.trainer import Telemetry, Trainer

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # in processes, too: two threads on busy cores take minutes
transformers_logging.disable_progress_bar()
settings.register_profile(
    "peagle",
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("peagle")


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_the_night(items)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not search it each time."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Target:
    """A target on disk, in our decoder, and in transformers."""

    directory: Path
    decoder: Decoder
    peer: Any


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def _log_left_alone() -> Iterator[None]:
    """A server that a test runs in this process sets up the log; the next test has its own."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers = [one for one in root.handlers if one in before]
    root.setLevel(level)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote.started() as zygote:
        yield zygote


@pytest.fixture
def forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of this Python have imported what commands import; for tests of other things."""
    if can_fork():
        monkeypatch.setattr(Popen, "zygote", request.getfixturevalue("zygote"))
        monkeypatch.setattr("subprocess.Popen", Popen)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    """One random target of each family, and `easy`, whose drafts a trained drafter gets right; each
    is made when it is first asked for."""
    root = tmp_path_factory.mktemp("targets")

    class Made(dict[str, Target]):
        def __missing__(self, name: str) -> Target:
            easy = {"family": "qwen3", "layer_std": 0.03}
            directory = tiny.save_target(
                root / name, **easy if name == "easy" else {"family": name}
            )
            decoder = tiny.load_target(directory)
            self[name] = Target(directory, decoder, tiny.load_peer(directory))
            return self[name]

    return Made()


@pytest.fixture(scope="session")
def target(targets: dict[str, Target]) -> Target:
    return targets["qwen3"]


DrafterOf = Callable[..., Drafter]


@pytest.fixture(scope="session")
def drafter_of(targets: dict[str, Target], tmp_path_factory: pytest.TempPathFactory) -> DrafterOf:
    """Untrained drafters by their configuration (`tiny.drafter_config`), each made once."""
    root = tmp_path_factory.mktemp("drafters")
    made: dict[str, Drafter] = {}

    def drafter(parallel: bool, **changes: Any) -> Drafter:
        name = f"{parallel}{sorted(changes.items())}"
        if name not in made:
            config = tiny.drafter_config(parallel, **changes)
            decoder = targets["qwen3"].decoder
            made[name] = tiny.random_drafter_for(decoder, root / str(len(made)), config)
        return made[name]

    return drafter


@pytest.fixture(scope="session")
def answers(targets: dict[str, Target], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training data: the easy target's own greedy continuations, none with the mask token."""
    directory = tmp_path_factory.mktemp("data")
    return tiny.save_answers(directory / "answers.jsonl", targets["easy"].decoder)


@dataclass(frozen=True)
class Run:
    """A finished training run on the easy target."""

    output: Path
    trainer: Trainer
    """With the weights of the run's end."""
    reports: list[Telemetry]
    progress: Progress
    drafter: Drafter
    """The best checkpoint, loaded."""


def tiny_recipe(targets: dict[str, Target], answers: Path, output: Path, **changes: Any) -> Recipe:
    """A run of a few seconds."""
    parallel = changes.get("method") != "eagle3"
    values: dict[str, Any] = {
        "target": str(targets["easy"].directory),
        "data": (str(answers),),
        "output": str(output),
        "mask_token_id": tiny.MASK if parallel else None,
        "num_hidden_layers": 1,
        "taps": tiny.TAPS,
        "num_speculative_tokens": 4,
        "row_length": 96,
        "rows_per_step": 4,
        "rows_per_pass": 2,
        "steps": 60,
        "learning_rate": 1e-2,
        "warmup_steps": 5,
        "validation_documents": 8,
        "evaluate_every": 20,
    }
    return Recipe(**{**values, **changes})


@pytest.fixture(scope="session")
def recipe_for(targets: dict[str, Target], answers: Path) -> Callable[..., Recipe]:
    """Recipes on the easy target, by their output directory and changes."""
    return functools.partial(tiny_recipe, targets, answers)


@pytest.fixture(scope="session")
def trained(
    targets: dict[str, Target],
    recipe_for: Callable[..., Recipe],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:
    """A half-trained drafter of each method for the easy target, made by one of xdist's workers."""
    base, own = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("trained")
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    (root / "trained").mkdir(parents=True, exist_ok=True)
    runs = {}
    for method in ("peagle", "eagle3"):
        output, ended = root / "trained" / method, root / f"{method}.pt"
        with FileLock(root / "lock"):
            if not ended.exists():
                torch.save(_train(recipe_for(output, method=method)), ended)
        weights, reports, progress = torch.load(ended, weights_only=False)
        trainer = prepare(recipe_for(own / method, method=method))
        trainer.model.load_state_dict(weights)
        model = tiny.load_drafter(output, targets["easy"].decoder)
        runs[method] = Run(output, trainer, reports, progress, drafter_for(model))
    return runs


def _train(recipe: Recipe) -> tuple[dict[str, Any], list[Telemetry], Progress]:
    """What is left of a run: the weights at its end, its reports and its progress."""
    trainer, reports = prepare(recipe), list[Telemetry]()
    progress = trainer.run(reports.append)
    return trainer.model.state_dict(), reports, progress
