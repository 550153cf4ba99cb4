"""Features of targets that transformers runs: taps by hooks, and a proof of what they mean."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peagle.errors import InputError
from peagle.models.ends import Ends
from peagle.models.foreign import decoder_of
from peagle.train.features import Features, FeatureSource, Split, documents_in, placed
from peagle.train.packing import Batch, Document, pack
from peagle.transfer import to_device

PROBE = 40
"""Tokens of each of a probe's documents."""
LEAK, SAME, LINEAR = 1e-5, 1e-3, 1e-4
"""Largest relative difference of states after another document, of states packed and alone, and of
logits from the head's."""
LONG = 2048
"""Tokens of a pass from which its documents run alone: transformers masks what they must not see of
each other, over the square of a pass's length. On two cores eight documents of so many tokens take
half of the time alone, and of twice as many a third."""
ROUNDINGS = 8
"""Roundings of the run's dtype that kernels may differ by, if that is more."""


class TransformersFeatures(FeatureSource):
    """Features by transformers' model, of packed rows as they are or of one document a row."""

    def __init__(self, model: Any, taps: tuple[int, ...], packed: bool = False) -> None:
        self.device, self.packed = model.device, packed
        self._decoder, layers = decoder_of(model)
        self._taps, self._tapped = taps, dict[int, Tensor]()
        for tap in taps:
            if tap < len(layers):
                layers[tap].register_forward_pre_hook(partial(self._enters, tap), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(self._leaves, tap))

    def __call__(self, split: Split, rows: Tensor, batch: Batch) -> Features:
        tokens, positions = to_device(self.device, batch.tokens, batch.positions)
        if self.packed and len(batch) < LONG:
            found = self._run(tokens[None], position_ids=positions[None])
            return Features(found.tapped[0], found.final[0])
        parts = [part for spans in _passes(batch) for part in self._alone(tokens, spans)]
        return placed(len(batch), parts)

    def _alone(self, tokens: Tensor, spans: Sequence[slice]) -> Iterator[tuple[slice, Features]]:
        """States of documents, each in a row of its own, padded behind."""
        found = self._run(pad_sequence([tokens[span] for span in spans], batch_first=True))
        for row, span in enumerate(spans):
            length = span.stop - span.start
            yield span, Features(found.tapped[row, :length], found.final[row, :length])

    @torch.no_grad()
    def _run(self, tokens: Tensor, **inputs: Tensor) -> Features:
        final = self._decoder(input_ids=tokens, use_cache=False, **inputs).last_hidden_state
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
    """The features of a model, packed if that is proved to keep documents apart.

    `tell` is called with both verdicts. Raises `InputError` where logits are not what the head
    makes of the final states.
    """
    source, draw = TransformersFeatures(model, taps), torch.Generator().manual_seed(0)
    one, other, third = torch.randint(ends.spec.vocab_size, (3, PROBE), generator=draw).tolist()
    other = other[: PROBE - 9]  # lengths differ, and so do sums
    rounding = torch.finfo(model.dtype).eps
    try:
        difference = _head_difference(model, ends, source, one)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"transformers cannot run the target: {error}") from None
    if not difference <= max(LINEAR, 2 * rounding):
        raise InputError(
            f"{model.config.model_type}: its logits are not its head times its final state "
            f"(relative difference {difference:.1e}), so no drafter can be trained for it"
        )
    tell(f"features by transformers: logits are the head's within {difference:.0e}, as required")
    source.packed = True
    try:
        together = _states(source, one, other)
        leak = _relative(_states(source, third, other)[PROBE:], together[PROBE:])
        source.packed = False
        apart = _relative(together, _states(source, one, other))
    except (RuntimeError, TypeError, ValueError):  # some take no positions
        leak = apart = float("inf")
    source.packed = leak <= LEAK and apart <= max(SAME, ROUNDINGS * rounding)
    alone = "each document has a row of its own"
    way = f"documents share rows under {LONG} tokens" if source.packed else alone
    tell(f"features by transformers: {way} (packed, states differ by {max(leak, apart):.0e})")
    return source


def _head_difference(
    model: Any, ends: Ends, source: TransformersFeatures, tokens: Sequence[int]
) -> float:
    """How far logits are from what the ends make of the final states, relatively."""
    ids = torch.tensor([tokens], device=source.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0]
        final = source("training", torch.arange(1), _batch(tokens)).final
        return _relative(ends.logits(final), logits)


def _states(source: TransformersFeatures, *documents: Sequence[int]) -> Tensor:
    """All features of documents in one row, side by side."""
    features = source("training", torch.arange(1), _batch(*documents))
    return torch.cat((features.tapped, features.final), dim=-1)


def _batch(*documents: Sequence[int]) -> Batch:
    rows = [Document.answered(tokens, 1) for tokens in documents]
    return pack(rows, sum(map(len, documents))).batch(torch.arange(1))


def _relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
