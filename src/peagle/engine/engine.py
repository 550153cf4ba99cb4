"""The engine: add, abort, step."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from peagle.config import EngineConfig, SamplingParams
from peagle.device import step_timeout
from peagle.drafters.kind import Kind
from peagle.drafters.proposer import Proposer
from peagle.engine.capacity import capacity_of
from peagle.engine.constraint import Constraint
from peagle.engine.cycle_times import MeasuredTimes, RunningTimes
from peagle.engine.draft_length import DraftLength, Stopped, candidate_lengths
from peagle.engine.drafting import Drafting
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.pace import Pace
from peagle.engine.plan import NOTHING, Plan
from peagle.engine.repeats import Repeats
from peagle.engine.request import Request, RequestOutput
from peagle.engine.scheduler import Scheduler
from peagle.engine.step import Step
from peagle.engine.thread_count import thread_count
from peagle.engine.worker import open_worker
from peagle.errors import ContextLengthError, InputError
from peagle.models.decoder import Decoder
from peagle.set_acceptance import SetAcceptance

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class EngineStats:
    """How busy an engine is, and what it has done so far."""

    running: int
    waiting: int
    kv_usage: float
    """Share of the KV cache's blocks that requests hold, 0 to 1, where it is largest."""
    preemptions: int
    prefix_queries: int
    """Tokens looked for in the prefix cache."""
    prefix_hits: int
    """Tokens found there."""
    drafting_stopped: Stopped | None = None
    """Why nothing is drafted, where drafts are chosen by load; None: drafts are in use."""

    @classmethod
    def pooled(cls, each: "Sequence[EngineStats]") -> "EngineStats":
        """The sums over several engines; `kv_usage` is that of the fullest cache."""
        counts = ("running", "waiting", "preemptions", "prefix_queries", "prefix_hits")
        sums = {name: sum(getattr(one, name) for one in each) for name in counts}
        return cls(kv_usage=max(one.kv_usage for one in each), **sums)


@dataclass(frozen=True)
class DrafterFacts:
    """What is told of a drafter."""

    kind: Kind
    trained_tokens: int | None
    """K_train, where its files say."""


@dataclass(frozen=True)
class EngineFacts:
    """What never changes of an engine, and whoever sends it requests must know."""

    vocab_size: int
    end_tokens: tuple[int, ...]
    """Ids that end a text."""
    max_length: int
    """Longest prompt + output in tokens."""
    max_num_seqs: int
    """Most requests that run at once."""
    k: int
    """Most drafts in a cycle; 0 without a drafter."""
    most_trees: int
    """Requests at once up to which K drafts branch; 0: they never do."""
    runs_ahead: bool
    """Whether a step's results come while the device works on the next one."""
    drafter: DrafterFacts | None
    block_size: int
    """Tokens per block of the KV cache."""
    num_blocks: int
    """Blocks of the KV cache, of all groups of layers."""
    kv_tokens: int
    """Positions of whole contexts that the KV cache holds."""
    seed: int
    """The seed of the first request without one; later ones have those after it."""
    step_timeout: float
    """Seconds after which a step counts as stuck; infinite: never."""
    is_exact: bool = False
    """Whether the target computes in float32."""

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
            raise InputError(
                f"num_speculative_tokens {k} is above the engine's {self.k}; ask for no more, or "
                "start it with a larger K"
            )


class EngineDeadError(Exception):
    """No step can run any more, as after an error of the device."""


class Engine:
    """Runs requests on one device; single-threaded, driven by calls to `step`.

    proposer: drafts up to K tokens for a cycle; None: nothing drafts, and K is 0.
    num_tree_nodes: drafts that branch, in place of K; as in `SpeculativeConfig`.
    acceptance: decides which drafts are accepted in place of the target, for measuring time: the
    text means nothing.

    Raises `InputError` when the KV cache cannot hold one sequence, or the context K drafts, and for
    trees that there cannot be.
    """

    def __init__(
        self,
        target: Decoder,
        proposer: Proposer | None,
        k: int,
        config: EngineConfig,
        end_tokens: Sequence[int] = (),
        num_tree_nodes: int | None = None,
        acceptance: SetAcceptance | None = None,
    ) -> None:
        assert (proposer is None) == (k == 0), "whatever drafts comes with its K"
        self.target, self.proposer, self.k = target, proposer, k
        lengths = candidate_lengths(k) if config.draft_length == "auto" else (k,)
        drafting = Drafting(proposer, lengths, num_tree_nodes, acceptance)
        self._needs = needs = drafting.needs
        capacity = capacity_of(target, needs, k, config)
        if k >= capacity.max_length:
            raise InputError(
                f"K = {k} drafts do not fit into a context of {capacity.max_length} tokens; lower "
                "K, or raise max_model_len"
            )
        self.blocks = capacity.groups()
        processor = LogitsProcessor(self._constraint_of)
        self.worker = open_worker(target, drafting, capacity, processor)
        branching, ahead = self.worker.branching, self.worker.runs_ahead
        draft_length = None
        if (costs := self.worker.cycle_seconds) is not None:
            times = MeasuredTimes(costs) if costs else RunningTimes(lengths)
            draft_length = DraftLength(times, self.worker.pauses, branching)
        repeats = Repeats() if ahead and lengths[0] == 0 and not needs.history else None
        pace = Pace(draft_length, repeats, branching, capacity)
        self.scheduler = Scheduler(self.blocks, config, ahead, pace)
        weight, vocab_size = target.embed.weight, target.spec.vocab_size
        self._threads = thread_count(weight.device)
        self._may_go_undrafted = ahead and needs.network is not None and not needs.history
        """Whether requests may go without drafts: on a CPU the cost of a cycle depends on how many
        of its requests do."""
        self.newest = Step(0)
        """The last step that was planned."""
        self.began: float | None = None
        """When the call of `step` that runs began, by `time.monotonic`; None: none runs."""
        self._added = 0
        drafts = None if needs.network is None else needs.network.config
        self.facts = EngineFacts(
            vocab_size=vocab_size,
            end_tokens=tuple(token for token in end_tokens if 0 <= token < vocab_size),
            max_length=capacity.max_length,
            max_num_seqs=capacity.num_seqs,
            k=k,
            most_trees=branching.most_requests if branching.nodes else 0,
            runs_ahead=ahead,
            drafter=None if drafts is None else DrafterFacts(drafts.kind, drafts.trained_tokens),
            block_size=capacity.block_size,
            num_blocks=self.blocks.num_blocks,
            kv_tokens=capacity.slots,
            seed=config.seed or 0,
            step_timeout=step_timeout(config, weight.device),
            is_exact=weight.dtype == torch.float32,
        )

    @property
    def busy(self) -> bool:
        """Whether any request is left."""
        return bool(self.scheduler.requests)

    @property
    def stats(self) -> EngineStats:
        """A snapshot; any thread may take it."""
        queue = self.scheduler
        return EngineStats(
            running=len(queue.running),
            waiting=len(queue.waiting),
            kv_usage=self.blocks.usage,
            preemptions=queue.preemptions,
            prefix_queries=queue.prefix_queries,
            prefix_hits=queue.prefix_hits,
            drafting_stopped=queue.pace.drafting_stopped,
        )

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> Request:
        """Queue a request. Raises `InputError` when it cannot be run as asked."""
        if request_id in self.scheduler.requests:
            raise InputError(f"request id {request_id} is already running")
        self.facts.check(prompt, params)
        k = self.k if params.num_speculative_tokens is None else params.num_speculative_tokens
        seed = self.facts.seed + self._added if params.seed is None else params.seed
        request = Request(
            request_id,
            prompt,
            params,
            seed & MAX_SEED,
            k,
            constraint,
            from_features=self._needs.network is not None,
            may_go_undrafted=self._may_go_undrafted and params.num_speculative_tokens is None,
        )
        ends = () if params.ignore_eos else self.facts.end_tokens
        request.stop_ids = frozenset((*ends, *params.stop_token_ids))
        self._added += params.unrecorded_from is None
        self.scheduler.add(request)
        return request

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request now; unknown and finished ids are ignored."""
        self.scheduler.abort(request_id, reason)

    def step(self) -> list[RequestOutput]:
        """One cycle for as many requests as fit; what each of them got.

        When it raises, requests keep their tokens and are computed again from the start. Raises
        `EngineDeadError` when there is no going on.
        """
        self.began = time.monotonic()
        try:
            self.newest = step = self.scheduler.launch(self._plan())
            with self._threads.step(step.rows) if self._threads else nullcontext():
                outcome = self.worker.exchange(step)
            return self.scheduler.commit(outcome)
        except BaseException:
            self._restart()
            raise
        finally:
            self.began = None

    def _restart(self) -> None:
        """Begin all requests anew after an error within a step."""
        self.scheduler.restart()
        try:
            self.worker.forget()
        except Exception as error:
            raise EngineDeadError(f"the device is lost: {error}") from error

    def _plan(self) -> Plan:
        """What to launch now: nothing where what the device works on is to be read first.

        The host's part in a choice depends on all tokens before it.
        """
        if self.scheduler.awaits_first_tokens:
            return NOTHING
        plan = self.scheduler.plan()
        return NOTHING if plan.hosted and self.scheduler.in_flight else plan

    def _constraint_of(self, request_id: str) -> Constraint:
        constraint = self.scheduler.requests[request_id].constraint
        assert constraint is not None, "only a request that has one says so"
        return constraint
