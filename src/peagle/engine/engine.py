"""The engine: add, abort, step."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.config import EngineConfig, SamplingParams
from peagle.drafters.drafter import Drafter
from peagle.engine.batch import Scheduled
from peagle.engine.block_pool import BlockPool
from peagle.engine.capacity import capacity_of
from peagle.engine.constraint import Constraint
from peagle.engine.draft_length import candidate_lengths
from peagle.engine.executor import Executor
from peagle.engine.request import Request, RequestOutput
from peagle.engine.runner import CycleResult
from peagle.engine.scheduler import Scheduler
from peagle.errors import ContextLengthError, InputError
from peagle.models.decoder import Decoder

MAX_SEED = 2**63 - 1
SMALLEST_CHUNK = 16
"""Fewest prompt tokens in one pass that a GPU must have memory for."""
NAN_LOGITS = "the target's logits are NaN; its weights may be broken, or need another dtype"


@dataclass(frozen=True)
class EngineStats:
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

    `synthetic[i]`: share of cycles in which draft i + 1 is accepted, whatever the target says. This
    is for measuring time; the text means nothing.

    Raises `InputError` when the KV cache cannot hold one sequence, or the context K drafts.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        k: int,
        config: EngineConfig,
        end_tokens: Sequence[int] = (),
        synthetic: Sequence[float] | None = None,
    ) -> None:
        assert (drafter is None) == (k == 0), "a drafter comes with its K"
        self.drafter, self.k, self.vocab_size = drafter, k, target.spec.vocab_size
        self.end_tokens = tuple(token for token in end_tokens if token < self.vocab_size)
        capacity = capacity_of(target, drafter, k, config)
        self.max_length = capacity.max_length
        if k >= self.max_length:
            raise InputError(
                f"K = {k} drafts do not fit into a context of {self.max_length} tokens"
            )
        self.pool = BlockPool(capacity.num_blocks)
        lengths = candidate_lengths(k) if config.draft_length == "auto" else (k,)
        self.executor = Executor(target, drafter, lengths, capacity, synthetic)
        self.scheduler = Scheduler(
            self.pool,
            self.executor.table,
            capacity.max_length,
            capacity.batched_tokens,
            capacity.prompt_tokens,
            config.enable_prefix_caching,
        )
        self.max_num_seqs = capacity.num_seqs
        self._seed = config.seed
        self._added = 0
        self._requests: dict[str, Request] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is left."""
        return bool(self._requests)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step's results come while the device works on the next one."""
        return self.executor.resident is not None

    @property
    def stats(self) -> EngineStats:
        """A snapshot; any thread may take it."""
        queue = self.scheduler
        return EngineStats(
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
        self._added += 1
        self._requests[request_id] = request
        self.scheduler.add(request)
        return request

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raise `InputError` for what cannot be run as asked; callable from any thread."""
        if not prompt:
            raise InputError("the prompt is empty; give at least one token")
        if len(prompt) + min(params.max_tokens, 1) > self.max_length:
            raise ContextLengthError(len(prompt), self.max_length)
        allowed = params.allowed_token_ids or ()
        ids = (*prompt, *params.logit_bias, *params.stop_token_ids, *allowed)
        for token in (min(ids), max(ids)):
            if not 0 <= token < self.vocab_size:
                raise InputError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
        k = params.num_speculative_tokens
        if k is not None and k > self.k:
            raise InputError(f"num_speculative_tokens {k} is above the engine's {self.k}")

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now; unknown and finished ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.finish(request, reason)

    def step(self) -> list[RequestOutput]:
        """One cycle for as many requests as fit; what each of them got.

        When it raises, requests keep their tokens and are computed again from the start.
        """
        try:
            work = [] if self._awaits_results else self._schedule()
            outputs = [self._advance(*done) for done in self.executor.run(work)]
        except BaseException:
            for request in reversed(list(self.scheduler.running)):
                self.scheduler.preempt(request)
            raise
        return outputs + self._make_room()

    @property
    def _awaits_results(self) -> bool:
        """Whether to launch nothing now, but to read first what the device works on.

        The host's part in a choice depends on all tokens before it.
        """
        needed = self.executor.in_flight and self.scheduler.may_need_host
        return needed or self._awaits_first_tokens

    @property
    def _awaits_first_tokens(self) -> bool:
        """Whether all requests are on the last chunk of their prompt.

        With nothing launched behind it their first tokens come sooner by the time of a launch, and
        requests that arrive meanwhile join the next step: a burst of prompts takes a pass or two in
        all, not one each.
        """
        queue = self.scheduler
        alone = not queue.waiting and queue.resident == len(queue.running)
        return alone and self.executor.filling

    def _schedule(self) -> list[Scheduled]:
        drafts = self.executor.draft_length(self.scheduler.resident)
        return self.scheduler.schedule(drafts, host=not self.executor.in_flight)

    def _make_room(self) -> list[RequestOutput]:
        """Reschedule prompt chunks for which a step had no memory, and make later ones smaller.

        Where the smallest chunk is too large, its requests end with an error.
        """
        refused = [item for item in self.executor.refused if item.request.id in self._requests]
        if not refused:
            return []
        rows = sum(item.rows for item in refused)
        if rows <= SMALLEST_CHUNK:
            for item in refused:
                item.request.failure = f"the GPU has no memory for {rows} prompt tokens at once"
                self.abort(item.request.id, "error")
            return [RequestOutput(item.request.id, (), 0, "error") for item in refused]
        self.scheduler.max_prompt_tokens = max(rows // 2, SMALLEST_CHUNK)
        taken_back = {item.request.id for item in refused}
        for request in reversed(list(self.scheduler.running)):
            if request.id in taken_back:
                self.scheduler.preempt(request)
        warnings.warn(
            f"the GPU has no memory for {rows} prompt tokens at once; continuing with "
            f"{self.scheduler.max_prompt_tokens} (set max_num_batched_tokens to start there)",
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
        if self.executor.resident is not None:
            request.drafter_computed = request.computed - len(result.tokens)
        request.speculation.record(item.drafts, result.accepted)
        new, reason = _until_end(request, result.tokens, self.max_length)
        if any(math.isnan(entry.chosen) for entry in result.prompt_logprobs):
            new, reason = [], "error"
        if reason != "error":
            request.prompt_logprobs += result.prompt_logprobs
        request.tokens += new
        request.logprobs += result.logprobs[: len(new)]
        if request.constraint is not None:
            request.constraint.advance(new)
        self.scheduler.remember(request)
        if reason == "error":
            reason = self._meet_nan(request)
        elif request.constraint is not None and request.constraint.failure:
            request.failure, reason = request.constraint.failure, "error"
        if reason is not None:
            self.abort(request.id, reason)
        return RequestOutput(request.id, tuple(new), min(result.accepted, len(new)), reason)

    def _meet_nan(self, request: Request) -> str | None:
        """End a request whose logits are NaN, or start it over if cached keys may be to blame.

        NaN spreads backwards within a pass, to keys of healthy tokens: attention multiplies hidden
        values by 0. So its blocks must be neither found nor handed on as they are.
        """
        self.executor.clear(self.pool.disown(request.blocks))
        if self.scheduler.recompute(request):
            return None
        request.failure = NAN_LOGITS
        return "error"


def _until_end(
    request: Request, tokens: list[int], max_length: int
) -> tuple[list[int], str | None]:
    """New tokens up to and including the one that ends the request, and why it ends.

    Those of a prompt after which nothing is to be generated are none, and end it.
    """
    allowed = min(request.params.max_tokens - request.output_length, max_length - request.total)
    for index, token in enumerate(tokens[:allowed]):
        if token < 0:
            return tokens[:index], "error"
        enough = request.output_length + index + 1 > request.params.min_tokens
        if token in request.stop_ids and enough:
            return tokens[: index + 1], "stop"
    return tokens[:allowed], "length" if tokens and len(tokens) >= allowed else None
