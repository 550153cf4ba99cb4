"""What a `config.json` says alike in every family, and what none of them may say."""

import dataclasses
import math
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.errors import InputError
from peagle.files import read_yaml
from peagle.models.quantization import quantization_of
from peagle.models.spec import AttentionSpec, DecoderSpec, ExpertsSpec, LayerSpec, MLPSpec, NormSpec
from peagle.ops.rope import RopeConfig

Values = Mapping[str, Any]
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
SCALED = ("linear", "yarn", "llama3")
"""Those that mean nothing without a `factor`."""
KIND_NAMES = {"mrope": "default", "su": "longrope"}
"""Other names: the sections of text all have one position in mrope, which is plain rope's."""
LARGEST = 2**31 - 1
"""More than any size of a model."""
STRETCHING = ("linear", "yarn")
"""Those by which a context grows beyond `max_position_embeddings`."""
SLIDING, FULL = "sliding_attention", "full_attention"
OUTER = ("tie_word_embeddings", "quantization_config")
"""Keys that stand beside a language model's own."""
SAID = ("hidden_size", "intermediate_size", "num_hidden_layers")
USUAL: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("usual.yaml"))
"""What is usual of a model type beside what transformers' configurations have."""


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn what goes wrong while a configuration's values are read into `InputError` about it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except KeyError as error:
        raise InputError(f"{source}: config.json lacks {error.args[0]}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{source}: config.json has a value of the wrong kind: {error}") from None


def architecture_of(values: Values) -> str:
    """The first of a configuration's `architectures`, "none" where there is none."""
    match values.get("architectures"):
        case [str(first), *_]:
            return first
    return "none"


def decoder(
    values: Values, layers: Sequence[LayerSpec], formats: Container[str] = ()
) -> DecoderSpec:
    """The decoder of these layers. Call this and all below within `reading`.

    formats: the `quant_method`s that the family reads besides those of FP8.
    """
    _refuse_unsupported(values, formats)
    positions = int(values.get("max_position_embeddings", 2048))
    require_positive(num_hidden_layers=len(layers), max_position_embeddings=positions)
    rotated = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)]
    length = min((_reach(each.rope, positions) for each in rotated), default=positions)
    require_positive(max_length=length)
    vocabulary, hidden = sizes(values, "vocab_size", "hidden_size")
    return DecoderSpec(
        vocabulary,
        hidden,
        layers=tuple(layers),
        norm=norms(values),
        max_length=length,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
    )


def dense(values: Values, attentions: Iterable[AttentionSpec]) -> DecoderSpec:
    """The decoder of layers with these attentions, each with a dense MLP."""
    fed, normed = mlp(values), norms(values)
    return decoder(values, [LayerSpec(each, fed, normed) for each in attentions])


def alike(values: Values, attention: AttentionSpec) -> DecoderSpec:
    """The same of layers that are all alike."""
    return dense(values, [attention] * num_layers(values))


def text(values: Values) -> Values:
    """The language model's values, of a configuration that has other models' beside it."""
    outer = {key: values[key] for key in OUTER if key in values}
    return {**values["text_config"], **outer}


def _reach(config: RopeConfig, positions: int) -> int:
    """The longest context of a model with so many `max_position_embeddings`; as vLLM has it."""
    if config.kind in STRETCHING:
        return int(config.factor * config.original_max_position)
    return positions


def usual(model_type: str) -> Values:
    """What transformers takes where a configuration says nothing, but for sizes of which every
    published one says something."""
    from transformers import CONFIG_MAPPING  # slow to import, and only some families need it

    # a model type may be newer than the library
    known = model_type in CONFIG_MAPPING
    fields = dataclasses.fields(CONFIG_MAPPING[model_type]) if known else ()
    given = {field.name: field.default for field in fields if field.name not in SAID}
    plain = {name: value for name, value in given.items() if value is not None}
    return {**plain, **USUAL.get(model_type, {})}


def with_usual(values: Values, usual: Values) -> Values:
    """The values, and a family's usual ones where nothing, or null, is given."""
    return {**usual, **{key: value for key, value in values.items() if value is not None}}


def num_layers(values: Values) -> int:
    """The number of layers."""
    return int(values["num_hidden_layers"])


def attention(values: Values, *, partly_rotated: bool = False) -> AttentionSpec:
    """Grouped-query attention over all positions, with biases only where they are asked for.

    partly_rotated: whether the family may rotate a part of each head alone.
    """
    heads = int(values["num_attention_heads"])
    spec = AttentionSpec(
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // heads),
        rope=rope(values, partly=partly_rotated),
        bias=bool(values.get("attention_bias", False)),
        out_bias=bool(values.get("attention_bias", False)),
    )
    require_positive(
        num_attention_heads=heads, num_key_value_heads=spec.num_kv_heads, head_dim=spec.head_dim
    )
    if spec.num_heads % spec.num_kv_heads:
        raise InputError(
            f"{spec.num_heads} attention heads cannot share {spec.num_kv_heads} key-value heads "
            "evenly"
        )
    if spec.head_dim % 2:
        raise InputError(f"head_dim {spec.head_dim} is odd; RoPE needs pairs")
    _check_width(spec.rope, spec.head_dim)
    return spec


def _check_width(config: RopeConfig, head_dim: int) -> None:
    """Raise `InputError` for a rotation that does not fit its heads."""
    width = config.width(head_dim)
    if not 0 < width <= head_dim or width % 2:
        raise InputError(
            f"partial_rotary_factor {config.partial_rotary_factor} turns {width} of {head_dim} "
            "lanes; it must turn pairs"
        )
    for name in ("short_factor", "long_factor"):
        count = len(getattr(config, name))
        if config.kind == "longrope" and count != width // 2:
            raise InputError(f"rope {name} has {count} numbers for {width // 2} pairs of lanes")


def mlp(values: Values) -> MLPSpec:
    """A dense MLP."""
    [inner] = sizes(values, "intermediate_size")
    return MLPSpec(inner, bool(values.get("mlp_bias", False)))


def norms(values: Values, key: str = "rms_norm_eps") -> NormSpec:
    """The norms of all layers, and the last one. key: that of their eps."""
    eps = float(values.get(key, 1e-6))
    if not 0 <= eps < math.inf:
        raise InputError(f"{key} is {eps}; it must be a number from 0 on")
    return NormSpec(eps)


def sizes(values: Values, *keys: str) -> list[int]:
    """Whole numbers above 0, by their keys."""
    found = {key: int(values[key]) for key in keys}
    require_positive(**found)
    return [*found.values()]


def require_positive(**sizes: int) -> None:
    """Raise `InputError` for a size below 1, or beyond any."""
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}; it must be at least 1")
        if size > LARGEST:
            raise InputError(f"{name} is {size}; it must be at most {LARGEST}")


def above_zero(values: Values, name: str, usual: float | None = None) -> float:
    """A number above 0; usual: where none is given."""
    given = values[name] if usual is None else values.get(name, usual)
    if not 0 < float(given) < math.inf:
        raise InputError(f"{name} is {given}; it must be a number above 0")
    return float(given)


def experts(
    values: Values,
    count: str = "num_experts",
    chosen: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    **more: Any,
) -> ExpertsSpec:
    """A mixture of experts, whose weights sum to 1.

    count, chosen, width: the keys of how many there are, of how many a row goes through, and of
    the inner width of each; more: what else `ExpertsSpec` has.
    """
    each, per_row, inner = sizes(values, count, chosen, width)
    if per_row > each:
        raise InputError(
            f"num_experts_per_tok is {per_row}; it must be at most num_experts, {each}"
        )
    usual = {"intermediate_size": inner, "norm_topk_prob": True}
    return ExpertsSpec(each, per_row, inner, **{**usual, **more})


def window(values: Values, usual: int | None) -> int | None:
    """The width of windows, None for none. usual: where `sliding_window` is not there."""
    width = values.get("sliding_window", usual)
    if width is None:
        return None
    require_positive(sliding_window=int(width))
    return int(width)


def layer_types(values: Values, period: int, others: str = SLIDING) -> list[str]:
    """Each layer's type; where none are given, one of each `period` is full, the last of them."""
    usual = [others if (i + 1) % period else FULL for i in range(num_layers(values))]
    return list(values.get("layer_types") or usual)


def windows(values: Values, types: Sequence[str], width: int | None) -> list[int | None]:
    """Each layer's window, given its `layer_types` and their common width, None for no windows."""
    other = set(types) - {SLIDING, FULL}
    if other:
        raise InputError(f"layers of type {', '.join(sorted(other))} are not supported")
    count = num_layers(values)
    if width is None:
        return [None] * count
    if len(types) != count:
        raise InputError(f"layer_types names {len(types)} of {count} layers")
    return [width if kind == SLIDING else None for kind in types]


def refuse_windows(values: Values) -> None:
    """Raise `InputError` for attention to the nearest positions alone."""
    layer_types = values.get("layer_types") or []
    windowed = values.get("use_sliding_window") or SLIDING in layer_types
    if windowed and values.get("sliding_window"):
        raise InputError("sliding-window attention is not supported; vLLM serves it")


def _refuse_unsupported(values: Values, formats: Container[str]) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"hidden_act {values['hidden_act']} is not supported, only silu")
    quantization = values.get("quantization_config") or {}
    if quantization:
        quantization_of(quantization)
    if quantization.get("quant_method") == "mxfp4" and "mxfp4" not in formats:
        raise InputError("mxfp4 weights are supported for GPT-OSS alone; vLLM serves others")


def rope(values: Values, *, partly: bool) -> RopeConfig:
    """Rotary settings. partly: as `partly_rotated`.

    They are in `rope_parameters` (transformers 5) or in `rope_scaling`, which replaces the other
    whole where both are given, as in transformers; the base may stand beside them.
    """
    given = _rope_values(values)
    kind = KIND_NAMES.get(named := given.get("rope_type", given.get("type", "default")), named)
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise InputError(f"rope scaling {kind} is not supported; peagle supports {known}")
    if kind in SCALED and given.get("factor") is None:
        raise KeyError("factor")
    positions = int(values.get("max_position_embeddings", 2048))
    original = given.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3", "longrope"):  # beside the others it counts first, as in
        original = values.get("original_max_position_embeddings") or original  # transformers
    original, factor = int(original or positions), given.get("factor")
    if kind == "longrope" and factor is None:
        factor = positions / original
    partial = given.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1) and kind != "proportional" and not partly:
        raise InputError(f"partial_rotary_factor {partial} is not supported, only whole heads")
    scale = given.get("attention_factor")
    config = RopeConfig(
        theta=float(given.get("rope_theta") or values.get("rope_theta", 10_000.0)),
        kind=kind,
        factor=float(1.0 if factor is None else factor),
        original_max_position=original,
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=_yarn_scale(given) if scale is None else float(scale),
        truncate=bool(given.get("truncate", True)),
        partial_rotary_factor=1.0 if partial is None else float(partial),
        short_factor=_factors(given, kind, "short_factor"),
        long_factor=_factors(given, kind, "long_factor"),
    )
    _refuse_odd_numbers(config)
    _warn_of_lost_base(values, config)
    return config


def _factors(given: Values, kind: str, name: str) -> tuple[float, ...]:
    """Longrope's of one name."""
    return tuple(map(float, given[name])) if kind == "longrope" else ()


def _yarn_scale(given: Values) -> float | None:
    """What `mscale` and `mscale_all_dim` make of YaRN's temperature; None: nothing of their own."""
    both = given.get("mscale"), given.get("mscale_all_dim")
    if not all(both):
        return None
    grown = 0.1 * math.log(max(float(given.get("factor") or 1), 1))
    own, of_all = (1 + grown * float(each) for each in both if each)
    return own / of_all


def _refuse_odd_numbers(config: RopeConfig) -> None:
    """Raise `InputError` for numbers that no rotation has."""
    for name, value in vars(config).items():
        least = 1 if name == "theta" else 0  # yarn divides by its logarithm
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers if name != "llama_4_scaling_beta" else ():
            if type(number) in (int, float) and not least < number < math.inf:
                raise InputError(f"rope {name} is {number}; it must be a number above {least}")


def _rope_values(values: Values) -> Values:
    """Those of `rope_scaling`, else of `rope_parameters`."""
    given: dict[str, Any] = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    if any(isinstance(value, Mapping) for value in given.values()):
        raise InputError(f"rope settings by layer type ({', '.join(given)}) are not supported")
    return given


def _warn_of_lost_base(values: Values, config: RopeConfig) -> None:
    """Warn where `rope_scaling` hides a base that its author may have meant to keep."""
    hidden = (values.get("rope_parameters") or {}).get("rope_theta") or config.theta
    if values.get("rope_scaling") and hidden != config.theta:
        warnings.warn(
            f"rope_scaling replaces rope_parameters, and with it rope_theta {hidden:g}: here and "
            f"in transformers it is {config.theta:g}; give rope_scaling a rope_theta of its own",
            stacklevel=2,
        )
