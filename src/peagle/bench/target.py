"""A target's weights, loaded once for all engines that verify with them."""

from peagle.bench.case import Setup
from peagle.config import EngineConfig
from peagle.drafters.methods import load_network, proposer_for
from peagle.drafters.network import Network
from peagle.drafters.proposer import Needs, Proposer
from peagle.engine.capacity import cache_shape
from peagle.engine.engine import Engine
from peagle.engine_client.source import load_target
from peagle.llm import LLM
from peagle.models.decoder import Decoder
from peagle.models.generation_config import end_tokens
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import model_directory
from peagle.speculative_config import TREE_NODES, SpeculativeConfig

BLOCKS_BESIDE = 2
"""Blocks of each request beside those of its tokens: one that is not full, one for drafts."""
LEAST = 512
"""Tokens that a KV cache holds at least."""


class SharedTarget:
    """A target in memory. Raises `InputError` when its directory is unusable or memory runs out."""

    def __init__(self, target: str, config: EngineConfig) -> None:
        self._directory = model_directory(target)
        self._decoder = load_target(self._directory, config)
        self.tokenizer = load_tokenizer(self._directory)
        self._networks: dict[tuple[object, ...], Network] = {}
        self._ends = end_tokens(self._directory, self.tokenizer.eos_token_id)

    def network(self, speculation: SpeculativeConfig) -> Network:
        """A network's weights, loaded once too."""
        named = speculation.model, speculation.parallel_drafting, speculation.quantization
        if named not in self._networks:
            self._networks[named] = load_network(speculation, self._directory, self._decoder)
        return self._networks[named]

    def llm(
        self, speculation: SpeculativeConfig | None, config: EngineConfig, longest: int | None
    ) -> LLM:
        """An engine over these weights.

        longest: tokens of the longest request, if the engine is to hold no more than its requests
        need; None lets it take the memory that an engine of its own takes.
        """
        nodes = None if speculation is None else speculation.num_tree_nodes
        device = self._decoder.embed.weight.device
        proposer, k = proposer_for(speculation, self.network, device, self._decoder.spec.vocab_size)
        if longest is not None:
            most = max(k, TREE_NODES if nodes is None else nodes)
            config = holding(self._decoder, proposer, k, config, longest + most)
        engine = Engine(self._decoder, proposer, k, config, self._ends, nodes)
        return LLM.over(engine, self.tokenizer)


def of_setup(config: EngineConfig, setup: Setup, concurrency: int) -> EngineConfig:
    """How an engine of a setup computes: without prefix caching, so that no case profits from an
    earlier one's prompts."""
    own = {"draft_length": setup.draft_length, "enable_prefix_caching": False}
    return config.model_copy(update={"max_num_seqs": concurrency, **own})


def holding(
    target: Decoder, proposer: Proposer | None, k: int, config: EngineConfig, longest: int
) -> EngineConfig:
    """The same with keys and values of as many requests of `longest` tokens as it may run."""
    assert config.max_num_seqs is not None, "a case says how many requests there are"
    needs = Needs() if proposer is None else proposer.needs
    shape = cache_shape(target, needs, k, config)
    each = longest + BLOCKS_BESIDE * config.block_size
    memory = shape.needed(config.max_num_seqs, max(each, LEAST // config.max_num_seqs))
    return config.model_copy(update={"kv_cache_memory": memory})
