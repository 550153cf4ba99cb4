"""The drafter of a model's method: P-EAGLE or EAGLE-3."""

from peagle.drafters.drafter import Drafter
from peagle.drafters.eagle3 import SequentialDrafter
from peagle.drafters.model import DraftModel
from peagle.drafters.peagle import ParallelDrafter


def drafter_for(model: DraftModel) -> Drafter:
    """The drafter that runs a model, by its configuration."""
    return ParallelDrafter(model) if model.config.parallel else SequentialDrafter(model)
