"""What requests hold, as it changes hands: blocks of the cache, and rows of the request table."""

from peagle.engine.block_groups import BlockGroups
from peagle.engine.plan import Passed, Share
from peagle.engine.request import Request
from peagle.engine.row_pool import RowPool
from peagle.engine.step import Begin


class Holdings:
    """Blocks and rows; `rows` notes what a worker has to be told of both."""

    def __init__(self, groups: BlockGroups, num_seqs: int) -> None:
        """num_seqs: most requests that run at once."""
        self._groups, self.rows = groups, RowPool(num_seqs)

    def admit(self, share: Share) -> Begin:
        """A row for a request, and the blocks of its cached prefix."""
        assert share.prefix is not None
        self._groups.share(share.prefix)  # before anybody takes blocks that nobody holds
        row = self.rows.admit()
        for group, passed in enumerate(share.prefix.passed):
            self.rows.append(row, group, passed, share.prefix.held(group))
        return share.request.admit(row, share.prefix, share.start)

    def grow(self, share: Share) -> None:
        """The blocks that a planned share needs."""
        request, held = share.request, len(share.request.blocks)
        for group, fresh in enumerate(self._groups.grow(request.blocks, share.fresh)):
            self.rows.append(request.row, group, held, fresh)

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
        self.rows.append(request.row, group, places.start, [None] * len(places))

    def give_back(self, request: Request) -> None:
        """All that a request holds."""
        self._groups.release(request.blocks)
        self.rows.leave(request.row)
