"""One cycle on state that stays on the device: draft, verify, accept; and the prompts before it.

This is what a CUDA graph captures: tensors only, no waiting. Nothing here may depend on a value
that only the device knows, so all requests of a batch get the same number of drafts, and one that
wants fewer accepts fewer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from peagle.drafters.resident import CycleShape, ResidentDrafter, known_inputs
from peagle.engine.device.texts import DeviceTexts, merged
from peagle.engine.draft_temperatures import DraftTemperatures
from peagle.engine.kv_cache import KVCache
from peagle.engine.logprobs import Scores, score
from peagle.models.decoder import Decoder
from peagle.models.fused import AttendProduct, Taps, fused_target
from peagle.ops import residual
from peagle.ops.argmax import argmax
from peagle.ops.cached_attention import PassRows, QKVSpec, attend_product, divided
from peagle.ops.drafts import Drafts
from peagle.ops.lookup import Found
from peagle.ops.penalties import penalize
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race
from peagle.ops.resident import ResidentState, accepted_below, settle, verify_inputs
from peagle.ops.sampling import Sampling, sample_requests
from peagle.ops.softcap import softcap

Attention = Callable[[KVCache], AttendProduct]
"""A model's cache -> the attention of one pass."""


@dataclass(frozen=True)
class PromptRows:
    """Rows of prompt chunks, concatenated, then padding rows."""

    tokens: Tensor
    """[rows]"""
    following: Tensor
    """[rows] the tokens after them; any token where a prompt ends."""
    ends: Tensor
    """[ends] rows that give their requests the next token."""
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
    """Of the scored rows."""


@dataclass(frozen=True)
class Proposed:
    """Drafts, and what they were chosen from."""

    drafts: Drafts
    """[requests, drafts]"""
    rivals: tuple[Found, Tensor] | None = None
    """What was found in the texts and a drafter's drafts [requests, drafts], if there are both."""


@dataclass(frozen=True)
class Verified:
    """Drafts, and what the target makes of them."""

    drafts: Drafts
    """[requests, drafts]"""
    logits: Tensor
    """[requests * (drafts + 1), vocab]"""
    features: Tensor | None
    """[requests * (drafts + 1), hidden_size], projected; None without a drafter."""


class DeviceCycle:
    """Target, drafter and their caches, run for any rows of the request table."""

    def __init__(
        self,
        target: Decoder,
        drafter: ResidentDrafter | None,
        caches: tuple[KVCache, KVCache | None],
        synthetic: Sequence[float] | None = None,
        texts: DeviceTexts | None = None,
    ) -> None:
        self.target, self.drafter, self.texts = target, drafter, texts
        self.layers = fused_target(target)
        self.target_cache, self.drafter_cache = caches
        device = target.embed.weight.device
        self.synthetic = None if synthetic is None else accepted_below(synthetic, device)
        """Thresholds that accept drafts whatever the target says; None: the target decides."""

    def run(
        self,
        state: ResidentState,
        requests: Tensor,
        shape: CycleShape,
        sampling: Sampling,
        temperatures: DraftTemperatures,
    ) -> None:
        """Draft, verify and accept for some requests. requests: [requests] table rows."""
        race = temperatures.race(sampling, state.computed, requests)
        proposed = self.draft(state, race, shape)
        verified = self.verify(state, requests, proposed.drafts)
        self.accept(state, requests, verified, sampling, temperatures, proposed.rivals)

    def draft(self, state: ResidentState, race: Race, shape: CycleShape) -> Proposed:
        """[requests, drafts] for a race's requests."""
        requests, own = race.requests, None
        if not shape.drafts:
            if self.texts is not None:
                self.texts.follow(state, requests)
            return Proposed(Drafts(requests.new_empty(len(requests), 0)))
        if self.drafter is not None:
            own = self.drafter.propose(state, race, shape, self.open_drafter)
            if self.texts is None:
                return Proposed(own)
        assert self.texts is not None, "whoever drafts has a drafter or a lookup"
        found = self.texts.propose(state, requests, shape.drafts)
        if own is None:  # the rows are there whether they are used or not
            found = replace(found, used=found.lengths > 0)
        state.results[:, -1].index_copy_(0, requests, found.used.long())
        rivals = None if own is None else (found, own.tokens)
        return Proposed(merged(found, own), rivals)

    def verify(
        self,
        state: ResidentState,
        requests: Tensor,
        drafts: Drafts,
        placed: Callable[[PassRows], PassRows] | None = None,
    ) -> Verified:
        """What the target makes of drafts [requests, drafts].

        placed: where the rows stand, if not one behind another.
        """
        norm = self.layers.layers[0].input_norm
        embedding, tokens = self.target.embed.weight, drafts.tokens
        rows, x, normed = verify_inputs(state, requests, tokens, embedding, norm.weight, norm.eps)
        rows = rows if placed is None else placed(rows)
        first = Normed(normed, None, norm.eps)
        if self.target.embedding_scale is not None or self.target.batch_invariant:
            x = self.target.scaled(x)
            first = residual.normed(x, norm)  # as a prompt's rows begin
        taps = self.taps(len(x))
        _, last = self.layers(x, first, self.open_target(rows), taps)
        return Verified(drafts, self._logits(last), self._features(taps))

    def accept(
        self,
        state: ResidentState,
        requests: Tensor,
        verified: Verified,
        sampling: Sampling,
        temperatures: DraftTemperatures,
        rivals: tuple[Found, Tensor] | None = None,
    ) -> None:
        """Choose tokens, which penalizes the logits in place, and accept drafts that agree.

        rivals: as in `Proposed`, where it is learned which of them were better.
        """
        drafts, logits = verified.drafts.tokens, verified.logits
        penalize(logits, drafts, state.penalties, requests)
        chosen = sample_requests(logits, argmax(logits), sampling, requests, state.computed + 1)
        chosen = chosen.view(len(requests), drafts.shape[1] + 1)
        if drafts.shape[1]:
            self.learn(state, requests, verified.drafts, chosen, temperatures, rivals)
        settle(state, requests, drafts, chosen, verified.features, self.synthetic)

    def learn(
        self,
        state: ResidentState,
        requests: Tensor,
        drafts: Drafts,
        chosen: Tensor,
        temperatures: DraftTemperatures,
        rivals: tuple[Found, Tensor] | None = None,
    ) -> None:
        """Learn from drafts, but not from those of requests that the drafter does not follow.

        chosen: [requests, drafts + 1] what the target takes after each prefix of the drafts.
        """
        followed, others = state.ks.index_select(0, requests) > 0, drafts.alternatives
        if others is not None:
            drafts = replace(drafts, alternatives=others.where(followed[:, None, None], -1))
        temperatures.record(drafts, chosen)
        if self.texts is not None and rivals is not None:
            found, own = rivals
            found = replace(found, lengths=found.lengths.where(followed, 0))
            self.texts.record(found, drafts.tokens, chosen, own)

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
        tapped = taps is not None and len(self.layers.layers) in taps.layers
        to_the_end = tapped or prompts.scored is not None
        reads = None if to_the_end else ends
        stream, last = self.layers(x, first, attention(self.target_cache), taps, reads)
        features = self._features(taps)
        if features is not None:
            self.show_drafter(prompts.following, features, attention)
            features = features.index_select(0, ends)
        scores = self._score(prompts, stream)
        if not len(ends):
            return PromptEnds(x.new_empty(0, target.spec.vocab_size), features, scores)
        if to_the_end:
            return PromptEnds(self._stream_logits(stream.index_select(0, ends)), features, scores)
        return PromptEnds(self._logits(last), features)

    def _score(self, prompts: PromptRows, stream: Tensor) -> Scores | None:
        """Of the tokens that follow the scored rows. stream: [rows, hidden_size]."""
        if prompts.scored is None:
            return None
        rows, tokens = (of.index_select(0, prompts.scored) for of in (stream, prompts.following))
        return score(rows, self._stream_logits, tokens)

    def _stream_logits(self, stream: Tensor) -> Tensor:
        """Of the residual stream after the last layer [rows, hidden_size]: [rows, vocab]."""
        return self._logits(residual.normed(stream, self.target.norm))

    def _logits(self, last: Normed) -> Tensor:
        """Of the same under the final norm."""
        return softcap(residual.linear(last, self.target.head), self.target.spec.logit_softcap)

    def show_drafter(self, following: Tensor, features: Tensor, attention: Attention) -> None:
        """Write the drafter's keys and values of some rows.

        following: [rows] the tokens after them; features: [rows, hidden_size], projected.
        """
        drafter, cache = self.drafter, self.drafter_cache
        assert drafter is not None
        assert cache is not None
        stream, x = known_inputs(drafter.model, following, features)
        drafter.layers(stream, x, attention(cache), reads=following[:0])

    def forget_null_slots(self) -> None:
        """Zero what rows without slots of their own have written: other rows' hidden positions."""
        for cache in (self.target_cache, self.drafter_cache):
            for tensor, _ in () if cache is None else cache.tensors:
                tensor[:, :, -1] = 0

    def open_target(self, rows: PassRows) -> AttendProduct:
        """The target's attention for one pass over cached requests."""
        return _attend(self.target_cache, rows, self.layers.specs)

    def open_drafter(self, rows: PassRows) -> AttendProduct:
        """The drafter's."""
        assert self.drafter is not None
        assert self.drafter_cache is not None
        return _attend(self.drafter_cache, rows, self.drafter.layers.specs)

    def _features(self, taps: Taps | None) -> Tensor | None:
        """What a pass kept for the drafter, projected [rows, hidden_size]; None without one."""
        if taps is None or self.drafter is None:
            return None
        return self.drafter.model.project(taps.into)

    def taps(self, rows: int) -> Taps | None:
        """Where to keep the streams of a pass that the drafter reads; None without a drafter."""
        if self.drafter is None:
            return None
        config = self.drafter.model.config
        embedding = self.target.embed.weight
        return Taps(config.taps, embedding.new_empty(rows, config.feature_size))


def _attend(cache: KVCache, rows: PassRows, specs: Sequence[QKVSpec]) -> AttendProduct:
    """Attention of a pass's layers over their cache.

    Contexts are divided among programs here, in a launch before the first layer's, for all layers
    of the same heads together. After the first layer `rows` are settled (`attend_product`): the
    launches between two layers' attentions include one that waits for everything before it.
    """
    by_sizes: dict[tuple[int, int, int], PassRows] = {}
    by_spec: dict[tuple[int | None, tuple[int, int, int]], PassRows] = {}
    for layer, spec in enumerate(specs):
        if spec.sizes not in by_sizes:
            by_sizes[spec.sizes] = divided(rows, spec, cache.layers[layer])
        key = spec.window, spec.sizes
        if key not in by_spec:
            by_spec[key] = cache.rows_for(spec.window, by_sizes[spec.sizes])

    def attend(layer: int, qkv: Tensor, spec: QKVSpec) -> Tensor:
        of_layer = by_spec[spec.window, spec.sizes]
        return attend_product(qkv, spec, cache.layers[layer], of_layer, layer > 0)

    return attend
