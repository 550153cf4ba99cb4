"""KV blocks: who holds which, and which still hold a known prefix."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a block's content and of everything before it."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """A fixed number of equal blocks, counted by reference, reused oldest first.

    A block nobody holds keeps its content and its hash until it is taken again, so a later request
    with the same prefix can have it back.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        # in the order in which they will be taken: what was given back first comes first
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that could be taken now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each; as many must be free.

        They are sorted, since contiguous blocks are read without gathering.
        """
        assert count <= len(self._free), "a plan takes no more blocks than there are"
        blocks = sorted(self._free.popitem(last=False)[0] for _ in range(count))
        for block in blocks:
            self._references[block] = 1
            self._forget(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each; the last block of a prefix is reused first."""
        # without its last block a prefix is shorter, without its first it is lost
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
        for block in blocks:
            if block in self._free and block not in self._hash_of:  # nobody can find it again
                self._free.move_to_end(block, last=False)

    def disown(self, blocks: Sequence[int]) -> list[int]:
        """Forget what blocks hold: `match` misses them. Returns those with one reference."""
        for block in blocks:
            self._forget(block)
        return [block for block in blocks if self._references[block] == 1]

    def remember(self, block: int, digest: bytes) -> None:
        """Register what a block holds; of equal blocks the first stays registered."""
        if digest not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def references(self, block: int) -> int:
        """How many requests hold a block."""
        return self._references[block]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of known blocks for a chain of hashes; it takes nothing."""
        blocks = []
        for digest in hashes:
            block = self.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The block known by a hash; it takes nothing."""
        return self._block_of.get(digest)

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference on each block."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
