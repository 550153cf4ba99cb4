"""An engine of a published size with random weights and given acceptance, at a method's usual K."""

from matches import METHODS

from peagle.bench.shapes import random_engine
from peagle.bench.synthetic import DRAFT_LAYERS, acceptance_rates
from peagle.config import EngineConfig
from peagle.engine.engine import Engine


def synthetic_engine(shape: str, method: str, requests: int, max_length: int) -> Engine:
    """The engine for so many requests of so many tokens; it always drafts K."""
    k, acceptance = METHODS[method]
    config = EngineConfig(
        max_num_seqs=requests,
        max_model_len=max_length,
        enable_prefix_caching=False,
        draft_length="fixed",
    )
    rates = acceptance_rates(k, acceptance)
    return random_engine(shape, method, k, DRAFT_LAYERS.get(method, 0), rates, config)
