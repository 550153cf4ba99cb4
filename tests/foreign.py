"""Tiny random targets of families that peagle does not run."""

from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {**tiny.SIZES, "pad_token_id": 0}
WINDOW = {"sliding_window": 7}
KINDS: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "cohere2": {**WINDOW, "logit_scale": 0.25},
    "glm4": {"partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
"""What each has besides the common sizes: windows, a cap, a scale, half-turned heads, experts."""


def save_foreign(directory: Path, kind: str, **changes: Any) -> Path:
    """A target in Hugging Face's layout, whose layers add little to its embeddings."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **changes})
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.03 if ".layers." in name else 0.15)
    model.float().save_pretrained(directory)
    return directory
