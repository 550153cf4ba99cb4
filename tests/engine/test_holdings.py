from peagle.config import SamplingParams
from peagle.engine.block_groups import BlockGroups, HeldBlocks
from peagle.engine.block_pool import BlockPool
from peagle.engine.holdings import Holdings
from peagle.engine.plan import Share
from peagle.engine.request import Request


def share(name: str, fresh: int = 0) -> Share:
    request = Request(name, [1, 2, 3], SamplingParams(), 0, 0)
    prefix = HeldBlocks([[], []], [0, 0])
    return Share(request, 3, 0, 0, True, False, False, fresh=fresh, prefix=prefix)


def holdings() -> Holdings:
    return Holdings(BlockGroups({None: BlockPool(4), 2: BlockPool(4)}, 2, None), num_seqs=2)


def test_rows_are_given_out_once_and_again_after_they_are_left():
    held, shares = holdings(), [share("a"), share("b")]
    assert ({held.admit(one).row for one in shares}, held.free_rows) == ({0, 1}, 0)
    held.give_back(shares[1].request)
    assert (held.free_rows, held.admit(share("c")).row) == (1, 1)


def test_what_changed_is_told_once():
    held, one = holdings(), share("a", fresh=2)
    row = held.admit(one).row
    held.grow(one)
    assert held.news() == ((), tuple((g, row, place, place) for g in (0, 1) for place in (0, 1)))
    held.give_back(one.request)
    assert held.news() == ((row,), ())
    assert held.news() == ((), ())
