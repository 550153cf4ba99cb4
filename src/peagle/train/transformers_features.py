"""Features of targets that transformers runs: taps by hooks, and a proof of what they mean.

A document has a row of its own: which models would keep two in one row apart differs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.ends import Ends
from peagle.models.foreign import decoder_of
from peagle.train.features import Features, FeatureSource, Split, documents_in, placed
from peagle.train.packing import Batch, Document, pack
from peagle.transfer import to_device

PROBE = 40
"""Tokens of a probe."""
LINEAR = 1e-4
"""Largest relative difference of logits from the head's."""


class TransformersFeatures(FeatureSource):
    """Features by transformers' model."""

    def __init__(self, model: Any, taps: tuple[int, ...]) -> None:
        self.device = model.device
        self._decoder, layers = decoder_of(model)
        self._taps, self._tapped = taps, dict[int, Tensor]()
        for tap in taps:
            if tap < len(layers):
                layers[tap].register_forward_pre_hook(partial(self._enters, tap), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(self._leaves, tap))

    def __call__(self, split: Split, rows: Tensor, batch: Batch) -> Features:
        (tokens,) = to_device(self.device, batch.tokens)
        parts = [part for spans in _passes(batch) for part in self._alone(tokens, spans)]
        return placed(len(batch), parts)

    def _alone(self, tokens: Tensor, spans: Sequence[slice]) -> Iterator[tuple[slice, Features]]:
        """States of documents, each in a row of its own, padded behind."""
        lengths = [span.stop - span.start for span in spans]
        padded = tokens.new_zeros(len(spans), max(lengths))
        for row, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            padded[row, :length] = tokens[span]
        found = self._run(padded)
        for row, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            yield span, Features(found.tapped[row, :length], found.final[row, :length])

    @torch.no_grad()
    def _run(self, tokens: Tensor) -> Features:
        final = self._decoder(input_ids=tokens, use_cache=False).last_hidden_state
        found = [self._tapped.pop(tap) for tap in self._taps]
        if any(state.shape != final.shape for state in found):
            shapes = [list(state.shape) for state in found]
            raise InputError(f"the target's streams {shapes} are not like {list(final.shape)}")
        return Features(torch.cat(found, dim=-1), final)

    def _enters(self, tap: int, _: Any, given: Any, named: Any) -> None:
        self._tapped[tap] = named["hidden_states"] if "hidden_states" in named else given[0]

    def _leaves(self, tap: int, _: Any, given: Any, left: Any) -> None:
        self._tapped[tap] = left[0] if isinstance(left, tuple) else left


def _passes(batch: Batch) -> Iterator[list[slice]]:
    """Documents of like lengths, as many as take no more places together than the batch."""
    taken: list[slice] = []
    for span in documents_in(batch):
        if taken and (len(taken) + 1) * (taken[0].stop - taken[0].start) > len(batch):
            yield taken
            taken = []
        taken.append(span)
    yield taken


def proved(
    model: Any, ends: Ends, taps: tuple[int, ...], tell: Callable[[str], None]
) -> TransformersFeatures:
    """The features of a model. `tell` is called with how its logits compare.

    Raises `InputError` where they are not what the head makes of the final states.
    """
    source, draw = TransformersFeatures(model, taps), torch.Generator().manual_seed(0)
    tokens = torch.randint(ends.spec.vocab_size, (PROBE,), generator=draw)
    try:
        difference = _head_difference(model, ends, source, tokens)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"transformers cannot run the target: {error}") from None
    if not difference <= max(LINEAR, 2 * torch.finfo(model.dtype).eps):
        raise InputError(
            f"{model.config.model_type}: its logits are not its head times its final state "
            f"(relative difference {difference:.1e}), so no drafter can be trained for it"
        )
    tell(f"features by transformers: logits are the head's within {difference:.0e}, as required")
    return source


@torch.no_grad()
def _head_difference(model: Any, ends: Ends, source: TransformersFeatures, tokens: Tensor) -> float:
    """How far logits are from what the ends make of the final states: the largest difference over
    the largest value."""
    row = pack([Document.answered(tokens.tolist(), 1)], len(tokens)).batch(torch.arange(1))
    expected = model(input_ids=tokens[None].to(source.device), use_cache=False).logits[0].float()
    found = ends.logits(source("training", torch.arange(1), row).final).float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
