"""Token ids -> text as they arrive."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""Most bytes of one character, hence most tokens that it takes."""
CONTEXT = 8
"""Tokens decoded together with those after them: some tokenizers drop the space before whatever
comes first."""


class Detokenizer:
    """Text of one request, in whole characters.

    prompt: the tokens before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        before = list(prompt[-CONTEXT:])
        self._tokens = [] if decode(before).endswith(UNFINISHED) else before
        self._context = 0
        """First token that decoding the newest ones still needs as context."""
        self._done = len(self._tokens)
        """Number of tokens whose text is in the prompt or was returned."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text of all but those of an incomplete character.

        Bytes that are no character after `BYTES` tokens never become one.
        """
        self._tokens += tokens
        for held in range(BYTES):
            end = len(self._tokens) - held
            if end <= self._done:
                return ""
            text = self._decode(self._tokens[self._context : end])
            if not text.endswith(UNFINISHED):
                break
        return self._take(text, end)

    def flush(self) -> str:
        """The text of whatever bytes are left, complete or not."""
        return self._take(self._decode(self._tokens[self._context :]), len(self._tokens))

    def skip(self, token: int) -> None:
        """Add a token that has no text of its own; what came before it must be flushed."""
        self._tokens.append(token)
        self._take(self._decode(self._tokens[self._context :]), len(self._tokens))

    def _take(self, text: str, end: int) -> str:
        """The new text of tokens up to `end`, of `text`, that from the context on."""
        known = self._decode(self._tokens[self._context : self._done])
        fresh = text[len(known) :]
        # a token without text, such as an end of text, is no context for the next one
        self._context = self._done if fresh else max(self._context, self._done - CONTEXT)
        self._done = end
        return fresh
