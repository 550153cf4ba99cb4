"""What holds of pools of blocks at all times."""

from peagle.engine.block_groups import BlockGroups
from peagle.engine.block_pool import BlockPool


def check_pool(pool: BlockPool) -> None:
    """Every block is either free or referenced, and hashes agree."""
    for block, references in enumerate(pool._references):
        assert (references == 0) == (block in pool._free), f"block {block} is lost"
    assert {block: name for name, block in pool._block_of.items()} == pool._hash_of


def check_blocks(groups: BlockGroups) -> None:
    """No pool has lost a block, or a slot for a state."""
    for pool in groups.pools:
        check_pool(pool)
    if groups.states is not None:
        check_pool(groups.states)
