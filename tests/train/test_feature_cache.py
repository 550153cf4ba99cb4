"""Features kept on disk stay the same, whatever happens while they are written."""

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from sweeps import at_night

from peagle.errors import InputError
from peagle.train import feature_cache
from peagle.train.feature_cache import FeatureCache, cache_bytes
from peagle.train.features import Features, TargetFeatures
from peagle.train.initial import drafter_config
from peagle.train.packing import Document, PackedRows, pack
from peagle.train.parallel import Ranks
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe
from peagle.train.teacher import Teacher
from peagle.train.trainer import Telemetry

SHARD = 200_000
"""Four of the tiny recipe's rows, of which seven times four are trained on and four held out."""
SHARDS = 8
ROW_BYTES = 96 * 4 * 64 * 2
STATES = {"bfloat16": 2**-8, "fp8": 2**-4}
"""Largest relative error of a number that is not tiny."""


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_cache, "SHARD", SHARD)


@pytest.fixture
def cached(recipe_for: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Recipe]:
    """Recipes with one cache, `cache`."""

    def recipe(name: str = "out", **changes: Any) -> Recipe:
        keys = {"features": "cached", "feature_cache": str(tmp_path / "cache")}
        return recipe_for(tmp_path / name, **{**keys, **changes})

    return recipe


def shards(directory: Path) -> dict[str, int]:
    """Files of a cache, and what changes when they are written again."""
    return {path.name: path.stat().st_ino for path in directory.glob("*.safetensors")}


def told_by(recipe: Recipe) -> list[str]:
    told: list[Any] = []
    prepare(recipe, told.append)
    return [line for line in told if isinstance(line, str)]


def sources(recipe: Recipe, target: Any, rows: PackedRows) -> tuple[Any, TargetFeatures]:
    """Features of some rows from a cache, in the target's dtype, and from the target itself."""
    config = drafter_config(recipe, target.spec)
    cache = FeatureCache(recipe, config, {"training": rows}, tiny.CPU, Ranks())
    source, dtype = TargetFeatures(target, config.taps), target.embed.weight.dtype
    cache.fill(cache.missing(Teacher.of(recipe), dtype, print), source, print)
    return cache.features(dtype), source


def packed() -> PackedRows:
    """Five rows of one or two documents."""
    tokens = [(7 * i + i * i) % tiny.MASK for i in range(96)]
    lengths = [30, 60, 96, 50, 20, 80, 40, 40]
    return pack([Document.answered(tokens[:length], 3) for length in lengths], 96)


def own(source: TargetFeatures, rows: PackedRows, indices: Sequence[int]) -> Features:
    """The target's features row by row, end to end."""
    each = [torch.tensor([index]) for index in indices]
    parts = [source("training", index, rows.batch(index)) for index in each]
    return Features(torch.cat([p.tapped for p in parts]), torch.cat([p.final for p in parts]))


def test_bfloat16_features_are_those_of_a_bfloat16_target(targets, cached):
    """Bit for bit: a run on a GPU sees the same with a cache and without."""
    half, rows = tiny.load_target(targets["easy"].directory, torch.bfloat16), packed()
    cache, online = sources(cached(rows_per_pass=1), half, rows)
    index = torch.tensor([4, 0, 3])
    found, expected = cache("training", index, rows.batch(index)), own(online, rows, [4, 0, 3])
    assert torch.equal(found.tapped, expected.tapped)
    assert torch.equal(found.final, expected.final)
    assert found.tapped.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", list(STATES))
def test_features_are_the_targets_within_their_precision(targets, cached, kind: str):
    rows = packed()
    cache, online = sources(cached(feature_dtype=kind), targets["easy"].decoder, rows)
    index = torch.tensor([1, 4])
    found, expected = cache("training", index, rows.batch(index)), own(online, rows, [1, 4])
    for one, other in ((found.tapped, expected.tapped), (found.final, expected.final)):
        assert one.dtype == torch.float32
        slices = other.unflatten(-1, (-1, 64))
        tiny_ones = slices.abs().amax(-1, keepdim=True).expand_as(slices).flatten(-2) / 2**17
        assert bool(((one - other).abs() <= STATES[kind] * other.abs() + tiny_ones).all())


@pytest.mark.parametrize("kind", list(STATES))
def test_padding_has_features_of_zero(targets, cached, kind: str):
    rows = packed()
    cache, _ = sources(cached(feature_dtype=kind), targets["easy"].decoder, rows)
    batch = rows.batch(torch.tensor([2])).padded(128)
    found = cache("training", torch.tensor([2]), batch)
    assert found.final.shape == (128, 64)
    assert found.tapped.shape == (128, 192)
    assert found.final[:96].any(-1).all()
    assert not found.final[96:].any()
    assert not found.tapped[96:].any()


@pytest.mark.parametrize("kind", ["fp8", *at_night(["bfloat16"])])
def test_a_run_on_cached_features_ends_as_one_without(trained, cached, kind: str):
    trainer = prepare(cached(feature_dtype=kind))
    assert not any("layers" in name for name, _ in trainer.target.named_parameters())
    reports: list[Telemetry] = []
    progress = trainer.run(reports.append)
    whole = trained["peagle"]
    assert reports[0].loss == pytest.approx(whole.reports[0].loss, rel=1e-2)
    assert reports[-1].loss == pytest.approx(whole.reports[-1].loss, rel=5e-2)
    length = whole.progress.best_acceptance_length
    assert progress.best_acceptance_length == pytest.approx(length, rel=0.1)


class InterruptionError(Exception):
    """Stands in for a lost machine."""


@pytest.mark.parametrize("method", ["eagle3", *at_night(["peagle"])])
def test_a_run_on_cached_features_resumes_bit_for_bit(cached, method: str):
    def lost(report: Telemetry) -> None:
        if report.step == 10:
            raise InterruptionError

    changes = {"method": method, "steps": 15, "evaluate_every": 5, "rows_per_pass": 2}
    whole = prepare(cached("whole", **changes))
    whole.run(lambda report: None)
    with pytest.raises(InterruptionError):
        prepare(cached("parts", **changes)).run(lost)
    resumed = prepare(cached("parts", **changes))
    resumed.run(lambda report: None)
    expected = whole.model.state_dict()
    assert all(torch.equal(v, expected[name]) for name, v in resumed.model.state_dict().items())


def test_the_size_is_told_before_and_progress_after(targets, cached, tmp_path: Path):
    told = told_by(cached())
    assert told[0].startswith(f"features: 1.5 MiB to write to {tmp_path / 'cache'}, ")
    assert told[0].endswith(f" free; 0 of {SHARDS} shards exist")
    assert told[-1] == f"features: {SHARDS} of {SHARDS} shards are written"
    config = drafter_config(cached(), targets["easy"].decoder.spec)
    assert cache_bytes(cached(), config, 32) == 32 * ROW_BYTES
    sizes = [path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors")]
    assert 0 <= sum(sizes) - 32 * ROW_BYTES < SHARDS * 1000
    halves = cache_bytes(cached(feature_dtype="fp8"), config, 32)
    assert halves == 32 * (ROW_BYTES // 2 + 96 * 4 * 4)


def test_a_full_cache_is_read_without_the_targets_layers(
    cached, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    prepare(cached())
    before = shards(tmp_path / "cache")
    monkeypatch.delattr("peagle.train.teacher.load_sharded")
    assert told_by(cached()) == [f"features: checking {SHARDS} shards in {tmp_path / 'cache'}"]
    assert shards(tmp_path / "cache") == before
    assert len(before) == SHARDS


def test_without_room_nothing_is_written(cached, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**20))
    with pytest.raises(InputError, match=r"cache lacks 0\.5 MiB of the 1\.5 MiB .*make room"):
        prepare(cached())
    assert not shards(tmp_path / "cache")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=str
)
def test_what_was_interrupted_goes_on(
    cached, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: BaseException
):
    """A full disk or Ctrl-C in the fourth shard: three stay unchanged, nothing else is left."""
    save, written = feature_cache.save_file, []

    def fail(tensors: dict[str, torch.Tensor], path: Path) -> None:
        written.append(path)
        if len(written) == 4:
            path.write_bytes(b"half")
            raise error
        save(tensors, path)

    with monkeypatch.context() as patched:
        patched.setattr(feature_cache, "save_file", fail)
        with pytest.raises((InputError, KeyboardInterrupt)) as caught:
            prepare(cached())
    if isinstance(error, OSError):
        expected = (
            f"{tmp_path / 'cache'} cannot be written: .*No space left.*same command continues"
        )
        assert caught.match(expected)
    kept = shards(tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3 + 1
    assert "3 of 8 shards exist" in told_by(cached())[1]
    after = shards(tmp_path / "cache")
    assert len(after) == SHARDS
    assert kept.items() <= after.items()


KILLED = """
import json, sys, time
from pathlib import Path
from peagle.train import feature_cache
from peagle.train.recipe import Recipe
from peagle.train.teacher import Teacher
from peagle.train.prepare import prepare

save = feature_cache.save_file

def stall(tensors, path):
    save(tensors, path)
    if len(list(path.parent.glob("*.safetensors"))) == 2:
        path.write_bytes(path.read_bytes()[:1000])
        print("half", flush=True)
        time.sleep(60)

feature_cache.SHARD, feature_cache.save_file = int(sys.argv[2]), stall
prepare(Recipe(**json.loads(sys.argv[1])))
"""


@pytest.mark.usefixtures("forked")
def test_what_was_killed_goes_on(cached, tmp_path: Path):
    """SIGKILL in the middle of a file."""
    recipe = json.dumps(cached().model_dump())
    command = [sys.executable, "-c", KILLED, recipe, str(SHARD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)
    kept = shards(tmp_path / "cache")
    assert len(kept) == 2
    assert list((tmp_path / "cache").glob("*.part"))
    prepare(cached())
    after = shards(tmp_path / "cache")
    assert kept.items() <= after.items()
    assert len(after) == SHARDS
    assert len(list((tmp_path / "cache").iterdir())) == SHARDS + 1
    prepare(cached("anew", feature_cache=str(tmp_path / "anew-cache")))
    assert sorted(after) == sorted(shards(tmp_path / "anew-cache"))


@pytest.mark.parametrize("cut", [None, 1000, 0])
def test_a_damaged_shard_is_computed_again(cached, tmp_path: Path, cut: int | None):
    prepare(cached())
    before = shards(tmp_path / "cache")
    path = next((tmp_path / "cache").glob("training-8-12.*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:cut])
    told = told_by(cached())
    assert told[1] == f"{path} is damaged; its rows will be computed again"
    after = shards(tmp_path / "cache")
    assert sorted(after) == sorted(before)
    assert {name for name in after if after[name] != before[name]} <= {path.name}


OTHERS = [
    ({"taps": (0, 1, 2)}, "taps"),
    ({"row_length": 64}, "row_length, training rows, validation rows"),
    ({"feature_dtype": "fp8"}, "feature_dtype"),
    ({"seed": 1}, "training rows, validation rows"),
    ({"overlong": "drop", "validation_documents": 10}, "training rows, validation rows"),
]


@pytest.mark.parametrize(("changes", "named"), OTHERS)
def test_a_cache_of_something_else_is_refused(cached, tmp_path: Path, changes, named: str):
    prepare(cached())
    before = shards(tmp_path / "cache")
    with pytest.raises(InputError, match=f"made with other {named}; name another directory"):
        prepare(cached("other", **changes))
    assert shards(tmp_path / "cache") == before


def test_what_features_do_not_depend_on_may_change(cached):
    """Sweeps over the drafter share a cache."""
    prepare(cached())
    changes = {"method": "eagle3", "learning_rate": 1e-3, "num_hidden_layers": 2, "steps": 7}
    assert len(told_by(cached("other", **changes))) == 1


def test_a_cache_of_another_target_is_refused(targets, cached, tmp_path: Path):
    """Other weights of the same names and shapes, and another configuration."""
    prepare(cached())
    tiny.save_target(tmp_path / "other", seed=1, layer_std=0.03)
    with pytest.raises(InputError, match="made with other target weights; name"):
        prepare(cached(target=str(tmp_path / "other")))
    same = shutil.copytree(targets["easy"].directory, tmp_path / "same")
    values = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-3}))
    with pytest.raises(InputError, match="made with other target configuration; name"):
        prepare(cached(target=str(same)))


def test_directories_that_are_no_cache(cached, tmp_path: Path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "letter.part").touch()
    with pytest.raises(InputError, match=r"holds other files \(letter.part\); name a new"):
        prepare(cached())
    assert (tmp_path / "cache" / "letter.part").exists()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    with pytest.raises(InputError, match=r"feature_cache .*cache cannot be used: .*File exists"):
        prepare(cached())


def test_a_damaged_manifest_is_named(cached, tmp_path: Path):
    prepare(cached())
    (tmp_path / "cache" / "manifest.json").write_text("{")
    with pytest.raises(InputError, match=r"manifest\.json cannot be read as JSON"):
        prepare(cached())


def test_a_document_that_the_target_cannot_read_is_named(targets, cached):
    target = tiny.load_target(targets["easy"].directory)
    target.embed.weight[3] = torch.inf
    documents = [Document((1, 2, 4, 5), ((1, 4),), "a:1"), Document((1, 2, 3, 5), ((1, 4),), "a:2")]
    with pytest.raises(InputError, match="hidden states of a:2 are not finite; leave it out"):
        sources(cached(row_length=8), target, pack(documents, 8))


def test_the_mask_token_is_looked_for_before_hours_of_caching(cached, tmp_path: Path):
    with pytest.raises(InputError, match=r"occurs in the data .*; choose an unused id"):
        prepare(cached(mask_token_id=7))
    assert not (tmp_path / "cache").exists()


@dataclasses.dataclass(frozen=True)
class RanksInTurn(Ranks):
    """Ranks within one process, which need not wait for each other."""

    def wait(self) -> None:
        pass


def test_ranks_share_the_work(targets, cached, tmp_path: Path):
    recipe, target, rows = cached(), targets["easy"].decoder, packed()
    config = drafter_config(recipe, target.spec)
    data = {"training": rows, "validation": rows}
    ranks = [RanksInTurn(rank, 2) for rank in range(2)]
    caches = [FeatureCache(recipe, config, data, tiny.CPU, rank) for rank in ranks]
    teacher, source = Teacher.of(recipe), TargetFeatures(target, config.taps)
    missing = [cache.missing(teacher, torch.float32, print) for cache in caches]
    assert missing[0] == missing[1]
    assert len(missing[0]) == 4
    for done, cache in enumerate(caches, start=1):
        cache.fill(missing[0], source, print)
        assert len(shards(tmp_path / "cache")) == 2 * done
    assert not caches[0].missing(teacher, torch.float32, print)
