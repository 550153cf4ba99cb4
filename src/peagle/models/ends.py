"""What a target has before and behind its layers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.models.spec import DecoderSpec
from peagle.ops.linear import Linear
from peagle.ops.packing import LeanModule
from peagle.ops.softcap import softcap


class Embedding(LeanModule):
    """Token embeddings; unlike torch's, not initialised at random when built."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Ends(nn.Module):
    """A target's embeddings and head: what drafters share, begin with and are compared by.

    A `Decoder` is one. In that of a target which transformers runs, the head's weight has taken the
    scale of the logits.
    """

    def __init__(self, spec: DecoderSpec, max_length: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.embed = Embedding(spec.vocab_size, spec.hidden_size)
        self.head = Linear(spec.hidden_size, spec.vocab_size)
        if spec.tie_word_embeddings:
            self.head.weight = self.embed.weight
        self.max_length = max_length or spec.max_length
        self.batch_invariant = False

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [rows, hidden_size] -> logits [rows, vocab_size]."""
        return softcap(self.head(hidden), self.spec.logit_softcap)
