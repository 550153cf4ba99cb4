"""Strict reading and writing of safetensors directories."""

import json
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from peagle.errors import InputError, reason, refuse
from peagle.ops.weight import QuantizedWeight, Weight, dense, replace_weight, weight_at

DESCRIPTION = ["*.json", "*.model", "*.txt"]
TEMPLATES = "*.jinja"
WEIGHTS = ["*.safetensors"]
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CORRECTION = ["correction/*.json", "correction/*.safetensors"]
"""A drafter's correction, the one sub-folder that is read."""
UNREAD = """
rotary_emb.inv_freq rotary_emb.cos_cached rotary_emb.sin_cached .q_scale .k_scale .v_scale .kv_scale
.q_zero_point .k_zero_point .v_zero_point .prob_scale .output_scale"""
"""How names of tensors end that are no weights: buffers that follow from the configuration, and
scales for a KV cache in FP8 (`models.kv_scales`)."""
MISMATCH = "it does not match its config.json"
LISTED = 4
"""Tensors that a message names of each kind; another model's directory has hundreds."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRule:
    """One of our parameters, and the file's tensors that, concatenated in order, are its value;
    where there are none, it consists of ones."""

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...]
    """Length of each of `theirs` along dimension 0."""
    leading: int = 1
    """Leading dimensions of ours that `theirs` are laid along: 2 for parts of every expert."""
    layouts: tuple["TensorRule", ...] = ()
    """Rules for files that hold the same value in other tensors: fused, apart or packed."""
    order: tuple[int, ...] = ()
    """Where ours has the file's rows in another order: of equal groups of them, which one comes
    where."""
    dtype: torch.dtype | None = None
    """The type that ours always has; None: the model's."""
    scale: float = 1.0
    """What the file's numbers are multiplied by, in the file's type."""
    offset: float = 0.0
    """What is added to them then: norms may be stored as what they are beside 1."""

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        """The shapes of `theirs`, given the shape of ours."""
        inner = ours[self.leading :]
        return {name: (size, *inner) for name, size in zip(self.theirs, self.sizes, strict=True)}

    def as_stored(self, names: Container[str]) -> "TensorRule":
        """This rule, or that of another layout if it is the one whose tensors a file has."""
        found = (
            rule for rule in (self, *self.layouts) if any(name in names for name in rule.theirs)
        )
        return next(found, self)

    def unfit(self, name: str, tensor: Tensor, expected: Shape) -> str | None:
        """What is wrong with one of `theirs`; None: nothing."""
        if tuple(tensor.shape) != expected:
            return f"{name} has shape {list(tensor.shape)}, expected {list(expected)}"
        if not tensor.is_floating_point() and tensor.dtype != torch.uint8:  # as packed numbers are
            return f"{name} is {tensor.dtype}, expected a floating-point type"
        if tensor.is_floating_point() and tensor.itemsize == 1:
            return (
                f"{name} is {tensor.dtype}, and no scales are found for it of the kind that "
                "quantization_config names"
            )
        return None

    def nbytes(self, ours: Shape, dtype: torch.dtype) -> int:
        """Bytes that ours takes in memory, given its shape and the dtype of what is not packed."""
        return math.prod(ours) * (self.dtype or dtype).itemsize

    def join(self, theirs: Sequence[Tensor], ours: Shape, dtype: torch.dtype | None) -> Weight:
        """Ours, of this shape."""
        if not self.theirs:
            return torch.ones(ours, dtype=self.dtype or dtype)
        if self.scale != 1:
            theirs = [part * self.scale for part in theirs]
        whole = torch.cat([part.to(dtype=self.dtype or dtype) for part in theirs])
        if self.offset:
            whole += self.offset
        return grouped(whole, self.order).reshape(ours)

    def split(self, ours: Weight) -> Sequence[Tensor]:
        """`theirs`, the inverse of `join`."""
        whole = regrouped(dense(ours).flatten(0, self.leading - 1), self.order)
        if self.offset:
            whole = whole - self.offset
        whole = whole / self.scale if self.scale != 1 else whole
        return whole.split(self.sizes) if self.theirs else ()


def grouped(rows: Tensor, order: Sequence[int]) -> Tensor:
    """Rows in as many equal groups as an order names, one behind another by it."""
    return rows.unflatten(0, (len(order), -1))[list(order)].flatten(0, 1) if order else rows


def regrouped(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The inverse of `grouped`."""
    return grouped(rows, sorted(range(len(order)), key=order.__getitem__))


def model_directory(name: str, weights: bool = True, revision: str | None = None) -> Path:
    """The directory of a model: `name` as a path, or the hub's snapshot of that id.

    Without `weights` only the other files are fetched from the hub. revision: the hub's branch, tag
    or commit. Raises `InputError` when it is neither.
    """
    if not name:
        raise InputError("a model's name is empty; give its directory or hub id")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
        is_file = path.exists()
    except (OSError, RuntimeError) as error:  # RuntimeError for the home of an unknown user
        raise InputError(f"{name}: {reason(error)}") from None
    if is_file:
        raise InputError(f"{name} is a file; give the model's directory or a Hugging Face hub id")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError(f"{name}: no such directory, and not a hub id of the form owner/name")
    try:
        wanted = [*DESCRIPTION, *(WEIGHTS if weights else []), TEMPLATES]
        # the same weights come again, as Mistral's and in subfolders, which hold more templates
        left_out = ["consolidated*", *(f"*/{each}" for each in wanted if each != TEMPLATES)]
        fetch = partial(snapshot_download, name, revision=revision)
        fetched = fetch(allow_patterns=wanted, ignore_patterns=left_out)
        if weights:
            fetch(allow_patterns=CORRECTION)
        return Path(fetched)
    except Exception as error:  # the hub raises many kinds of errors, which mean the same here
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{name}: no such directory, and fetching it from the hub failed: {why}"
        ) from None


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file. Raises `InputError` naming the file when it is anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        _refuse_adapter(path.parent)
        raise InputError(f"{path.parent} is not a model directory: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} must hold a JSON object")
    return value


def _refuse_adapter(directory: Path) -> None:
    """Raise `InputError` where LoRA's part of a model is, of a directory without a whole one."""
    if (directory / ADAPTER).is_file():
        base = read_json(directory / ADAPTER).get("base_model_name_or_path")
        raise InputError(
            f"{directory} is a LoRA adapter of {base}, not a model; give {base} as the target, and "
            "this as --lora"
        )


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a directory, from its index if it is sharded. Pickles are never read."""
    index, whole = directory / INDEX, directory / WHOLE
    named = sorted(set(_weight_map(index).values())) if index.exists() else []
    files = [directory / name for name in named]
    missing = [file.name for file in files if not os.path.exists(file)]  # a name may be too long
    if whole.exists() and whole not in files:
        if files and not missing:
            raise InputError(
                f"{directory} holds two models, in {WHOLE} and in the files of {INDEX}; remove "
                "the older one"
            )
        files, missing = [whole], []  # others beside it may be copies of before
    elif not index.exists():
        files = [f for f in sorted(directory.glob("*.safetensors")) if f.name != ADAPTER_WEIGHTS]
    if missing:
        raise InputError(f"{directory} lacks the weight files {shortened(missing)}")
    if not files:
        _refuse_adapter(directory)
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt"))
        hint = " (pickle files are never loaded; convert them to safetensors)" if pickled else ""
        raise InputError(f"{directory} has no .safetensors file{hint}")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    weight_map = read_json(index).get("weight_map")
    if isinstance(weight_map, dict) and all(isinstance(v, str) for v in weight_map.values()):
        return weight_map
    raise InputError(f"{index}: weight_map must name a file for each tensor; fetch it again")


def read_tensors(directory: Path, wanted: Container[str] | None = None) -> dict[str, Tensor]:
    """Every tensor of a directory, or those in `wanted`: memory-mapped, and read when used.

    Raises `InputError` for a damaged file.
    """
    return dict(_tensors(safetensors_files(directory), wanted))


def read_tensor_file(file: Path) -> dict[str, Tensor]:
    """Every tensor of one file. Raises `InputError` for a damaged or missing file."""
    return dict(_tensors([file], None))


def tensor_names(directory: Path) -> set[str]:
    """Names of every tensor of a directory. Raises `InputError` for a damaged file."""
    names: set[str] = set()
    for file in safetensors_files(directory):
        with opened(file) as shard:
            names.update(shard.keys())
    return names


def known_names(directory: Path) -> set[str]:
    """Names of the tensors that a directory has or that its index lists; none if neither is there.

    Raises `InputError` for a damaged file.
    """
    index = directory / INDEX
    if index.exists() and not (directory / WHOLE).exists():
        return set(_weight_map(index))
    return tensor_names(directory) if any(directory.glob("*.safetensors")) else set()


def _tensors(files: Iterable[Path], wanted: Container[str] | None) -> Iterator[tuple[str, Tensor]]:
    found: dict[str, str] = {}
    for file in files:
        with opened(file) as shard:
            for name in shard.keys():  # noqa: SIM118 (a safe_open handle is not a mapping)
                if name in found:
                    raise InputError(f"{name} is both in {found[name]} and {file}; remove one")
                found[name] = file.name
                if wanted is None or name in wanted:
                    yield name, shard.get_tensor(name)


@contextmanager
def opened(file: Path, advice: str = "fetch or export it again") -> Iterator[Any]:
    """A file's tensors. Raises `InputError` for a damaged file, with what to do."""
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        if file.exists() and not os.access(file, os.R_OK):
            raise InputError(f"{file} cannot be read: permission denied") from None
        raise InputError(f"{file} is damaged or cut short ({error}); {advice}") from None


def finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinite values. Only 8-bit tensors are copied."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.itemsize == 1:  # torch has no comparisons for these
        tensor = tensor.bfloat16()
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def assemble(
    module: nn.Module,
    rules: Iterable[TensorRule],
    tensors: Mapping[str, Tensor],
    ignored: Iterable[str] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    change: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
) -> None:
    """Set a module's weights from a file's tensors, in their own dtype or in `dtype`, or packed.

    change: what becomes of a file's tensor, given its name. Each is moved to the device, joined and
    checked there before the next is read, so that a large model is never in memory twice. Raises
    `InputError` naming missing, unexpected and misshapen tensors at once, or the first with NaN or
    infinite values.
    """
    rules = list(rules)
    refuse(MISMATCH, mismatches(module, rules, tensors, ignored))
    shapes = _shapes(module)

    def moved(name: str) -> Tensor:
        tensor = tensors[name].to(device)
        if tensor.dtype == torch.float64:  # of which much is no number in fewer bits
            tensor = tensor.float()
        tensor = change(name, tensor)
        if not finite(tensor):
            raise InputError(f"its tensor {name} holds NaN or infinite values")
        return tensor

    state: dict[str, Tensor] = {}
    for rule in rules:
        value = rule.join([*map(moved, rule.theirs)], shapes[rule.ours], dtype)
        if isinstance(value, QuantizedWeight):
            replace_weight(module, rule.ours, value)
        else:
            state[rule.ours] = value
    module.load_state_dict(state, strict=False, assign=True)


def _shapes(module: nn.Module) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def bytes_of(rules: Iterable[TensorRule], module: nn.Module, dtype: torch.dtype) -> int:
    """Bytes that a module's weights will take, those that are not packed in `dtype`."""
    shapes = _shapes(module)
    return sum(rule.nbytes(shapes[rule.ours], dtype) for rule in rules)


def mismatches(
    module: nn.Module,
    rules: Iterable[TensorRule],
    tensors: Mapping[str, Tensor],
    ignored: Iterable[str] = (),
) -> list[str]:
    """Missing, unexpected and misshapen tensors, compared with a module's shapes."""
    rules, shapes = list(rules), _shapes(module)
    expected = {rule: rule.shapes(shapes[rule.ours]) for rule in rules}
    missing = sorted({name for of_rule in expected.values() for name in of_rule} - tensors.keys())
    problems = [f"missing tensors: {shortened(missing)}"] if missing else []
    problems += unexpected(rules, tensors, ignored)
    found = (
        rule.unfit(name, tensors[name], shape)
        for rule, of_rule in expected.items()
        for name, shape in of_rule.items()
        if name in tensors
    )
    unfit = sorted(problem for problem in found if problem is not None)
    return [*problems, shortened(unfit, "; ")] if unfit else problems


def unexpected(
    rules: Iterable[TensorRule], names: Iterable[str], ignored: Iterable[str] = ()
) -> list[str]:
    """The problem of a file's tensors that no rule reads; empty if there are none."""
    read, ends = file_names(rules) | set(ignored), tuple(UNREAD.split())
    others = sorted(name for name in set(names) - read if not name.endswith(ends))
    return [f"unexpected tensors: {shortened(others)}"] if others else []


def shortened(items: Sequence[str], separator: str = ", ") -> str:
    """The first of a message's items, and how many more there are."""
    more = len(items) - LISTED
    return separator.join(items[:LISTED]) + (f" and {more} more" if more > 0 else "")


def file_names(rules: Iterable[TensorRule]) -> set[str]:
    """Names of the tensors that rules read."""
    return {name for rule in rules for name in rule.theirs}


def disassemble(module: nn.Module, rules: Iterable[TensorRule]) -> dict[str, Tensor]:
    """The inverse of `assemble`: a module's weights under the file's names."""
    tensors: dict[str, Tensor] = {}
    for rule in rules:
        parts = rule.split(weight_at(module, rule.ours))
        stored = (part.detach().cpu().contiguous() for part in parts)
        tensors.update(zip(rule.theirs, stored, strict=True))
    return tensors


def save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file that others may read as they may any new file."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})  # readable by its owner alone
    file.chmod(mode)


def write_model(directory: Path, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write a directory's one file of tensors, and its `config.json`."""
    save_tensors(directory / WHOLE, tensors)
    text = json.dumps(config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
