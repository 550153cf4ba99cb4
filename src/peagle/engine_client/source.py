"""Which models an engine runs, and how: plain data, of which any process can make the engine."""

from pathlib import Path
from typing import Any

from peagle.config import Config, EngineConfig, SpeculativeConfig
from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.drafter import Drafter
from peagle.drafters.lookup import Lookup
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.engine_client.constraints import Constraints
from peagle.engine_client.local import LocalEngine
from peagle.models.decoder import Decoder
from peagle.models.families import read_spec
from peagle.models.fused import check_fusible
from peagle.models.generation_config import end_tokens
from peagle.models.loading import load_decoder
from peagle.models.weights import about, model_directory


class EngineSource(Config):
    """An engine's target, perhaps its drafter, and its sizes."""

    target: str
    """The target's directory."""
    speculation: SpeculativeConfig | None
    config: EngineConfig

    def load(self, tokenizer: Any) -> LocalEngine:
        """Load it. Raises `InputError` when a directory is unusable, the pair does not fit or
        memory runs out."""
        device = resolve_device(self.config.device)
        dtype = resolve_dtype(self.config.dtype, device)
        directory = Path(self.target)
        if device.type == "cuda":
            with about(directory):
                check_fusible(read_spec(directory))
        decoder = load_decoder(directory, dtype, device, self.config.max_model_len)
        decoder.set_arithmetic(
            quantize_activations=self.config.quantize_activations,
            batch_invariant=self.config.batch_invariant,
        )
        drafter, k = _load_drafter(self.speculation, decoder)
        lookup, rates, nodes = None, None, None
        if self.speculation is not None:
            lookup = Lookup.of(self.speculation, device)
            rates = self.speculation.synthetic_acceptance_rates
            nodes = self.speculation.num_tree_nodes
        ends = end_tokens(directory, tokenizer.eos_token_id)
        core = Engine(decoder, drafter, k, self.config, ends, rates, lookup, nodes)
        return local_engine(core, tokenizer)


def local_engine(core: Engine, tokenizer: Any) -> LocalEngine:
    """An engine whose grammars are for a tokenizer."""
    return LocalEngine(core, Constraints(tokenizer, core.vocab_size, core.end_tokens))


def _load_drafter(
    speculation: SpeculativeConfig | None, decoder: Decoder
) -> tuple[Drafter | None, int]:
    """A drafter for the target, if any, and K."""
    if speculation is None:
        return None, 0
    if speculation.model is None:
        return None, speculation.num_speculative_tokens or 0
    how = speculation.parallel_drafting, speculation.quantization
    model = load_drafter(model_directory(speculation.model), decoder, *how)
    return drafter_for(model), speculation.num_speculative_tokens or model.config.default_k
