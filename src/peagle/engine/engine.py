"""The engine: add, abort, step."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peagle.config import EngineConfig, SamplingParams
from peagle.device import batched_tokens, kv_cache_memory
from peagle.drafters.drafter import Drafter
from peagle.engine.batch import Scheduled
from peagle.engine.block_pool import BlockPool
from peagle.engine.constraint import Constraint
from peagle.engine.kv_cache import KVCache, kv_bytes_per_token
from peagle.engine.request import Request, RequestOutput
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import SAMPLING_BYTES
from peagle.engine.resident_runner import ResidentRunner, captures_cycles
from peagle.engine.runner import CycleResult, Runner
from peagle.engine.scheduler import Scheduler
from peagle.errors import InputError
from peagle.models.decoder import Decoder

MAX_SEED = 2**63 - 1
SMALLEST_CHUNK = 16
"""Prompt tokens for which a GPU must have memory."""
SMALLEST_CONTEXT = 256
"""Tokens that the KV cache must hold when no context length was asked for."""


@dataclass(frozen=True)
class Load:
    """How busy an engine is, and what it has done so far."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache's blocks that requests hold, 0 to 1."""
    preemptions: int
    prefix_queries: int
    """Tokens looked for in the prefix cache."""
    prefix_hits: int
    """Tokens found there."""


class Engine:
    """Runs requests on one device; single-threaded, driven by calls to `step`.

    `synthetic` accepts so many drafts a cycle on average whatever the target says: it measures
    time, and its text means nothing.

    Raises `InputError` when the memory given holds no single sequence.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        k: int,
        config: EngineConfig,
        end_tokens: Sequence[int] = (),
        synthetic: float | None = None,
    ) -> None:
        assert (drafter is None) == (k == 0), "a drafter comes with its K"
        if target.embed.weight.is_cuda:
            torch.cuda.set_device(target.embed.weight.device)  # where Triton launches
        self.drafter, self.k, self.end_tokens = drafter, k, tuple(end_tokens)
        device = target.embed.weight.device
        batched = batched_tokens(config, device)
        workspace = _workspace(target, drafter, batched, config.max_num_seqs * (k + 1))
        memory = kv_cache_memory(config, device, workspace)
        num_blocks = _num_blocks(target, drafter, config, memory)
        self.max_length = _max_length(target, config, num_blocks, memory)
        size = config.block_size
        on_device = captures_cycles(target, drafter)
        if synthetic is not None and not on_device and device.type == "cuda":
            raise InputError("synthetic acceptance needs the GPU kernels, which this model has not")
        on_device = on_device or synthetic is not None
        rows = config.max_num_seqs + on_device
        slots = num_blocks * size
        table = RequestTable(rows, self.max_length, size, device, nowhere=slots)
        self.pool = BlockPool(num_blocks)
        caches = _caches(target, drafter, table, slots)
        self._caches = [cache for cache in caches if cache is not None]
        self.runner = Runner(target, drafter, table, caches)
        self.resident: ResidentRunner | None = None
        """Runs the requests whose tokens the device chooses by itself, where it can."""
        if on_device:
            self.resident = ResidentRunner(target, drafter, k, table, caches, synthetic)
            self.resident.capture()
        self.scheduler = Scheduler(
            self.pool,
            table,
            self.max_length,
            batched,
            config.enable_prefix_caching,
        )
        self.vocab_size = target.config.vocab_size
        self.max_num_seqs = config.max_num_seqs
        self._seed = config.seed
        self._added = 0
        self._requests: dict[str, Request] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is left."""
        return bool(self._requests)

    @property
    def load(self) -> Load:
        """A snapshot, which any thread may take."""
        queue = self.scheduler
        return Load(
            running=len(queue.running),
            waiting=len(queue.waiting),
            kv_usage=1 - self.pool.free_blocks / self.pool.num_blocks,
            preemptions=queue.preemptions,
            prefix_queries=queue.prefix_queries,
            prefix_hits=queue.prefix_hits,
        )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a request. Raises `InputError` when it cannot be run as asked."""
        if request_id in self._requests:
            raise InputError(f"request id {request_id} is already running")
        self.check(prompt, params)
        k = self.k if params.num_speculative_tokens is None else params.num_speculative_tokens
        seed = self._seed + self._added if params.seed is None else params.seed
        request = Request(request_id, list(prompt), params, seed & MAX_SEED, k, constraint)
        ends = () if params.ignore_eos else self.end_tokens
        request.stop_ids = frozenset((*ends, *params.stop_token_ids))
        request.on_device = self.resident is not None and params.logits_unchanged
        self._added += 1
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, reason)

    def step(self) -> list[RequestOutput]:
        """One cycle for as many requests as fit; what each of them got."""
        outputs = [self._advance(*done) for done in self._run(self.scheduler.schedule())]
        return outputs + self._make_room()

    def _run(self, work: list[Scheduled]) -> list[tuple[Scheduled, CycleResult]]:
        """Start the work; what has come of it, or of earlier work."""
        done: list[tuple[Scheduled, CycleResult]] = []
        if self.resident is not None:
            done += self.resident.run([item for item in work if item.request.on_device])
            work = [item for item in work if not item.request.on_device]
        if work:
            done += zip(work, self.runner.run(work), strict=True)
        return done

    def _make_room(self) -> list[RequestOutput]:
        """Take back prompt chunks for which a step had no memory, and make later ones smaller.

        Requests for which there is none however small the chunk end with an error.
        """
        refused = self.resident.refused if self.resident is not None else []
        refused = [item for item in refused if item.request.id in self._requests]
        if not refused:
            return []
        rows = sum(item.rows for item in refused)
        if rows <= SMALLEST_CHUNK:
            for item in refused:
                self.abort(item.request.id, "error")
            return [RequestOutput(item.request.id, (), 0, "error") for item in refused]
        self.scheduler.max_prompt_tokens = max(rows // 2, SMALLEST_CHUNK)
        taken_back = {item.request.id for item in refused}
        for request in reversed(list(self.scheduler.running)):
            if request.id in taken_back:
                self.scheduler.preempt(request)
        warnings.warn(
            f"the GPU has no memory for {rows} prompt tokens at once; going on with "
            f"{self.scheduler.max_prompt_tokens} (set max_num_batched_tokens to begin there)",
            stacklevel=2,
        )
        return []

    def _advance(self, item: Scheduled, result: CycleResult) -> RequestOutput:
        """Apply one request's result: its lengths, its tokens, and whether it ends."""
        request = item.request
        if request.features is not None:
            request.drafter_computed += len(request.features)
        request.features = result.features
        request.computed += item.rows - item.drafts + result.accepted
        if request.on_device:
            request.drafter_computed = request.computed - len(result.tokens)
        request.speculation.record(item.drafts, result.accepted)
        new, reason = _until_end(request, result.tokens, self.max_length)
        request.tokens += new
        if request.constraint is not None:
            request.constraint.advance(new)
            reason = "error" if request.constraint.failure else reason
        request.logprobs += result.logprobs[: len(new)]
        self.scheduler.remember(request)
        if reason == "error":
            self._clear(request)
        if reason is not None:
            self.abort(request.id, reason)
        return RequestOutput(request.id, tuple(new), min(result.accepted, len(new)), reason)

    @torch.inference_mode()
    def _clear(self, request: Request) -> None:
        """Keep whatever made a request fail from those that get its blocks next."""
        blocks = self.pool.disown(request.blocks)
        for cache in self._caches:
            cache.clear(blocks)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise `InputError` for what cannot be run as asked; callable from any thread."""
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if len(prompt) >= self.max_length:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.max_length} with "
                "at least one of output; shorten the prompt or raise max_model_len"
            )
        ids = (*prompt, *params.logit_bias, *params.stop_token_ids)
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.vocab_size:
                raise InputError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        k = params.num_speculative_tokens
        if k is not None and k > self.k:
            raise InputError(f"num_speculative_tokens {k} is above the engine's {self.k}")


def _until_end(
    request: Request, tokens: list[int], max_length: int
) -> tuple[list[int], str | None]:
    """New tokens up to and with the one that ends the request, and why it ends."""
    allowed = min(request.params.max_tokens - request.output_length, max_length - request.total)
    for index, token in enumerate(tokens[:allowed]):
        if token < 0:
            return tokens[:index], "error"
        enough = request.output_length + index + 1 > request.params.min_tokens
        if token in request.stop_ids and enough:
            return tokens[: index + 1], "stop"
    return tokens[:allowed], "length" if len(tokens) >= allowed else None


def _caches(
    target: Decoder, drafter: Drafter | None, table: RequestTable, slots: int
) -> tuple[KVCache, KVCache | None]:
    dtype = target.embed.weight.dtype
    of_target = KVCache(target.config, table, slots, dtype)
    if drafter is None:
        return of_target, None
    return of_target, KVCache(drafter.model.config.transformer, table, slots, dtype)


def _workspace(target: Decoder, drafter: Drafter | None, rows: int, sampled: int) -> int:
    """Bytes of a step's largest tensors: a layer's products, drafter features, and logits."""
    config = target.config
    inner = max(config.intermediate_size, config.moe_intermediate_size * config.num_experts_per_tok)
    features = 0 if drafter is None else drafter.model.config.feature_size
    width = 3 * inner + 8 * config.hidden_size + 2 * features
    numbers = rows * width + 2 * sampled * config.vocab_size
    return numbers * target.embed.weight.dtype.itemsize + SAMPLING_BYTES


def _num_blocks(target: Decoder, drafter: Drafter | None, config: EngineConfig, memory: int) -> int:
    dtype = target.embed.weight.dtype
    shapes = [target.config] + ([drafter.model.config.transformer] if drafter else [])
    per_token = sum(kv_bytes_per_token(shape, dtype) for shape in shapes)
    affordable = memory // (per_token * config.block_size)
    longest = config.max_model_len or target.rotations.shape[0]
    return min(affordable, config.max_num_seqs * -(-longest // config.block_size))


def _max_length(target: Decoder, config: EngineConfig, num_blocks: int, memory: int) -> int:
    held = num_blocks * config.block_size
    limit = target.rotations.shape[0]
    wanted = config.max_model_len or min(limit, max(held, SMALLEST_CONTEXT))
    if wanted > target.config.max_position_embeddings:
        raise InputError(
            f"max_model_len {wanted} is above the target's {target.config.max_position_embeddings}"
        )
    if wanted > held:
        needed = -(-wanted // config.block_size) * (memory / max(num_blocks, 1))
        raise InputError(
            f"the KV cache holds {held} tokens, one sequence needs {wanted} "
            f"(about {needed / 2**20:.0f} MiB); raise kv_cache_memory or lower max_model_len"
        )
    return wanted
