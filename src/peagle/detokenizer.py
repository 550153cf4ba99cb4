"""Token ids -> text as they arrive."""

import codecs
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""Most bytes of one character, hence most tokens that it takes."""
CONTEXT = 8
"""Tokens decoded together with those after them: some tokenizers drop the space before whatever
comes first."""
_SHOWN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A byte's piece in the vocabulary of SentencePiece's tokenizers."""
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
LETTERS = {chr(byte): byte for byte in _SHOWN} | {chr(256 + n): b for n, b in enumerate(_HIDDEN)}
"""The byte that each letter of a byte-level BPE's token stands for, as in GPT-2's vocabulary."""
Decode = Callable[[Sequence[int]], str]
Spell = Callable[[str], bytes]


def detokenize(tokenizer: Any, tokens: Sequence[int], skip_special: bool = False) -> str:
    """The text of all tokens, as `detokenizers` has it of any parts of them."""
    detokenizer = detokenizers(tokenizer, skip_special)([])
    return detokenizer.feed(tokens) + detokenizer.flush()


def detokenizers(tokenizer: Any, skip_special: bool) -> "Callable[[Sequence[int]], Detokenizer]":
    """What makes the detokenizer of the answer to a prompt (token ids), fastest for `tokenizer`.

    skip_special: whether texts leave special tokens out.
    """
    pieces = token_bytes(tokenizer, skip_special)
    if pieces is not None:
        return lambda prompt: ByteDetokenizer(pieces, prompt)
    own = getattr(tokenizer, "backend_tokenizer", tokenizer)  # without transformers' cleaning up
    decode = functools.partial(own.decode, skip_special_tokens=skip_special)
    return lambda prompt: WindowDetokenizer(decode, prompt)


class TokenBytes(dict[int, bytes]):
    """The bytes of a tokenizer's tokens, each found when it is first met.

    spell: the bytes of a token by its piece of the vocabulary. spell_added: those of one that was
    added to it. lead: what a text lacks where it begins with it. errors: how `bytes.decode` takes
    bytes that are no character.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special: bool,
        spell: Spell,
        spell_added: Spell,
        lead: bytes = b"",
        errors: str = "replace",
    ) -> None:
        super().__init__()
        self._piece: Callable[[int], str | None] = tokenizer.backend_tokenizer.id_to_token
        self._spell, self.lead, self.errors = spell, lead, errors
        for token, added in tokenizer.added_tokens_decoder.items():
            hidden = skip_special and added.special
            self[token] = b"" if hidden else spell_added(added.content)

    def text(self, token: int) -> str:
        """One token's text; part of a character becomes the replacement character."""
        return self[token].decode(errors=self.errors)

    def __missing__(self, token: int) -> bytes:
        self[token] = found = self._spell(self._piece(token) or "")
        return found


@functools.lru_cache(4)
def token_bytes(tokenizer: Any, skip_special: bool = False) -> TokenBytes | None:
    """The bytes of a tokenizer's tokens; None where they are not, one after the other, a text's.

    They are with a byte-level decoder, and with one of SentencePiece's that falls back to bytes.
    skip_special: whether special tokens have none.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = {} if decoder is None else json.loads(decoder.__getstate__())
    match state.get("decoders", [state]):
        case [{"type": "ByteLevel"}]:
            return _byte_level(tokenizer, skip_special)
        case [
            {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(text)},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ] if rest in ([], [STRIP]):
            spell = functools.partial(_byte_or_text, mark, text)
            return TokenBytes(tokenizer, skip_special, spell, spell, b" " if rest else b"")
    return None


def _byte_level(tokenizer: Any, skip_special: bool) -> TokenBytes:
    """An added token's letters stand for no bytes, unless the vocabulary has the same piece.

    A letter by itself always is such a piece. Where it was added too, it stands for the byte where
    that belongs to a character, else for itself.
    """
    known = tokenizer.backend_tokenizer.model.token_to_id
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    lone = {LETTERS[text]: text for text in added if text in LETTERS}

    def spell_added(text: str) -> bytes:
        return text.encode() if known(text) is None else _letters(text)

    return TokenBytes(tokenizer, skip_special, _letters, spell_added, errors=_errors(lone))


def _errors(letters: Mapping[int, str]) -> str:
    """The name under which `bytes.decode` finds what bytes are that belong to no character."""
    if not letters:
        return "replace"

    def told(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        found = [letters.get(byte, "") for byte in error.object[error.start : error.end]]
        return "".join(found) if all(found) else UNFINISHED, error.end

    name = "letters " + "".join(sorted(letters.values()))
    codecs.register_error(name, told)
    return name


def _letters(piece: str) -> bytes:
    spelled = all(letter in LETTERS for letter in piece)
    return bytes(map(LETTERS.__getitem__, piece)) if spelled else piece.encode()


def _byte_or_text(mark: str, text: str, piece: str) -> bytes:
    named = BYTE.fullmatch(piece)
    return bytes.fromhex(named[1]) if named else piece.replace(mark, text).encode()


class ByteDetokenizer:
    """Joins the bytes of tokens. What can become no character is shown as soon as that is known.

    prompt: the tokens before the answer.
    """

    def __init__(self, pieces: TokenBytes, prompt: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(pieces.errors)
        self._lead = b"" if any(map(pieces.__getitem__, prompt)) else pieces.lead

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens, and return the text of all but those of an incomplete character."""
        data = b"".join(map(self._pieces.__getitem__, tokens))
        if self._lead and data:
            data, self._lead = data.removeprefix(self._lead), b""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The text of whatever bytes are left, complete or not."""
        return self._decoder.decode(b"", final=True)

    def skip(self, token: int) -> None:
        """Do nothing: each token's bytes are its own."""


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

        Bytes that are no character after `BYTES` tokens never become one. The text is the same for
        tokens that come one at a time, since they are read so.
        """
        return "".join(map(self._add, tokens))

    def _add(self, token: int) -> str:
        self._tokens.append(token)
        # the newest tokens may be the first bytes of a character
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
        self.flush()

    def _take(self, text: str, end: int) -> str:
        """The new text of tokens up to `end`. text: theirs from the context on."""
        # tokens   ... │ context ... │ done ... end │ bytes that are no character yet
        #              └──── known ──┘              │
        #              └──────────── text ──────────┘    what `text` has beyond `known` is new
        known = self._decode(self._tokens[self._context : self._done])
        fresh = text[len(known) :]
        # a token without text, such as an end of text, is no context for the next one
        self._context = self._done if fresh else max(self._context, self._done - CONTEXT)
        self._done = end
        return fresh


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""Text of one answer, in whole characters."""
