"""Single tokens as text, and which of them the drafter proposed."""

from typing import Any

from peagle.llm import Chunk


def token_text(tokenizer: Any, token: int) -> str:
    """One token's text; a part of a character shows as the replacement character."""
    text: str = tokenizer.decode([token])
    return text


def speculation_trace(tokenizer: Any, chunk: Chunk) -> dict[str, Any]:
    """A cycle's tokens, the first `accepted` of which are the drafter's."""
    return {
        "token_ids": chunk.token_ids,
        "texts": [token_text(tokenizer, token) for token in chunk.token_ids],
        "accepted": chunk.accepted,
    }
