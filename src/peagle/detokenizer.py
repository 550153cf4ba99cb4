"""Token ids -> text as they arrive, cut at stop strings."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""Most bytes of one character, hence most tokens that it takes."""
CONTEXT = 8
"""Tokens decoded together with those after them: some tokenizers drop the space before whatever
comes first."""


class Detokenizer:
    """Text of one request, token by token; never shows half a character or half a stop string.

    prompt: the tokens before it. include_stop: whether the text ends after a stop string that ends
    it; then nothing is held back.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop: Sequence[str],
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
        include_stop: bool = False,
    ) -> None:
        self._decode, self._stop, self._include_stop = decode, tuple(stop), include_stop
        self._held = 0 if include_stop else max((len(text) for text in stop), default=1) - 1
        before = list(prompt[-CONTEXT:])
        self._tokens = [] if decode(before).endswith(UNFINISHED) else before
        self._context = 0
        """First token that decoding the newest ones still needs as context."""
        self._done = len(self._tokens)
        """Number of tokens whose text is in the prompt or in `text`."""
        self._least = self._done + min_tokens
        self.text = ""
        self._shown = 0

    def extend(self, tokens: Sequence[int]) -> int | None:
        """Add tokens; return how many of them complete a stop string, else None.

        The text then ends before that string, or after it. Without stop strings all tokens are
        decoded at once.
        """
        if not self._stop:
            self._append(tokens)
            return None
        for count, token in enumerate(tokens, start=1):
            if self._append([token]):
                return count
        return None

    def _append(self, tokens: Sequence[int]) -> bool:
        """Take all tokens but those of an incomplete character; returns as `_take`.

        Bytes that are no character after `BYTES` tokens never become one.
        """
        self._tokens += tokens
        for held in range(BYTES):
            end = len(self._tokens) - held
            if end <= self._done:
                return False
            text = self._decode(self._tokens[self._context : end])
            if not text.endswith(UNFINISHED):
                break
        return self._take(text, end)

    def flush(self) -> bool:
        """Take whatever bytes are left at the end, complete or not; returns as `_take`."""
        return self._take(self._decode(self._tokens[self._context :]), len(self._tokens))

    def delta(self, finished: bool) -> str:
        """Text not shown yet; what may begin a stop string is held back until it cannot."""
        stop = len(self.text) if finished else max(len(self.text) - self._held, self._shown)
        fresh, self._shown = self.text[self._shown : stop], stop
        return fresh

    def _take(self, text: str, end: int) -> bool:
        """Add the new text of tokens up to `end`; True when a stop string is now complete."""
        known = self._decode(self._tokens[self._context : self._done])
        before, fresh = len(self.text), text[len(known) :]
        self.text += fresh
        # a token without text, such as an end of text, is no context for the next one
        self._context = self._done if fresh else max(self._context, self._done - CONTEXT)
        self._done = end
        return end > self._least and self._cut(before)

    def _cut(self, before: int) -> bool:
        """End the text at a stop string that reaches past its first `before` characters."""
        places = [(self.text.find(s, max(before - len(s) + 1, 0)), s) for s in self._stop]
        found = [(place, place + len(s)) for place, s in places if place >= 0]
        if found:
            start, end = min(found)
            self.text = self.text[: end if self._include_stop else start]
        return bool(found)
