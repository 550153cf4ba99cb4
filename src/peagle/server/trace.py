"""Single tokens as text, their scores, and which of them the drafter proposed."""

import codecs
import functools
from typing import Any

from peagle import detokenizer
from peagle.completion import Chunk, Completion

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""What stands for a space in the vocabulary of SentencePiece's tokenizers."""


def token_text(tokenizer: Any, token: int) -> str:
    """One token's text; part of a character becomes the replacement character.

    Some decoders drop the space at the start of a text, which a token within one has.
    """
    known = detokenizer.token_bytes(tokenizer)
    if known is not None:
        return known.text(token)
    text: str = tokenizer.decode([token])
    if str(tokenizer.convert_ids_to_tokens(token)).startswith(SPACE):
        text = tokenizer.decode([token, token])[len(text) :]
    return text


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """One token's bytes, even if they are only part of a character."""
    known = detokenizer.token_bytes(tokenizer)
    return token_text(tokenizer, token).encode() if known is None else known[token]


def token_name(tokenizer: Any, token: int, as_id: bool | None) -> str:
    """What log-probabilities call a token: its text, or vLLM's form of its id."""
    return f"token_id:{token}" if as_id else token_text(tokenizer, token)


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


def prompt_scores(tokenizer: Any, completion: Completion, top: int | None) -> dict[str, Any]:
    """vLLM's `prompt_logprobs`: by token id, each of a prompt's tokens and `top` likely ones.

    The first token has none. Nothing where `top` is None.
    """
    if top is None:
        return {}
    text = functools.cache(functools.partial(token_text, tokenizer))
    found: list[dict[int, Any] | None] = []
    for token, scores in zip(completion.prompt_token_ids, completion.prompt_logprobs, strict=False):
        if scores is None:
            found.append(None)
            continue
        likely = ((token, rank, score) for rank, (token, score) in enumerate(scores.top[:top], 1))
        found.append(
            {
                token: {"logprob": json_score(score), "rank": rank, "decoded_token": text(token)}
                for token, rank, score in ((token, scores.rank, scores.chosen), *likely)
            }
        )
    return {"prompt_logprobs": found}


def speculation_trace(tokenizer: Any, chunk: Chunk) -> dict[str, Any]:
    """A cycle's tokens, or those of several that came together.

    drafted: which are the drafter's; refused: how many more it had proposed; sections: what each
    belongs to: content, reasoning, call or marker.
    """
    return {
        "token_ids": chunk.token_ids,
        "sections": chunk.sections,
        "texts": [token_text(tokenizer, token) for token in chunk.token_ids],
        "drafted": chunk.drafted,
        "refused": chunk.refused,
    }
