"""Which element sees which, in closed form (paper.md section 2.3), and attention by that rule."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.train.cod import Elements


def visible(query: Elements, key: Elements) -> Tensor:
    """The attention rule as a boolean matrix [batch, 1, queries, keys].

    An element sees the depth-0 elements of its document up to its own anchor, and the shallower
    elements of its own chain. Padding sees only padding, so that no row is empty.
    """
    anchors = query.anchors[:, :, None], key.anchors[:, None]
    depths = query.depths[:, :, None], key.depths[:, None]
    documents = query.documents[:, :, None], key.documents[:, None]
    context = (depths[1] == 0) & (anchors[1] <= anchors[0])
    chain = (anchors[1] == anchors[0]) & (depths[1] <= depths[0])
    return ((context | chain) & (documents[0] == documents[1]))[:, None]


@dataclass(frozen=True)
class MaskedAttention:
    """Attention of one training pass: FlexAttention on a GPU, SDPA with a matrix on a CPU."""

    block_mask: Any
    matrix: Tensor | None

    @classmethod
    def build(cls, query: Elements, key: Elements) -> "MaskedAttention":
        """Prepare the rule for some queries and keys."""
        if query.anchors.device.type == "cpu":
            return cls(None, visible(query, key))
        return cls(_block_mask(query, key), None)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query: [batch, heads, queries, head_dim]; key, value: [batch, kv_heads, keys, ...]."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        if self.matrix is not None:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=self.matrix, enable_gqa=True
            )
        flex, _ = _compiled()
        attended: Tensor = flex(query, key, value, block_mask=self.block_mask, enable_gqa=True)
        return attended


def _block_mask(query: Elements, key: Elements) -> Any:
    qa, qd, qo = query.anchors, query.depths, query.documents
    ka, kd, ko = key.anchors, key.depths, key.documents

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        context = (kd[b, k] == 0) & (ka[b, k] <= qa[b, q])
        chain = (ka[b, k] == qa[b, q]) & (kd[b, k] <= qd[b, q])
        return (context | chain) & (qo[b, q] == ko[b, k])

    _, create = _compiled()
    shape = (qa.shape[0], None, qa.shape[1], ka.shape[1])
    return create(rule, *shape, device=qa.device)


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)
