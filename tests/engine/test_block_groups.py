"""Blocks of whole contexts and of windows, against plain models of both."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
import tiny
import torch
from blocks import check_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.config import SamplingParams
from peagle.engine.block_groups import BlockGroups, HeldBlocks
from peagle.engine.block_pool import BlockPool, block_hash
from peagle.engine.branching import Branching
from peagle.engine.capacity import Capacity
from peagle.engine.pace import Pace
from peagle.engine.request import Request
from peagle.engine.request_table import RequestTable
from peagle.engine.scheduler import Scheduler
from peagle.engine.step import Cycle, Outcome, PromptChunk, Result, Step

DRAFTS = 3


def groups_of(block_size: int, blocks: int, *windows: int) -> BlockGroups:
    """Groups of equally many blocks."""
    return BlockGroups({window: BlockPool(blocks) for window in (None, *windows)}, block_size, None)


@given(
    st.integers(1, 4),
    st.integers(1, 12),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(0, 8),
)
def test_a_prefix_is_the_longest_of_which_the_next_row_sees_all(
    size: int, window: int, known: list[bool], whole: int
):
    """known: which blocks of the window are; whole: how many of whole contexts."""
    groups = groups_of(size, 16, window)
    held = HeldBlocks([[], []], [0, 0])
    groups.grow(held, 8)
    hashes = [block_hash(b"", [place]) for place in range(8)]
    for place, digest in enumerate(hashes):
        for group, keeps in enumerate((place < whole, known[place])):
            if keeps:
                passed = [8, 8]
                passed[group] = 0
                groups.remember(HeldBlocks(held.of_groups, passed), place, digest)
    found = groups.match(hashes)
    expected = max(
        count
        for count in range(whole + 1)
        if all(
            known[position // size]
            for position in range(max(count * size - window + 1, 0), count * size)
        )
    )
    assert len(found) == expected
    seen = range(max(expected * size - window + 1, 0) // size, expected)
    assert found.held(1) == [held.of_groups[1][place] for place in seen]


@dataclass
class Book:
    """A worker that writes down which token of whose text each slot holds, and reads like layers.

    A text is known by where it parted from the others, so that equal prefixes are equal content.
    """

    table: RequestTable
    window: int
    texts: dict[int, torch.Tensor]
    """By first token of a request's own part: its content, position by position."""
    slots: dict[int | None, torch.Tensor]
    random: Random
    late: bool
    """Whether an outcome comes with the next step."""
    of_row: dict[int, torch.Tensor] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    answers: deque[Outcome] = field(default_factory=deque)
    rows_read: int = 0

    def exchange(self, step: Step) -> Outcome:
        self.table.update(step)
        for begin in step.begun:
            own = next(token for token in begin.tokens if token in self.texts)
            self.of_row[begin.row] = self.texts[own]
        if step.work:
            results = tuple(self._run(item) for item in step.work)
            self.answers.append(Outcome(step.number, results))
        if len(self.answers) > (self.late and bool(step.work)):
            return self.answers.popleft()
        return Outcome()

    def _run(self, item: PromptChunk | Cycle) -> Result:
        text = self.of_row[item.row]
        if isinstance(item, PromptChunk):
            self._pass(item.row, item.start, text[item.start : item.stop])
            self.lengths[item.row] = item.stop
            return Result(item.row, (tiny.VOCAB,) * item.completes, pending=1)
        start = self.lengths[item.row] if self.late else item.start
        accepted = self.random.randint(0, item.drafts)
        written = text[start : start + 1 + item.drafts].clone()
        written[1 + accepted :] = -1  # rejected drafts
        self._pass(item.row, start, written)
        self.lengths[item.row] = start + 1 + accepted
        tokens = (tiny.VOCAB,) * (accepted + 1)
        return Result(item.row, tokens, accepted, pending=accepted + 1)

    def _pass(self, row: int, start: int, content: torch.Tensor) -> None:
        """All keys are written before any row reads; a row reads up to its own position."""
        kept = max(min(len(content), int(self.table.limits[row]) - start), 0)
        stop, text = start + kept, self.of_row[row]
        for window, written in self.slots.items():
            slots = self.table.slots if window is None else self.table.windows[window].slots
            written[slots[row, start:stop]] = content[:kept]
            first = 0 if window is None else max(start - window + 1, 0)
            read = written[slots[row, first:stop]]
            true = torch.cat((text[first:start], content[:kept]))
            assert torch.equal(read, true), "a row read what is not its own"
            self.rows_read += kept


@dataclass(frozen=True)
class Plan:
    """Requests and how little room they have."""

    block_size: int
    window: int
    blocks: int
    window_blocks: int
    num_seqs: int
    prompt_tokens: int
    lengths: tuple[tuple[int, int, int], ...]
    """Tokens of the part shared with others, of the own, and of the output."""
    late: bool
    caching: bool
    speculates: bool
    aborted: frozenset[int]
    seed: int
    worth_waiting: int = 256
    """Shared tokens for which a request waits while another one computes them."""


def content_of(number: int, shared: int, total: int) -> torch.Tensor:
    """Equal for all requests in the shared part."""
    positions = torch.arange(total)
    return torch.where(positions < shared, positions, positions + (number + 1) * (1 << 20))


def run(plan: Plan, longest: int) -> tuple[Book, Scheduler]:
    """All of the requests to their ends; every read is checked on the way."""
    capacity = Capacity(
        num_seqs=plan.num_seqs,
        num_blocks=plan.blocks,
        windows={plan.window: plan.window_blocks},
        block_size=plan.block_size,
        max_length=longest,
        batched_tokens=plan.prompt_tokens + plan.num_seqs * (DRAFTS + 1),
        prompt_tokens=plan.prompt_tokens,
    )
    config = tiny.engine_config(enable_prefix_caching=plan.caching)
    pace = Pace(None, None, Branching(0, 0, 0), capacity)
    scheduler = Scheduler(capacity.groups(), config, plan.late, pace)
    table = RequestTable(
        plan.num_seqs,
        longest,
        plan.block_size,
        torch.device("cpu"),
        capacity.slots,
        capacity.window_slots,
    )
    sizes = {None: capacity.slots, **capacity.window_slots}
    texts: dict[int, torch.Tensor] = {}
    book = Book(
        table,
        plan.window,
        texts,
        {window: torch.full((size + 1,), -2) for window, size in sizes.items()},
        Random(plan.seed),
        plan.late,
    )
    for number, (shared, own, output) in enumerate(plan.lengths):
        first = (number + 1) * (1 << 20)
        texts[first] = content_of(number, shared, longest + DRAFTS + 1)
        prompt = [*range(shared), *range(first, first + own)]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        k = DRAFTS * plan.speculates
        scheduler.add(Request(str(number), prompt, params, 0, k))
    for number in range(400 * len(plan.lengths)):
        if not scheduler.requests:
            break
        if number in plan.aborted and scheduler.running:
            scheduler.abort(scheduler.running[0].id, "abort")
        scheduler.commit(book.exchange(scheduler.launch(scheduler.plan())))
        if number % 16 == 0:
            check_blocks(scheduler.groups)
    assert not scheduler.requests, "no progress"
    assert sum(scheduler.groups.free_by_group()) == scheduler.groups.num_blocks
    return book, scheduler


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size, window = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    least = -(-(max(window, DRAFTS + 2) + 2 * (DRAFTS + 1)) // size) + 2
    each = st.tuples(st.integers(0, 50), st.integers(1, 30), st.integers(1, 12))
    return Plan(
        block_size=size,
        window=window,
        blocks=-(-96 // size) + draw(st.integers(0, 40)),
        window_blocks=least + draw(st.integers(0, 30)),
        num_seqs=draw(st.integers(1, 5)),
        prompt_tokens=draw(st.integers(1, 40)),
        lengths=tuple(draw(st.lists(each, min_size=1, max_size=8))),
        late=draw(st.booleans()),
        caching=draw(st.booleans()),
        speculates=draw(st.booleans()),
        aborted=frozenset(draw(st.lists(st.integers(0, 40), max_size=3))),
        seed=draw(st.integers(0, 9)),
        worth_waiting=draw(st.sampled_from([1, 8, 256])),
    )


@settings(deadline=None, max_examples=100)
@given(plans())
def test_every_row_reads_its_own_text(plan: Plan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.engine.plan.WORTH_WAITING", plan.worth_waiting)
        run(plan, longest=96)


@pytest.mark.slow
def test_a_hundred_requests_of_32k_tokens():
    """They share 24,000 tokens, of which all but the first few requests find every block."""
    window, chunk, seqs = 1024, 4096, 8
    held = (window + 2 * (DRAFTS + 1)) // 16 + 2
    plan = Plan(
        block_size=16,
        window=window,
        blocks=seqs * 2048,
        window_blocks=seqs * held + 2 * chunk // 16,
        num_seqs=seqs,
        prompt_tokens=chunk,
        lengths=((24_000, 8_000, 12),) * 100,
        late=True,
        caching=True,
        speculates=True,
        aborted=frozenset({9, 30}),
        seed=0,
    )
    book, scheduler = run(plan, longest=32_768)
    assert scheduler.preemptions == 0
    assert book.rows_read > 0
    assert scheduler.prefix_hits >= 80 * 23_000
