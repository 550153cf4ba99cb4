"""Random weights for targets and drafters, in the formats in which targets are published.

Random layers send nearly all rows to the same experts, since what they add to the residual streams
is alike; drafts would then cost less than they do. So where routing is set, the embeddings have a
part that all tokens share and one of their own, and layers add little to them: how alike two rows
choose follows from the share of the common part. It is in the weights alone, which every engine can
load.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from peagle.errors import InputError
from peagle.models.decoder import Decoder, DecoderLayer, DeltaNet, decoder_layer
from peagle.models.spec import DecoderSpec
from peagle.ops.norm import RMSNorm
from peagle.ops.packing import pack
from peagle.ops.weight import E4M3, FP8, INT4, MXFP4, NVFP4, QuantizedWeight, Weight, replace_weight

STD = 0.02
SMALL = STD / 64
"""Deviation of the weights of layers' outputs where routing is set."""
OVERLAPS = {"independent": 0.0, "half": 0.5}
"""How many of a row's experts another row chooses too, beyond chance, as a share."""
OUTPUTS = "out.weight", "down.weight", ".down"
"""Ends of the names of the weights by which layers add to the stream."""
PRODUCTS = "qkv.weight", "qkvz.weight", "gate_up.weight", ".gate_up", *OUTPUTS
PACKED: dict[str | None, tuple[str, ...]] = {
    **dict.fromkeys(("fp8", "int4", "nvfp4"), PRODUCTS),
    "mxfp4": ("mlp.gate_up", "mlp.down"),
}
"""Of those that are packed."""
BITS: dict[str | None, float] = {
    "fp8": 8 + 32 / (128 * 128),
    "int4": 4 + 16 / 128,
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
}
"""Of a packed number, its share of a scale included, and none of what a whole output has."""
BLOCK = (128, 128)
E4M3_STD = 64.0
"""Deviation of FP8's numbers, which their scales correct."""
E2M1_STD = 2.93
"""Deviation of uniform four-bit codes."""
INT4_STD, GROUP = 4.61, 128
"""The same of integers, and how many share a scale."""
ROWS, STEPS = 4096, 16
"""Random rows by which a correlation is found, and halvings of its range."""


@dataclass(frozen=True)
class Weights:
    """What a target's random weights are like."""

    quantization: str | None = None
    """None: plain; "fp8", "int4", "nvfp4": the products of all layers; "mxfp4": the experts."""
    routing: str | None = None
    """A key of `OVERLAPS`; None: as it comes."""

    def routed(self, routing: str | None) -> "Weights":
        """The same with another routing; None: with its own. Raises `InputError`."""
        if routing is None:
            return self
        if routing not in OVERLAPS:
            raise InputError(f"routing {routing} is not known; choose one of {', '.join(OVERLAPS)}")
        return replace(self, routing=routing)


PLAIN = Weights()


def random_target(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, weights: Weights = PLAIN
) -> Decoder:
    """A target with random weights, ready for inference."""
    decoder = random_ends(spec, device, dtype, weights)
    decoder.layers.extend(random_layers(spec, device, dtype, weights))
    return decoder


def random_ends(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, weights: Weights = PLAIN
) -> Decoder:
    """The same target's embeddings, final norm and head, without the layers between them."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    decoder.layers = nn.ModuleList()
    source, share = RandomWeights(device, dtype), _share(spec, weights)
    source.fill(decoder)
    if share is not None:
        decoder.embed.weight = nn.Parameter(source.embeddings(spec, share), requires_grad=False)
    return decoder


def random_layers(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, weights: Weights = PLAIN
) -> Iterator[DecoderLayer]:
    """The layers that `random_ends` leaves out, one by one, for who cannot hold them all."""
    output_std = STD if _share(spec, weights) is None else SMALL
    source = RandomWeights(device, dtype, weights.quantization, output_std, seed=1)
    for of_layer in spec.layers:
        with torch.device("meta"):
            layer = decoder_layer(of_layer, spec.hidden_size)
        source.fill(layer)
        yield layer


def _share(spec: DecoderSpec, weights: Weights) -> float | None:
    """The embeddings' correlation that makes the routing; None: none is set, or no experts."""
    experts = spec.layers[0].experts
    if weights.routing is None or experts is None:
        return None
    return correlation(experts.num_experts, experts.num_experts_per_tok, OVERLAPS[weights.routing])


def target_bytes(spec: DecoderSpec, dtype: torch.dtype, weights: Weights = PLAIN) -> int:
    """Bytes of a target's weights; none are made."""
    with torch.device("meta"):
        decoder = Decoder(spec, max_length=1)
    packed = PACKED.get(weights.quantization, ())
    bits = BITS.get(weights.quantization, 0)
    return sum(
        math.ceil(value.numel() * bits / 8)
        if path.endswith(packed)
        else value.numel() * dtype.itemsize
        for path, value in decoder.named_parameters()
    )


class RandomWeights:
    """Fills modules on the meta device with normal noise, and their norms with ones."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        quantization: str | None = None,
        output_std: float = STD,
        seed: int = 0,
    ) -> None:
        """output_std: the deviation of the weights by which layers add to the stream."""
        self._device, self._dtype = device, dtype
        self._quantization, self._output_std = quantization, output_std
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, module: nn.Module) -> None:
        """Give a module all its weights, and make it ready for inference."""
        made: dict[nn.Parameter, nn.Parameter | QuantizedWeight] = {}
        for path, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter not in made:  # a head may be the embeddings
                owner = module.get_submodule(path.rpartition(".")[0])
                value = self._weight(path, owner, tuple(parameter.shape))
                if isinstance(value, Tensor):
                    value = nn.Parameter(value, requires_grad=False)
                made[parameter] = value
            replace_weight(module, path, made[parameter])
        module.to(device=self._device, dtype=self._dtype).eval()
        pack(module)

    def _weight(self, path: str, owner: nn.Module, shape: tuple[int, ...]) -> Weight:
        std = self._output_std if path.endswith(OUTPUTS) else STD
        if isinstance(owner, DeltaNet) and not path.endswith(".weight"):
            return self._recurrence(path, shape)
        if isinstance(owner, RMSNorm) or path.endswith("scalar"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        if path.endswith(("bias", "sinks")):
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        if path.endswith(PACKED.get(self._quantization, ())):
            made = self._fp8 if self._quantization == "fp8" else self._four_bits
            return made(shape, std)
        return self._normal(shape, std)

    def _recurrence(self, path: str, shape: tuple[int, ...]) -> Tensor:
        """A delta net's own weights, by which states neither vanish nor grow: as trained ones."""
        value = torch.empty(shape, device=self._device, dtype=torch.float32)
        if path.endswith("decay"):
            value.uniform_(1, 16, generator=self._generator).log_()
        elif path.endswith("decay_bias"):
            value.uniform_(1e-3, 0.1, generator=self._generator).expm1_().log_()
        elif path.endswith("conv"):
            value.uniform_(-0.5, 0.5, generator=self._generator)
        else:
            value.fill_(1)
        return value.to(self._dtype)

    def _normal(self, shape: tuple[int, ...], std: float) -> Tensor:
        value = torch.empty(shape, device=self._device, dtype=self._dtype)
        return value.normal_(0.0, std, generator=self._generator)

    def _fp8(self, shape: tuple[int, ...], std: float) -> QuantizedWeight:
        numbers = torch.empty(shape, device=self._device, dtype=E4M3)
        for part in numbers.view(-1, *shape[-2:]):
            noise = torch.randn(part.shape, device=self._device, generator=self._generator)
            part.copy_(noise * E4M3_STD)
        blocks = [-(-size // high) for size, high in zip(shape[-2:], BLOCK, strict=True)]
        scales = torch.full((*shape[:-2], *blocks), std / E4M3_STD, device=self._device)
        packed = numbers.view(torch.uint8)
        return QuantizedWeight(FP8, packed, scales, BLOCK, dynamic_activations=True)

    def _four_bits(self, shape: tuple[int, ...], std: float) -> QuantizedWeight:
        packed = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=self._device)
        packed.random_(generator=self._generator)
        form, wide, scale, dtype = {
            "int4": (INT4, GROUP, std / INT4_STD, self._dtype),
            "nvfp4": (NVFP4, NVFP4.block, 1.0, E4M3),
            "mxfp4": (MXFP4, MXFP4.block, round(math.log2(std / E2M1_STD)) + 127, torch.uint8),
        }[str(self._quantization)]
        groups = *shape[:-1], shape[-1] // wide
        scales = torch.full(groups, scale, device=self._device).to(dtype)
        if form != NVFP4:
            return QuantizedWeight(form, packed, scales, (1, wide))
        factors = torch.full(shape[:-1], E2M1_STD / std, device=self._device)
        return QuantizedWeight(form, packed, scales, (1, wide), factors=factors, divided=True)

    def embeddings(self, spec: DecoderSpec, share: float) -> Tensor:
        """Embeddings [vocab_size, hidden_size] of which any two have this correlation."""
        own = self._normal((spec.vocab_size, spec.hidden_size), (1 - share) ** 0.5)
        return own + self._normal((1, spec.hidden_size), share**0.5)


@functools.cache
def correlation(experts: int, top_k: int, overlap: float) -> float:
    """The correlation of two rows' router logits at which they have so many experts in common.

    overlap: share of a row's experts, beyond those that independent rows have in common.
    """
    generator = torch.Generator().manual_seed(0)
    one, own = (torch.randn(ROWS, experts, generator=generator) for _ in range(2))
    chosen, chance = one.topk(top_k).indices, top_k / experts
    low, high = 0.0, 1.0
    for _ in range(STEPS * (overlap > 0)):
        share = (low + high) / 2
        other = share * one + (1 - share**2) ** 0.5 * own
        common = (other.topk(top_k).indices[:, :, None] == chosen[:, None]).any(2)
        beyond = (common.double().mean().item() - chance) / (1 - chance)
        low, high = (share, high) if beyond < overlap else (low, share)
    return low
