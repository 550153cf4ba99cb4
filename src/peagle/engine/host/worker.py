"""The worker on a CPU: one step's batch at a time, whose tokens the host sees before the next."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter, DraftWork
from peagle.engine.draft_length import Seconds
from peagle.engine.draft_temperatures import DraftTemperatures
from peagle.engine.host.attention import HostCache
from peagle.engine.host.cycle import Verification, accept, verify
from peagle.engine.host.rows import Part, Row
from peagle.engine.host.sampler import choose, sampling_of
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.logprobs import PromptLogprobs, output_logprobs, score, scored_rows
from peagle.engine.request_table import RequestTable
from peagle.engine.step import Chunk, Outcome, Result, Step, TokenLogprobs
from peagle.models.decoder import Decoder
from peagle.ops.drafts import Drafts
from peagle.ops.race import Race
from peagle.transfer import upload


class Verdict(NamedTuple):
    """What the target decided on one request's drafts."""

    tokens: tuple[int, ...]
    """The accepted drafts, then the target's own."""
    accepted: int
    logprobs: tuple[TokenLogprobs, ...]


UNDECIDED = Verdict((), 0, ())
"""In the middle of a prompt."""


class HostWorker:
    """Draft, verify and accept for all requests of a step together.

    An outcome is that of the step itself. Where memory is short nothing has happened yet: its
    chunks are refused, and what can run comes again with the next step.
    """

    runs_ahead = False
    cycle_seconds: Seconds | None = None

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        most_drafts: int,
        table: RequestTable,
        slots: int,
        processor: LogitsProcessor,
    ) -> None:
        """most_drafts: of a request in a cycle; slots: of the KV caches, besides the table's null
        slot."""
        dtype = target.embed.weight.dtype
        self._target, self._drafter = target, drafter
        self._device = target.embed.weight.device
        self._table, self._processor = table, processor
        self._cache = HostCache(target.spec, table, slots, dtype, table.windows)
        self._drafter_cache: HostCache | None = None
        self._taps: tuple[int, ...] = ()
        if drafter is not None:
            config = drafter.model.config
            self._drafter_cache = HostCache(config.transformer, table, slots, dtype)
            self._taps = config.taps
        self._rows: dict[int, Row] = {}
        self._temperatures = DraftTemperatures(most_drafts, self._device)

    @torch.inference_mode()
    def exchange(self, step: Step) -> Outcome:
        """Run a step."""
        self._update(step)
        if not step.work:
            return Outcome()
        try:
            results = self._run([Part.of(item, self._rows[item.row]) for item in step.work], step)
        except torch.OutOfMemoryError:
            if not step.chunks:
                raise
            torch.cuda.empty_cache()
            return Outcome(step.number, refused=tuple(chunk.row for chunk in step.chunks))
        return Outcome(step.number, results)

    @torch.inference_mode()
    def forget(self) -> None:
        """Forget all requests; raises where the device is lost."""
        self._table.forget()
        self._rows.clear()

    def _update(self, step: Step) -> None:
        self._table.update(step)
        for row in step.left:
            self._rows.pop(row, None)
        for begin in step.begun:
            self._rows[begin.row] = Row.of(begin)
        for cache in (self._cache, self._drafter_cache):
            if cache is not None:
                cache.clear(step.cleared)

    def _run(self, work: Sequence[Part], step: Step) -> tuple[Result, ...]:
        """One cycle for every part of a step, in their order."""
        drafts = self._draft(work)
        seen = self._verify(work, drafts.tokens)
        verdicts = self._accept(work, drafts.tokens, seen.logits)
        self._fit_temperatures(work, drafts, verdicts)
        first_chunk = sum(part.span.count for part in work[: len(step.cycles)])
        prompts = self._score_prompts(step.chunks, seen.hidden[first_chunk:])
        results, first = [], 0
        for part in work:
            tokens, accepted, scores = verdicts.get(part.row, UNDECIDED)
            kept = len(part.known) + accepted
            pending = self._keep(part, tokens, seen.features, range(first, first + kept))
            first += part.span.count
            of_prompt = prompts.get(part.row, ())
            results.append(Result(part.row, tokens, accepted, pending, scores, of_prompt))
        return tuple(results)

    def _draft(self, work: Sequence[Part]) -> Drafts:
        """Drafts of every request that wants some [sum(drafts)]; also fills the drafter's cache."""
        pending = [part for part in work if part.request.features is not None]
        if self._drafter is None or self._drafter_cache is None or not pending:
            return Drafts(torch.empty(0, dtype=torch.int64, device=self._device))
        spans = tuple(part.unseen for part in pending)
        following: list[int] = []
        for part, span in zip(pending, spans, strict=True):
            following += part.request.tokens[span.start + 1 : span.start + 1 + span.count]
        features = [part.request.features for part in pending if part.request.features is not None]
        tokens = torch.tensor(following, device=self._device)
        ks = tuple(part.drafts for part in pending)
        race = self._race([part.request for part in pending])
        rows = DraftWork(spans, ks, tokens, torch.cat(features), race)
        return self._drafter.propose(rows, self._drafter_cache)

    def _race(self, requests: Sequence[Row]) -> Race | None:
        """The draws that the requests' drafts are for; None where all are greedy."""
        settings = [request.settings for request in requests]
        if all(each.temperature == 0 for each in settings):
            return None
        newest = [len(request.tokens) - 1 for request in requests]
        positions = torch.tensor(newest, device=self._device)
        every = torch.arange(len(requests), device=self._device)
        return self._temperatures.race(sampling_of(settings, self._device), positions, every)

    def _fit_temperatures(
        self, work: Sequence[Part], drafts: Drafts, verdicts: Mapping[int, Verdict]
    ) -> None:
        if drafts.alternatives is None:
            return
        ks = [part.drafts for part in work]
        tokens = [verdicts.get(part.row, UNDECIDED).tokens for part in work]
        chosen = [[*known, *[-1] * (max(ks) + 1 - len(known))] for known in tokens]
        self._temperatures.record(drafts.padded(ks), torch.tensor(chosen, device=self._device))

    def _verify(self, work: Sequence[Part], drafts: Tensor) -> Verification:
        """The target over newest tokens, drafts and prompt chunks; fills its cache."""
        tokens, sampled = self._inputs(work, drafts)
        positions, attend = self._cache.open([part.span for part in work])
        taps = self._taps if any(part.request.speculates for part in work) else ()
        return verify(self._target, tokens, positions, attend, sampled, taps)

    def _inputs(self, work: Sequence[Part], drafts: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's tokens [rows], and the rows whose logits are wanted (None: all)."""
        tokens: list[int] = []
        sampled: list[int] = []
        places: list[int] = []
        for part in work:
            tokens += part.known
            places += range(len(tokens), len(tokens) + part.drafts)
            if part.completes:
                sampled += range(len(tokens) - 1, len(tokens) + part.drafts)
            tokens += [0] * part.drafts
        inputs = torch.tensor(tokens, device=self._device)
        if places:
            inputs[torch.tensor(places, device=self._device)] = drafts
        if len(sampled) == len(tokens):
            return inputs, None
        return inputs, torch.tensor(sampled, dtype=torch.int64, device=self._device)

    def _accept(self, work: Sequence[Part], drafts: Tensor, logits: Tensor) -> dict[int, Verdict]:
        """By table row, for those whose rows are sampled. logits: [sampled rows, vocab]."""
        sampled = {part.row: part.sampled for part in work if part.completes}
        if not sampled:
            return {}
        each = list(sampled.values())
        chosen = choose(logits, each, drafts, self._processor)
        emitted, accepted = accept(drafts, chosen, [rows.drafts for rows in each])
        shares = logits.split([rows.drafts + 1 for rows in each])
        scores = output_logprobs([rows.settings.logprobs for rows in each], shares, emitted)
        verdicts = map(Verdict, map(tuple, emitted), accepted, scores)
        return dict(zip(sampled, verdicts, strict=True))

    def _score_prompts(
        self, chunks: Sequence[Chunk], hidden: Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of prompts' tokens, by table row. hidden: [chunks' rows, hidden]."""
        rows = scored_rows(chunks)
        if not rows:
            return {}
        tokens = [c.following[position - c.start] for c in chunks for position in c.scored]
        chosen, places = (upload(values, self._device) for values in (tokens, rows))
        scores = score(hidden.index_select(0, places), self._target.logits, chosen)
        return PromptLogprobs(chunks, scores).by_row()

    def _keep(
        self, part: Part, tokens: tuple[int, ...], features: Tensor | None, rows: range
    ) -> int:
        """Keep what the next step needs; returns how many positions the drafter has not seen.

        rows: of the pass, those whose keys stay.
        """
        part.request.tokens += tokens
        if features is None or not part.request.speculates:
            return 0
        part.request.features = features[rows.start : rows.stop]
        return len(rows)
