"""The scheduler: it makes a step of what requests do next, and applies the step's outcome."""

import bisect
import math
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.config import EngineConfig
from peagle.engine.block_groups import BlockGroups, GroupBlock
from peagle.engine.holdings import Holdings
from peagle.engine.pace import Pace
from peagle.engine.plan import Plan, Planner, Share, StepBudget
from peagle.engine.request import Request, RequestOutput
from peagle.engine.step import Begin, Outcome, Result, Step

SMALLEST_CHUNK = 16
"""Fewest prompt tokens in one pass that a GPU must have memory for."""
NAN_LOGITS = "the target's logits are NaN; its weights may be broken, or need another dtype"


@dataclass(frozen=True)
class Launched:
    """A step whose outcome is not known yet."""

    step: Step
    work: tuple[Share, ...]
    admissions: tuple[int, ...]
    """`Request.admissions` of each share's request, at the launch."""


class Scheduler:
    """Continuous batching: running requests first, then waiting ones.

    Each kind is in order of priority, and of arrival where that is equal. When blocks run out the
    last running request gives its own back and waits at the front of its priority; its tokens
    stay, so it later continues where it was.

    `plan` reads, `launch` carries a plan out and writes it down for the worker, and `commit`
    applies what came of it. A request goes round like this:

              add              plan, launch: a row, blocks          commit: it ended
        ──────────▶ waiting ────────────────────────────▶ running ──────────────────▶ gone
                       ▲                                     │   ▲
                       │    launch: preempted, its blocks    │   │  commit: tokens, and blocks
                       └──── go to those before it ──────────┘   └─ that the prefix cache keeps

    Where the worker runs ahead, a step is planned before the outcome of the one before is known:

        step      1: plan launch ·················· commit
        step      2:             plan launch ·················· commit
        worker       ───────────▶[ step 1         ][ step 2          ]
    """

    def __init__(
        self, groups: BlockGroups, config: EngineConfig, runs_ahead: bool, pace: Pace
    ) -> None:
        capacity = pace.capacity
        self.groups, self._held = groups, Holdings(groups, capacity.num_seqs)
        self.runs_ahead = runs_ahead
        """Whether requests stay on the device after their prompt, so that the worker can begin the
        next step before the outcome of this one is known."""
        self.pace = pace
        self._capacity, self._prefix_caching = capacity, config.enable_prefix_caching
        self.max_prompt_tokens = capacity.prompt_tokens
        """Most rows of prompts in a step; fewer once the device had no memory for them."""
        self.requests: dict[str, Request] = {}
        """The requests that have not ended, by id."""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._launched: deque[Launched] = deque()
        self._caught_up: list[int] = []
        """Rows that were left, whose blocks lack keys of the drafter until the next step."""
        self._cleared: list[GroupBlock] = []
        """Blocks that the next step fills with zeros."""
        self._steps, self._crowded = 0, False
        """Steps so far, and whether prompts were left out of the newest."""
        self.preemptions = 0
        self.prefix_queries = 0
        """Tokens looked up in the prefix cache: all tokens of admitted requests."""
        self.prefix_hits = 0
        """Tokens found in the prefix cache."""

    @property
    def in_flight(self) -> bool:
        """Whether the worker has a step whose outcome is not known yet."""
        return bool(self._launched)

    @property
    def awaits_first_tokens(self) -> bool:
        """Whether all requests are on the last chunk of their prompt, which is in flight.

        With nothing launched behind it their first tokens come sooner by the time of a launch, and
        requests that arrive meanwhile join the next step: a burst of prompts takes a pass or two in
        all, not one each.
        """
        alone = not self.waiting and all(request.on_device for request in self.running)
        return alone and self.in_flight and not self._launched[-1].step.cycles

    def add(self, request: Request) -> None:
        """Queue a request. Where drafts do not pay, it goes without them if it may."""
        if request.may_go_undrafted and not self.pace.follows_one_more(self.requests.values()):
            request.k = 0
        self.pace.begun(request)
        self.requests[request.id] = request
        bisect.insort_right(self.waiting, request, key=_priority)

    def plan(self) -> Plan:
        """Plan the next step, empty where all that is left is in flight; this changes nothing."""
        decoding = [request for request in self.running if self._decodes(request)]
        drafts, repeats = self.pace.choose(decoding, self._crowded)
        limits = StepBudget(
            max_length=self._capacity.max_length,
            rows=self._capacity.batched_tokens,
            prompt_rows=self.max_prompt_tokens,
            drafts=drafts,
            prefix_caching=self._prefix_caching,
            repeats=repeats,
            tree_nodes=self.pace.nodes_for(decoding, drafts),
        )
        planner = Planner(self.groups, limits)
        return planner.plan(self.running, self.waiting, self._held.free_rows)

    def launch(self, plan: Plan) -> Step:
        """Carry out a plan: blocks and table rows change hands. Returns what a worker has to do."""
        for passed in plan.passed:  # first, since others take what is given back
            self._held.give_back_passed(passed)
        for request in plan.preempted:
            self.preempt(request)
        begun = tuple(self._admit(share) for share in plan.work if share.prefix is not None)
        for share in plan.work:
            if share.fresh:
                self._held.grow(share)
        cycles = [share for share in plan.work if self._is_cycle(share)]
        chunks = [share for share in plan.work if not self._is_cycle(share)]
        left, blocks = self._held.news()
        caught_up, self._caught_up = tuple(self._caught_up), []
        self._steps, self._crowded = self._steps + 1, plan.crowded
        step = Step(
            self._steps,
            left=left,
            caught_up=caught_up,
            cleared=tuple(self._cleared),
            begun=begun,
            blocks=blocks,
            cycles=tuple(share.cycle() for share in cycles),
            repeats=plan.repeats,
            chunks=tuple(share.chunk(self._held.state_slot(share)) for share in chunks),
            nodes=self._nodes(plan, cycles),
        )
        self._note(plan, step, [share.request for share in cycles])
        return step

    def commit(self, outcome: Outcome) -> list[RequestOutput]:
        """Apply what a worker answered; returns what each request got by it."""
        self._cleared.clear()  # the worker has filled them
        refused = self._refused(outcome)
        outputs = []
        if outcome.step is not None:
            launched = self._launched.popleft()
            assert launched.step.number == outcome.step, "outcomes come in the order of steps"
            outputs = self._land(launched, outcome)
        return outputs + self._make_room(refused)

    def restart(self) -> None:
        """Compute all running requests again from the start, with a worker that has forgotten them.

        They keep their tokens; steps in flight are void.
        """
        for request in reversed(list(self.running)):  # each goes before its equals
            self._evict(request)
        self._launched.clear()
        self.groups.forget_states()  # a lost step may have left some unwritten
        self._caught_up.clear()
        self._held.news()

    def abort(self, request_id: str, reason: str) -> None:
        """End a request now; unknown and finished ids are ignored."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        if request.running:
            if reason != "error":  # an error's keys are not to be shared
                self._catch_up(request)
            self.running.remove(request)
            self._held.give_back(request)
        else:
            self.waiting.remove(request)
        request.running, request.finish_reason = False, reason

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks away; it keeps its tokens and waits before its equals."""
        self._catch_up(request)
        self._evict(request)

    def _evict(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self._held.give_back(request)
        request.forget_cache()
        bisect.insort_left(self.waiting, request, key=_priority)

    def _decodes(self, request: Request) -> bool:
        """Whether a running request is past its prompt, so that drafts may be made for it."""
        if self.runs_ahead:
            return request.on_device
        known = request.total - request.computed
        return known == 1 and request.output_length > 0 and request.ready

    def _is_cycle(self, share: Share) -> bool:
        """Whether a share verifies drafts, rather than computing known tokens.

        A request that gets onto the device does so by a chunk, if only of its newest token.
        """
        return share.request.on_device if self.runs_ahead else share.decodes

    def _admit(self, share: Share) -> Begin:
        request = share.request
        self.waiting.remove(request)
        bisect.insort_right(self.running, request, key=_priority)
        self.prefix_queries += 0 if request.is_unrecorded else request.total
        self.prefix_hits += share.start
        return self._held.admit(share)

    def _nodes(self, plan: Plan, cycles: Sequence[Share]) -> int:
        """Drafts of each of a step's cycles where they branch; 0: they are chains.

        A worker that answers at once has trees for a request that is alone and has room for them.
        """
        nodes = self.pace.nodes_for([share.request for share in cycles], plan.drafts)
        if not nodes or self.runs_ahead:
            return nodes
        [share, *others] = plan.work
        room = len(share.request.blocks) * self._capacity.block_size
        return nodes if not others and share.start + nodes < room else 0

    def _note(self, plan: Plan, step: Step, cycles: Sequence[Request]) -> None:
        """Write down a plan that the worker gets as a step. cycles: who takes part in those."""
        if not plan.work:
            return
        self.pace.launched(cycles, plan.drafts, plan.repeats)
        for share in plan.work:
            share.request.launch(share.rows, share.tokens)
            share.request.on_device |= share.completes and self.runs_ahead
        admissions = tuple(share.request.admissions for share in plan.work)
        self._launched.append(Launched(step, plan.work, admissions))

    def _land(self, launched: Launched, outcome: Outcome) -> list[RequestOutput]:
        """Apply results, but not those of requests that ended or began anew meanwhile."""
        results = {result.row: result for result in outcome.results}
        outputs, verified = [], []
        for share, admissions in zip(launched.work, launched.admissions, strict=True):
            request = share.request
            if not request.running or request.admissions != admissions:
                continue
            request.land(share.rows, share.tokens)
            if request.row in results:
                if share.decodes:
                    verified.append((share.drafts, results[request.row].accepted))
                outputs.append(self._advance(share, results[request.row]))
        self.pace.landed(verified, outcome.time, launched.step.nodes > 0)
        return outputs

    def _advance(self, share: Share, result: Result) -> RequestOutput:
        """Apply one request's result: its lengths, its tokens, and whether it ends."""
        request = share.request
        request.computed += share.rows - share.drafts + result.accepted
        request.drafter_computed = request.computed - result.pending
        new, reason = request.until_end(result.tokens, self._capacity.max_length)
        scores = result.prompt_logprobs
        if scores and any(math.isnan(entry.chosen) for entry in scores):
            new, reason = (), "error"
        if reason != "error":
            request.prompt_logprobs += scores
        request.tokens += new
        if request.constraint is not None:
            request.constraint.advance(new)
        written = request.drafter_computed if request.speculates else request.computed
        self._remember(request, written)
        if reason == "error":
            reason = self._meet_nan(request)
        elif request.constraint is not None and request.constraint.failure:
            request.failure, reason = request.constraint.failure, "error"
            new = ()  # some of them may be what the constraint forbids
        if reason is not None:
            self.abort(request.id, reason)
        return RequestOutput(
            request.id,
            new,
            min(result.accepted, len(new)),  # an end may come among them
            reason,
            drafted=result.drafted,
            verified=result.accepted,
            logprobs=result.logprobs[: len(new)],
            beginning=request.beginning() if new or reason else None,
            failure=request.failure,
            cycle=share.decodes,
        )

    def _meet_nan(self, request: Request) -> str | None:
        """End a request whose logits are NaN, or start it over if cached keys may be to blame.

        NaN spreads backwards within a pass, to keys of healthy tokens: attention multiplies hidden
        values by 0. So its blocks must be neither found nor handed on as they are.
        """
        self._cleared += self.groups.disown(request.blocks)
        if not request.reused:
            request.failure = NAN_LOGITS
            return "error"
        request.distrusts_cache = True
        self._evict(request)
        return None

    def _remember(self, request: Request, written: int) -> None:
        """Register the request's full blocks in the prefix cache, where all keys of its first
        `written` positions are written."""
        size, known = self._capacity.block_size, request.remembered
        full = written // size
        if not self._prefix_caching or request.is_unrecorded or full <= known:
            return
        hashes = request.block_hashes(full, size)
        for index in range(known, len(hashes)):
            self.groups.remember(request.blocks, index, hashes[index])
        request.remembered = max(known, len(hashes))

    def _refused(self, outcome: Outcome) -> list[Share]:
        """The chunks of the newest step that did not run."""
        if not outcome.refused:
            return []
        self.groups.forget_states()  # some of which the chunks were to leave
        return [share for share in self._launched[-1].work if share.request.row in outcome.refused]

    def _make_room(self, refused: Sequence[Share]) -> list[RequestOutput]:
        """Compute again from the start what had no memory, and make later chunks smaller.

        Where the smallest chunk is too large, its requests end with an error.
        """
        shares = [share for share in refused if share.request.id in self.requests]
        if not shares:
            return []
        rows = sum(share.rows for share in shares)
        if rows <= SMALLEST_CHUNK:
            return [self._fail(share.request, rows) for share in shares]
        self.max_prompt_tokens = max(rows // 2, SMALLEST_CHUNK)
        taken_back = {share.request.id for share in shares}
        for request in reversed(list(self.running)):
            if request.id in taken_back:
                self.preempt(request)
        warnings.warn(
            f"the GPU has no memory for {rows} prompt tokens at once; continuing with "
            f"{self.max_prompt_tokens} (set max_num_batched_tokens to start there)",
            stacklevel=3,
        )
        return []

    def _fail(self, request: Request, rows: int) -> RequestOutput:
        request.failure = f"the GPU has no memory for {rows} prompt tokens at once"
        self.abort(request.id, "error")
        beginning, failure = request.beginning(), request.failure
        return RequestOutput(request.id, (), 0, "error", beginning=beginning, failure=failure)

    def _catch_up(self, request: Request) -> None:
        """Have the drafter see what cycles without drafts left unseen of a request that leaves.

        The worker does so before all else in the next step, so that the prefix cache may know these
        blocks now.
        """
        known, usual = request.remembered, request.k + 1
        if not request.speculates or request.pending <= usual or request.output_length <= 1:
            return
        self._remember(request, request.computed)
        if request.remembered > known:
            self._caught_up.append(request.row)


def _priority(request: Request) -> int:
    return request.params.priority
