"""Which requests take part in a step, with how many rows, holding which blocks."""

import bisect
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from peagle.engine.batch import Scheduled
from peagle.engine.block_pool import BlockPool, block_hash
from peagle.engine.request import Request, Status
from peagle.engine.request_table import RequestTable


@dataclass
class Budget:
    """Target rows that a step can still give to requests outside the captured cycle."""

    rows: int
    prompt: int
    """Of `rows`, those that may go to prompts."""
    drafts: int | None
    """Most drafts of a resident request; None: its own K."""

    def left(self, request: Request) -> int:
        """Rows that a request may have; a resident one's are in the captured cycle."""
        if request.resident:
            return 1 + request.k
        return max(self.rows if request.decoding else min(self.rows, self.prompt), 0)

    def spend(self, item: Scheduled) -> None:
        """Take away an item's rows."""
        if item.request.resident:
            return
        self.rows -= item.rows
        if not item.request.decoding:
            self.prompt -= item.rows


class Scheduler:
    """Continuous batching: running requests first, then waiting ones.

    Each kind is in order of priority, and of arrival where that is equal. When blocks run out the
    last running request gives its own back and waits at the front of its priority; its tokens
    stay, so it later continues where it was.
    """

    def __init__(
        self,
        pool: BlockPool,
        table: RequestTable,
        max_length: int,
        max_batched_tokens: int,
        max_prompt_tokens: int,
        prefix_caching: bool,
    ) -> None:
        self.pool, self.table = pool, table
        self.max_length, self.max_batched_tokens = max_length, max_batched_tokens
        self.max_prompt_tokens = max_prompt_tokens
        """Of those, rows that may go to prompts; fewer once the device had no memory for them."""
        self.prefix_caching = prefix_caching
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._stuck: tuple[Request, int] | None = None
        """Who was last refused blocks at the head of the line, and how many were free then."""
        self.preemptions = 0
        self.prefix_queries = 0
        """Tokens looked up in the prefix cache: all of admitted requests'."""
        self.prefix_hits = 0
        """Tokens found there."""

    def add(self, request: Request) -> None:
        """Queue a request."""
        bisect.insort_right(self.waiting, request, key=_priority)

    @property
    def resident(self) -> int:
        """Requests whose newest tokens live on the device."""
        return sum(request.resident for request in self.running)

    @property
    def may_need_host(self) -> bool:
        """Whether the host may take part in a choice of tokens in the next step."""
        return any(
            request.needs_host and self._may_complete(request)
            for request in (*self.running, *self._next_in_line())
        )

    def _may_complete(self, request: Request) -> bool:
        """Whether a step may bring a request to a choice of tokens, not just further in its prompt.

        How much a waiting one finds in the prefix cache is not known before.
        """
        fits = request.total - request.furthest <= self._prompt_rows
        return fits or request.resident or request.status is Status.WAITING

    def _next_in_line(self) -> Iterable[Request]:
        """Who may be admitted in the next step.

        Nobody while prompts that have begun take all its rows, nor until the head of the line finds
        more blocks free than when it was refused some.
        """
        begun = sum(item.total - item.furthest for item in self.running if not item.resident)
        if not self.waiting or begun >= self._prompt_rows:
            return ()
        if self._stuck is not None:
            request, free = self._stuck
            if self.waiting[0] is request and self.pool.free_blocks <= free:
                return ()
        return itertools.islice(self.waiting, self.table.free_rows)

    @property
    def _prompt_rows(self) -> int:
        """Most rows of prompts in a step."""
        return min(self.max_batched_tokens, self.max_prompt_tokens)

    def schedule(self, drafts: int | None = None, host: bool = True) -> list[Scheduled]:
        """This step's work; empty where all that is left is in flight or was preempted.

        drafts: most drafts of a resident request; None: its own K. host: whether the host may take
        part in choices; if not, `may_need_host` must be false.
        """
        budget = Budget(self.max_batched_tokens, self.max_prompt_tokens, drafts)
        work: list[Scheduled] = []
        before = list(self.running)
        for request in before:
            if request.status is Status.RUNNING and not self._will_end(request):
                item = self._grow(request, budget) if budget.left(request) else None
                if item is not None:
                    work.append(item)
                    budget.spend(item)
        short_of_blocks = any(request.status is Status.WAITING for request in before)
        while self.waiting and self.table.free_rows and not short_of_blocks:
            request = self.waiting[0]
            if request.needs_host and not host:
                break
            item = self._admit(request, budget) if budget.left(request) else None
            if item is None:
                break
            work.append(item)
            budget.spend(item)
        return work

    def recompute(self, request: Request) -> bool:
        """Start a request over without the prefix cache; False if that is how it ran already."""
        if not request.reused:
            return False
        request.distrusts_cache = True
        self.preempt(request)
        return True

    def finish(self, request: Request, reason: str) -> None:
        """Take a request out, wherever it is, and give back what it held."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._give_back(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it keeps its tokens and waits before its equals."""
        self.preemptions += 1
        self.running.remove(request)
        self._give_back(request)
        request.forget_cache()
        bisect.insort_left(self.waiting, request, key=_priority)

    def remember(self, request: Request) -> None:
        """Register the request's full blocks whose keys are all written in the prefix cache."""
        if not self.prefix_caching:
            return
        written = request.drafter_computed if request.speculates else request.computed
        known = self._extend_hashes(request, written // self.table.block_size)
        for index in range(request.remembered, known):
            self.pool.remember(request.blocks[index], request.hashes[index])
        request.remembered = max(request.remembered, known)

    def _grow(self, request: Request, budget: Budget) -> Scheduled | None:
        """Rows for a running request, preempting later ones for blocks; None if it was itself."""
        while True:
            item = self._rows_for(request, budget)
            if self._hold(request, min(item.stop, self.max_length)):
                return item
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return None

    def _admit(self, request: Request, budget: Budget) -> Scheduled | None:
        """Start a waiting request after its cached prefix; None when blocks are short."""
        blocks = self._cached_prefix(request)
        request.blocks, request.remembered = blocks, len(blocks)
        request.computed = request.drafter_computed = len(blocks) * self.table.block_size
        item = self._rows_for(request, budget)
        needed = self._blocks_for(request.computed + item.rows) - len(blocks)
        fresh = self.pool.take(needed)
        if fresh is None:
            self.pool.release(blocks)
            request.forget_cache()
            self._stuck = request, self.pool.free_blocks
            return None
        self.waiting.popleft()
        bisect.insort_right(self.running, request, key=_priority)
        self.prefix_queries += request.total
        self.prefix_hits += request.computed
        request.admit(self.table.admit())
        request.blocks = blocks + fresh
        self.table.append(request.row, 0, request.blocks)
        return item

    def _rows_for(self, request: Request, budget: Budget) -> Scheduled:
        start = request.furthest
        if request.resident:
            drafts = request.k if budget.drafts is None else min(request.k, budget.drafts)
            return Scheduled(request, 1 + drafts, drafts, start, completes=True)
        known = request.total - start
        if not request.decoding or request.features is None:
            rows = min(known, budget.left(request))
            return Scheduled(request, rows, 0, start, completes=rows == known)
        drafts = max(min(request.k, self.max_length - request.total, budget.rows - 1), 0)
        return Scheduled(request, 1 + drafts, drafts, start, completes=True)

    def _will_end(self, request: Request) -> bool:
        """Whether what is already launched will bring a request to its last token."""
        left = min(
            request.params.max_tokens - request.output_length, self.max_length - request.total
        )
        return 0 < request.promised >= left

    def _hold(self, request: Request, length: int) -> bool:
        """Take blocks until the request has `length` positions; False when there are too few."""
        needed = self._blocks_for(length) - len(request.blocks)
        if needed <= 0:
            return True
        fresh = self.pool.take(needed)
        if fresh is None:
            return False
        position = len(request.blocks) * self.table.block_size
        self.table.append(request.row, position, fresh)
        request.blocks = request.blocks + fresh
        return True

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.table.block_size)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        self.table.leave(request.row)
        request.features = None

    def _cached_prefix(self, request: Request) -> list[int]:
        """Blocks that already hold the request's prefix; at least one token is left to compute.

        Nor do they hold anything of a prompt that is still to be scored, whose rows have to be run.
        """
        if not self.prefix_caching or request.distrusts_cache:
            return []
        left = request.unscored
        length = left.start if left else request.total - 1
        most = self._extend_hashes(request, length // self.table.block_size)
        return self.pool.find(request.hashes[:most])

    def _extend_hashes(self, request: Request, count: int) -> int:
        """Hash the first `count` blocks, as far as their tokens are known; returns how far.

        A drafter's keys at position p depend on token p + 1, so where a drafter works the hash
        covers one token past the block, and its blocks are kept apart from those without.
        """
        size, ahead = self.table.block_size, int(request.speculates)
        count = min(count, (request.total - ahead) // size)
        for index in range(len(request.hashes), count):
            parent = request.hashes[index - 1] if index else bytes([ahead]) + request.salt
            tokens = request.tokens[index * size : (index + 1) * size + ahead]
            request.hashes.append(block_hash(parent, tokens))
        return count


def _priority(request: Request) -> int:
    return request.params.priority
