"""What the host does to logits within a step: bias, least lengths and forms."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.constraint import Constraint
from peagle.engine.step import Settings
from peagle.transfer import Download, upload


@dataclass(frozen=True)
class Choice:
    """The rows of logits from which one request's next tokens are chosen."""

    settings: Settings
    drafts: int
    """There is a row for each, and one more."""
    missing: int
    """Output tokens that must come before one that ends it."""


class LogitsProcessor:
    """Stands beside a worker, which calls it between computing logits and choosing tokens.

    constraint_of: the constraint of a request, by `Settings.constraint`. Constraints have a state
    of their own, so that they stay with the host, and are no part of a step.
    """

    def __init__(self, constraint_of: Callable[[str], Constraint]) -> None:
        self._constraint_of = constraint_of

    def edit(self, logits: Tensor, choices: Sequence[Choice], drafts: Download) -> None:
        """Apply bias, form and least length in place.

        logits: [sum(drafts + 1), vocab]; drafts: [sum(drafts)]. Only forms wait for the drafts, and
        nothing waits for the logits.
        """
        shares = logits.split([choice.drafts + 1 for choice in choices])
        for choice, rows in zip(choices, shares, strict=True):
            _add_bias(rows, choice.settings.params.logit_bias)
            if choice.missing > 0:
                stops = upload(choice.settings.stop_ids, rows.device)
                rows[: choice.missing].index_fill_(1, stops, float("-inf"))
        if any(choice.settings.constraint is not None for choice in choices):
            self._keep_to_forms(shares, choices, drafts.tolist())

    def _keep_to_forms(
        self, shares: Sequence[Tensor], choices: Sequence[Choice], drafts: Sequence[int]
    ) -> None:
        """Rule out what forms do not allow. shares: [drafts + 1, vocab] of each request."""
        proposed, bound, masks = iter(drafts), [], []
        for choice, rows in zip(choices, shares, strict=True):
            own = list(itertools.islice(proposed, choice.drafts))
            if choice.settings.constraint is not None:
                bound.append(rows)
                masks.append(self._constraint_of(choice.settings.constraint).allowed(own))
        bits = upload(torch.cat(masks), bound[0].device)
        forbidden = ~_unpacked(bits, bound[0].shape[1])
        for rows, mask in zip(bound, forbidden.split([len(rows) for rows in bound]), strict=True):
            rows.masked_fill_(mask, float("-inf"))


def _add_bias(rows: Tensor, bias: Mapping[int, float]) -> None:
    """Add to the logits of some tokens. rows: [rows, vocab]."""
    if bias:
        ids = upload([*bias], rows.device)
        added = upload([*bias.values()], rows.device).to(rows.dtype)
        rows.index_add_(1, ids, added.expand(len(rows), -1))


def _unpacked(bits: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row, the lowest of a byte first. bits: [rows, bytes] uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None] >> places & 1).flatten(1)[:, :count].bool()
