"""P-EAGLE: K tokens from one pass, with K - 1 mask slots after the newest token."""

from torch import Tensor

from peagle.drafters.proposer import Drafter, Hidden, ProposerRows
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
        return self.drafted(rows, rows.run(masks=rows.drafts - 1))

    def drafted(self, rows: ProposerRows, output: Hidden, before: Tensor | None = None) -> Draft:
        """The drafts of slots that have run together. before: as of `Readout.draft`."""
        readout, asked = self.model.readout, (output.normed, rows.drafts, rows.race)
        if not rows.nodes:
            return Draft(readout.draft(*asked, before=before))
        found, pairs = readout.slots(*asked, before=before)
        return grow(found, pairs, rows.race, rows.nodes, rows.unbranched())
