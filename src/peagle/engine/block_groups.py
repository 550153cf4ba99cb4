"""A request's KV blocks, by how much of its past the layers of a group see.

```
 positions          0 ........................................ computed
 whole contexts     [b][b][b][b][b][b][b][b][b][b][b][b][b][b][b]
 a window           [ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][ ][b][b][b][b]
                     passed: given back, found again while nobody took them
```

All groups have blocks of equally many positions, so that a request's place in one is its place in
all. A prefix is found where the blocks of whole contexts are known up to its end, and those blocks
of each window that the rows after it see.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from peagle.engine.block_pool import BlockPool

WHOLE = 0
"""The group of layers that see all of a context; those with windows follow it."""
GroupBlock = tuple[int, int]
"""(group, block)"""


@dataclass
class HeldBlocks:
    """The blocks of one request."""

    of_groups: list[list[int]]
    """Blocks by group, in the order of positions."""
    passed: list[int]
    """By group, how many of the first ones were given back since no row sees them any more."""
    state: int | None = None
    """The slot, where a prefix was found, of the recurrent layers' state behind it."""
    furthest: int = 0
    """Blocks that are known of such a prefix; more than it has where no state is kept so far."""

    def __len__(self) -> int:
        """Blocks that the request's positions reach over."""
        return len(self.of_groups[WHOLE]) if self.of_groups else 0

    def __iter__(self) -> Iterator[GroupBlock]:
        """The blocks that the request holds."""
        for group, (blocks, passed) in enumerate(zip(self.of_groups, self.passed, strict=True)):
            yield from ((group, block) for block in blocks[passed:])

    def held(self, group: int) -> list[int]:
        """The blocks of a group that the request holds."""
        return self.of_groups[group][self.passed[group] :]


NO_BLOCKS = HeldBlocks([], [])


class BlockGroups:
    """The block pools of all groups."""

    def __init__(
        self, pools: Mapping[int | None, BlockPool], block_size: int, states: BlockPool | None
    ) -> None:
        """pools: of each group by its window, the positions that a row sees, its own included; the
        first one's is None: all up to its own. states: slots for the states of recurrent layers
        behind a block, by the block's hash; None where no layer is a recurrence."""
        self._windows, self.pools = tuple(pools), tuple(pools.values())
        self.block_size, self.states = block_size, states

    def __len__(self) -> int:
        return len(self.pools)

    @property
    def windowed(self) -> bool:
        """Whether any layers have a window."""
        return len(self) > 1

    @property
    def num_blocks(self) -> int:
        """The blocks of all groups."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1, in the group with the largest."""
        return max(1 - pool.free_blocks / pool.num_blocks for pool in self.pools)

    def free_by_group(self) -> list[int]:
        """Blocks that could be taken now."""
        return [pool.free_blocks for pool in self.pools]

    def references(self, group: int, block: int) -> int:
        """How many requests hold a block."""
        return self.pools[group].references(block)

    def knows(self, digest: bytes) -> bool:
        """Whether a block is known by a hash."""
        return self.pools[WHOLE].find(digest) is not None

    def match(self, hashes: Sequence[bytes]) -> HeldBlocks:
        """The longest known prefix for a chain of hashes; it takes nothing."""
        whole = self.pools[WHOLE].match(hashes)
        count = len(whole)
        # where a window lacks a block the prefix ends before it, and then needs other blocks of the
        # windows
        while (gap := self._gap(hashes, count)) is not None:
            count = gap
        furthest, state = count, None
        if self.states is not None:
            # recurrent layers can go on where a state is kept, and nowhere else
            while count and (state := self.states.find(hashes[count - 1])) is None:
                count -= 1
        found = HeldBlocks([whole[:count]], [0], state=state, furthest=furthest)
        for group in range(WHOLE + 1, len(self)):
            passed = self._first_seen(group, count * self.block_size)
            known = self.pools[group].match(hashes[passed:count])
            # places that no row sees have no block: their 0 is never read
            found.of_groups.append([0] * passed + known)
            found.passed.append(passed)
        return found

    def share(self, prefix: HeldBlocks) -> None:
        """Take one more reference on each block of a prefix."""
        for group, pool in enumerate(self.pools):
            pool.share(prefix.held(group))
        if self.states is not None and prefix.state is not None:  # the last one to be reused now
            self.states.share([prefix.state])
            self.states.release([prefix.state])

    def grow(self, held: HeldBlocks, count: int) -> list[list[int]]:
        """Take `count` blocks of each group, whose pools must have them; returns them by group."""
        fresh = [pool.take(count) for pool in self.pools]
        for blocks, taken in zip(held.of_groups, fresh, strict=True):
            blocks += taken
        return fresh

    def passed(self, held: HeldBlocks, position: int, most: int) -> Iterator[tuple[int, range]]:
        """By group, the places of blocks that no row from `position` on sees.

        most: only a request's first ones, so many, are looked at.
        """
        for group in range(WHOLE + 1, len(self)):
            first = min(self._first_seen(group, position), most)
            if first > held.passed[group]:
                yield group, range(held.passed[group], first)

    def give_back(self, held: HeldBlocks, group: int, places: range) -> None:
        """Release blocks that `passed` named."""
        self.pools[group].release(held.of_groups[group][places.start : places.stop])
        held.passed[group] = places.stop

    def release(self, held: HeldBlocks) -> None:
        """Give back all that a request holds."""
        for group, pool in enumerate(self.pools):
            pool.release(held.held(group))

    def remember(self, held: HeldBlocks, place: int, digest: bytes) -> None:
        """Register what a request's blocks at a place hold, in every group that still has one."""
        for group, (blocks, passed) in enumerate(zip(held.of_groups, held.passed, strict=True)):
            if place >= passed:
                self.pools[group].remember(blocks[place], digest)

    def disown(self, held: HeldBlocks) -> list[GroupBlock]:
        """Forget what a request's blocks hold. Returns those that nobody else holds."""
        return [
            (group, block)
            for group, pool in enumerate(self.pools)
            for block in pool.disown(held.held(group))
        ]

    def keep_state(self, digest: bytes) -> int | None:
        """A slot for the state behind a block; None where it is kept already, or nothing is."""
        states = self.states
        if states is None or not states.num_blocks or states.find(digest) is not None:
            return None
        [slot] = states.take(1)
        states.remember(slot, digest)
        # nobody holds a state: it stays until the oldest one gives its slot to another
        states.release([slot])
        return slot

    def forget_states(self) -> None:
        """Forget all states: some may not have been written."""
        if self.states is not None:
            self.states.disown(range(self.states.num_blocks))

    def _gap(self, hashes: Sequence[bytes], count: int) -> int | None:
        """The last of the first `count` blocks that the next row sees and a window does not know.

        None: there is no such block.
        """
        for group in range(WHOLE + 1, len(self)):
            find = self.pools[group].find
            for place in reversed(range(self._first_seen(group, count * self.block_size), count)):
                if find(hashes[place]) is None:
                    return place
        return None

    def _first_seen(self, group: int, position: int) -> int:
        """The place of the first block that a row at a position sees."""
        window = self._windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size
