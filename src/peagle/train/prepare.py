"""Before the first step: a recipe's target, documents, drafter and trainer."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

import torch

from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.correction import FOLDER
from peagle.drafters.network import NetworkConfig
from peagle.errors import InputError
from peagle.files import writing
from peagle.models.tokenizer import load_tokenizer
from peagle.train.cod import reaches
from peagle.train.conversations import Summary, read_documents
from peagle.train.feature_cache import FeatureCache
from peagle.train.features import Split
from peagle.train.initial import check_mask_token, drafter_config, initial_drafter
from peagle.train.packing import Document, PackedRows, pack
from peagle.train.parallel import ALONE, Ranks
from peagle.train.recipe import Recipe
from peagle.train.snapshot import check_snapshot, is_finished, origin_of, snapshot_path
from peagle.train.teacher import Teacher
from peagle.train.trainer import Trainer

FINISHED = "holds a finished drafter; name a new directory, or remove it to train again"


@dataclass(frozen=True)
class Preflight:
    """What is read and checked of a recipe before any weights are."""

    recipe: Recipe
    teacher: Teacher
    config: NetworkConfig
    """The drafter's."""
    training: PackedRows
    validation: PackedRows
    summary: Summary
    origin: Mapping[str, str]
    """What its snapshots depend on; for a dry run but for the target's files."""

    @classmethod
    def of(cls, recipe: Recipe, *, dry_run: bool = False) -> Self:
        """Read the data and the configuration; a dry run fetches no weights.

        Raises `InputError` for a target, data or snapshot that cannot be used.
        """
        teacher = Teacher.of(recipe, weights=not dry_run)
        config = drafter_config(recipe, teacher.spec)  # tells what does not fit before data is read
        training, validation, summary = read_rows(recipe, teacher)
        fingerprint = {} if dry_run else teacher.fingerprint
        origin = origin_of(recipe, training, validation, fingerprint)
        if snapshot_path(Path(recipe.output)).exists():
            check_snapshot(snapshot_path(Path(recipe.output)), origin)
        return cls(recipe, teacher, config, training, validation, summary, origin)


def prepare(recipe: Recipe, tell: Callable[[Summary | str], None] = lambda _: None) -> Trainer:
    """Load and check everything that a run needs before its first step, and fill its feature cache.

    `tell` is called with the data's summary, what is proved of transformers' target, and the
    cache's size and progress. Raises `InputError` for a target, data, output or cache that cannot
    be used.
    """
    check_output(Path(recipe.output))
    ranks, device = Ranks.join(resolve_device(recipe.device))
    ready, dtype = Preflight.of(recipe), resolve_dtype("auto", device)
    teacher, rows = ready.teacher, (ready.training, ready.validation)
    tell(ready.summary)
    sharing = ranks if recipe.shard_target else ALONE
    load = partial(teacher.load, ready.config.taps, dtype, device, sharing, tell)
    if recipe.features == "online":
        target, source = load()
    else:
        data: dict[Split, PackedRows] = {"training": rows[0], "validation": rows[1]}
        cache = FeatureCache(recipe, ready.config, data, device, ranks)
        missing = cache.missing(teacher, dtype, tell)
        if missing and teacher.written is not None:
            written = teacher.read_written(ready.config.taps, dtype, device)
            cache.fill(missing, written, tell)
        elif missing:
            cache.fill(missing, load()[1], tell)
        target, source = teacher.ends(dtype, device)[0], cache.features(dtype)
    model = initial_drafter(recipe, target, rows[0])
    return Trainer(recipe, target, model, *rows, source, ranks, ready.origin)


def read_rows(recipe: Recipe, teacher: Teacher) -> tuple[PackedRows, PackedRows, Summary]:
    """Rows to train on, rows held out, and the data's summary.

    Raises `InputError` for data that cannot be used.
    """
    load = partial(load_tokenizer, teacher.directory)
    documents, summary = read_documents(
        recipe.data, load, recipe.row_length, recipe.overlong, teacher.spec.vocab_size
    )
    training, validation = split(documents, recipe)
    _check_chains(validation, recipe.num_speculative_tokens)
    for rows in (training, validation):
        check_mask_token(recipe, rows)
    return training, validation, summary


def split(documents: Sequence[Document], recipe: Recipe) -> tuple[PackedRows, PackedRows]:
    """Packed rows to train on and packed rows held out, drawn by the recipe's seed.

    Pieces of one sample go to the same side, since one tells about the others.
    """
    by_sample: dict[str, list[Document]] = {}
    for document in documents:
        by_sample.setdefault(document.source, []).append(document)
    drawn = list(by_sample.values())
    random.Random(recipe.seed).shuffle(drawn)
    sizes = itertools.accumulate(map(len, drawn))
    samples = 1 + sum(size < recipe.validation_documents for size in sizes)
    held, kept = (list(itertools.chain(*side)) for side in (drawn[:samples], drawn[samples:]))
    if not kept:
        raise InputError(
            f"holding out {recipe.validation_documents} documents in whole samples leaves none of "
            f"{len(documents)} documents in {len(drawn)} samples; use more data, or lower "
            "validation_documents"
        )
    return pack(kept, recipe.row_length), pack(held, recipe.row_length)


def _check_chains(validation: PackedRows, depths: int) -> None:
    """Raise `InputError` if no chain is whole: acceptance length, by which the best drafter is
    chosen, is estimated on whole ones."""
    longest = int(reaches(validation.batch(torch.arange(len(validation)))).max())
    if longest < depths:
        raise InputError(
            f"the held-out responses are too short to estimate an acceptance length: the longest "
            f"chain has {longest} of num_speculative_tokens {depths}; lower that, use longer "
            "responses, or raise validation_documents"
        )


def check_output(output: Path, dry_run: bool = False) -> None:
    """Raise `InputError` for an output that a run would refuse.

    A dry run writes nothing to find out, and a finished drafter is not in its way.
    """
    with writing(output):
        _refuse_occupied(output)
        if not dry_run:
            if is_finished(output):
                raise InputError(f"output {output} {FINISHED}")
            output.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=output.parent).close()  # unique, since all ranks check at once


def _refuse_occupied(output: Path) -> None:
    if output.is_symlink():
        raise InputError(f"output {output} is a link; name the directory itself")
    kept = {"config.json", "model.safetensors", FOLDER}
    foreign = [f.name for f in output.iterdir() if f.name not in kept] if output.is_dir() else []
    if foreign:
        raise InputError(f"output {output} holds other files ({foreign[0]}); name a new directory")
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; output is the drafter's directory")
