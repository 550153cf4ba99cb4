"""Tiny random models for tests: targets by transformers, drafters by us."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.model import DrafterConfig, DraftModel
from peagle.models.decoder import DecoderConfig

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
TAPS = (1, 2, 3)
MASK = VOCAB - 1


def save_target(directory: Path, family: str = "qwen3", seed: int = 0, **changes: object) -> Path:
    """A random target in Hugging Face's layout, with logits far enough apart to rank firmly."""
    torch.manual_seed(seed)
    kinds = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    config_type, model_type = kinds[family]
    model = model_type(config_type(**{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
        else:
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
    model.float().save_pretrained(directory)
    return directory


def drafter_config(
    parallel: bool, qk_norm: bool = True, layers: int = 2, draft_vocab: int = VOCAB, **changes: object
) -> DrafterConfig:
    """A drafter's sizes for `save_target`'s default target."""
    shape = DecoderConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        qk_norm=qk_norm,
    )
    values = {
        "transformer": shape,
        "target_hidden_size": 64,
        "taps": TAPS,
        "draft_vocab_size": draft_vocab,
        "mask_token_id": MASK if parallel else None,
        "trained_tokens": 8,
        **changes,
    }
    return DrafterConfig(**values)  # type: ignore[arg-type]


def random_drafter(config: DrafterConfig, seed: int = 1) -> DraftModel:
    """An untrained drafter; a reduced vocabulary keeps every other token, then the next ones."""
    torch.manual_seed(seed)
    model = DraftModel(config, 256)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.7, 1.3)
        else:
            torch.nn.init.normal_(parameter, std=0.15)
    if config.reduced_vocabulary:
        kept = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
        model.d2t = kept - torch.arange(config.draft_vocab_size)
    return model


def save_random_drafter(directory: Path, config: DrafterConfig, seed: int = 1) -> Path:
    """An untrained drafter on disk, in float32."""
    save_drafter(directory, random_drafter(config, seed), torch.float32)
    return directory
