"""Grammars compiled for a tokenizer, and one request's place in its own."""

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from peagle.config import StructuredOutputs
from peagle.errors import InputError
from peagle.grammar import FORM, KEPT, complaint_of, importing, limits, read, source_of, written
from peagle.sandbox import on_large_stack

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MASK_SECONDS = 5e-3
"""Seconds of the processor that a form's masks may take on average, since others wait for them."""
SPARE_SECONDS = 0.5
"""Seconds beyond that: the first masks take longer than others."""
TOO_SLOW = f"{FORM} too complex: it keeps other requests waiting"
NO_TOKEN = f"{FORM} what has to come next is no token of the target"


class GrammarCompiler:
    """Compiles grammars for one tokenizer; safe to call from several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        with importing():
            import llguidance.hf
        if not end_tokens:
            raise InputError("structured outputs need a target that names its end of text")
        ends, size = list(end_tokens), max(vocab_size, len(tokenizer))
        self._vocab_size = vocab_size
        try:
            self._tokenizer: LLTokenizer = llguidance.hf.from_tokenizer(tokenizer, size, ends)
        except ValueError as error:
            raise InputError(f"structured outputs: not with this tokenizer: {error}") from None
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def compile(self, wanted: StructuredOutputs) -> "GrammarConstraint":
        """Make the constraint of one sequence. Raises `InputError` for a grammar that is wrong,
        unsupported or too complex, or that no text fits.

        The latest `KEPT` are compiled once: an agent sends the same tools at every turn. They are
        told apart by their JSON, since to Python `true` equals 1, and properties have no order.
        """
        return GrammarConstraint(self._compiled(written(wanted)), self._vocab_size)

    def _compile(self, text: str) -> "LLMatcher":
        wanted = read(text)
        try:
            matcher = on_large_stack(lambda: self._matcher(wanted))
        except ValueError as error:
            raise InputError(f"structured outputs: {error}") from None
        if matcher.is_error():
            raise InputError(complaint_of(matcher))
        return matcher

    def _matcher(self, wanted: StructuredOutputs) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, source_of(wanted), log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out whether any text fits
        return matcher


class GrammarConstraint:
    """One request's place in its grammar."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._unused, self._vocab_size = matcher, vocab_size
        self._bytes = -(-vocab_size // 8)
        self._matcher = matcher.deep_copy()
        self._taken: list[int] = []
        self._masked, self._fault = 0, ""
        """How many of the next tokens are chosen under a mask, and why no more are."""
        self._seconds, self._count = 0.0, 0
        """Seconds of the processor that the masks so far took, and how many they are."""
        self.failure: str | None = None
        """Why the grammar failed: it may turn out too complex only as the output grows."""

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """The grammar's masks along the drafts, as far as it follows them: [K + 1, bytes] uint8.

        Where it is too complex, any token is allowed: a request that takes one there has failed.
        """
        masks, fault = self._masks(drafts)
        self._masked = len(drafts) + 1
        if fault is not None:
            self._masked, self._fault = len(masks), fault
            # to the end of the output: after an error, even among drafts, rollback fails
            self._matcher = self._unused.deep_copy()
            self._take(self._taken)
        else:
            self._matcher.rollback(len(masks) - 1)
        anything = torch.full((self._bytes,), 255, dtype=torch.uint8)
        return torch.stack(masks + [anything] * (len(drafts) + 1 - len(masks)))

    def advance(self, tokens: Sequence[int]) -> None:
        """Move on by the chosen tokens; an end of text after a complete form is not part of it."""
        if len(tokens) > self._masked:
            self.failure = self._fault
            return
        self._taken += tokens
        self._take(tokens)

    def _masks(self, drafts: Sequence[int]) -> tuple[list[Tensor], str | None]:
        """The masks that can be computed, and why the next one cannot.

        The matcher consumes drafts up to the last mask.
        """
        masks: list[Tensor] = []
        for draft in (*drafts, None):
            began = time.thread_time()
            mask = self._mask()
            self._seconds += time.thread_time() - began
            self._count += 1
            if self._seconds > SPARE_SECONDS + MASK_SECONDS * self._count:
                return masks, TOO_SLOW
            if self._matcher.is_error():
                return masks, complaint_of(self._matcher)
            if not mask.any():
                return masks, NO_TOKEN
            masks.append(mask)
            if draft is None or self._matcher.is_stopped():
                break
            if not self._matcher.try_consume_tokens([draft]):
                break
        return masks, None

    def _mask(self) -> Tensor:
        """Tokens allowed next, a bit each: [bytes] uint8. A tokenizer may have more."""
        mask = bytearray(self._matcher.compute_bitmask()[: self._bytes])
        mask[-1] &= 0xFF >> (-self._vocab_size % 8)
        return torch.frombuffer(mask, dtype=torch.uint8)

    def _take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
