"""A proposer that is a network: P-EAGLE or EAGLE-3, by what its files say, or MTP."""

from peagle.drafters.network import Network
from peagle.drafters.proposer import Needs, Proposer


class Drafter(Proposer):
    """A network that reads the target's tapped hidden states."""

    def __init__(self, model: Network) -> None:
        self.model = model
        self.needs = Needs(model)
