"""Hidden states of every packed row, computed once and kept in a directory.

`manifest.json` says what they were made from. A shard is a safetensors file with the states of
some rows; its name holds those rows and a checksum of its bytes, and is given once it is whole.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from peagle.drafters.network import NetworkConfig
from peagle.errors import InputError
from peagle.files import replacing, sync, unfinished, writing
from peagle.models.weights import read_json
from peagle.train.feature_format import restore, row_bytes, store
from peagle.train.features import Features, FeatureSource, Split, padded_for
from peagle.train.packing import Batch, Document, PackedRows
from peagle.train.parallel import Ranks
from peagle.train.recipe import Recipe
from peagle.train.teacher import Teacher, Tell

VERSION = 1
"""Version of the format."""
MANIFEST = "manifest.json"
SHARD = 2**30
"""Approximate bytes of a shard, which has at least one row."""


@dataclass(frozen=True)
class Shard:
    """Rows of one split that share a file."""

    split: Split
    rows: range

    @property
    def name(self) -> str:
        """What its file's name begins with."""
        return f"{self.split}-{self.rows.start}-{self.rows.stop}"


class FeatureCache:
    """The directory while it is filled, with some of the shards by each rank."""

    def __init__(
        self,
        recipe: Recipe,
        config: NetworkConfig,
        data: Mapping[Split, PackedRows],
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        assert recipe.feature_cache is not None
        self._recipe, self._config, self._data = recipe, config, data
        self._device, self._ranks = device, ranks
        self._directory = Path(recipe.feature_cache)
        self._row_bytes = row_bytes(config, recipe.row_length, recipe.feature_dtype)
        self._rows_per_shard = max(SHARD // self._row_bytes, 1)
        self._shards = [
            Shard(split, range(len(rows))[start : start + self._rows_per_shard])
            for split, rows in data.items()
            for start in range(0, len(rows), self._rows_per_shard)
        ]

    def missing(self, teacher: Teacher, dtype: torch.dtype, tell: Tell) -> list[Shard]:
        """The shards to compute; all others were read once and match their checksums.

        dtype: what the teacher computes in. `tell` is called with what is to be written. Raises
        `InputError` for a directory that was made from something else or has too little room.
        """
        try:
            if self._ranks.first:
                self._claim(self._made_from(teacher, dtype))
            self._ranks.wait()
            self._drop_damaged(tell)
        except OSError as error:
            raise InputError(f"feature_cache {self._directory} cannot be used: {error}") from None
        self._ranks.wait()
        found = self._found()
        missing = [shard for shard in self._shards if shard.name not in found]
        if self._ranks.first and missing:
            self._check_room(missing, tell)
        self._ranks.wait()
        return missing

    def fill(self, missing: Sequence[Shard], source: FeatureSource, tell: Tell) -> None:
        """Compute shards. `tell` is called after every tenth of them.

        Raises `InputError` when the disk is full, or for NaN or infinite states; finished shards
        stay.
        """
        own = [missing[index] for index in self._ranks.own(len(missing))]
        for done, shard in enumerate(own, start=1):
            self._write(shard, self._compute(shard, source))
            if done * 10 // len(own) > (done - 1) * 10 // len(own):
                tell(f"features: {done} of {len(own)} shards are written")
        if self._recipe.shard_target:
            self._keep_step(missing, source)
        self._ranks.wait()

    def features(self, dtype: torch.dtype) -> "CachedFeatures":
        """The features of a full cache, in the dtype to compute with."""
        found = self._found()
        files: dict[Split, list[Path]] = {split: [] for split in self._data}
        for shard in self._shards:
            files[shard.split].append(found[shard.name])
        return CachedFeatures(files, self._rows_per_shard, self._device, dtype)

    def _made_from(self, teacher: Teacher, dtype: torch.dtype) -> dict[str, object]:
        """Everything that features depend on, keyed by the words an error uses for a mismatch."""
        return {
            "format": VERSION,
            "backend, version or dtype": teacher.computed_by(dtype),
            **teacher.fingerprint,
            "taps": sorted(self._config.taps),
            "row_length": self._recipe.row_length,
            "feature_dtype": self._recipe.feature_dtype,
            **{f"{split} rows": rows.digest for split, rows in self._data.items()},
        }

    def _claim(self, expected: Mapping[str, object]) -> None:
        """Begin a directory, or check that this run continues it; removes unfinished files."""
        manifest = self._directory / MANIFEST
        self._directory.mkdir(parents=True, exist_ok=True)
        if not manifest.exists():
            names = (path.name for path in self._directory.iterdir())
            if foreign := [name for name in names if not name.startswith(MANIFEST)]:
                raise InputError(
                    f"feature_cache {self._directory} holds other files ({foreign[0]}); name a new "
                    "directory"
                )
            with replacing(manifest) as scratch:
                scratch.write_text(json.dumps(expected, indent=2) + "\n", encoding="utf-8")
        given = read_json(manifest)
        if differing := [name for name, value in expected.items() if given.get(name) != value]:
            raise InputError(
                f"feature_cache {self._directory} was made with other {', '.join(differing)}; "
                "name another directory, or remove this one"
            )
        for left in self._directory.glob("*.part"):
            left.unlink()

    def _found(self) -> dict[str, Path]:
        """Finished shards, by `Shard.name`."""
        files = self._directory.glob("*.safetensors")
        return {path.name.partition(".")[0]: path for path in files}

    def _drop_damaged(self, tell: Tell) -> None:
        """Remove files of this rank's shards that do not hold what was written."""
        found, shards = self._found(), self._shards
        mine = [shards[index].name for index in self._ranks.own(len(shards))]
        paths = [found[name] for name in mine if name in found]
        if paths:
            tell(f"features: checking {len(paths)} shards in {self._directory}")
        with ThreadPoolExecutor() as pool:
            sums = list(pool.map(_checksum, paths))
        for path, found_sum in zip(paths, sums, strict=True):
            if path.name.split(".")[1] != found_sum:
                path.unlink()
                tell(f"{path} is damaged; its rows will be computed again")

    def _check_room(self, missing: Sequence[Shard], tell: Tell) -> None:
        wanted = self._row_bytes * sum(len(shard.rows) for shard in missing)
        free = shutil.disk_usage(self._directory).free
        tell(
            f"features: {_size(wanted)} to write to {self._directory}, {_size(free)} free; "
            f"{len(self._shards) - len(missing)} of {len(self._shards)} shards exist"
        )
        if wanted > free:
            raise InputError(
                f"feature_cache {self._directory} lacks {_size(wanted - free)} of the "
                f"{_size(wanted)} that the features take; make room, name another directory or "
                "set feature_dtype to fp8"
            )

    def _compute(self, shard: Shard, source: FeatureSource) -> dict[str, Tensor]:
        """A shard's tensors, [rows, row_length, ...] each."""
        passes = torch.tensor(shard.rows).split(self._recipe.rows_per_pass)
        parts = [self._pass(shard.split, rows, source) for rows in passes]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _keep_step(self, missing: Sequence[Shard], source: FeatureSource) -> None:
        """Run idle passes if this rank has fewer: a sharded target runs on all ranks or on none."""
        size, of_pass = self._ranks.size, self._recipe.rows_per_pass
        counts = [
            sum(-(-len(shard.rows) // of_pass) for shard in missing[rank::size])
            for rank in range(size)
        ]
        for _ in range(max(counts) - counts[self._ranks.rank]):
            self._pass("training", torch.arange(1), source)

    def _pass(self, split: Split, rows: Tensor, source: FeatureSource) -> dict[str, Tensor]:
        data = self._data[split]
        batch = data.batch(rows)
        features = source(split, rows, padded_for(self._device, batch))
        features = Features(features.tapped[: len(batch)], features.final[: len(batch)])
        if not features.finite:
            documents = data.documents_of(rows)
            raise InputError(
                f"the target's hidden states of {self._unreadable(documents, source)} are not "
                "finite; leave it out"
            )
        stored = store(features, self._recipe.feature_dtype)
        return {name: value.unflatten(0, (len(rows), -1)) for name, value in stored.items()}

    def _unreadable(self, documents: Sequence[Document], source: FeatureSource) -> str:
        """The document with states that are not finite, if this rank can run its target alone."""
        if self._recipe.shard_target and self._ranks.size > 1:
            return "one of " + ", ".join(document.source or "?" for document in documents)
        return (source.unreadable(documents) or documents[0]).source or "a document"

    def _write(self, shard: Shard, tensors: dict[str, Tensor]) -> None:
        """Give a shard its name once all of it is on disk."""
        advice = "make room, and the same command continues with the missing shards"
        place = self._directory / shard.name
        with writing(self._directory, advice), unfinished(place, f".{os.getpid()}") as scratch:
            save_file(tensors, scratch)
            sync(scratch)
            scratch.replace(f"{place}.{_checksum(scratch)}.safetensors")


class CachedFeatures(FeatureSource):
    """The features of a full cache, memory-mapped."""

    def __init__(
        self,
        files: Mapping[Split, Sequence[Path]],
        rows_per_file: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._files, self._rows_per_file = files, rows_per_file
        self.device, self._dtype = device, dtype
        self._opened: dict[Path, Any] = {}

    def __call__(self, split: Split, rows: Tensor, batch: Batch) -> Features:
        """Features of some rows; those of the padding after them are zeros."""
        stored = [self._row(split, row) for row in rows.tolist()]
        joined = {name: self._join([row[name] for row in stored], len(batch)) for name in stored[0]}
        return restore(joined, self._dtype)

    def unreadable(self, documents: Sequence[Document]) -> Document | None:
        """None: features were checked before they were written."""
        return None

    def _row(self, split: Split, row: int) -> dict[str, Tensor]:
        """A row's tensors as they are on disk, [row_length, ...]."""
        index, offset = divmod(row, self._rows_per_file)
        path = self._files[split][index]
        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        file = self._opened[path]
        return {name: file.get_slice(name)[offset] for name in file.keys()}  # noqa: SIM118

    def _join(self, parts: Sequence[Tensor], length: int) -> Tensor:
        """Rows end to end on the device, copied asynchronously."""
        filled, cuda = sum(map(len, parts)), self.device.type == "cuda"
        shape = (length, *parts[0].shape[1:])
        joined = torch.empty(shape, dtype=parts[0].dtype, pin_memory=cuda)
        torch.cat(list(parts), out=joined[:filled])
        joined[filled:].zero_()
        return joined.to(self.device, non_blocking=True)


def cache_bytes(recipe: Recipe, config: NetworkConfig, rows: int) -> int:
    """Bytes that the features of `rows` packed rows take on disk."""
    return rows * row_bytes(config, recipe.row_length, recipe.feature_dtype)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _size(count: int) -> str:
    """Bytes in a readable unit."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
