"""`POST /tokenize` and `POST /detokenize`."""

from typing import Any

from fastapi import Request

from peagle.detokenizer import detokenize as text_of
from peagle.server.chat import prompt_of
from peagle.server.errors import APIError
from peagle.server.protocol import DetokenizeBody, TokenizeBody
from peagle.server.service import Service


async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """Token ids of a text, or of messages through the chat template."""
    service = Service.of(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "give prompt or messages", "prompt")
    if body.messages is not None:
        ids = await prompt_of(service, body, shows_tools=True)
    else:
        ids = await service.tokenize(body.prompt or "", body.add_special_tokens is not False)
    limit = service.llm.engine.max_length
    found = {"tokens": ids, "count": len(ids), "max_model_len": limit}
    if body.return_token_strs:
        found["token_strs"] = service.llm.tokenizer.convert_ids_to_tokens(ids)
    return found


async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, str]:
    """The text of token ids."""
    service = Service.of(request, body.model)
    vocab = service.llm.engine.vocab_size
    if not all(0 <= token < vocab for token in body.tokens):
        raise APIError(400, f"token ids are 0 to {vocab - 1}", "tokens")
    return {"prompt": await service.aside(text_of, service.llm.tokenizer, body.tokens)}
