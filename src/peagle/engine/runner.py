"""Requests whose tokens the host sees before it goes on: one step's batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter, DraftWork, Span
from peagle.engine.batch import Scheduled
from peagle.engine.cycle import accept, verify
from peagle.engine.kv_cache import KVCache
from peagle.engine.request import TokenLogprobs
from peagle.engine.request_table import RequestTable
from peagle.engine.sampler import choose, logprobs
from peagle.models.decoder import Decoder


@dataclass(frozen=True)
class CycleResult:
    """What one step computed for one request."""

    tokens: list[int]
    """New tokens; empty in the middle of a prompt."""
    accepted: int
    features: Tensor | None
    """[kept rows, feature_size] features of the rows whose keys stay."""
    logprobs: list[TokenLogprobs]


class Runner:
    """Turns scheduled work into chosen tokens: draft, verify, accept."""

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        table: RequestTable,
        caches: tuple[KVCache, KVCache | None],
    ) -> None:
        self.target, self.drafter = target, drafter
        self.device = target.embed.weight.device
        self._table = table
        self._memory, self._drafter_memory = caches
        self._taps = () if drafter is None else drafter.model.config.taps

    @torch.inference_mode()
    def run(self, work: Sequence[Scheduled]) -> list[CycleResult]:
        """One cycle for every scheduled request, in their order."""
        self._table.flush()
        drafts = self._draft(work)
        tokens, sampled = self._inputs(work, drafts)
        spans = [Span(item.request.row, item.start, item.rows) for item in work]
        positions, attend = self._memory.open(spans)
        taps = self._taps if any(item.request.speculates for item in work) else ()
        seen = verify(self.target, tokens, positions, attend, sampled, taps)
        sampling = [item for item in work if item.completes]
        if not sampling:
            return self._results(work, {}, seen.features)
        chosen = choose(seen.logits, sampling, drafts)
        emitted, accepted = accept(drafts, chosen, [item.drafts for item in sampling])
        shares = seen.logits.split([item.drafts + 1 for item in sampling])
        verdicts = {
            item.request.id: (
                new,
                count,
                logprobs(item.request, share, new)
                if item.request.params.logprobs is not None
                else [],
            )
            for item, new, count, share in zip(sampling, emitted, accepted, shares, strict=True)
        }
        return self._results(work, verdicts, seen.features)

    def _draft(self, work: Sequence[Scheduled]) -> Tensor:
        """Drafts of every request that wants some [sum(drafts)]; also fills the drafter's cache."""
        pending = [item for item in work if item.request.features is not None]
        if self.drafter is None or self._drafter_memory is None or not pending:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        spans, following, features = [], [], []
        for item in pending:
            request = item.request
            assert request.features is not None
            start, count = request.drafter_computed, len(request.features)
            spans.append(Span(request.row, start, count))
            following += request.tokens[start + 1 : start + 1 + count]
            features.append(request.features)
        tokens = torch.tensor(following, device=self.device)
        ks = tuple(item.drafts for item in pending)
        work_rows = DraftWork(tuple(spans), ks, tokens, torch.cat(features))
        return self.drafter.propose(work_rows, self._drafter_memory)

    def _inputs(self, work: Sequence[Scheduled], drafts: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's tokens [rows], and the rows whose logits are wanted (None: all)."""
        tokens: list[int] = []
        sampled: list[int] = []
        places: list[int] = []
        for item in work:
            request, first = item.request, len(tokens)
            tokens += request.tokens[item.start : item.stop - item.drafts]
            places += range(len(tokens), len(tokens) + item.drafts)
            tokens += [0] * item.drafts
            if item.completes:
                sampled += range(first + item.rows - item.drafts - 1, first + item.rows)
        inputs = torch.tensor(tokens, device=self.device)
        if places:
            inputs[torch.tensor(places, device=self.device)] = drafts
        if len(sampled) == len(tokens):
            return inputs, None
        return inputs, torch.tensor(sampled, dtype=torch.int64, device=self.device)

    def _results(
        self,
        work: Sequence[Scheduled],
        verdicts: dict[str, tuple[list[int], int, list[TokenLogprobs]]],
        features: Tensor | None,
    ) -> list[CycleResult]:
        results, first = [], 0
        for item in work:
            tokens, accepted, scores = verdicts.get(item.request.id, ([], 0, []))
            kept = item.rows - item.drafts + accepted
            share = features[first : first + kept] if features is not None else None
            first += item.rows
            results.append(
                CycleResult(tokens, accepted, share if item.request.speculates else None, scores)
            )
        return results
