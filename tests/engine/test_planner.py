"""Plans that hold no more than there is, where a request makes room for others."""

from blocks import check_blocks

from peagle.config import SamplingParams
from peagle.engine.block_groups import BlockGroups, HeldBlocks
from peagle.engine.block_pool import BlockPool
from peagle.engine.plan import Planner, StepBudget
from peagle.engine.request import Request

K, NODES = 4, 15


def running(name: str, length: int, blocks: HeldBlocks) -> Request:
    """A request that decodes, with all tokens but its newest computed."""
    request = Request(name, list(range(length - 1)), SamplingParams(), 0, K)
    request.tokens.append(0)
    request.computed, request.drafter_computed = length - 1, length - 2
    request.blocks = blocks
    return request


def test_a_block_that_a_request_passes_and_leaves_at_once_is_given_back_once():
    """The second request passes the two blocks that both hold, then has to leave altogether. The
    first one still holds them, so that they are no room for its tree."""
    groups = BlockGroups({None: BlockPool(20), 8: BlockPool(6)}, 4, None)
    first = HeldBlocks([[], []], [0, 0])
    groups.grow(first, 3)
    second = HeldBlocks([of_group[:2] for of_group in first.of_groups], [0, 0])
    groups.share(second)
    groups.grow(second, 2)
    requests = [running("first", 11, first), running("second", 16, second)]
    budget = StepBudget(200, 100, 100, K, prefix_caching=False, tree_nodes=NODES)
    plan = Planner(groups, budget).plan(requests, [], 0)
    assert (list(plan.preempted), [(p.group, p.places) for p in plan.passed]) == (
        requests[1:],
        [(1, range(2))],
    )
    groups.give_back(second, 1, range(2))
    groups.release(second)
    [share] = plan.work
    groups.grow(first, share.fresh)
    check_blocks(groups)
