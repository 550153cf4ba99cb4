"""A target's weights, loaded once for all engines that verify with them."""

from peagle.config import TREE_NODES, DrafterFormat, EngineConfig, SpeculativeConfig
from peagle.device import resolve_device, resolve_dtype
from peagle.drafters.checkpoint import load_drafter
from peagle.drafters.drafter import Drafter
from peagle.drafters.lookup import Lookup
from peagle.drafters.methods import drafter_for
from peagle.drafters.model import DraftModel
from peagle.engine.capacity import cache_shape
from peagle.engine.engine import Engine
from peagle.llm import LLM
from peagle.models.decoder import Decoder
from peagle.models.generation_config import end_tokens
from peagle.models.loading import load_decoder
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import model_directory

BLOCKS_BESIDE = 2
"""Blocks of each request beside those of its tokens: one that is not full, one for drafts."""
LEAST = 512
"""Tokens that a KV cache holds at least."""


class SharedTarget:
    """A target in memory. Raises `InputError` when its directory is unusable or memory runs out."""

    def __init__(self, target: str, config: EngineConfig) -> None:
        directory = model_directory(target)
        device = resolve_device(config.device)
        self._decoder = load_decoder(directory, resolve_dtype(config.dtype, device), device)
        self._decoder.set_arithmetic(
            quantize_activations=config.quantize_activations,
            batch_invariant=config.batch_invariant,
        )
        self.tokenizer = load_tokenizer(directory)
        self._draft_models: dict[tuple[str, bool | None, DrafterFormat | None], DraftModel] = {}
        self._ends = end_tokens(directory, self.tokenizer.eos_token_id)

    def draft_model(
        self, drafter: str, parallel: bool | None, quantization: DrafterFormat | None = None
    ) -> DraftModel:
        """A drafter's weights, loaded once too."""
        named = drafter, parallel, quantization
        if named not in self._draft_models:
            place = model_directory(drafter)
            model = load_drafter(place, self._decoder, parallel, quantization)
            self._draft_models[named] = model
        return self._draft_models[named]

    def llm(
        self, speculation: SpeculativeConfig | None, config: EngineConfig, longest: int | None
    ) -> LLM:
        """An engine over these weights.

        longest: tokens of the longest request, if the engine is to hold no more than its requests
        need; None lets it take the memory that an engine of its own takes.
        """
        drafter: Drafter | None = None
        k, nodes = 0, None
        lookup: Lookup | None = None
        if speculation is not None:
            k, nodes = speculation.num_speculative_tokens or 0, speculation.num_tree_nodes
            lookup = Lookup.of(speculation, self._decoder.embed.weight.device)
            if speculation.model is not None:
                how = speculation.parallel_drafting, speculation.quantization
                model = self.draft_model(speculation.model, *how)
                drafter, k = drafter_for(model), k or model.config.default_k
        if longest is not None:
            most = max(k, TREE_NODES if nodes is None else nodes)
            memory = kv_memory(self._decoder, drafter, k, config, longest + most)
            config = config.model_copy(update={"kv_cache_memory": memory})
        engine = Engine(
            self._decoder, drafter, k, config, self._ends, lookup=lookup, num_tree_nodes=nodes
        )
        return LLM.over(engine, self.tokenizer)


def kv_memory(
    target: Decoder, drafter: Drafter | None, k: int, config: EngineConfig, longest: int
) -> int:
    """Bytes of keys and values of as many requests of `longest` tokens as the engine may run."""
    assert config.max_num_seqs is not None, "a case says how many requests there are"
    shape = cache_shape(target, drafter, k, config)
    each = longest + BLOCKS_BESIDE * config.block_size
    return shape.needed(config.max_num_seqs, max(each, LEAST // config.max_num_seqs))
