"""Before the first step: a recipe's target, documents, drafter and trainer."""

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import torch

from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.correction import FOLDER
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.families import read_spec
from peagle.models.loading import load_decoder, load_ends
from peagle.models.spec import DecoderSpec
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import model_directory
from peagle.train.cod import reaches
from peagle.train.conversations import Summary, read_documents
from peagle.train.feature_cache import FeatureCache
from peagle.train.features import FeatureSource, Split
from peagle.train.initial import check_mask_token, drafter_config, initial_drafter
from peagle.train.packing import Document, PackedRows, pack
from peagle.train.parallel import Ranks
from peagle.train.recipe import Recipe
from peagle.train.sharding import load_sharded
from peagle.train.snapshot import check_snapshot, origin_of, snapshot_path
from peagle.train.trainer import Trainer

Place = tuple[Path, torch.dtype, torch.device]
"""A target's directory, dtype and device."""
FINISHED = "holds a finished drafter; name a new directory, or remove it to train again"
Load = Callable[[Path, torch.dtype, torch.device], Decoder]


def prepare(recipe: Recipe, tell: Callable[[Summary | str], None] = lambda _: None) -> Trainer:
    """Load and check everything that a run needs before its first step, and fill its feature cache.

    `tell` is called with the data's summary, and with the cache's size and progress. Raises
    `InputError` for a target, data, output or cache that cannot be used.
    """
    check_output(Path(recipe.output))
    ranks, device = Ranks.join(resolve_device(recipe.device))
    directory = model_directory(recipe.target)
    spec = read_spec(directory)
    training, validation, summary = read_rows(recipe, directory, spec)
    check_resumption(recipe, training, validation)
    tell(summary)
    place = directory, resolve_dtype("auto", device), device
    load: Load = partial(_load_target, recipe, ranks)
    source = None
    if recipe.features == "online":
        target = load(*place)
    else:
        data: dict[Split, PackedRows] = {"training": training, "validation": validation}
        cache = FeatureCache(recipe, drafter_config(recipe, spec), data, device, ranks)
        target, source = _cached(recipe, cache, place, load, tell)
    model = initial_drafter(recipe, target, training)
    return Trainer(recipe, target, model, training, validation, ranks, source)


def _load_target(
    recipe: Recipe, ranks: Ranks, directory: Path, dtype: torch.dtype, device: torch.device
) -> Decoder:
    if recipe.shard_target:
        return load_sharded(directory, dtype, device, ranks, recipe.lora)
    return load_decoder(directory, dtype, device, lora=recipe.lora)


def _cached(
    recipe: Recipe, cache: FeatureCache, place: Place, load: Load, tell: Callable[[str], None]
) -> tuple[Decoder, FeatureSource]:
    """A target without layers, and its features; the layers are loaded only to fill the cache."""
    directory, dtype, device = place
    missing = cache.missing(directory, tell)
    if missing:
        cache.fill(missing, load(*place), tell)
    ends = load_ends(directory, dtype, device, lora=recipe.lora)
    return ends, cache.features(dtype)


def read_rows(
    recipe: Recipe, directory: Path, spec: DecoderSpec
) -> tuple[PackedRows, PackedRows, Summary]:
    """Rows to train on, rows held out, and the data's summary.

    Raises `InputError` for a recipe that does not fit the target, and for data that cannot be used.
    """
    drafter_config(recipe, spec)  # tells all that does not fit before the data are read
    documents, summary = read_documents(
        recipe.data,
        partial(load_tokenizer, directory),
        recipe.row_length,
        recipe.overlong,
        spec.vocab_size,
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


def check_resumption(recipe: Recipe, training: PackedRows, validation: PackedRows) -> None:
    """Raise `InputError` if the output's snapshot is of another run, or damaged."""
    snapshot = snapshot_path(Path(recipe.output))
    if snapshot.exists():
        check_snapshot(snapshot, origin_of(recipe, training, validation))


def check_output(output: Path, dry_run: bool = False) -> None:
    """Raise `InputError` for an output that a run would refuse.

    A dry run writes nothing to find out, and a finished drafter is not in its way.
    """
    try:
        _refuse_occupied(output)
        if not dry_run:
            if is_finished(output):
                raise InputError(f"output {output} {FINISHED}")
            output.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=output.parent).close()  # unique, since all ranks check at once
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}") from None


def _refuse_occupied(output: Path) -> None:
    if output.is_symlink():
        raise InputError(f"output {output} is a link; name the directory itself")
    kept = {"config.json", "model.safetensors", FOLDER}
    foreign = [f.name for f in output.iterdir() if f.name not in kept] if output.is_dir() else []
    if foreign:
        raise InputError(f"output {output} holds other files ({foreign[0]}); name a new directory")
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; output is the drafter's directory")


def is_finished(output: Path) -> bool:
    """Whether an output holds a drafter whose training is over."""
    return not snapshot_path(output).exists() and (output / "model.safetensors").exists()
