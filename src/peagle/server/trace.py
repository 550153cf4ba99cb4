"""Single tokens as text, their scores, and which of them the drafter proposed."""

import codecs
import functools
from typing import Any

from peagle import detokenizer
from peagle.completion import Chunk, Completion
from peagle.engine.step import TokenLogprobs

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What stands for a space in the vocabulary of SentencePiece's tokenizers."""


class TokenTexts:
    """What each token of a tokenizer is called in an answer."""

    def __init__(self, tokenizer: Any, as_ids: bool | None = None) -> None:
        """as_ids: whether names are vLLM's form of ids."""
        self._as_ids, self._known = as_ids, detokenizer.token_bytes(tokenizer)
        self.text = functools.cache(functools.partial(_text, tokenizer, self._known))
        """One token's text; part of a character becomes the replacement character."""

    def data(self, token: int) -> bytes:
        """One token's bytes, even if they are only part of a character."""
        return self.text(token).encode() if self._known is None else self._known[token]

    def name(self, token: int) -> str:
        """What log-probabilities call a token: its text, or vLLM's form of its id."""
        return f"token_id:{token}" if self._as_ids else self.text(token)

    def prompt_scores(self, done: Completion, top: int | None) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`: by token id, each of a prompt's tokens and `top` likely ones.

        The first token has none. Nothing where `top` is None.
        """
        if top is None:
            return {}
        pairs = zip(done.prompt_token_ids, done.prompt_logprobs, strict=False)
        return {"prompt_logprobs": [one and self._ranked(token, one, top) for token, one in pairs]}

    def _ranked(self, token: int, scores: TokenLogprobs, top: int) -> dict[int, Any]:
        likely = ((token, rank, score) for rank, (token, score) in enumerate(scores.top[:top], 1))
        return {
            token: {"logprob": json_score(score), "rank": rank, "decoded_token": self.text(token)}
            for token, rank, score in ((token, scores.rank, scores.chosen), *likely)
        }

    def trace(self, chunk: Chunk) -> dict[str, Any]:
        """A cycle's tokens, or those of several that came together.

        drafted: which are the drafter's; refused: how many more it had proposed; sections: what
        each belongs to: content, reasoning, call or marker.
        """
        return {
            "token_ids": chunk.token_ids,
            "sections": chunk.sections,
            "texts": [*map(self.text, chunk.token_ids)],
            "drafted": chunk.drafted,
            "refused": chunk.refused,
        }


def _text(tokenizer: Any, known: detokenizer.TokenBytes | None, token: int) -> str:
    """One token's text. Some decoders drop the space at the start of a text, which a token within
    one has."""
    if known is not None:
        return known.text(token)
    text: str = tokenizer.decode([token])
    if str(tokenizer.convert_ids_to_tokens(token)).startswith(SPACE):
        text = tokenizer.decode([token, token])[len(text) :]
    return text


class TextOffsets:
    """Where each token's text begins in an answer; for part of a character, where that begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.length = 0
        """The length of the text so far."""

    def add(self, token: bytes) -> int:
        """The offset of the next token."""
        begin = self.length
        self.length += len(self._decoder.decode(token))
        return begin


def json_score(score: float) -> float:
    """A log-probability that JSON can hold; -9999 is OpenAI's minus infinity."""
    return max(score, -9999.0)
