"""Hugging Face configurations and tensor names of each target family -> our decoder."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.device import require_memory
from peagle.errors import InputError
from peagle.models import gpt_oss
from peagle.models.decoder import Decoder, DecoderConfig, DecoderLayer
from peagle.models.weights import TensorRule, assemble, read_json, read_tensors, tensor_names
from peagle.ops.moe import ALPHA
from peagle.ops.packing import pack
from peagle.ops.rope import RopeConfig

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def decoder_config(values: Mapping[str, Any], source: str) -> DecoderConfig:
    """Read a target's `config.json`.

    Raises `InputError` for an architecture or a setting that the decoder does not have.
    """
    architecture = (values.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise InputError(
            f"{source}: architecture {architecture} is not supported; peagle runs "
            f"{', '.join(sorted(FAMILIES))}; vLLM serves other targets with the same drafter"
        )
    family = FAMILIES[architecture]
    config = transformer_config(values, family, source)
    return MORE_OF[family](config, values, source) if family in MORE_OF else config


def transformer_config(values: Mapping[str, Any], model_type: str, source: str) -> DecoderConfig:
    """The sizes of a dense Llama- or Qwen3-style transformer, target or drafter."""
    _refuse_unsupported(values, model_type, source)
    with _reading(source):
        heads = int(values["num_attention_heads"])
        config = DecoderConfig(
            vocab_size=int(values["vocab_size"]),
            hidden_size=int(values["hidden_size"]),
            intermediate_size=int(values["intermediate_size"]),
            num_hidden_layers=int(values["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // heads),
            rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=rope_config(values, source),
            max_position_embeddings=int(values.get("max_position_embeddings", 2048)),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            attention_bias=bool(values.get("attention_bias", False)),
            mlp_bias=bool(values.get("mlp_bias", False)),
        )
    _refuse_impossible(config, source)
    return config


def _qwen3_moe(config: DecoderConfig, values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The same transformer with experts in every layer."""
    _refuse_dense_layers(values, source)
    with _reading(source):
        # transformers 5 writes Qwen3-MoE's count under Mixtral's name
        count = "num_local_experts" if "num_local_experts" in values else "num_experts"
        config = replace(
            config,
            num_experts=int(values[count]),
            num_experts_per_tok=int(values["num_experts_per_tok"]),
            moe_intermediate_size=int(values["moe_intermediate_size"]),
            norm_topk_prob=bool(values.get("norm_topk_prob", False)),
        )
    _refuse_impossible_experts(config, source)
    return config


def _gpt_oss(config: DecoderConfig, values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The same transformer with sinks, windows in some layers, and GPT-OSS's experts in all."""
    with _reading(source):
        config = replace(
            config,
            attention_bias=bool(values.get("attention_bias", True)),
            attention_sinks=True,
            sliding_window=int(values["sliding_window"]),
            layer_types=tuple(values["layer_types"]),
            num_experts=int(values["num_local_experts"]),
            num_experts_per_tok=int(values["num_experts_per_tok"]),
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
            swiglu_limit=float(values.get("swiglu_limit", 7.0)),
        )
    _refuse_impossible_experts(config, source)
    _refuse_below_one(config, ["sliding_window"], source)
    _refuse_other_layers(config, source)
    if values.get("swiglu_alpha", ALPHA) != ALPHA:
        raise InputError(f"{source}: swiglu_alpha {values['swiglu_alpha']} is not {ALPHA}")
    return config


MORE_OF = {"qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss}
"""What families have beyond a dense transformer."""


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Errors of reading a configuration's values, said in its user's words."""
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{source}: config.json lacks {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise InputError(f"{source}: config.json has a value of the wrong kind: {error}") from None


def _refuse_impossible(config: DecoderConfig, source: str) -> None:
    sizes = [name for name in vars(config) if name not in EXPERT_SIZES]
    _refuse_below_one(config, sizes, source)
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"{source}: {config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise InputError(f"{source}: head_dim {config.head_dim} is odd; rotary positions pair up")


def _refuse_impossible_experts(config: DecoderConfig, source: str) -> None:
    _refuse_below_one(config, EXPERT_SIZES, source)
    if config.num_experts_per_tok > config.num_experts:
        raise InputError(
            f"{source}: num_experts_per_tok is {config.num_experts_per_tok}; it must be at most "
            f"num_experts, {config.num_experts}"
        )


def _refuse_below_one(config: DecoderConfig, names: Iterable[str], source: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is int and value < 1:
            raise InputError(f"{source}: {name} is {value}; it must be at least 1")


def _refuse_dense_layers(values: Mapping[str, Any], source: str) -> None:
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise InputError(
            f"{source}: dense layers among those with experts (decoder_sparse_step {step}, "
            f"mlp_only_layers {dense}) are not supported; vLLM serves them"
        )


def _refuse_other_layers(config: DecoderConfig, source: str) -> None:
    types, layers = config.layer_types, config.num_hidden_layers
    other = set(types) - {"sliding_attention", "full_attention"}
    if other:
        raise InputError(f"{source}: layers of type {', '.join(sorted(other))} are not supported")
    if len(types) != layers:
        raise InputError(f"{source}: layer_types names {len(types)} of {layers} layers")


def _refuse_unsupported(values: Mapping[str, Any], family: str, source: str) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"{source}: hidden_act {values['hidden_act']} is not supported, only silu")
    layer_types = values.get("layer_types") or []
    windowed = values.get("use_sliding_window") or "sliding_attention" in layer_types
    if family != "gpt_oss" and windowed and values.get("sliding_window"):
        raise InputError(f"{source}: sliding-window attention is not supported; vLLM serves it")
    quantization = values.get("quantization_config") or {}
    readable = family == "gpt_oss" and quantization.get("quant_method") == "mxfp4"
    if quantization and not readable:
        raise InputError(f"{source}: quantized weights are not supported; give the bf16 checkpoint")


def rope_config(values: Mapping[str, Any], source: str) -> RopeConfig:
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    scaling: dict[str, Any] = dict(
        values.get("rope_parameters") or values.get("rope_scaling") or {}
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if (
        kind not in ROPE_KINDS
        or "mscale" in scaling
        or scaling.get("partial_rotary_factor", 1) != 1
    ):
        known = ", ".join(ROPE_KINDS)
        raise InputError(f"{source}: rope scaling {kind} is not supported; peagle has {known}")
    given = scaling.get("original_max_position_embeddings")
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or values.get("rope_theta", 10000.0)),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        original_max_position=int(given or values.get("max_position_embeddings", 2048)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=scaling.get("attention_factor"),
        truncate=bool(scaling.get("truncate", True)),
    )


def layer_rules(config: DecoderConfig, ours: str, theirs: str) -> list[TensorRule]:
    """The tensors of one transformer block; the same names in every family, target or drafter."""
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    hidden, inner = config.hidden_size, config.intermediate_size

    def rule(name: str, parts: tuple[str, ...], sizes: tuple[int, ...]) -> TensorRule:
        return TensorRule(f"{ours}.{name}", tuple(f"{theirs}.{part}" for part in parts), sizes)

    def linear(name: str, parts: tuple[str, ...], sizes: tuple[int, ...], bias: bool) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            rules.append(rule(f"{name}.{kind}", tuple(f"{part}.{kind}" for part in parts), sizes))

    rules = [
        rule("input_norm.weight", ("input_layernorm.weight",), (hidden,)),
        rule("post_norm.weight", ("post_attention_layernorm.weight",), (hidden,)),
    ]
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    linear("attention.qkv", attention, (q, kv, kv), config.attention_bias)
    linear("attention.out", ("self_attn.o_proj",), (hidden,), config.attention_bias)
    if config.attention_sinks:
        heads = config.num_attention_heads
        rules.append(rule("attention.sinks", ("self_attn.sinks",), (heads,)))
    if config.swiglu_limit is not None:
        rules += gpt_oss.expert_rules(config, f"{ours}.mlp", f"{theirs}.mlp")
    elif config.num_experts:
        rules += _expert_rules(config, f"{ours}.mlp", f"{theirs}.mlp")
    else:
        linear("mlp.gate_up", ("mlp.gate_proj", "mlp.up_proj"), (inner, inner), config.mlp_bias)
        linear("mlp.down", ("mlp.down_proj",), (hidden,), config.mlp_bias)
    if config.qk_norm:
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        rules.append(rule("attention.qk_norm.weight", norms, (config.head_dim,) * 2))
    return rules


def _expert_rules(config: DecoderConfig, ours: str, theirs: str) -> list[TensorRule]:
    """The router of a layer and its experts, which the file has one by one."""
    experts = [f"{theirs}.experts.{index}" for index in range(config.num_experts)]
    gate_up = tuple(f"{expert}.{part}_proj.weight" for expert in experts for part in ("gate", "up"))
    down = tuple(f"{expert}.down_proj.weight" for expert in experts)
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    return [
        TensorRule(f"{ours}.router", (f"{theirs}.gate.weight",), (config.num_experts,)),
        TensorRule(f"{ours}.gate_up", gate_up, (inner,) * len(gate_up), leading=2),
        TensorRule(f"{ours}.down", down, (hidden,) * len(down), leading=2),
    ]


def decoder_rules(config: DecoderConfig) -> list[TensorRule]:
    """Every tensor of a target."""
    rules = [
        TensorRule("embed.weight", ("model.embed_tokens.weight",), (config.vocab_size,)),
        TensorRule("norm.weight", ("model.norm.weight",), (config.hidden_size,)),
    ]
    if not config.tie_word_embeddings:
        rules.append(TensorRule("head.weight", ("lm_head.weight",), (config.vocab_size,)))
    for index in range(config.num_hidden_layers):
        rules += layer_rules(config, f"layers.{index}", f"model.layers.{index}")
    return rules


def load_decoder(
    directory: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = None
) -> Decoder:
    """A target from its Hugging Face directory, ready for inference.

    Raises `InputError` for an unsupported architecture and for damaged or mismatched weights.
    """
    config = decoder_config(read_json(directory / "config.json"), str(directory))
    with torch.device("meta"):
        decoder = Decoder(config, max_length)
    parameters = {id(value): value.numel() for value in decoder.parameters()}
    require_memory(sum(parameters.values()) * dtype.itemsize, device, f"the weights of {directory}")
    return _filled(decoder, directory, read_tensors(directory), dtype, device)


def load_ends(
    directory: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = 1
) -> Decoder:
    """A target's embeddings, final norm and head, without the layers between them.

    Raises `InputError` as `load_decoder` does.
    """
    config = decoder_config(read_json(directory / "config.json"), str(directory))
    ends = replace(config, num_hidden_layers=0)
    with torch.device("meta"):
        decoder = Decoder(ends, max_length)
    names = {name for rule in decoder_rules(ends) for name in rule.theirs}
    decoder = _filled(decoder, directory, read_tensors(directory, names), dtype, device)
    decoder.config = config
    return decoder


@dataclass(frozen=True)
class Below:
    """The names of a part's tensors."""

    prefix: str

    def __contains__(self, name: object) -> bool:
        return str(name).startswith(f"{self.prefix}.")


def load_layers(
    directory: Path, dtype: torch.dtype, device: torch.device
) -> Iterator[DecoderLayer]:
    """The layers that `load_ends` leaves out, one by one, for whoever cannot hold them all.

    Raises `InputError` as `load_decoder` does.
    """
    config = decoder_config(read_json(directory / "config.json"), str(directory))
    _refuse_unexpected(directory, config)
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        tensors = read_tensors(directory, Below(prefix))
        with torch.device("meta"):
            layer = DecoderLayer(config, config.window(index))
        rules = gpt_oss.as_stored(layer_rules(config, "0", prefix), tensors)
        _assemble(nn.ModuleList([layer]), rules, directory, tensors, dtype=dtype, device=device)
        yield layer.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _refuse_unexpected(directory: Path, config: DecoderConfig) -> None:
    """What `assemble` refuses, for weights that are read in parts."""
    names = tensor_names(directory)
    rules = gpt_oss.as_stored(decoder_rules(config), names)
    expected = {name for rule in rules for name in rule.theirs} | _ignored(config)
    if unexpected := sorted(names - expected):
        raise _mismatch(directory, f"unexpected tensors: {', '.join(unexpected)}")


def _ignored(config: DecoderConfig) -> set[str]:
    """Tensors that a file may have beside ours."""
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


def _assemble(
    module: nn.Module,
    rules: list[TensorRule],
    directory: Path,
    tensors: Mapping[str, Tensor],
    **how: Any,
) -> None:
    """`assemble`, with the directory in its complaints."""
    try:
        assemble(module, rules, tensors, **how)
    except InputError as error:
        raise _mismatch(directory, error) from None


def _mismatch(directory: Path, problem: object) -> InputError:
    return InputError(f"{directory} does not match its config.json: {problem}")


def _filled(
    decoder: Decoder,
    directory: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """A decoder with the values of a directory's tensors."""
    config = decoder.config
    rules = gpt_oss.as_stored(decoder_rules(config), tensors)
    how: dict[str, Any] = {"ignored": _ignored(config), "dtype": dtype, "device": device}
    _assemble(decoder, rules, directory, tensors, **how)
    if config.tie_word_embeddings:
        decoder.head.weight = decoder.embed.weight
    decoder = decoder.to(device=device, dtype=dtype).requires_grad_(False).eval()
    pack(decoder)
    return decoder
