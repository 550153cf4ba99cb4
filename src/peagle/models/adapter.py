"""LoRA adapters in PEFT's layout, merged into a target's weights while these are read."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from peagle.errors import InputError, about
from peagle.models.formats.layout import PackedRule, stem
from peagle.models.weights import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    TensorRule,
    file_names,
    finite,
    model_directory,
    read_json,
    read_tensor_file,
)

REFUSED = """
use_dora use_qalora use_bdlora lora_bias modules_to_save trainable_token_indices layer_replication
alora_invocation_tokens arrow_config monteclora_config kasa_config"""
"""Keys of PEFT's configuration whose adapters are more than a product beside a weight."""
CHANGED_AT_START = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How names of beginnings begin that change the target's own weights, too."""
OUTER = re.compile(r"^(?:base_model\.model\.)?(?:(?:model|language_model)\.)*")
FACTOR = re.compile(r"(.+?)((?:\.base_layer)?)\.lora_(embedding_)?([AB])(?:\.weight)?")
"""A factor's name: that of a module, of the first of its two parameters, or of embeddings."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
STACKED = "gate_up_proj", "down_proj"
"""PEFT's parameters of a module of experts, in its order."""
MERGE = "merge it with PEFT (merge_and_unload), and give the result as the target"


@dataclass(frozen=True)
class LowRankProduct:
    """What is added to a weight, or to that of each expert: scale * outputs @ inputs."""

    inputs: Tensor
    """[rank, inputs], before it perhaps [experts]"""
    outputs: Tensor
    """[outputs, rank], likewise"""
    scale: float
    rounded: bool = False
    """Whether what is added has the weight's type first, as of PEFT's `target_parameters`."""

    def added_to(self, weight: Tensor) -> Tensor:
        """The sum, found in float32."""
        down, up = (part.to(weight.device).float() for part in (self.inputs, self.outputs))
        product = (up @ down) * self.scale
        if product.shape != weight.shape:
            raise InputError(
                f"the LoRA adapter adds {list(product.shape)} to a weight of {list(weight.shape)}; "
                "it was made for another model"
            )
        if self.rounded:
            product = product.to(weight.dtype)
        return (weight.float() + product).to(weight.dtype)

    def of_expert(self, expert: int, part: str) -> "LowRankProduct":
        """One expert's gate, up or down."""
        outputs = self.outputs[expert]
        if part != "down":
            outputs = outputs.chunk(2)[part == "up"]
        return LowRankProduct(self.inputs[expert], outputs, self.scale, rounded=True)


@dataclass(frozen=True)
class Adapter:
    """An adapter's products by the weights' names, without what such names begin with."""

    directory: Path
    products: Mapping[str, LowRankProduct]

    @classmethod
    def read(cls, name: str) -> "Adapter":
        """The adapter of a directory or hub id.

        Raises `InputError` for what is no LoRA adapter, or more than one.
        """
        directory = model_directory(name)
        config = read_json(directory / ADAPTER)
        tensors = read_tensor_file(directory / ADAPTER_WEIGHTS)
        with about(directory):
            _refuse(config)
            try:
                return cls(directory, dict(_products(config, tensors)))
            except InputError:
                raise
            except (KeyError, TypeError, ValueError, RuntimeError, re.error) as error:
                raise InputError(f"{ADAPTER} and its tensors do not fit: {error}") from None

    def check(self, rules: Iterable[TensorRule], left_out: Set[str]) -> None:
        """Raise `InputError` for a product whose weight a target of these rules does not have, or
        has in few bits.

        left_out: tensors of its files that text has no use of, whose products are never added.
        """
        rules = list(rules)
        tied = all(rule.ours != "head.weight" for rule in rules)
        if tied and "embed_tokens.weight" in self.products:
            raise InputError(
                f"{self.directory} adapts embeddings that are the target's head, too, which it was "
                "not trained with; give a target with a head of its own"
            )
        packed = [rule for rule in rules if isinstance(rule, PackedRule)]
        plain = file_names(rule for rule in rules if type(rule) is TensorRule)
        read = map(_inner, plain | left_out)
        known = {each for name in read for each in (name, _stacked(name))}
        for name in sorted(self.products.keys() - known):
            for rule in packed:
                if any(each.startswith(stem(name)) for each in map(_inner, rule.theirs)):
                    raise InputError(
                        f"{self.directory} adapts {name}, which the target has in "
                        f"{rule.layout.label}, and merging would round it anew; give the target in "
                        "16 bits"
                    )
            raise InputError(f"{self.directory} adapts {name}, which the target lacks; {MERGE}")

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """A file's tensor with what is added to it."""
        inner = _inner(name)
        product = self.products.get(inner) or self.products.get(_stacked(inner))
        if product is not None and product.inputs.ndim > weight.ndim:
            _, expert, part = EXPERT.fullmatch(inner).groups()  # type: ignore[union-attr]
            product = product.of_expert(int(expert), part)
        return weight if product is None else product.added_to(weight)


def _inner(name: str) -> str:
    """A name from where families' and classes' names agree: `layers.0...`, or an end's."""
    return OUTER.sub("", name)


def _stacked(name: str) -> str:
    """The name of all experts' weights of which a file has this one's; other names as they are."""
    match = EXPERT.fullmatch(name)
    return f"{match[1]}.{STACKED[match[3] == 'down']}" if match else name


def _products(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, LowRankProduct]]:
    factors: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".base_layer.weight"):  # the target's own, saved beside it
            continue
        match = FACTOR.fullmatch(name)
        if match is None or tensor.ndim != 2:
            _stop(f"{name} is no factor of a LoRA product")
        if not finite(tensor):
            raise InputError(f"{name} holds NaN or infinite values")
        module, place, embeds, factor = match.groups()
        if embeds:  # which hold a row for each input
            tensor, factor = tensor.T, "AB"[factor == "A"]
        factors.setdefault((module, place), {})[factor] = tensor
    wanted = tuple(config.get("target_parameters") or ())
    for (module, place), pair in factors.items():
        down, up = pair["A"], pair["B"]
        module = module.removeprefix("base_model.model.")
        if not module.endswith(".experts"):
            weight = f"{module}.weight"
            scale = _scale(config, (module, weight), down.shape[0])
            yield _inner(weight), LowRankProduct(down, up, scale, weight.endswith(wanted))
            continue
        adapted = [name for name in STACKED if any(one.endswith(name) for one in wanted)]
        parameter = f"{module}.{adapted[0 if place else -1]}"
        rank = int(_by_pattern(config, "rank_pattern", "r", (parameter,)))
        down = down.unflatten(0, (-1, rank))
        up = up.unflatten(1, (rank, -1)).permute(2, 0, 1)
        yield _inner(parameter), LowRankProduct(down, up, _scale(config, (parameter,), rank), True)


def _scale(config: Mapping[str, Any], names: Iterable[str], rank: int) -> float:
    alpha = _by_pattern(config, "alpha_pattern", "lora_alpha", names)
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _by_pattern(config: Mapping[str, Any], patterns: str, usual: str, names: Iterable[str]) -> Any:
    """The value of the first pattern that a module's or a parameter's name ends with."""
    own = dict(config.get(patterns) or {})
    found = (own[key] for key in own for name in names if re.match(rf"(.*\.)?({key})$", name))
    return next(found, config[usual])


def _refuse(config: Mapping[str, Any]) -> None:
    kind = str(config.get("peft_type")).upper()
    if kind != "LORA":
        raise InputError(f"peft_type {kind} is not supported, only LORA")
    for key in REFUSED.split():
        if config.get(key):
            _stop(f"{key} is not supported")
    if config.get("bias", "none") != "none":
        _stop(f"bias {config['bias']} is not supported")
    if str(start := config.get("init_lora_weights")).lower().startswith(CHANGED_AT_START):
        _stop(f"init_lora_weights {start} changes the target's own weights")


def _stop(why: str) -> NoReturn:
    raise InputError(f"{why}; {MERGE}")
