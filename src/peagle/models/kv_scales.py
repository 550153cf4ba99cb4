"""The units in which a target's files want its keys and values kept in FP8.

Sources: compressed-tensors' `kv_cache_scheme`, modelopt's `kv_cache_quant_algo`; names as vLLM maps
them (`model_loader/weight_utils.py`).
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from peagle.models.decoder import Attention, Decoder
from peagle.models.quantization import BESIDE
from peagle.models.weights import read_json

OF_KEYS = "k_proj.k_scale", "attn.k_scale", "k_scale", "qkv_proj.k_scale"
OF_VALUES = "v_proj.v_scale", "attn.v_scale", "v_scale", "qkv_proj.v_scale"
OF_BOTH = "kv_scale", "attn.kv_scale"
"""Names within a layer's `self_attn`."""


def set_kv_scales(decoder: Decoder, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Tell each layer's attention its units. prefix: how names of a decoder's tensors begin."""
    for index, layer in enumerate(decoder.layers):
        if isinstance(layer.mixer, Attention):
            scales = kv_scales(tensors, f"{prefix}.layers.{index}.self_attn")
            layer.mixer.set_kv_scales(scales)


def kv_scales(tensors: Mapping[str, Tensor], attention: str) -> tuple[float, float]:
    """The units of one layer's keys and values; where files name one, it is that of both.

    attention: how names of its tensors begin. Heads that have units of their own get the largest.
    """

    def largest(names: tuple[str, ...]) -> float | None:
        found = (tensors.get(f"{attention}.{name}") for name in names)
        return next((float(scale.max()) for scale in found if scale is not None), None)

    both = largest(OF_BOTH)
    key, value = largest(OF_KEYS) or both, largest(OF_VALUES) or both
    return key or value or 1.0, value or key or 1.0


def asks_for_fp8(directory: Path) -> bool:
    """Whether a target's files ask for keys and values in FP8."""
    files = (path for name in ("config.json", BESIDE) if (path := directory / name).is_file())
    return any(_asks(read_json(path)) for path in files)


def _asks(values: object) -> bool:
    """Whether the values of a file, or those of a mapping within them, do."""
    if not isinstance(values, Mapping):
        return False
    scheme = values.get("kv_cache_scheme") or values.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    return scheme == "FP8" or any(map(_asks, values.values()))
