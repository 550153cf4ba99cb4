"""A proposer that is a network: P-EAGLE or EAGLE-3, by what its files say."""

from peagle.drafters.model import DraftModel
from peagle.drafters.proposer import Needs, Proposer


class Drafter(Proposer):
    """A network that reads the target's tapped hidden states."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.needs = Needs(model)
