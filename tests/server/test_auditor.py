"""Audits of a server: what is judged, what waits, what the log and the metrics say."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle import LLM, AsyncLLM, SamplingParams
from peagle.cli.app import app
from peagle.completion import Completion
from peagle.live_request import Prepared
from peagle.pair import bundled
from peagle.server import auditor as audits
from peagle.server.auditor import Auditor
from peagle.server.metrics import Metrics
from peagle.server.settings import ServerSettings
from peagle.server.siblings import Siblings


class Server:
    """An engine whose answers are audited while its load allows."""

    def __init__(self, place: Path, share: float = 1.0) -> None:
        self.llm = AsyncLLM(lambda: LLM(bundled("target")))
        engine, totals = self.llm.llm.engine, self.llm.llm.draft_totals
        self.metrics, self.load, self.findings = Metrics("demo", engine, totals), 0.0, 0
        settings = ServerSettings(model_names=("demo",), audit=share, audit_dump=str(place))
        self.load_now: Callable[[], float] = lambda: self.load
        load, found = lambda: self.load_now(), self._found
        self.auditor = Auditor(self.llm, settings, self.metrics, load, found)

    def _found(self) -> None:
        self.findings += 1

    def count(self, result: str) -> int:
        found = re.search(
            rf'audited_requests_total.*"{result}".* (\d+)', self.metrics.text().decode()
        )
        assert found is not None
        return int(found[1])

    async def answer(
        self, change: Callable[..., tuple[int, ...]] = tuple, **params: object
    ) -> None:
        """Serve an answer, changed afterwards, to the auditor."""
        request = await self.llm.prepare("def f(", SamplingParams(max_tokens=24, **params))
        done = await self.llm.complete(request)
        self.auditor.offer(request, replace(done, token_ids=change(done.token_ids)))

    @asynccontextmanager
    async def auditing(self) -> AsyncIterator[None]:
        task = asyncio.ensure_future(self.auditor.run())
        yield
        task.cancel()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not reached():
                await asyncio.sleep(0.02)


def damaged(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return (*tokens[:12], tokens[12] + 1, *tokens[13:])


def test_an_audit_counts_for_all_processes_in_front_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that gets no requests does not tell of an hour without audits."""
    monkeypatch.setattr(audits, "IDLE", 0.0)
    server = Server(tmp_path)
    other = Metrics("demo", server.llm.llm.engine, server.llm.llm.draft_totals)
    server.metrics.siblings = other.siblings = Siblings(2)
    other.siblings.began -= 4000.0
    assert since_audit(other) > 4000.0

    async def serve() -> None:
        async with server.auditing():
            await server.answer()
            await server.until(lambda: server.count("equal") == 1)

    asyncio.run(serve())
    assert since_audit(other) < 3600.0


def since_audit(metrics: Metrics) -> float:
    found = re.search(r"audit_seconds_since_last\{.*} (\S+)", metrics.text().decode())
    assert found is not None
    return float(found[1])


def test_findings_are_counted_logged_without_text_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(audits, "IDLE", 0.0)
    caplog.set_level(logging.INFO, "peagle.audit")

    async def run() -> None:
        server = Server(tmp_path)
        await server.answer()
        await server.answer(temperature=0.8, seed=5)
        await server.answer(damaged)
        await server.answer(repetition_penalty=1.3)
        server.load = 1.0
        async with server.auditing():
            await asyncio.sleep(0.2)
            assert server.count("equal") == 0  # which would be in a request's way
            server.load = 0.0
            await server.until(lambda: server.findings > 0)
        assert [server.count(name) for name in ("equal", "different", "skipped")] == [2, 1, 1]
        assert "peagle:audited_tokens_total" in server.metrics.text().decode()
        server.llm.close()

    asyncio.run(run())
    [told] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert re.search(r"differs at token 12 of 24: margin .* seed 2, T=0.0, K=0; .* not_repr", told)
    assert "audits a share of 1.0" in caplog.text
    [case] = tmp_path.glob("audit-*.json")
    assert len(json.loads(case.read_text())["answer"]) == 24
    drafter = ["check", str(bundled("peagle")), "--target", str(bundled("target"))]
    shown = CliRunner().invoke(app, [*drafter, "--replay", str(case)])
    assert shown.exit_code == 2
    assert re.search(r"^different: .*\ndecoded again: not_reproduced", shown.output)


def test_answers_are_audited_beside_requests_while_seats_are_free(tmp_path: Path):
    """A server that is never idle is audited, too."""

    async def run() -> None:
        server = Server(tmp_path)
        server.load = audits.BUSY
        async with server.auditing():
            await server.answer()
            await asyncio.sleep(0.5)
            assert server.count("equal") == 0
            server.load = audits.BUSY / 2
            await server.until(lambda: server.count("equal") == 1)
        server.llm.close()

    asyncio.run(run())


def test_a_busy_server_audits_now_and_then_whatever_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audits, "OFTEN", 0.0)

    async def run() -> None:
        server = Server(tmp_path, share=1e-9)
        server.load = 0.5
        monkeypatch.setattr(audits.random, "random", lambda: 0.0)  # others wait already
        for _ in range(2):
            await server.answer()
        async with server.auditing():
            await server.until(lambda: server.count("equal") == 2)
        server.llm.close()

    asyncio.run(run())


def test_an_audit_beyond_the_share_waits_until_no_request_has_come_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where nothing waited while there were requests."""
    monkeypatch.setattr(audits.random, "random", lambda: 0.0)  # all wait, as if all were suspect

    async def run() -> None:
        server = Server(tmp_path, share=1e-9)
        server.load = 1.0
        async with server.auditing():
            await asyncio.sleep(0.3)
            await server.answer()
            server.load, begun = 0.0, time.monotonic()
            await server.until(lambda: server.count("equal") == 1)
            assert time.monotonic() - begun >= audits.IDLE - audits.LOOK
        server.llm.close()

    asyncio.run(run())


def test_requests_that_came_during_an_audit_put_the_next_one_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They came beside the first one, which the share had earned."""
    monkeypatch.setattr(audits.random, "random", lambda: 0.0)

    async def run() -> None:
        server = Server(tmp_path, share=0.5)
        server.load = 0.5
        complete, ends = server.llm.complete, [0.0]

        async def slower(request: Prepared) -> Completion:
            done = await complete(request)
            await asyncio.sleep(0.5)
            server.load, ends[0] = 0.0, time.monotonic()
            return done

        async with server.auditing():
            for _ in range(2):
                await server.answer()
            monkeypatch.setattr(server.llm, "complete", slower)
            await server.until(lambda: server.count("equal") == 1)
            first = ends[0]
            await server.until(lambda: server.count("equal") == 2)
            assert ends[0] - first >= audits.IDLE - audits.LOOK
        server.llm.close()

    asyncio.run(run())


def test_a_finding_is_reported_though_requests_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audits, "IDLE", 0.0)

    async def run() -> None:
        server = Server(tmp_path)
        complete = server.llm.complete

        async def busier(request: Prepared) -> Completion:
            done = await complete(request)
            server.load = 1.0 if server.count("different") else 0.0
            return done

        await server.answer(damaged)
        monkeypatch.setattr(server.llm, "complete", busier)
        async with server.auditing():
            await server.until(lambda: server.findings > 0)
        assert server.count("different") == 1
        server.llm.close()

    asyncio.run(run())


def test_short_pauses_between_requests_put_no_audit_off(tmp_path: Path):
    began = time.monotonic()

    async def run() -> None:
        server = Server(tmp_path)
        server.load_now = lambda: 0.5 * (int(5 * (time.monotonic() - began)) % 2)
        async with server.auditing():
            await server.answer()
            await server.until(lambda: server.count("equal") == 1)
        server.llm.close()

    asyncio.run(run())


def test_suspects_that_keep_coming_are_audited_too(tmp_path: Path):
    """Each goes before those that wait, and none waits long."""
    repeated = audits.TAIL * audits.REPEATED

    async def run() -> None:
        server = Server(tmp_path)
        server.load, begun = 0.5, time.monotonic()
        async with server.auditing():
            while not server.count("different"):
                await server.answer(lambda tokens: tokens[:1] * repeated, ignore_eos=True)
                await asyncio.sleep(0.05)
                assert time.monotonic() - begun < 60.0
        server.llm.close()

    asyncio.run(run())


def test_no_larger_share_than_was_asked_for_is_audited_beside_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audits.random, "random", lambda: 0.0)  # all wait, as if all were suspect

    async def run() -> None:
        server = Server(tmp_path, share=0.5)
        server.load = 0.5
        for _ in range(3):
            await server.answer()
        async with server.auditing():
            await server.until(lambda: server.count("equal") == 1)
            await asyncio.sleep(0.5)
            assert server.count("equal") == 1
            await server.answer()
            await server.until(lambda: server.count("equal") == 2)
        server.llm.close()

    asyncio.run(run())


def test_no_burst_of_audits_follows_a_time_without_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(audits, "BURST", 2.0)

    async def run() -> None:
        server = Server(tmp_path)
        server.load = 0.5
        for _ in range(4):
            await server.answer()
        async with server.auditing():
            await server.until(lambda: server.count("equal") == 2)
            await asyncio.sleep(0.5)
            assert server.count("equal") == 2
        server.llm.close()

    asyncio.run(run())


def test_an_audit_that_cannot_tell_damage_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(audits, "EXACT_BOUND", 1e3)

    async def run() -> None:
        server = Server(tmp_path)
        await asyncio.wait_for(server.auditor.run(), 120)
        server.llm.close()

    asyncio.run(run())
    assert "the self-test found margins of 0.00 in a healthy answer" in caplog.text


def test_an_audit_whose_engine_ends_is_dropped_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(audits, "IDLE", 0.0)

    async def run() -> None:
        server = Server(tmp_path)
        complete, scored = server.llm.complete, []

        async def lose_third(request: Prepared) -> Completion:
            done = await complete(request)
            scored.extend([done] if request.params.prompt_logprobs else [])
            lost = len(scored) == 3 and done is scored[-1]  # the test of itself scores two
            return replace(done, prompt_logprobs=(), failure="it ended") if lost else done

        await server.answer()
        await server.answer()
        monkeypatch.setattr(server.llm, "complete", lose_third)
        async with server.auditing():
            await server.until(lambda: server.count("equal") == 1)
        assert server.count("dropped") == 1
        server.llm.close()

    asyncio.run(run())
    assert "the audit ended early: it ended" in caplog.text


def test_a_finding_that_no_file_can_keep_is_told_and_acted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(audits, "IDLE", 0.0)

    async def run() -> None:
        server = Server(tmp_path / "removed")
        await server.answer(damaged)
        async with server.auditing():
            await server.until(lambda: server.findings > 0)
        server.llm.close()

    asyncio.run(run())
    assert re.search(r"differs at token 12 .*json cannot be written: No such file", caplog.text)
