"""P-EAGLE: K tokens from one pass, with K - 1 mask slots after the newest token."""

from peagle.drafters.proposer import Drafter, ProposerRows
from peagle.ops.draft import Draft
from peagle.ops.tree import grow


class PEagle(Drafter):
    """Runs known rows and mask slots together; mask slots never stay in the kept cache.

    A mask slot's keys are written to positions that the next pass overwrites with real rows before
    anything reads them.
    """

    branches = True

    def propose(self, rows: ProposerRows) -> Draft:
        """One pass over every request's known rows and mask slots."""
        output, readout = rows.run(masks=rows.drafts - 1), self.model.readout
        if not rows.nodes:
            return Draft(readout.draft(output.normed, rows.drafts, rows.race))
        found, pairs = readout.slots(output.normed, rows.drafts, rows.race)
        return grow(found, pairs, rows.race, rows.nodes, rows.unbranched())
