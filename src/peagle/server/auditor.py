"""Audits of served answers in time that is free; `peagle.audit` says how one is judged."""

import asyncio
import contextlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from peagle.async_llm import AsyncLLM, EngineClosedError
from peagle.audit import BOUND, EXACT_BOUND, LAST, AuditCase, Finding
from peagle.completion import Completion
from peagle.config import SamplingParams
from peagle.errors import InputError, reason
from peagle.live_request import Prepared
from peagle.server.metrics import Metrics
from peagle.server.settings import ServerSettings

IDLE = 2.0
"""Seconds without a request before an audit begins that no request has earned."""
BUSY = 0.75
"""The share of seats below which audits run beside requests: the share of answers that was asked
for, or one in `OFTEN`."""
BURST = 4.0
"""Most of these that may follow one another."""
LOOK = 0.05
"""Seconds between two looks at whether requests have come."""
OFTEN = 60.0
"""Seconds after which the next answer is audited whatever the share."""
MOST = 64
"""Answers that wait to be audited."""
SHORT = 0.6
"""An answer is suspect whose AL is below this share of the mean."""
TAIL, REPEATED = 8, 4
"""So is one cut at its longest that ends with so many tokens so many times."""
FAMILIAR, SELF_TEST_TOKENS = 0.99, 16
log = logging.getLogger("peagle.audit")


class Auditor:
    """Takes a share of the answers, suspects first, and judges as many beside requests, and the
    others while nothing else runs.

    load: the share of seats taken; act: what is done after a finding, besides the log.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        settings: ServerSettings,
        metrics: Metrics,
        load: Callable[[], float],
        act: Callable[[], None],
    ) -> None:
        self._llm, self._settings, self._metrics = llm, settings, metrics
        self._load, self._act = load, act
        self.bound = EXACT_BOUND if llm.llm.engine.facts.is_exact else BOUND
        self._waiting: deque[tuple[Completion, AuditCase]] = deque()
        self._usual_length = 0.0
        self._busy_at = time.monotonic()
        """When there were requests last."""
        self._credit = 0.0
        """How many audits may run beside requests."""

    def offer(self, request: Prepared, done: Completion) -> None:
        """Take an answer that has been served, or leave it."""
        suspect = self._is_suspect(done)
        overdue = self._metrics.since_audit(done.replica) > OFTEN
        self._credit = min(self._credit + max(self._settings.audit, overdue), BURST)
        if not (suspect or overdue or random.random() < self._settings.audit):
            return
        if (case := AuditCase.of(request, done)) is None:
            self._count("skipped", done)
            return
        self._waiting.append((done, case))
        if suspect:
            self._waiting.rotate(1)
        if len(self._waiting) > MOST:
            self._count("dropped", self._waiting.pop()[0])

    async def run(self) -> None:
        """Audit for ever, after a test of this itself."""
        try:
            await self._test_itself()
            while True:
                while not (self._may_run(begins=True) and self._waiting):
                    await asyncio.sleep(LOOK)
                done, case = self._waiting.popleft()
                if not await self._audit(done, case):
                    self._waiting.append((done, case))
        except EngineClosedError:
            pass
        except Exception:
            log.exception("audits end: this one failed")

    def _may_run(self, begins: bool = False) -> bool:
        """Whether an audit is in no request's way. One that begins needs more than a moment."""
        load, now = self._load(), time.monotonic()
        if load:
            self._busy_at = now
            return load < BUSY and self._credit >= 1
        return not begins or now - self._busy_at >= IDLE

    async def _unless_disturbed(self, case: AuditCase) -> Finding | None:
        """Judge a case, but give way to requests that it may not run beside, and then return None.

        Raises `InputError` where an engine that ends takes it with it.
        """
        work, began = asyncio.ensure_future(self._llm.complete(case.scoring)), time.monotonic()
        try:
            while not work.done():
                if not self._may_run():
                    return None
                await asyncio.wait([work], timeout=LOOK)
            self._credit -= self._busy_at >= began
            return case.judge(work.result(), self.bound)
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, InputError):
                await work

    async def _audit(self, done: Completion, case: AuditCase) -> bool:
        """Audit an answer, and tell what is found. Returns False where requests came."""
        try:
            verdict = await self._unless_disturbed(case)
            if verdict is None:
                return False
            self._tell(verdict, done)
            if verdict.result == "different":  # from here on it gives way to nobody
                await self._report(verdict, done, case)
        except InputError as error:  # this audit is lost, and no other one
            log.warning(f"request {done.request_id}: {error}")
            self._count("dropped", done)
        return True

    def _tell(self, verdict: Finding, done: Completion) -> None:
        """Count an audit and its margins."""
        self._metrics.siblings.audited[done.replica] = time.monotonic()
        self._count(verdict.result, done)
        self._metrics.count("peagle:audited_tokens", len(verdict.margins), replica=done.replica)
        for margin in filter(None, verdict.margins):
            self._metrics.count("peagle:audit_flips", 1, replica=done.replica)
            self._metrics.observe("peagle:audit_margin", margin, done.replica)

    async def _report(self, verdict: Finding, done: Completion, case: AuditCase) -> None:
        """Log a finding with its cause, keep its case, and act."""
        place = verdict.first
        alone = await self._llm.complete(case.replay(place, num_speculative_tokens=0))
        cause = case.cause(place, alone, await self._llm.complete(case.replay(place)))
        told = (
            f"audit: request {done.request_id} differs at token {place} of {len(case.answer)}: "
            f"margin {verdict.margins[place]:.2f} (bound {verdict.bound}), seed {case.seed}, "
            f"T={case.temperature}, K={self._llm.llm.k}; decoded again: {cause}"
        )
        log.error(told + self._keep(case))
        self._act()

    def _keep(self, case: AuditCase) -> str:
        """Write a case where that is asked for. Returns what the log says of it."""
        if (folder := self._settings.audit_dump) is None:
            return ""
        path = Path(folder) / f"audit-{time.time_ns()}.json"
        try:
            case.save(path)
        except OSError as error:  # the finding counts all the same
            return f"; {path} cannot be written: {reason(error)}"
        return f"; peagle check DRAFTER --target TARGET --replay {path}"

    def _count(self, result: str, done: Completion) -> None:
        self._metrics.count("peagle:audited_requests", 1, result, replica=done.replica)

    def _is_suspect(self, done: Completion) -> bool:
        """Whether an answer looks like those that faults have left elsewhere."""
        length, usual = done.speculation.acceptance_length, self._usual_length
        if done.speculation.cycles:
            self._usual_length = FAMILIAR * (usual or length) + (1 - FAMILIAR) * length
        tail = done.token_ids[-TAIL * REPEATED :]
        repeats = len(tail) == TAIL * REPEATED and tail == tail[-TAIL:] * REPEATED
        slow = bool(done.speculation.cycles) and length < SHORT * usual
        return slow or (repeats and done.finish_reason == "length")

    async def _test_itself(self) -> None:
        """Audit an answer of our own, as it is and with one draft that was accepted falsely."""
        size = self._llm.llm.engine.vocab_size
        tokens = [size // 2]
        params = SamplingParams(
            max_tokens=SELF_TEST_TOKENS, ignore_eos=True, unrecorded_from=1, priority=LAST, seed=0
        )
        request = Prepared(tokens, params, None)
        done = await self._llm.complete(request)
        case = AuditCase.of(request, done)
        assert case is not None
        healthy = case.judge(await self._llm.complete(case.scoring), self.bound)
        place = len(case.answer) // 2
        other = (case.answer[place] + size // 2) % size
        answer = (*case.answer[:place], other, *case.answer[place + 1 :])
        false = replace(case, answer=answer)
        damaged = false.judge(await self._llm.complete(false.scoring), self.bound)
        if healthy.result == "different" or damaged.result != "different":
            raise RuntimeError(
                f"the self-test found margins of {healthy.margin:.2f} in a healthy answer and "
                f"{damaged.margin:.2f} in a damaged one, around a bound of {self.bound}"
            )
        log.info(f"audits a share of {self._settings.audit}; margins up to {self.bound} are equal")
        if self._settings.audit_action == "drain" and self.bound == BOUND:
            log.warning(
                f"--audit-action drain: the bound of {BOUND} was measured on small targets in "
                "bfloat16, not on this one; watch peagle:audit_margin with log first"
            )
