"""A recipe's target: what its configuration says, and ways to its ends and features."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Self

import torch

from peagle.errors import InputError
from peagle.models.ends import Ends
from peagle.models.families import has_family, read_spec
from peagle.models.foreign import ends_of, final_norm, load_foreign, read_target_spec
from peagle.models.loading import load_ends, widen_on_cpu
from peagle.models.spec import DecoderSpec
from peagle.models.weights import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    model_directory,
    read_json,
    safetensors_files,
)
from peagle.train.digest import digest
from peagle.train.features import FeatureSource, Taps, TargetFeatures
from peagle.train.parallel import Ranks
from peagle.train.recipe import Recipe
from peagle.train.sharding import load_sharded
from peagle.train.transformers_features import proved
from peagle.train.written_features import Finish, SpeculatorsFeatures, VllmFeatures

HEADER = 100 * 2**20
"""Longest header of a safetensors file, in bytes."""
SAMPLES, SAMPLE = 256, 4096
"""Number of pieces of a weights file that go into its fingerprint, and bytes of each."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Teacher:
    """A target of which no weights are read yet."""

    directory: Path
    spec: DecoderSpec
    own: bool
    """Whether our decoder runs it for this run; else transformers does."""
    written: str | None = None
    """Who has written its features, if they are not computed here: the recipe's source."""
    lora: str | None = None
    """An adapter that is merged into its weights."""

    @classmethod
    def of(cls, recipe: Recipe, weights: bool = True) -> Self:
        """A recipe's. Raises `InputError` for one that neither can run.

        weights: whether a target on the hub is fetched whole.
        """
        directory = model_directory(recipe.target, weights)
        ours, spec = has_family(directory), read_target_spec(directory)
        own = ours if recipe.target_backend == "auto" else recipe.target_backend == "own"
        if own and not ours:
            read_spec(directory)  # says why not
        for key in ("shard_target", "lora"):
            if getattr(recipe, key) and not own:
                raise InputError(f"{key} is for targets that peagle runs itself; leave it out")
        return cls(directory, spec, own, recipe.feature_source, recipe.lora)

    def load(
        self, taps: Taps, dtype: torch.dtype, device: torch.device, ranks: Ranks, tell: Tell
    ) -> tuple[Ends, FeatureSource]:
        """Its ends, and features by its layers; ranks: those that share them.

        `tell` is called with what is proved of transformers' model. Raises `InputError`.
        """
        if not self.own:
            model = load_foreign(self.directory, dtype, device)
            ends = ends_of(model, self.spec)
            return ends, proved(model, ends, taps, tell)
        target = load_sharded(self.directory, dtype, device, ranks, self.lora)
        return target, TargetFeatures(target, taps)

    def ends(self, dtype: torch.dtype, device: torch.device) -> tuple[Ends, Finish]:
        """Its ends alone, and its final norm."""
        if not self.own:
            model = load_foreign(self.directory, dtype, device, layers=False)
            return ends_of(model, self.spec), final_norm(model)
        ends = load_ends(self.directory, dtype, device, lora=self.lora)
        widen_on_cpu(ends, ends.embed.weight)
        return ends, lambda stream: ends.norm(stream / self.spec.residual_multiplier)

    def read_written(self, taps: Taps, dtype: torch.dtype, device: torch.device) -> FeatureSource:
        """Features by those that have written them."""
        assert self.written is not None
        ends, norm = self.ends(dtype, device)
        if self.written.startswith(("http://", "https://")):
            return VllmFeatures(ends, norm, taps, self.written)
        return SpeculatorsFeatures(ends, norm, taps, Path(self.written))

    def computed_by(self, dtype: torch.dtype) -> str:
        """What computes its features: backend, version and dtype; or who has written them."""
        backend = "peagle" if self.own else "transformers"
        maker = f"{backend} {version(backend)}" if self.written is None else self.written
        return f"{maker}, {str(dtype).removeprefix('torch.')}"

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """What tells its files from others, keyed by the words an error uses for a mismatch."""
        values, files = read_json(self.directory / "config.json"), safetensors_files(self.directory)
        if self.lora is not None:
            adapter = model_directory(self.lora)
            files += [adapter / ADAPTER, adapter / ADAPTER_WEIGHTS]
        return {
            "target configuration": digest([json.dumps(values, sort_keys=True).encode()]),
            "target weights": digest(map(_fingerprint, files)),
        }


def _fingerprint(path: Path) -> bytes:
    """Bytes that tell a weights file from another without reading it whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = min(int.from_bytes(file.read(8), "little"), HEADER)
        pieces = [f"{path.name} {size} ".encode(), file.read(header)]
        for place in range(0, size, max(size // SAMPLES, 1)):
            file.seek(place)
            pieces.append(file.read(SAMPLE))
    return b"".join(pieces)
