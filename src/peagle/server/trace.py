"""Single tokens as text, their scores, and which of them the drafter proposed."""

from typing import Any

from peagle.llm import Chunk


def token_text(tokenizer: Any, token: int) -> str:
    """One token's text; a part of a character shows as the replacement character."""
    text: str = tokenizer.decode([token])
    return text


def json_score(score: float) -> float:
    """A log-probability as JSON can hold it; -9999 is OpenAI's minus infinity."""
    return max(score, -9999.0)


def speculation_trace(tokenizer: Any, chunk: Chunk) -> dict[str, Any]:
    """A cycle's tokens, the first `accepted` of which are the drafter's."""
    return {
        "token_ids": chunk.token_ids,
        "texts": [token_text(tokenizer, token) for token in chunk.token_ids],
        "accepted": chunk.accepted,
    }
