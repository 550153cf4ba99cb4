"""Proposers of other packages, found by their entry points; what they do wrong harms no request."""

import logging
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Protocol

import torch

from peagle.drafters.proposer import Needs, Proposer, ProposerRows
from peagle.errors import InputError
from peagle.ops.draft import NO_DRAFT, Draft
from peagle.speculative_config import PROPOSERS

log = logging.getLogger("peagle.drafters")


class TextProposer(Protocol):
    """What the class that an entry point of `peagle.proposers` names must be.

    It is called with the size of the target's vocabulary. It runs on the host, between the
    target's passes.
    """

    def propose(self, text: Sequence[int], most: int) -> Sequence[int]:
        """The tokens that may follow a request's text, in order: at most `most`, or none.

        text: the token ids of its prompt and of what the target has written so far.
        """


class Outside(Proposer):
    """A proposer of another package. What it gets wrong costs drafts: the text stays the target's.

    A request for which it raises, or gives anything but at most as many tokens as asked, all of the
    vocabulary, goes on without drafts, and the log says so once.
    """

    needs = Needs(history=True, on_host=True)

    def __init__(self, name: str, proposer: TextProposer, vocab_size: int) -> None:
        """name: that of its entry point."""
        self._name, self._proposer, self._vocab_size = name, proposer, vocab_size
        self._told = False

    def propose(self, rows: ProposerRows) -> Draft:
        """What it proposes for each request's text."""
        tokens, requests, counts = rows.texts
        found = [
            self._drafts(tokens[row, :count].tolist(), rows.drafts)
            for row, count in zip(requests.tolist(), counts.tolist(), strict=True)
        ]
        padded = [[*draft, *[NO_DRAFT] * (rows.drafts - len(draft))] for draft in found]
        return Draft(torch.tensor(padded, dtype=torch.int64, device=tokens.device))

    def _drafts(self, text: Sequence[int], most: int) -> list[int]:
        try:
            return self._checked(self._proposer.propose(text, most), most)
        except Exception as error:  # code of others may raise anything
            if not self._told:
                what = str(error).strip() or "no message"
                log.warning(f"proposer {self._name}: {type(error).__name__}: {what}; no drafts")
            self._told = True
            return []

    def _checked(self, draft: Sequence[int], most: int) -> list[int]:
        """The draft. Raises `ValueError` where it is none."""
        tokens = list(draft)
        if len(tokens) > most:
            raise ValueError(f"it gives {len(tokens)} drafts, and {most} were asked for")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self._vocab_size:
                raise ValueError(f"{token!r} is no token of the {self._vocab_size} that there are")
        return tokens


def load_outside(name: str, vocab_size: int) -> Outside:
    """The proposer that an entry point names. Raises `InputError` where it cannot be made."""
    [found] = entry_points(group=PROPOSERS, name=name)
    try:
        return Outside(name, found.load()(vocab_size), vocab_size)
    except Exception as error:  # code of others may raise anything
        raise InputError(f"proposer {name} ({found.value}): {error}") from None
