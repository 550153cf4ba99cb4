"""Token ids -> text as they arrive."""

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""Most bytes of one character, hence most tokens that it takes."""
CONTEXT = 8
"""Tokens decoded together with those after them: some tokenizers drop the space before whatever
comes first."""
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
LETTERS = {chr(byte): byte for byte in _SHOWN} | {chr(256 + n): b for n, b in enumerate(_HIDDEN)}
"""The byte that each letter of a byte-level BPE's token stands for, as in GPT-2's vocabulary."""
Decode = Callable[[Sequence[int]], str]


class Detokenizer(Protocol):
    """Text of one answer, in whole characters."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text of all but those of an incomplete character."""
        ...

    def flush(self) -> str:
        """The text of whatever bytes are left, complete or not."""
        ...

    def skip(self, token: int) -> None:
        """Add a token that has no text of its own; what came before it must be flushed."""
        ...


def detokenizers(tokenizer: Any, skip_special: bool) -> Callable[[Sequence[int]], Detokenizer]:
    """What makes the detokenizer of the answer to a prompt (token ids), fastest for `tokenizer`.

    skip_special: whether texts leave special tokens out.
    """
    if _is_byte_level(tokenizer):
        pieces = TokenBytes(tokenizer, skip_special)
        return lambda prompt: ByteDetokenizer(pieces)
    own = getattr(tokenizer, "backend_tokenizer", tokenizer)  # without transformers' cleaning up
    decode = functools.partial(own.decode, skip_special_tokens=skip_special)
    return lambda prompt: WindowDetokenizer(decode, prompt)


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a text's bytes are those of its tokens, one after the other."""
    from tokenizers.decoders import ByteLevel

    own = getattr(tokenizer, "backend_tokenizer", None)
    return isinstance(getattr(own, "decoder", None), ByteLevel)


class TokenBytes(dict[int, bytes]):
    """The bytes of a byte-level tokenizer's tokens, each found when it is first met."""

    def __init__(self, tokenizer: Any, skip_special: bool) -> None:
        super().__init__()
        self._piece: Callable[[int], str | None] = tokenizer.backend_tokenizer.id_to_token
        added = tokenizer.added_tokens_decoder.items() if skip_special else ()
        self.update({token: b"" for token, text in added if text.special})

    def __missing__(self, token: int) -> bytes:
        piece = self._piece(token) or ""
        spelled = all(letter in LETTERS for letter in piece)
        self[token] = found = bytes(map(LETTERS.__getitem__, piece)) if spelled else piece.encode()
        return found


class ByteDetokenizer:
    """Joins the bytes of tokens. What can become no character is shown as soon as that is known."""

    def __init__(self, pieces: TokenBytes) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text of all but those of an incomplete character."""
        return self._decoder.decode(b"".join(map(self._pieces.__getitem__, tokens)))

    def flush(self) -> str:
        """The text of whatever bytes are left, complete or not."""
        return self._decoder.decode(b"", final=True)

    def skip(self, token: int) -> None:
        """Nothing: each token's bytes are its own."""


class WindowDetokenizer:
    """Decodes new tokens together with some before them, for tokenizers of any kind.

    prompt: the tokens before the answer.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
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
