"""A segment: the elements deeper than 0 whose activations are kept at once."""

import torch

from peagle.drafters.network import NetworkConfig
from peagle.train.recipe import Recipe

ELEMENTS, KEPT = 6144, 68_608
"""Elements of a segment that keep so many numbers each in a layer, as Qwen3-8B's drafter does."""


def elements_per_segment(recipe: Recipe, config: NetworkConfig, device: torch.device) -> int:
    """The recipe's; unset, as many as take the memory of `ELEMENTS` of Qwen3-8B's drafter, since a
    small one's segments cost the host more than the device. On a CPU `ELEMENTS`: attention holds
    all pairs of a segment there."""
    if recipe.elements_per_segment is not None:
        return recipe.elements_per_segment
    if device.type == "cpu":
        return ELEMENTS
    return ELEMENTS * max(KEPT, kept := kept_by_layer(config, compiled=True)) // kept


def kept_by_layer(config: NetworkConfig, compiled: bool) -> int:
    """Numbers that one element keeps in a layer for its gradient.

    With d, q, kv and m the widths of the stream, of queries, of keys and of the MLP or all experts
    of a row: inputs and outputs of both norms (4 d); queries, keys and values as projected, queries
    and keys after RoPE, and attention's output (3 q + 3 kv), its gates and what they leave (2 q);
    gate, up and their product (3 m). Without compilation also norms before their weights (2 d, and
    q + kv with QK norm) and the gate's activation (m).
    """
    hidden_size, inner = config.transformer.hidden_size, config.layer.feed_forward.width
    attention = config.attention
    q_kv = attention.width + attention.kv_width
    kept = 4 * hidden_size + 3 * q_kv + 2 * attention.width * attention.gated + 3 * inner
    return kept if compiled else kept + 2 * hidden_size + q_kv * attention.qk_norm + inner
