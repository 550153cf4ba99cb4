"""A target's directory -> our decoder, whole or in parts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peagle.device import require_memory
from peagle.errors import InputError
from peagle.models import gpt_oss
from peagle.models.decoder import Decoder, DecoderConfig, DecoderLayer
from peagle.models.families import read_target_config
from peagle.models.weights import (
    TensorRule,
    about,
    assemble,
    file_names,
    mismatches,
    read_tensors,
    refuse,
    tensor_names,
    unexpected,
)
from peagle.ops.packing import pack


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
    """The router of a layer and its experts, which the file holds one by one."""
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

    Raises `InputError` for an unsupported architecture, a context beyond the target's, and damaged
    or mismatched weights.
    """
    config = read_target_config(directory)
    check_length(config, max_length or 1)
    with torch.device("meta"):
        decoder = Decoder(config, max_length)
    parameters = {id(value): value.numel() for value in decoder.parameters()}
    require_memory(sum(parameters.values()) * dtype.itemsize, device, f"the weights of {directory}")
    return _filled(decoder, directory, read_tensors(directory), dtype, device)


def check_length(config: DecoderConfig, max_model_len: int) -> None:
    """Raise `InputError` for a context that the target's positions do not reach."""
    if max_model_len > config.max_position_embeddings:
        raise InputError(
            f"max_model_len {max_model_len} is above the target's {config.max_position_embeddings}"
        )


def check_decoder(directory: Path) -> None:
    """Check a target's tensors against its configuration, without reading their values.

    Raises `InputError` as `load_decoder` does, except for NaN or infinite values.
    """
    config, tensors = read_target_config(directory), read_tensors(directory)
    with torch.device("meta"):
        decoder = Decoder(config, 1)
    rules = gpt_oss.as_stored(decoder_rules(config), tensors)
    with about(directory):
        refuse(mismatches(decoder, rules, tensors, _ignored(config)))


def load_ends(
    directory: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = 1
) -> Decoder:
    """A target's embeddings, final norm and head, without the layers between them.

    Raises `InputError` as `load_decoder` does.
    """
    config = read_target_config(directory)
    ends = replace(config, num_hidden_layers=0)
    with torch.device("meta"):
        decoder = Decoder(ends, max_length)
    tensors = read_tensors(directory, file_names(decoder_rules(ends)))
    decoder = _filled(decoder, directory, tensors, dtype, device)
    decoder.config = config
    return decoder


def load_layers(
    directory: Path, dtype: torch.dtype, device: torch.device
) -> Iterator[DecoderLayer]:
    """The layers that `load_ends` leaves out, one by one, for devices that cannot hold them all.

    Raises `InputError` as `load_decoder` does.
    """
    config, names = read_target_config(directory), tensor_names(directory)
    rules = gpt_oss.as_stored(decoder_rules(config), names)
    with about(directory):
        refuse(unexpected(rules, names, _ignored(config)))
    for index in range(config.num_hidden_layers):
        rules = gpt_oss.as_stored(layer_rules(config, "0", f"model.layers.{index}"), names)
        with torch.device("meta"):
            layer = DecoderLayer(config, config.window(index))
        tensors = read_tensors(directory, file_names(rules))
        with about(directory):
            assemble(nn.ModuleList([layer]), rules, tensors, dtype=dtype, device=device)
        yield layer.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _ignored(config: DecoderConfig) -> set[str]:
    """Tensors of a file that are not needed but allowed."""
    return {"lm_head.weight"} if config.tie_word_embeddings else set()


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
    with about(directory):
        assemble(decoder, rules, tensors, _ignored(config), dtype, device)
    if config.tie_word_embeddings:
        decoder.head.weight = decoder.embed.weight
    decoder = decoder.to(device=device, dtype=dtype).requires_grad_(False).eval()
    pack(decoder)
    return decoder
