"""EAGLE-3: K tokens from K passes, each fed the drafter's own last output."""

import torch

from peagle.drafters.drafter import Drafter
from peagle.drafters.proposer import ProposerRows
from peagle.ops.draft import Draft


class Eagle3(Drafter):
    """One pass over the known rows gives the first token, K - 1 passes of one row each the rest."""

    def propose(self, rows: ProposerRows) -> Draft:
        """Draft token by token."""
        readout, race = self.model.readout, rows.race
        output = rows.run(masks=0)
        columns = [readout.draft(output.normed, 1, race)]
        for depth in range(1, rows.drafts):
            rows = rows.after(columns[-1][:, 0], self.model.feedback(output.stream))
            output = rows.run(masks=0)
            columns.append(readout.draft(output.normed, 1, race, depth))
        return Draft(torch.cat(columns, dim=1))
