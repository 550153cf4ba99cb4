"""What drafts: the proposer that a configuration asks for."""

from collections.abc import Callable

import torch

from peagle.config import SpeculativeConfig
from peagle.drafters.beside import Beside
from peagle.drafters.drafter import Drafter
from peagle.drafters.eagle3 import Eagle3
from peagle.drafters.kind import PEAGLE
from peagle.drafters.lookup import BESIDE_PRICE, PRICE, Lookup
from peagle.drafters.model import DraftModel
from peagle.drafters.outside import load_outside
from peagle.drafters.peagle import PEagle
from peagle.drafters.proposer import Proposer


def drafter_for(model: DraftModel) -> Drafter:
    """The drafter that runs a model, by its configuration."""
    return PEagle(model) if model.config.kind is PEAGLE else Eagle3(model)


def proposer_for(
    speculation: SpeculativeConfig | None,
    load: Callable[[str], DraftModel],
    device: torch.device,
    vocab_size: int,
) -> tuple[Proposer | None, int]:
    """The proposer of a configuration, and K; None and 0 where nothing drafts.

    load: makes a drafter's model of its directory or hub id; vocab_size: that of the target.
    Raises `InputError` where the proposer of another package cannot be made.
    """
    if speculation is None:
        return None, 0
    k, lengths = speculation.num_speculative_tokens, speculation.lookup
    if speculation.model is None:
        assert k is not None, "whatever has no drafter comes with its K"
        if lengths is None:
            return load_outside(speculation.method, vocab_size), k
        return Lookup(*lengths, device, PRICE), k
    model = load(speculation.model)
    drafter, k = drafter_for(model), k or model.config.default_k
    if lengths is None:
        return drafter, k
    return Beside(Lookup(*lengths, device, BESIDE_PRICE), drafter), k
