"""What requests hold, as it changes hands: blocks of the cache, and rows of the request table."""

from collections.abc import Sequence

from peagle.engine.block_groups import BlockGroups
from peagle.engine.plan import Passed, Share
from peagle.engine.request import Request
from peagle.engine.step import Begin, BlockUpdate


class Holdings:
    """Blocks, and a row for each running request, with what a worker has not been told of them."""

    def __init__(self, groups: BlockGroups, num_seqs: int) -> None:
        """num_seqs: most requests that run at once."""
        self._groups = groups
        self._free = list(range(num_seqs - 1, -1, -1))
        self._left: list[int] = []
        self._blocks: list[BlockUpdate] = []

    @property
    def free_rows(self) -> int:
        """Requests that could still be admitted."""
        return len(self._free)

    def admit(self, share: Share) -> Begin:
        """A row for a request, and the blocks of its cached prefix."""
        assert share.prefix is not None
        self._groups.share(share.prefix)  # before anybody takes blocks that nobody holds
        row = self._free.pop()
        for group, passed in enumerate(share.prefix.passed):
            self._note(row, group, passed, share.prefix.held(group))
        return share.request.admit(row, share.prefix, share.start)

    def grow(self, share: Share) -> None:
        """The blocks that a planned share needs."""
        request, held = share.request, len(share.request.blocks)
        for group, fresh in enumerate(self._groups.grow(request.blocks, share.fresh)):
            self._note(request.row, group, held, fresh)

    def state_slot(self, share: Share) -> int | None:
        """Where the state behind a planned share is kept; None: nowhere."""
        if not share.keeps_state:
            return None
        size = self._groups.block_size
        return self._groups.keep_state(share.request.block_hashes(share.stop // size, size)[-1])

    def give_back_passed(self, passed: Passed) -> None:
        """The blocks that no row of a request sees any more."""
        request, group, places = passed
        self._groups.give_back(request.blocks, group, places)
        self._note(request.row, group, places.start, [None] * len(places))

    def give_back(self, request: Request) -> None:
        """All that a request holds."""
        self._groups.release(request.blocks)
        self._free.append(request.row)
        self._left.append(request.row)

    def news(self) -> tuple[tuple[int, ...], tuple[BlockUpdate, ...]]:
        """What changed since the last call: `Step.left` and `Step.blocks`."""
        told = tuple(self._left), tuple(self._blocks)
        self._left, self._blocks = [], []
        return told

    def _note(self, row: int, group: int, place: int, blocks: Sequence[int | None]) -> None:
        """Note the blocks of a group that hold a request from its block `place` on."""
        self._blocks += [BlockUpdate(group, row, at, own) for at, own in enumerate(blocks, place)]
