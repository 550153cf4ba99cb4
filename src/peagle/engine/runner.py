"""The plain path: one step's batch at a time, whose tokens the host sees before the next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter, DraftWork, Span
from peagle.drafters.readout import Drafts
from peagle.engine.batch import Scheduled
from peagle.engine.cycle import Verification, accept, verify
from peagle.engine.draft_temperatures import DraftTemperatures
from peagle.engine.kv_cache import KVCache
from peagle.engine.logprobs import PromptLogprobs, output_logprobs, score, scored_rows
from peagle.engine.request import Request, TokenLogprobs
from peagle.engine.request_table import RequestTable
from peagle.engine.sampler import choose, sampling_of
from peagle.engine.upload import upload
from peagle.models.decoder import Decoder
from peagle.ops.race import Race


@dataclass(frozen=True)
class CycleResult:
    """What one step computed for one request."""

    tokens: list[int]
    """New tokens; empty in the middle of a prompt."""
    accepted: int
    features: Tensor | None
    """[kept rows, feature_size] features of the rows whose keys stay; None on the device."""
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    """Of the prompt's next tokens, behind those of the steps before."""


class Verdict(NamedTuple):
    """What the target decided on one request's drafts."""

    tokens: list[int]
    """The accepted drafts, then the target's own."""
    accepted: int
    logprobs: list[TokenLogprobs]


UNDECIDED = Verdict([], 0, [])
"""In the middle of a prompt."""


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
        self._temperatures = DraftTemperatures(self.device)

    @torch.inference_mode()
    def run(self, work: Sequence[Scheduled]) -> list[CycleResult]:
        """One cycle for every scheduled request, in their order."""
        self._table.flush()
        drafts = self._draft(work)
        seen = self._verify(work, drafts.tokens)
        verdicts = _accept(work, drafts.tokens, seen.logits)
        self._fit_temperatures(work, drafts, verdicts)
        return _results(work, verdicts, self._score_prompts(work, seen.hidden), seen.features)

    def _draft(self, work: Sequence[Scheduled]) -> Drafts:
        """Drafts of every request that wants some [sum(drafts)]; also fills the drafter's cache."""
        pending = [item for item in work if item.request.features is not None]
        if self.drafter is None or self._drafter_memory is None or not pending:
            return Drafts(torch.empty(0, dtype=torch.int64, device=self.device))
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
        race = self._race([item.request for item in pending], max(ks))
        work_rows = DraftWork(tuple(spans), ks, tokens, torch.cat(features), race)
        return self.drafter.propose(work_rows, self._drafter_memory)

    def _race(self, requests: Sequence[Request], depths: int) -> Race | None:
        """The draws that the requests' drafts are for; None where all are greedy."""
        if all(request.params.temperature == 0 for request in requests):
            return None
        positions = torch.tensor([request.total for request in requests], device=self.device)
        sampling = sampling_of(requests, self.device)
        return Race(sampling, positions, self._temperatures.choose(depths))

    def _fit_temperatures(
        self, work: Sequence[Scheduled], drafts: Drafts, verdicts: Mapping[str, Verdict]
    ) -> None:
        if drafts.alternatives is None:
            return
        shares = drafts.alternatives.split([item.drafts for item in work])
        for item, alternatives in zip(work, shares, strict=True):
            if item.drafts and item.request.params.temperature > 0:
                self._temperatures.record(alternatives, verdicts[item.request.id].tokens)

    def _verify(self, work: Sequence[Scheduled], drafts: Tensor) -> Verification:
        """The target over newest tokens, drafts and prompt chunks; fills its cache."""
        tokens, sampled = self._inputs(work, drafts)
        spans = [Span(item.request.row, item.start, item.rows) for item in work]
        positions, attend = self._memory.open(spans)
        taps = self._taps if any(item.request.speculates for item in work) else ()
        return verify(self.target, tokens, positions, attend, sampled, taps)

    def _score_prompts(
        self, work: Sequence[Scheduled], hidden: Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        """Log-probabilities of prompts' tokens, by request id. hidden: [rows, hidden_size]."""
        rows = scored_rows(work)
        if not rows:
            return {}
        tokens = [item.request.tokens[place + 1] for item in work for place in item.scored]
        chosen, places = (upload(values, self.device) for values in (tokens, rows))
        scores = score(hidden.index_select(0, places), self.target.head, chosen)
        return PromptLogprobs(work, scores).by_request()

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


def _accept(work: Sequence[Scheduled], drafts: Tensor, logits: Tensor) -> dict[str, Verdict]:
    """By request id, for those whose rows are sampled. logits: [sampled rows, vocab]."""
    sampled = [item for item in work if item.completes]
    if not sampled:
        return {}
    chosen = choose(logits, sampled, drafts)
    emitted, accepted = accept(drafts, chosen, [item.drafts for item in sampled])
    requests = [item.request for item in sampled]
    scores = output_logprobs(requests, logits.split([item.drafts + 1 for item in sampled]), emitted)
    verdicts = map(Verdict, emitted, accepted, scores)
    return {request.id: verdict for request, verdict in zip(requests, verdicts, strict=True)}


def _results(
    work: Sequence[Scheduled],
    verdicts: Mapping[str, Verdict],
    prompts: Mapping[str, list[TokenLogprobs]],
    features: Tensor | None,
) -> list[CycleResult]:
    results, first = [], 0
    for item in work:
        tokens, accepted, scores = verdicts.get(item.request.id, UNDECIDED)
        kept = item.rows - item.drafts + accepted
        wanted = features if item.request.speculates else None
        share = None if wanted is None else wanted[first : first + kept]
        first += item.rows
        of_prompt = prompts.get(item.request.id, [])
        results.append(CycleResult(tokens, accepted, share, scores, of_prompt))
    return results
