import pytest
from blocks import check_pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peagle.engine.block_pool import BlockPool, block_hash

BLOCKS = 6
CONTENTS = [bytes([i]) for i in range(8)]


class Pool(RuleBasedStateMachine):
    """Holders take, share, name and release blocks; a model knows what each block must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        """What each block was last said to hold, since it was last taken."""

    @rule(count=st.integers(0, BLOCKS + 1))
    def take(self, count: int) -> None:
        if count > self.pool.free_blocks:
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        blocks = self.pool.take(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for holder in self.holders for block in holder}
        for block in blocks:
            self.content.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), content=st.sampled_from(CONTENTS))
    def remember(self, data: st.DataObject, content: bytes) -> None:
        block = data.draw(st.sampled_from([b for holder in self.holders for b in holder]))
        self.pool.remember(block, content)
        if content not in self.content.values():
            self.content.setdefault(block, content)

    @rule(chain=st.lists(st.sampled_from(CONTENTS), max_size=4, unique=True))
    def find(self, chain: list[bytes]) -> None:
        found = self.pool.match(chain)
        known = {content: block for block, content in self.content.items()}
        expected = []
        for content in chain:
            if content not in known:
                break
            expected.append(known[content])
        assert found == expected
        self.pool.share(found)
        self.holders.append(found)

    @invariant()
    def every_block_is_free_or_held(self) -> None:
        check_pool(self.pool)
        held = {block for holder in self.holders for block in holder}
        assert self.pool.free_blocks == BLOCKS - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30)


def test_free_blocks_are_reused_oldest_first_and_prefixes_last():
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.release(blocks)
    assert pool.take(1) == [blocks[-1]]  # the end of a prefix goes before its beginning


def test_a_released_block_keeps_its_content_until_it_is_taken():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.remember(block, b"content")
    pool.release([block])
    assert pool.match([b"content"]) == [block]
    pool.release(pool.take(2))
    assert pool.match([b"content"]) == []


def test_a_hash_covers_everything_before():
    first = block_hash(b"", [1, 2])
    assert block_hash(first, [3, 4]) != block_hash(block_hash(b"", [9, 2]), [3, 4])
    assert block_hash(b"", [1, 23]) != block_hash(b"", [12, 3])
    assert block_hash(b"", [1, 2]) == first


def test_what_is_disowned_is_found_by_nobody_and_given_back_by_its_last_holder():
    pool = BlockPool(3)
    own, shared = pool.take(2)
    for block, content in ((own, b"own"), (shared, b"shared")):
        pool.remember(block, content)
    pool.share(pool.match([b"shared"]))
    assert pool.references(shared) == 2
    assert pool.disown([own, shared]) == [own]
    assert pool.match([b"own"]) == pool.match([b"shared"]) == []
    pool.release([own, shared])
    pool.release([shared])
    check_pool(pool)
    assert pool.free_blocks == 3
