"""The checkpoint's own head for multi-token prediction (MTP): one more layer of the target, whose
tensors (`mtp.*`) are among the target's. Qwen3.5, 3.6 and 3.8 have one.

Position p reads the embedding of x_{p+1} and the target's state after its final norm, each normed;
`fc` makes the layer's stream of both. A further draft's row reads the head's own normed output.
Trained further, it has a directory of its own: these tensors, and the target's `config.json`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafters.checkpoint import head_for_drafts, write_network
from peagle.drafters.kind import MTP
from peagle.drafters.network import Network, NetworkConfig
from peagle.drafters.readout import Readout
from peagle.errors import InputError, about
from peagle.files import replacing_directory
from peagle.models.decoder import Attend, Decoder, decoder_layer
from peagle.models.families import read_family, read_spec
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place, centred
from peagle.models.loading import widen_on_cpu
from peagle.models.quantization import read_quantization
from peagle.models.spec import DecoderSpec
from peagle.models.weights import (
    TensorRule,
    assemble,
    disassemble,
    known_names,
    read_json,
    read_tensors,
    tensor_names,
)
from peagle.ops import residual
from peagle.ops.cycle_state import FirstNorms
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.packing import pack
from peagle.ops.products.normed import Normed
from peagle.ops.rope import rotation_at
from peagle.ops.weight import widen

PREFIX = "mtp."
QUANTIZATION, TRAINED = "quantization_config", "num_speculative_tokens"
LAYERS, DEDICATED = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
INSTEAD = "give a drafter as model, or method ngram"


@dataclass(frozen=True)
class MTPConfig(NetworkConfig):
    """The sizes of a target's head: those of the target."""

    kind = MTP

    @classmethod
    def of(cls, target: DecoderSpec, trained_tokens: int | None = None) -> "MTPConfig":
        """That of a target: a layer like its first that attends, over its last one's output."""
        layer = target.layers[next(iter(target.attention))]
        alone, taps = replace(target, layers=(layer,)), (len(target.layers),)
        sizes = target.hidden_size, taps, target.vocab_size
        return cls(alone, *sizes, trained_tokens=trained_tokens)


class MTPHead(Network):
    """A target's head, which shares its embeddings, its own head, and its final norm."""

    config: MTPConfig

    def __init__(self, target: Decoder, trained_tokens: int | None = None) -> None:
        """Its own weights have no values yet."""
        super().__init__()
        self.config = MTPConfig.of(target.spec, trained_tokens)
        shape = self.config.transformer
        size, eps = shape.hidden_size, shape.norm.eps
        with torch.device("meta"):
            self.embedding_norm = RMSNorm(size, eps)
            self.hidden_norm = RMSNorm(size, eps)
            self.fc = Linear(2 * size, size)
            self.layer = decoder_layer(shape.layers[0], size)
            self.readout = Readout(shape, shape.vocab_size)
        self.readout.head = head_for_drafts(target)
        self.embed, self.target_norm = target.embed, target.norm.requires_grad_(False)
        self.rotations, _ = target.rope.of_layers()[next(iter(target.spec.attention))]

    @property
    def blocks(self) -> Sequence[Any]:
        """As `Network`."""
        return (self.layer,)

    @property
    def own(self) -> Sequence[nn.Module]:
        """The parts that are not the target's."""
        return self.embedding_norm, self.hidden_norm, self.fc, self.layer, self.readout.norm

    def first_norms(self) -> FirstNorms:
        """As `Network`."""
        return FirstNorms(
            embedding=self.embed.weight,
            input_weight=self.embedding_norm.weight,
            hidden_weight=self.hidden_norm.weight,
            eps=self.embedding_norm.eps,
            mask_feature=self.embed.weight[0],
        )

    def begin(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Normed]:
        """As `Network`; the features are in the layer's stream only by `fc`."""
        stream = residual.linear(Normed(x, None, self.embedding_norm.eps), self.fc)
        return stream, residual.normed(stream, self.layer.input_norm)

    def project(self, features: Tensor) -> Tensor:
        """As `Network`."""
        return residual.normed(features, self.target_norm).x

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """As `Network`."""
        embedded = self.embedding_norm(self.embed(tokens))
        x = self.fc(torch.cat((embedded, self.hidden_norm(features)), dim=-1))
        return self.layer(x, rotation_at(self.rotations, positions), 0, attend)

    def feedback(self, hidden: Tensor) -> Tensor:
        """As `Network`: its output after its final norm."""
        return residual.normed(hidden, self.readout.norm).x


def load_mtp(directory: Path, target: Decoder) -> MTPHead:
    """The head in a target's directory, ready for inference.

    Raises `InputError` where there is none that can be run: another family, no such layer or
    several, embeddings of its own, missing, unexpected or misshapen tensors.
    """
    weight = target.embed.weight
    model, _ = _read(directory, target, weight.dtype, weight.device)
    widen_on_cpu(nn.ModuleList(model.own), weight)
    pack(model)
    return model.to(weight.device).eval()


def trainable_mtp(directory: Path, target: Decoder, length: int) -> MTPHead:
    """The same head to train on, for so many positions: what is its own learns, none of it packed.

    Raises `InputError` as `load_mtp`.
    """
    weight = target.embed.weight
    model, _ = _read(directory, target, weight.dtype, weight.device)
    model.rotations = model.config.rotations(length).to(weight)
    for own in model.own:
        widen(own, weight.dtype)
        own.requires_grad_()
    return model.to(weight.device)


def read_mtp_config(directory: Path, target: DecoderSpec) -> MTPConfig:
    """The sizes of the head in a directory. Raises `InputError` as `load_mtp`, but of tensors."""
    family, _ = read_family(directory)
    values = read_json(directory / "config.json")
    with about(directory):
        _refuse_unsupported(family, values)
    trained = values.get(TRAINED)
    return MTPConfig.of(target, trained if isinstance(trained, int) else None)


def check_mtp(directory: Path, target: Path) -> tuple[MTPConfig, dict[str, Tensor]]:
    """The sizes and the tensors of a head, which raises `InputError` as `load_mtp`.

    target: a directory with the target's `config.json`, as that of the head has it, too.
    """
    with torch.device("meta"):
        decoder = Decoder(read_spec(target), 1)
    model, tensors = _read(directory, decoder, None, None)
    return model.config, tensors


def is_mtp(directory: Path) -> bool:
    """Whether a directory holds a target's own head and nothing else."""
    try:
        names = known_names(directory)
    except InputError:  # which is told where its tensors are read
        return False
    return bool(names) and all(name.startswith(PREFIX) for name in names)


def save_mtp(
    directory: Path, model: MTPHead, origin: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head's directory whole or not at all, replacing an existing one.

    Its tensors are called as in `origin`, where it was read, and none is in few bits.
    """
    family, _ = read_family(origin)
    names, values = tensor_names(origin), read_json(origin / "config.json")
    rules = [rule.as_stored(names) for rule in mtp_rules(family, model.config)]
    plain = {**_unquantized(values), TRAINED: model.config.trained_tokens}
    with replacing_directory(directory) as fresh:
        write_network(fresh, model, disassemble(model, rules), plain, dtype)


def _unquantized(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _unquantized(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if key != QUANTIZATION
    }


def _read(
    directory: Path, target: Decoder, dtype: torch.dtype | None, device: torch.device | None
) -> tuple[MTPHead, dict[str, Tensor]]:
    """A head with the values of its tensors, and these."""
    family, _ = read_family(directory)
    model = MTPHead(target, read_mtp_config(directory, target.spec).trained_tokens)
    with about(directory):
        names = {name for name in tensor_names(directory) if name.startswith(PREFIX)}
        if not names:
            told = "its files hold no mtp.* tensors, as some quantised copies do not"
            raise InputError(f"method mtp: {told}; take the original's, or {INSTEAD}")
        quantization, tensors = read_quantization(directory), read_tensors(directory, names)
        rules = [quantization.as_stored(rule, names) for rule in mtp_rules(family, model.config)]
        assemble(model, rules, tensors, quantization.ignored(names), dtype, device)
    return model.requires_grad_(False), tensors


def _refuse_unsupported(family: Family, values: Mapping[str, Any]) -> None:
    if PREFIX not in family.ignored:  # which its decoder leaves in its files
        own = f"{family.architecture} has no head of its own that peagle runs"
        raise InputError(f"method mtp: {own}, only Qwen3.5 to 3.8 have; {INSTEAD}")
    within = {**values, **(values.get("text_config") or {})}
    if (layers := within.get(LAYERS)) not in (None, 1):
        raise InputError(f"method mtp: {LAYERS} is {layers}; peagle runs heads of 1; {INSTEAD}")
    if within.get(DEDICATED):
        told = "embeddings of the head's own are not supported"
        raise InputError(f"method mtp: {DEDICATED} is true: {told}; {INSTEAD}")


def mtp_rules(family: Family, config: MTPConfig) -> list[TensorRule]:
    """Every tensor of a head."""
    shape = config.transformer
    size, [layer] = shape.hidden_size, shape.layers
    own = {
        "embedding_norm": "pre_fc_norm_embedding",
        "hidden_norm": "pre_fc_norm_hidden",
        "readout.norm": "norm",
        "fc": "fc",
    }
    rules = [
        TensorRule(f"{ours}.weight", (f"{PREFIX}{theirs}.weight",), (size,))
        for ours, theirs in own.items()
    ]
    rules += family.layer(layer, size, Place("layer", f"{PREFIX}layers.0"))
    return centred(rules, shape.norm)
