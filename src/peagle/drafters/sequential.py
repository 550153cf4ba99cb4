"""EAGLE-3 and MTP: K tokens from K passes, each fed the network's own last output."""

import torch
from torch import Tensor

from peagle.drafters.proposer import Drafter, ProposerRows
from peagle.ops.candidates import Candidates
from peagle.ops.draft import Draft, draw
from peagle.ops.tree import grow


class SequentialDrafter(Drafter):
    """One pass over the known rows gives the first token, K - 1 passes of one row each the rest.

    A tree branches off this chain: a slot's other candidates stand beside its draft, and what
    follows any of them is taken to be as probable as after the draft.
    """

    branches = True

    def propose(self, rows: ProposerRows) -> Draft:
        """Draft token by token."""
        readout, slots, hidden = self.model.readout, rows, rows.run(masks=0)
        columns: list[Tensor] = []
        found: list[Candidates] = []
        for depth in range(rows.drafts):
            if depth:
                slots = slots.after(columns[-1][:, 0], self.model.feedback(hidden.stream))
                hidden = slots.run(masks=0)
            if rows.nodes:
                candidates, _ = readout.slots(hidden.normed, 1, rows.race, depth)
                found.append(candidates)
                columns.append(draw(candidates, None, rows.race, depth))
            else:
                columns.append(readout.draft(hidden.normed, 1, rows.race, depth))
        if not rows.nodes:
            return Draft(torch.cat(columns, dim=1))
        return grow(Candidates.beside(found), None, rows.race, rows.nodes, rows.unbranched())
