"""One cycle on state that stays on the device: draft, verify, accept; and prompts before it.

What a CUDA graph captures: tensors only, no waiting. Nothing here may depend on a value that only
the device knows, so all requests of a batch get as many drafts; one that wants fewer accepts fewer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.resident import Breadth, ResidentDrafter, known_inputs
from peagle.models.decoder import Decoder
from peagle.models.fused import AttendProduct, Taps, fused_target
from peagle.ops import residual
from peagle.ops.cached_attention import PassRows, QKVSpec, attend_product, divided
from peagle.ops.choice import argmax
from peagle.ops.penalties import penalize
from peagle.ops.resident import Resident, accepted_below, settle, verify_inputs
from peagle.ops.sampling import Sampling, choose

Attention = Callable[[Tensor], AttendProduct]
"""Over a cache of [layers, 2, slots, heads, head_dim]: the attention of one pass."""


@dataclass(frozen=True)
class Prompts:
    """Rows of prompts, one chunk's behind another's, and behind them all any that are nobody's."""

    tokens: Tensor
    """[rows]"""
    following: Tensor
    """[rows] the tokens behind them; where a prompt ends, any."""
    ends: Tensor
    """[ends] rows that give their requests the next token."""


@dataclass(frozen=True)
class Ends:
    """What those rows leave for the first cycle."""

    logits: Tensor
    """[ends, vocab]"""
    features: Tensor | None
    """[ends, hidden_size], projected; None without a drafter."""


class ResidentCycle:
    """Target, drafter and their caches, run for any rows of the request table."""

    def __init__(
        self,
        target: Decoder,
        drafter: ResidentDrafter | None,
        caches: tuple[Tensor, Tensor | None],
        synthetic: Sequence[float] | None = None,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.layers = fused_target(target)
        self.target_cache, self.drafter_cache = caches
        device = target.embed.weight.device
        self.synthetic = None if synthetic is None else accepted_below(synthetic, device)
        """What decides on drafts whatever the target says; None: the target decides."""

    def run(self, state: Resident, requests: Tensor, breadth: Breadth, sampling: Sampling) -> None:
        """Draft, verify and accept for some requests. requests: [requests] table rows."""
        drafts = self.draft(state, requests, breadth)
        logits, features = self.verify(state, requests, drafts)
        penalize(logits, drafts, state.penalties, requests)
        chosen = choose(logits, argmax(logits), sampling, requests, state.computed + 1)
        chosen = chosen.view(len(requests), breadth.drafts + 1)
        settle(state, requests, drafts, chosen, features, self.synthetic)

    def draft(self, state: Resident, requests: Tensor, breadth: Breadth) -> Tensor:
        """[requests, drafts] tokens."""
        if self.drafter is None:
            return torch.empty(len(requests), 0, dtype=torch.int64, device=requests.device)
        return self.drafter.propose(state, requests, breadth, self.open_drafter)

    def verify(
        self, state: Resident, requests: Tensor, drafts: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [requests * (drafts + 1), vocab] and projected features of the same rows."""
        norm = self.layers.layers[0].input_norm
        embedding = self.target.embed.weight
        rows, x, scaled = verify_inputs(state, requests, drafts, embedding, norm.weight, norm.eps)
        taps = self.taps(len(x))
        first = residual.Normed(scaled, None, norm.eps)
        _, last = self.layers(x, first, self.open_target(rows), taps)
        logits = residual.linear(last, self.target.head)
        if taps is None or self.drafter is None:
            return logits, None
        return logits, self.drafter.model.project(taps.into)

    def fill(self, prompts: Prompts, attention: Attention) -> Ends:
        """Write the keys of prompts' rows into both caches.

        The drafter's for a prompt's last row, whose next token is not known yet, mean nothing: the
        first cycle writes them again before it reads them.
        """
        target, ends = self.target, prompts.ends
        x = target.embed(prompts.tokens)
        first = residual.normed(x, self.layers.layers[0].input_norm)
        taps = self.taps(len(x))
        to_the_end = taps is not None and len(self.layers.layers) in taps.layers
        reads = None if to_the_end else ends
        stream, last = self.layers(x, first, attention(self.target_cache), taps, reads)
        features = None if taps is None else self._fill_drafter(prompts, taps.into, attention)
        if not len(ends):
            return Ends(x.new_empty(0, target.config.vocab_size), features)
        if to_the_end:
            last = residual.normed(stream.index_select(0, ends), target.norm)
        return Ends(residual.linear(last, target.head), features)

    def _fill_drafter(self, prompts: Prompts, tapped: Tensor, attention: Attention) -> Tensor:
        drafter, cache = self.drafter, self.drafter_cache
        assert drafter is not None
        assert cache is not None
        features = drafter.model.project(tapped)
        stream, x = known_inputs(drafter.model, prompts.following, features)
        drafter.layers(stream, x, attention(cache), reads=prompts.ends[:0])
        return features.index_select(0, prompts.ends)

    def open_target(self, rows: PassRows) -> AttendProduct:
        """The target's attention for one pass over cached requests."""
        return _attend(self.target_cache, rows, self.layers.specs[0])

    def open_drafter(self, rows: PassRows) -> AttendProduct:
        """The drafter's."""
        assert self.drafter is not None
        assert self.drafter_cache is not None
        return _attend(self.drafter_cache, rows, self.drafter.layers.specs[0])

    def taps(self, rows: int) -> Taps | None:
        """Room for the streams that the drafter reads of a pass; None without a drafter."""
        if self.drafter is None:
            return None
        config = self.drafter.model.config
        embedding = self.target.embed.weight
        return Taps(config.taps, embedding.new_empty(rows, config.feature_size))


def _attend(cache: Tensor, rows: PassRows, like: QKVSpec) -> AttendProduct:
    """Attention over a cache of [layers, 2, slots, heads, head_dim], whose layers have heads `like`
    these. Contexts are divided among programs here, in a launch before the first layer's.

    Behind the first layer `rows` are settled: a layer's gate, the addition of its experts, or the
    one launch that a layer's products are, waits for all that was launched before it.
    """
    rows = divided(rows, like, cache[0])
    return lambda layer, qkv, spec: attend_product(qkv, spec, cache[layer], rows, layer > 0)
