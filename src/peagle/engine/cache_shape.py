"""The groups of a KV cache, and how memory is divided among them."""

import operator

import torch

from peagle.config import EngineConfig
from peagle.engine.kv_cache import kv_bytes_by_window, kv_bytes_per_token
from peagle.engine.repeats import MOST_REPEATS
from peagle.engine.step import MOST_UNSEEN
from peagle.models.spec import DecoderSpec

SEQ_TOKENS = 512
"""Tokens of each request that the KV cache must hold, where no more is known of their lengths."""
FLIGHTS = 2
"""Steps whose rows may lie between a window and what comes next: one in flight, one launched."""
PROMPTS_SHARE = 4
"""Windows give prompts' rows at most one part in this many of the memory."""


class CacheShape:
    """How many bytes a block of each group takes, and how many blocks a request needs of each.

    A window keeps what the next rows of a request see and what is in flight; the rows of a prompt's
    chunk are beside that, until the chunk is done. The drafter's few layers keep whole contexts.
    """

    def __init__(
        self,
        target: DecoderSpec,
        drafter: DecoderSpec | None,
        dtype: torch.dtype,
        k: int,
        prompt_tokens: int,
        config: EngineConfig,
    ) -> None:
        """prompt_tokens: most rows of prompts in a step."""
        size = config.block_size
        pauses = drafter is not None and config.draft_length == "auto"
        self._unseen = max(MOST_UNSEEN if pauses else 0, k + 1)
        """Most positions before a decoding request's newest that the drafter has not seen."""
        self.longest = config.max_model_len or target.max_length
        """Tokens of the longest request."""
        self._asked = config.max_model_len or 0
        self._block_size, self._k = size, k
        by_window = kv_bytes_by_window(target, dtype)
        self.windows = {
            window: size * count
            for window, count in sorted(by_window.items(), key=lambda item: item[0] or 0)
            if window is not None and window < self.longest
        }
        """Bytes of a block of each window that is shorter than the longest request."""
        whole = sum(by_window.values()) - sum(self.windows.values()) // size
        if drafter is not None:
            whole += kv_bytes_per_token(drafter, dtype)
        self.whole = size * whole
        """Bytes of a block of whole contexts; 0 where all layers have windows."""
        self._chunks = FLIGHTS * self.blocks(prompt_tokens)

    def blocks(self, tokens: int) -> int:
        """Blocks that so many positions reach over."""
        return -(-tokens // self._block_size)

    def held(self, window: int) -> int:
        """Blocks of a window that a request holds once it decodes, wherever they begin.

        The prefix cache knows a block when the drafter has seen the token after it.
        """
        behind, ahead = max(window, self._unseen + 1), FLIGHTS * max(self._k + 1, MOST_REPEATS)
        return min(self.blocks(behind + ahead) + 1, self.blocks(self.longest))

    def needed(self, num_seqs: int, tokens: int) -> int:
        """Bytes with which so many requests of `tokens` tokens run without waiting for memory."""
        each = self.blocks(tokens)
        windows = (
            bytes_of_block * min(num_seqs * self.held(window) + self._chunks, num_seqs * each)
            for window, bytes_of_block in self.windows.items()
        )
        return num_seqs * each * self.whole + sum(windows)

    def divided(self, memory: int, num_seqs: int) -> tuple[tuple[int, ...], int | None]:
        """Blocks of whole contexts, then of each window, and most rows of prompts in a step for
        which windows have room; None: they do not bound them.

        memory: for so many requests; for fewer where it does not hold the windows of all.
        """
        most = num_seqs * self.blocks(self.longest)
        if not self.windows:
            return (min(memory // self.whole, most),), None
        if most * (self.whole + sum(self.windows.values())) <= memory:
            return (most,) * (1 + len(self.windows)), None
        room = memory // PROMPTS_SHARE // sum(self.windows.values())
        room = max(min(self._chunks, room), FLIGHTS)
        for seqs in range(num_seqs, 0, -1):
            longest = seqs * self.blocks(self.longest)
            windows = [min(seqs * self.held(window) + room, longest) for window in self.windows]
            left = memory - sum(map(operator.mul, windows, self.windows.values()))
            if left >= self.whole * self._least_blocks(seqs):
                break
        # where all layers have windows, these alone have to fit
        whole = left // self.whole if self.whole else most * (left >= 0)
        return (max(min(whole, most), 0), *windows), room // FLIGHTS * self._block_size

    def _least_blocks(self, num_seqs: int) -> int:
        """Blocks of whole contexts that so many requests should find, and the longest must."""
        each = self.blocks(min(SEQ_TOKENS, self.longest))
        return max(num_seqs * each, self.blocks(self._asked))
