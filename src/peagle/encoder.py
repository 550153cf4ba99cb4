"""Texts and conversations as token ids of a target."""

import contextlib
import functools
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from peagle.config import ChatConfig
from peagle.errors import ContextLengthError, InputError
from peagle.models.chat_template import render_chat
from peagle.preparation import LARGE

Prompt = str | Sequence[int]
SHRINKAGE = 4
"""Most characters of a text of which normalization makes one."""


class PromptEncoder:
    """A target's tokenizer, for contexts of a length."""

    def __init__(self, tokenizer: Any, max_length: int, chat: ChatConfig) -> None:
        self.tokenizer, self.chat_config, self._max_length = tokenizer, chat, max_length
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            tokenizer("", verbose=False)  # with which transformers turns off what would cut texts
        self._encoding = threading.Lock()
        """Large texts are encoded one by one: each takes up to 200 times its size."""

    def encode(self, prompt: Prompt, is_cut: bool = False) -> list[int]:
        """Token ids of a prompt. Raises `InputError` when it is empty or not valid text.

        is_cut: as in `tokenize`.
        """
        if isinstance(prompt, str):
            ids = self.tokenize(prompt, is_cut=is_cut)
        else:
            try:
                ids = [operator.index(token) for token in prompt]
            except TypeError:
                raise InputError("a prompt is text or a list of token ids") from None
        if not ids:
            raise InputError("the prompt is empty; give at least one token")
        return ids

    def tokenize(
        self, text: str, add_special_tokens: bool = True, is_cut: bool = False
    ) -> list[int]:
        """Token ids of a text, possibly none for an empty one.

        is_cut: whether only its last tokens are wanted. Raises `InputError`; a text too long for
        any context is refused unread.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text is not valid Unicode: {error}") from None
        if len(text) > self._max_length and not is_cut:
            least = len(text) // (SHRINKAGE * self._longest_token)
            if least >= self._max_length:
                raise ContextLengthError(least, self._max_length, "at least ")
        with self._encoding if len(text) > LARGE else contextlib.nullcontext():
            return self._encoded(text, add_special_tokens=add_special_tokens)

    def _encoded(self, text: str, **how: bool) -> list[int]:
        """As transformers has them, which also looks for their places in the text."""
        if self._backend is None:
            return self.tokenizer(text, verbose=False, **how).input_ids
        [encoded] = self._backend.encode_batch_fast([text], **how)
        return list(encoded.ids)

    @functools.cached_property
    def _longest_token(self) -> int:
        """Most characters that a token stands for."""
        return max(map(len, self.tokenizer.get_vocab()))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_special_tokens: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation by the chat template, up to where the answer begins.

        tools: in OpenAI's form. add_special_tokens: whether the tokenizer adds its own to those of
        the template. variables: the template's own. Raises `InputError` when there is no
        template, or when it refuses the conversation.
        """
        chat = self.chat_config
        known = {"add_generation_prompt": True, **chat.default_chat_template_kwargs, **variables}
        shown = {"tools": list(tools)} if tools else {}
        text = render_chat(self.tokenizer, messages, chat.chat_template, **known, **shown)
        return self.tokenize(text, add_special_tokens)
