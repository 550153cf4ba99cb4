"""Target and drafter on the device: their layers, caches and attention, and prompts through both.

Tensors only, no waiting: passes are captured in CUDA graphs, so nothing here may depend on a value
that only the device knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.fused import FusedDrafter
from peagle.engine.kv_cache import KVCache
from peagle.engine.logprobs import Scores, score
from peagle.engine.request_memory import RequestMemory
from peagle.models.decoder import Decoder, Recur
from peagle.models.fused import AttendProduct, Taps, fused_target
from peagle.ops import residual
from peagle.ops.cached_attention import PassRows, QKVSpec, attend_product, divided
from peagle.ops.delta_net import DeltaRows
from peagle.ops.products.normed import Normed
from peagle.ops.softcap import softcap
from peagle.ops.triton.fences import fences

Attention = Callable[[KVCache], AttendProduct]
"""A model's cache -> the attention of one pass."""


@dataclass(frozen=True)
class PromptRows:
    """Rows of prompt chunks, concatenated, then padding rows."""

    tokens: Tensor
    """[rows]"""
    following: Tensor
    """[rows] the token after each; any token where a prompt ends."""
    ends: Tensor
    """[ends] rows that give their requests the next token."""
    recurrent: DeltaRows | None
    """The same rows for recurrent layers; None where no layer is a recurrence."""
    scored: Tensor | None = None
    """[scored] rows whose following token is scored; None: no row's."""


@dataclass(frozen=True)
class PromptEnds:
    """What prompts leave for their first cycle."""

    logits: Tensor
    """[ends, vocab]"""
    features: Tensor | None
    """[ends, hidden_size], projected; None without a drafter."""
    scores: Scores | None = None
    """The scores of the scored rows."""


class DeviceModels:
    """Target, drafter and their caches, run for any rows of the request table."""

    def __init__(
        self, target: Decoder, network: FusedDrafter | None, memory: RequestMemory
    ) -> None:
        """memory: holds the caches of both, and the states of the target's recurrent layers."""
        self.target, self.network = target, network
        self.layers = fused_target(target)
        self.target_cache, self.network_cache = memory.target_cache, memory.network_cache
        self.states = memory.states

    @property
    def caches(self) -> list[KVCache]:
        """The caches that there are."""
        both = self.target_cache, self.network_cache
        return [cache for cache in both if cache is not None]

    def fill(self, prompts: PromptRows, attention: Attention, followed: bool) -> PromptEnds:
        """Write the keys and values of prompt rows into both caches; the target's alone where the
        drafter follows none of the requests.

        The drafter's at a prompt's last row are wrong, since its next token is not known yet: the
        first cycle overwrites them before it reads them.
        """
        target, ends = self.target, prompts.ends
        x = target.scaled(target.embed(prompts.tokens))
        first = residual.normed(x, self.layers.layers[0].input_norm)
        taps = self.taps(len(x)) if followed else None
        # the last layer runs for rows that are read alone, unless its stream is a feature of all
        # rows
        tapped = taps is not None and len(self.layers.layers) in taps.layers
        to_the_end = tapped or prompts.scored is not None
        reads = None if to_the_end else ends
        given = attention(self.target_cache), taps, reads, self._recur(prompts)
        stream, last = self.layers(x, first, *given)
        if self.states is not None and prompts.recurrent is not None:
            self.states.settle(prompts.recurrent.requests)
        features = self.features(taps)
        if features is not None:
            self.fill_network(prompts.following, features, attention)
            features = features.index_select(0, ends)
        scores = self._score(prompts, stream)
        if not len(ends):
            return PromptEnds(x.new_empty(0, target.spec.vocab_size), features, scores)
        if to_the_end:
            return PromptEnds(self._stream_logits(stream.index_select(0, ends)), features, scores)
        return PromptEnds(self.logits(last), features)

    def _recur(self, prompts: PromptRows) -> Recur | None:
        """The recurrences of prompt rows; None where no layer is one."""
        rows = prompts.recurrent
        return None if self.states is None or rows is None else self.states.open(rows)

    def recur(self, rows: PassRows) -> Recur | None:
        """The target's recurrences for one pass over cached requests, whose first rows are sure."""
        if self.states is None:
            return None
        spans = rows.requests, rows.starts, rows.firsts, rows.counts, torch.ones_like(rows.counts)
        return self.states.open(DeltaRows(*spans, self.states.accepted, rows.most))

    def fill_network(self, following: Tensor, features: Tensor, attention: Attention) -> None:
        """Write the drafter's keys and values of some rows.

        following: [rows] the tokens after them; features: [rows, hidden_size], projected.
        """
        assert self.network is not None
        assert self.network_cache is not None
        self.network.fill(following, features, attention(self.network_cache))

    def _score(self, prompts: PromptRows, stream: Tensor) -> Scores | None:
        """The scores of the tokens that follow the scored rows. stream: [rows, hidden_size]."""
        if prompts.scored is None:
            return None
        rows, tokens = (of.index_select(0, prompts.scored) for of in (stream, prompts.following))
        return score(rows, self._stream_logits, tokens)

    def _stream_logits(self, stream: Tensor) -> Tensor:
        """The logits [rows, vocab] of the stream after the last layer [rows, hidden_size]."""
        return self.logits(residual.normed(stream, self.target.norm))

    def logits(self, last: Normed) -> Tensor:
        """The logits [rows, vocab] of the residual stream under the final norm."""
        return softcap(residual.linear(last, self.target.head), self.target.spec.logit_softcap)

    def forget_null_slots(self) -> None:
        """Zero what rows without slots of their own have written: other rows' hidden positions."""
        for cache in self.caches:
            for tensor, _ in cache.tensors:
                tensor[:, :, -1] = 0

    def open_target(self, rows: PassRows) -> AttendProduct:
        """The target's attention for one pass over cached requests."""
        return _attend(self.target_cache, rows, self.layers.specs)

    def open_network(self, rows: PassRows) -> AttendProduct:
        """The drafter's attention for one pass over cached requests."""
        assert self.network is not None
        assert self.network_cache is not None
        return _attend(self.network_cache, rows, self.network.layers.specs)

    def features(self, taps: Taps | None) -> Tensor | None:
        """The features that a pass kept, projected [rows, hidden_size]; None without a drafter."""
        if taps is None or self.network is None:
            return None
        return self.network.model.project(taps.into)

    def taps(self, rows: int) -> Taps | None:
        """Where to keep the streams of a pass that the drafter reads; None without a drafter."""
        if self.network is None:
            return None
        config = self.network.model.config
        into = self.target.embed.weight.new_empty(rows, config.feature_size)
        return Taps(config.taps, into, self.target.spec.residual_multiplier)


def _attend(cache: KVCache, rows: PassRows, specs: Mapping[int, QKVSpec]) -> AttendProduct:
    """Attention of a pass's layers over their cache.

    Contexts are divided among programs here, in a launch before the first layer's, for all layers
    of the same heads together.
    """
    # how contexts are divided depends on the heads' sizes, and where keys lie on the window, too
    by_sizes: dict[tuple[int, int, int], PassRows] = {}
    by_spec: dict[tuple[int | None, tuple[int, int, int]], PassRows] = {}
    for layer, spec in specs.items():
        if spec.sizes not in by_sizes:
            by_sizes[spec.sizes] = divided(rows, spec, cache.layers[layer])
        key = spec.window, spec.sizes
        if key not in by_spec:
            by_spec[key] = cache.rows_for(spec.window, by_sizes[spec.sizes])

    # what is launched before here may be read early once a fence has come in between
    opened = fences()

    def attend(layer: int, qkv: Tensor, spec: QKVSpec) -> Tensor:
        of_layer = by_spec[spec.window, spec.sizes]
        return attend_product(qkv, spec, cache.layers[layer], of_layer, opened)

    return attend
