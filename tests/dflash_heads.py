"""Small DFlash heads and their target, of numbers that no generator of random ones makes.

Run as a script it writes `dflash_oracle.json`: the drafts of each cycle by z-lab's own generation.

    pip install --no-deps --target SITE dflash==0.1.0
    PYTHONPATH=SITE:src:tests python tests/dflash_heads.py
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, MASK, HIDDEN, LAYERS, BLOCK, NEW = 96, 95, 32, 4, 6, 24
HEADS, KV_HEADS, SIZE, INNER = 2, 1, 16, 48
TAPS = (1, 2, 3)
FULL, SLIDING = "full_attention", "sliding_attention"
ORACLE = Path(__file__).with_name("dflash_oracle.json")
PROMPTS = [[7 * i * i % 89 + 1 for i in range(length)] for length in (3, 17, 40)]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "hidden_act": "silu",
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": [FULL, FULL]},
    "mixed": {"layer_types": [SLIDING, FULL], "sliding_window": 9},
    "both ways": {"layer_types": [SLIDING, SLIDING], "sliding_window": 9, "is_causal": False},
    "second": {"layer_types": [FULL, SLIDING], "sliding_window": 9, "is_causal": False},
}
"""Heads in z-lab's layout."""


def numbers(name: str, shape: tuple[int, ...], scale: float) -> Tensor:
    """What a tensor of this name holds: the same everywhere."""
    count, seed = torch.Size(shape).numel(), zlib.crc32(name.encode()) % 1000
    places = torch.arange(count, dtype=torch.float64)
    found = torch.frac(torch.sin(places * 12.9898 + seed) * 43758.5453) * scale
    return found.view(shape).float()


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Norms are near 1, those of queries and keys near 2, which makes attention sharp."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 2 + numbers(name, shape, 0.5)
    if name.endswith("norm.weight"):
        return 1 + numbers(name, shape, 0.3)
    scales = {"embed_tokens": 0.2, "codebook": 1.0, "base_kernel": 1.0}
    return numbers(name, shape, next((s for part, s in scales.items() if part in name), 0.5))


def layer_shapes(index: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Qwen3 layer."""
    at = f"layers.{index}"
    return {
        f"{at}.input_layernorm.weight": (HIDDEN,),
        f"{at}.post_attention_layernorm.weight": (HIDDEN,),
        f"{at}.self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
        f"{at}.self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        f"{at}.self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
        f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
        f"{at}.self_attn.q_norm.weight": (SIZE,),
        f"{at}.self_attn.k_norm.weight": (SIZE,),
        f"{at}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{at}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{at}.mlp.down_proj.weight": (HIDDEN, INNER),
    }


def save_target(directory: Path) -> Path:
    """The target of all heads."""
    shapes = {f"model.{name}": s for i in range(LAYERS) for name, s in layer_shapes(i).items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    config = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": LAYERS}
    return _save(directory, config, shapes)


def head_shapes(second: bool) -> dict[str, tuple[int, ...]]:
    """The tensors of a head of two layers."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
    }
    for index in range(2):
        shapes |= layer_shapes(index)
        if second:
            for conv in ("attention_conv", "mlp_conv"):
                added = 2 * 2 * HIDDEN // SECOND["conv_group_size"]
                shapes[f"layers.{index}.{conv}.base_kernel"] = (2, 2, HIDDEN)
                shapes[f"layers.{index}.{conv}.kernel_projection.weight"] = (added, HIDDEN)
    if second:
        rank = SECOND["selector_rank"]
        for codebook in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{codebook}"] = (VOCAB, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, HIDDEN)
    return shapes


def save_head(directory: Path, name: str, **changes: Any) -> Path:
    """A head in z-lab's layout; changes: of `dflash_config`."""
    second, own = name == "second", LAYOUTS[name]
    told = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [t - 1 for t in TAPS]}
    told |= (SECOND if second else {}) | changes
    config = {
        **SHAPE,
        **own,
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "use_sliding_window": "sliding_window" in own,
        "max_window_layers": 0,
        "dflash_config": told,
    }
    return _save(directory, config, head_shapes(second))


def save_speculators_head(
    directory: Path, kept: list[int], layers: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """The same weights as speculators writes them, with a reduced vocabulary of ids `kept`; layers:
    what is said of them."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "draft_vocab_size": len(kept),
        "transformer_layer_config": {
            **SHAPE,
            "num_hidden_layers": 2,
            "layer_types": [FULL, FULL],
            **(layers or {}),
        },
        **changes,
    }
    _save(directory, config, head_shapes(False) | {"lm_head.weight": (VOCAB, HIDDEN)})
    file = directory / "model.safetensors"
    tensors = {name: weight(name, shape) for name, shape in head_shapes(False).items()}
    ids = torch.tensor(kept)
    tensors["lm_head.weight"] = weight("lm_head.weight", (VOCAB, HIDDEN))[ids].contiguous()
    tensors["d2t"] = ids - torch.arange(len(kept))
    save_file(tensors, file, {"format": "pt"})
    return directory


def _save(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def zlab_drafts(directory: Path, target: Path) -> list[list[list[int]]]:
    """The drafts of each cycle of each prompt, by z-lab's generation."""
    import time

    from dflash import model as zlab
    from transformers import Qwen3ForCausalLM

    zlab._cuda_time = time.perf_counter
    name = json.loads((directory / "config.json").read_text())["architectures"][0]
    model = Qwen3ForCausalLM.from_pretrained(target, attn_implementation="eager").float().eval()
    head = getattr(zlab, name).from_pretrained(directory, attn_implementation="eager")
    forward, drafts = model.forward, []

    def recorded(ids: Tensor, *given: Any, **more: Any) -> Any:
        if ids.shape[1] == BLOCK and int(more["position_ids"][0, 0]):
            drafts.append(ids[0, 1:].tolist())
        return forward(ids, *given, **more)

    model.forward = recorded
    found = []
    for prompt in PROMPTS:
        drafts.clear()
        zlab.dflash_generate(head.float().eval(), model, torch.tensor([prompt]), NEW, None)
        found.append([*drafts])
    return found


if __name__ == "__main__":
    import tempfile

    place = Path(tempfile.mkdtemp())
    target = save_target(place / "target")
    made = {name: zlab_drafts(save_head(place / name, name), target) for name in LAYOUTS}
    ORACLE.write_text(json.dumps(made) + "\n")
