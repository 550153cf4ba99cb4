"""Who could take part in the next step, with how many rows: found by reading alone."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from peagle.engine.block_groups import WHOLE, BlockGroups, GroupBlock, HeldBlocks
from peagle.engine.request import Request
from peagle.engine.step import Cycle, PromptChunk

WORTH_WAITING = 256
"""Fewest tokens of its prompt for which a request waits while another one computes them: rows that
take a GPU about as long as the step that it waits for."""


WORTH_KEEPING = 256
"""Fewest tokens between states that are kept: each ends a pass, which takes as long as a cycle."""
UNRECORDED_ROWS = 1024
"""Most rows of an audit in one pass, for which a newcomer may have to wait."""


class Share(Struct, frozen=True):
    """A request's part of a step."""

    request: Request
    rows: int
    """Target rows: a chunk of known tokens, or the newest one and the drafts; of a cycle that runs
    several times one each."""
    drafts: int
    """Drafts, at most K; 0 for a chunk."""
    start: int
    """The position of the first row; for a request on the device, the furthest that it can be."""
    completes: bool
    """Whether the last row's logits give the request its next token."""
    decodes: bool
    """Whether only the newest token lacks its keys."""
    hosted: bool
    """Whether the host takes part in the choice of its next token."""
    fresh: int = 0
    """New blocks that the share takes of each group."""
    keeps_state: bool = False
    """Whether the state of recurrent layers behind its last row is kept for others."""
    prefix: HeldBlocks | None = None
    """Blocks that hold its beginning already, where it is admitted; None: it runs."""

    @property
    def stop(self) -> int:
        """Position after its last row."""
        return self.start + self.rows

    @property
    def tokens(self) -> int:
        """The fewest tokens that the share brings."""
        return self.rows - self.drafts if self.decodes else int(self.completes)

    def cycle(self) -> Cycle:
        """What a worker does, where drafts are verified."""
        request = self.request
        return Cycle(request.row, self.start, self.drafts, self.hosted, request.missing)

    def chunk(self, state: int | None) -> PromptChunk:
        """What a worker does, where known tokens are computed. state: as in `PromptChunk`."""
        request, start, stop = self.request, self.start, self.stop
        wanted = request.unscored
        return PromptChunk(
            row=request.row,
            start=start,
            tokens=tuple(request.tokens[start:stop]),
            next_token=request.tokens[min(stop, request.total - 1)],
            completes=self.completes,
            hosted=self.hosted,
            missing=request.missing,
            scored=range(max(start, wanted.start), min(stop, wanted.stop)),
            top=request.params.prompt_logprobs or 0,
            state=state,
        )


class Passed(NamedTuple):
    """Blocks of one group that none of a request's next rows sees."""

    request: Request
    group: int
    places: range


@dataclass(frozen=True)
class Plan:
    """What `Scheduler.launch` carries out."""

    work: tuple[Share, ...] = ()
    passed: tuple[Passed, ...] = ()
    """What running requests give back of windows, before anything else changes hands."""
    preempted: tuple[Request, ...] = ()
    """Running requests that give their blocks back, in this order."""
    drafts: int | None = None
    """Most drafts of a request, as they were chosen; None: each request has its own K."""
    repeats: int = 1
    """How often cycles run."""
    crowded: bool = False
    """Whether prompts have no rows left, so that more of them may wait for the next step."""

    @property
    def hosted(self) -> bool:
        """Whether the host takes part in a choice of tokens."""
        return any(share.hosted for share in self.work)


NOTHING = Plan()


@dataclass(frozen=True)
class StepBudget:
    """What bounds a step and the requests in it."""

    max_length: int
    """Longest prompt + output in tokens."""
    rows: int
    """Most target rows; those of requests on the device, in captured cycles, do not count."""
    prompt_rows: int
    """Most of these rows that may go to prompts."""
    drafts: int | None
    """Most drafts of a request; None: its own K."""
    prefix_caching: bool
    repeats: int = 1
    """How often cycles of requests on the device run; more than once only without drafts."""
    tree_nodes: int = 0
    """Positions behind the newest token that a request has blocks for where its drafts branch, if
    the context goes on so far and there are any."""


class Planner:
    """A plan in the making, and what is left for others as requests get their shares."""

    def __init__(self, groups: BlockGroups, limits: StepBudget) -> None:
        self._groups, self._block_size, self._limits = groups, groups.block_size, limits
        self._rows, self._prompt_rows = limits.rows, limits.prompt_rows
        self._free_blocks = groups.free_by_group()
        self._released: dict[GroupBlock, set[str]] = {}
        """The requests, by id, that give back each block."""
        self._reused: set[GroupBlock] = set()
        """Free blocks that admitted requests find their beginning in."""
        self._work: list[Share] = []
        self._passed: list[Passed] = []
        self._preempted: list[Request] = []

    def plan(
        self, running: Sequence[Request], waiting: Collection[Request], free_rows: int
    ) -> Plan:
        """Running requests first, then waiting ones, until one does not fit.

        Where one running request makes room for another, nobody is admitted. One whose prompt
        begins as that of a request on its way through its own is passed over meanwhile.
        """
        # running requests, where the second one finds no block left:
        #
        #   r1         r2      r3   r4     r4 gives its blocks back, then r3, at last r2 itself,
        #   has grown  grows               which is the last one then
        staying = list(running)
        for place, request in enumerate(running):
            if place < len(staying):  # the last ones make room
                self._grow(request, staying)
        if waiting and free_rows and not self._preempted:
            self._admit_from(waiting, staying, free_rows)
        if self._limits.tree_nodes:
            self._work = [self._with_room_for_a_tree(share) for share in self._work]
        return Plan(
            work=tuple(self._work),
            passed=tuple(self._passed),
            preempted=tuple(self._preempted),
            drafts=self._limits.drafts,
            repeats=self._limits.repeats,
            crowded=not self._rows_left(decodes=False),
        )

    def _grow(self, request: Request, staying: list[Request]) -> None:
        """A share for a running request, for whose blocks the last ones may not stay."""
        if self._will_end(request):
            return
        if self._groups.windowed:
            self._pass(request)
        held = len(request.blocks) * self._block_size
        share = self._share(request, request.furthest, request.blocks)
        if share is None:
            return
        share = replace(share, fresh=self._fresh(share.stop, held))
        if request.ahead and min(self._free_blocks) < share.fresh <= self._free_blocks[WHOLE]:
            return  # its windows get blocks back when what it has in flight is known
        while share.fresh > min(self._free_blocks):
            last = staying.pop()
            self._preempted.append(last)
            self._give_back(last, last.blocks)
            if last is request:
                return
        self._take(share)

    def _fresh(self, stop: int, held: int) -> int:
        """Blocks for positions up to one, within the context, beside those that are held."""
        return self._blocks_for(max(min(stop, self._limits.max_length) - held, 0))

    def _with_room_for_a_tree(self, share: Share) -> Share:
        """A share with blocks for a tree, if there are any left when all have what they need.

        Blocks for the others' trees are left: a request would else lack what another holds in
        advance, and be preempted.
        """
        if not share.drafts:
            return share
        rows = 1 + self._limits.tree_nodes
        held = len(share.request.blocks) * self._block_size
        wanted = self._fresh(share.start + rows, held)
        more, others = wanted - share.fresh, len(self._work) - 1
        if more <= 0 or more + others * self._blocks_for(rows) > min(self._free_blocks):
            return share
        self._free_blocks = [free - more for free in self._free_blocks]
        return replace(share, fresh=wanted)

    def _pass(self, request: Request) -> None:
        """Give back what a running request's next rows do not see.

        Where prefixes are cached, only blocks that the cache knows by then.
        """
        # drafts in flight may be rejected: the next row may come as early as that
        earliest = request.computed if request.on_device else request.furthest
        blocks = request.blocks
        most = request.remembered if self._limits.prefix_caching else len(blocks)
        for group, places in self._groups.passed(blocks, earliest, most):
            self._passed.append(Passed(request, group, places))
            passed = ((group, blocks.of_groups[group][place]) for place in places)
            self._give_back(request, passed)

    def _admit_from(
        self, waiting: Iterable[Request], begun: Sequence[Request], free_rows: int
    ) -> None:
        """Admit some of those that wait, until one does not fit. begun: requests that run."""
        coming = {digest for request in begun for digest in self._coming(request)}
        least = self._blocks_for(WORTH_WAITING)
        for request in waiting:
            if not free_rows or not self._rows_left(decodes=False):
                return
            hashes = self._hashes(request)
            prefix = self._groups.match(hashes)
            following = hashes[len(prefix) : len(prefix) + least]
            if len(following) == least and coming.issuperset(following):
                continue
            if not self._admit(request, prefix):
                return
            coming.update(hashes[len(prefix) :])
            free_rows -= 1

    def _coming(self, request: Request) -> list[bytes]:
        """The blocks of a prompt on its way that the cache does not know yet."""
        return [] if request.output_length else self._hashes(request)[request.remembered :]

    def _hashes(self, request: Request) -> list[bytes]:
        """The hashes by which the cache may know a request's beginning."""
        if not self._limits.prefix_caching:
            return []
        own, knows = request.prefix_hashes(self._block_size), self._groups.knows
        others = request.followed_prefix_hashes(self._block_size)
        # its own blocks have a drafter's keys if it has one; without, blocks with and without them
        # serve as well
        better = [other if knows(other) else mine for mine, other in zip(own, others, strict=False)]
        return better + own[len(better) :]

    def _admit(self, request: Request, prefix: HeldBlocks) -> bool:
        """A share for a waiting request after its cached prefix; False when there is no room."""
        # a cached block that nobody holds counts among the free ones, but is not free once it is
        # reused
        idle = {block for block in prefix if self._is_free(block)} - self._reused
        free = self._free_blocks
        self._free_blocks = free.copy()
        for group, _ in idle:
            self._free_blocks[group] -= 1
        share = self._share(request, len(prefix) * self._block_size, prefix)
        fresh = 0 if share is None else self._blocks_for(share.stop) - len(prefix)
        if share is None or fresh > min(self._free_blocks):
            self._free_blocks = free
            return False
        # two requests of one step may reuse the same blocks, which are taken once
        self._reused |= idle
        self._take(replace(share, prefix=prefix, fresh=fresh))
        return True

    def _share(self, request: Request, start: int, blocks: HeldBlocks) -> Share | None:
        """A request's rows from a position on, given its blocks; None where none are left."""
        limits, held = self._limits, len(blocks) * self._block_size
        k = request.k if limits.drafts is None else min(request.k, limits.drafts)
        if request.on_device:
            share = _cycle(request, k, start)
            # a row each time, since such cycles have no drafts
            return share if limits.repeats == 1 else replace(share, rows=limits.repeats)
        known = request.total - start
        decodes = known == 1 and request.output_length > 0
        left = self._rows_left(decodes)
        if not decodes:
            left = min(left, self._room_in_windows(start, held))
        if not left:
            return None
        if not decodes or not request.ready:
            whole = self._until_state(request, start, blocks)
            rows = min(whole, left)
            completes = rows == known
            keeps = rows == whole and not completes and not request.is_unrecorded
            hosted = completes and request.needs_host
            return Share(request, rows, 0, start, completes, decodes, hosted, keeps_state=keeps)
        drafts = max(min(k, limits.max_length - request.total, left - 1), 0)
        return _cycle(request, drafts, start)

    def _until_state(self, request: Request, start: int, blocks: HeldBlocks) -> int:
        """Rows to the end, or until the state of recurrent layers is to be kept: where what the
        cache knew of a prompt ends, and behind the last whole block that others may share."""
        if request.is_unrecorded:
            return min(request.total - start, UNRECORDED_ROWS)
        if self._groups.states is None or not self._limits.prefix_caching:
            return request.total - start
        size = self._block_size
        places = blocks.furthest * size, (request.total - 1) // size * size
        worth = (place for place in places if place - start >= WORTH_KEEPING)
        return min(worth, default=request.total) - start

    def _rows_left(self, decodes: bool) -> int:
        return max(self._rows if decodes else min(self._rows, self._prompt_rows), 0)

    def _room_in_windows(self, start: int, held: int) -> int:
        """Rows of a chunk that windows have room for, which they get back as the prompt goes on.

        At least one, for which others make room.
        """
        free = min(self._free_blocks[WHOLE + 1 :], default=self._limits.max_length)
        return max(held + free * self._block_size - start, 1)

    def _take(self, share: Share) -> None:
        self._work.append(share)
        self._free_blocks = [free - share.fresh for free in self._free_blocks]
        # the rows of captured cycles have memory of their own
        if not share.request.on_device:
            self._rows -= share.rows
            self._prompt_rows -= 0 if share.decodes else share.rows

    def _give_back(self, request: Request, blocks: Iterable[GroupBlock]) -> None:
        for block in blocks:
            given = self._released.setdefault(block, set())
            # a request that passes blocks may have to leave in the same step, with all it has
            if request.id not in given:
                given.add(request.id)
                self._free_blocks[block[0]] += self._is_free(block)

    def _is_free(self, block: GroupBlock) -> bool:
        """Whether nobody holds a block once what is given back is."""
        return len(self._released.get(block, ())) == self._groups.references(*block)

    def _will_end(self, request: Request) -> bool:
        """Whether what is already launched will bring a request to its last token."""
        left = min(request.longest, self._limits.max_length) - request.total
        return 0 < request.promised >= left

    def _blocks_for(self, length: int) -> int:
        return -(-length // self._block_size)


def _cycle(request: Request, drafts: int, start: int) -> Share:
    """The newest token and some drafts."""
    hosted = request.needs_host
    return Share(request, 1 + drafts, drafts, start, completes=True, decodes=True, hosted=hosted)
