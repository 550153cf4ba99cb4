"""Which models an engine runs, and how: plain data, of which any process can make the engine."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

from peagle.config import EngineConfig
from peagle.configuration import Config
from peagle.device import kv_cache_memory, resolve_device, resolve_dtype
from peagle.drafters.methods import load_network, proposer_for
from peagle.engine.engine import Engine
from peagle.engine_client.local import LocalEngine
from peagle.models.decoder import Decoder
from peagle.models.generation_config import end_tokens
from peagle.models.kv_scales import asks_for_fp8
from peagle.models.loading import load_decoder, widen_on_cpu
from peagle.ops.weight import keep_activations
from peagle.set_acceptance import SetAcceptance
from peagle.speculative_config import SpeculativeConfig


class EngineSource(Config):
    """An engine's target, perhaps its drafter, and its sizes."""

    target: str
    """The target's directory."""
    speculation: SpeculativeConfig | None
    config: EngineConfig

    def load(self, tokenizer: Any) -> LocalEngine:
        """Load it. Raises `InputError` when a directory is unusable, the pair does not fit or
        memory runs out."""
        directory = Path(self.target)
        decoder = load_target(directory, self.config)
        like = decoder.embed.weight
        if self.config.kv_cache_dtype == "auto" and asks_for_fp8(directory):
            warnings.warn(
                f"{directory}: its files ask for keys and values in FP8; they keep {like.dtype} "
                "unless kv_cache_dtype is fp8 (--kv-cache-dtype fp8)",
                stacklevel=2,
            )
        load = partial(load_network, directory=directory, target=decoder)
        proposer, k = proposer_for(self.speculation, load, like.device, decoder.spec.vocab_size)
        nodes, acceptance = None, None
        if self.speculation is not None:
            nodes = self.speculation.num_tree_nodes
            if (rates := self.speculation.synthetic_acceptance_rates) is not None:
                acceptance = SetAcceptance(rates)
        ends = end_tokens(directory, tokenizer.eos_token_id)
        core = Engine(decoder, proposer, k, self.config, ends, nodes, acceptance)
        return LocalEngine(core, tokenizer)


def load_target(directory: Path, config: EngineConfig) -> Decoder:
    """A target as an engine of this configuration computes with it. Raises `InputError`."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    decoder = load_decoder(directory, dtype, device, config.max_model_len, config.lora)
    return computing(decoder, config)


def computing(decoder: Decoder, config: EngineConfig) -> Decoder:
    """The decoder, which computes from now on as a configuration says."""
    weight = decoder.embed.weight
    if weight.device.type == "cpu":
        widen_on_cpu(decoder, weight, kv_cache_memory(config, weight.device))
    if not config.quantize_activations:
        keep_activations(decoder)
    if config.batch_invariant:
        decoder.make_batch_invariant()
    return decoder
