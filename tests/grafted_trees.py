"""Trees of drafts that tests change node by node."""

from random import Random

from peagle.ops.candidates import Candidates
from peagle.ops.draft import Draft


def graft(draft: Draft, request: int, row: int, parent: int, token: int) -> None:
    """Have a row of a request's tree hold a token after another row."""
    tree = draft.tree
    assert tree is not None
    draft.tokens[request, row - 1], tree.parents[request, row - 1] = token, parent
    tree.depths[request, row] = tree.depths[request, parent] + 1
    tree.ancestors[request, row] = tree.ancestors[request, parent] | 1 << row


def redraw(draft: Draft, found: Candidates, request: int, draw: Random) -> None:
    """Draw all of a request's nodes again among the candidates, some of them twice."""
    slots, count = found.tokens.shape[1:]
    tree = draft.tree
    assert tree is not None
    for row in range(1, tree.depths.shape[1]):
        parent = draw.choice([r for r in range(row) if tree.depths[request, r] < slots])
        depth = int(tree.depths[request, parent]) + 1
        likely = found.scores[request, depth - 1].argsort(descending=True)
        place = likely[min(int(draw.expovariate(0.7)), count - 1)]
        graft(draft, request, row, parent, int(found.tokens[request, depth - 1, place]))
