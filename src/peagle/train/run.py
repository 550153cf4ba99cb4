"""A recipe made ready to run: target, documents, drafter and trainer."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from peagle.device import resolve_device, resolve_dtype
from peagle.errors import InputError
from peagle.models.families import load_decoder
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import model_directory
from peagle.train.conversations import Summary, read_documents
from peagle.train.initial import initial_drafter
from peagle.train.packing import Document, PackedRows, pack
from peagle.train.parallel import Ranks
from peagle.train.recipe import Recipe
from peagle.train.trainer import Trainer


def prepare(recipe: Recipe, on_data: Callable[[Summary], None] = lambda _: None) -> Trainer:
    """Load and check everything that a run needs, before its first step.

    `on_data` is told what the data came to. Raises `InputError` for a target, data or output that
    cannot be used.
    """
    _check_output(Path(recipe.output))
    ranks, device = Ranks.join(resolve_device(recipe.device))
    directory = model_directory(recipe.target)
    target = load_decoder(directory, resolve_dtype("auto", device), device)
    if recipe.row_length > target.config.max_position_embeddings:
        raise InputError(
            f"row_length {recipe.row_length} is above the target's context of "
            f"{target.config.max_position_embeddings}"
        )
    documents, summary = read_documents(
        recipe.data,
        partial(load_tokenizer, directory),
        recipe.row_length,
        recipe.overlong,
        target.config.vocab_size,
    )
    on_data(summary)
    training, validation = split(documents, recipe)
    model = initial_drafter(recipe, target, training)
    return Trainer(recipe, target, model, training, validation, ranks)


def split(documents: Sequence[Document], recipe: Recipe) -> tuple[PackedRows, PackedRows]:
    """Packed rows to train on and packed rows held out, drawn by the recipe's seed."""
    if len(documents) <= recipe.validation_documents:
        raise InputError(
            f"{len(documents)} documents, and {recipe.validation_documents} are to be held out; "
            "bring more data or lower validation_documents"
        )
    shuffled = list(documents)
    random.Random(recipe.seed).shuffle(shuffled)
    held, kept = shuffled[: recipe.validation_documents], shuffled[recipe.validation_documents :]
    return pack(kept, recipe.row_length), pack(held, recipe.row_length)


def _check_output(output: Path) -> None:
    kept = {"config.json", "model.safetensors"}
    foreign = [f.name for f in output.iterdir() if f.name not in kept] if output.is_dir() else []
    if foreign:
        raise InputError(f"output {output} holds other files ({foreign[0]}); name a new directory")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        probe = output.parent / f".{output.name}.probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror}") from None
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file; output is the drafter's directory")
