"""The worker on a CPU: one step's batch at a time, whose tokens the host sees before the next."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.drafters.drafter import DraftWork, Span
from peagle.drafters.peagle import ParallelDrafter
from peagle.engine.cycle_times import Seconds
from peagle.engine.draft_temperatures import DraftTemperatures
from peagle.engine.drafting import Drafting
from peagle.engine.host.attention import HostCache
from peagle.engine.host.cycle import Verification, accept, verify
from peagle.engine.host.proposal import Proposal, Texts
from peagle.engine.host.rows import Part, Row
from peagle.engine.host.sampler import choose, choose_at, sampling_of
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.logprobs import PromptLogprobs, output_logprobs, score, scored_rows
from peagle.engine.request_table import RequestTable
from peagle.engine.step import (
    MOST_UNSEEN,
    CycleTime,
    Outcome,
    PromptChunk,
    Result,
    Step,
    TokenLogprobs,
)
from peagle.models.decoder import Decoder
from peagle.ops.drafts import Drafts
from peagle.ops.race import Race
from peagle.ops.tree import TreePath, compact, known_alternatives, walk
from peagle.transfer import upload


class Unseen(NamedTuple):
    """Positions of a request that the drafter sees next."""

    row: int
    request: Row
    first: int
    """How many, from the first one on that it has not seen."""


class Decision(NamedTuple):
    """What the target decided on one request's drafts."""

    tokens: tuple[int, ...]
    """The accepted drafts, then the target's own."""
    accepted: int
    logprobs: tuple[TokenLogprobs, ...]


UNDECIDED = Decision((), 0, ())
"""In the middle of a prompt."""


class HostWorker:
    """Draft, verify and accept for all requests of a step together.

    An outcome is that of the step itself. Where memory is short nothing has happened yet: its
    chunks are refused, and what can run comes again with the next step.
    """

    runs_ahead = False
    pauses = True

    def __init__(
        self,
        target: Decoder,
        drafting: Drafting,
        table: RequestTable,
        slots: int,
        processor: LogitsProcessor,
    ) -> None:
        """slots: of the KV caches, besides the table's null slot. Trees are for a request that is
        alone."""
        dtype, drafter, k = target.embed.weight.dtype, drafting.drafter, drafting.k
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
        self._texts: Texts | None = None
        if drafting.lookup is not None:
            rows, positions = table.slots.shape
            self._texts = Texts(drafting.lookup, rows, positions, self._device)
        self._rows: dict[int, Row] = {}
        self._temperatures = DraftTemperatures(k, self._device)
        chosen = drafter is not None and len(drafting.lengths) > 1
        self.cycle_seconds: Seconds | None = {} if chosen else None
        """Nothing is measured at the start. Without a drafter there is nothing to choose: a request
        in whose text nothing is found drafts nothing anyway."""
        self._most_pending = k + 1
        """Positions that a cycle with drafts leaves unseen, at most."""
        self._others = max((drafting.num_tree_nodes or 0) - k, 0)
        """Nodes of a tree beside as many as a path may have."""
        self.most_trees = int(self._others > 0)

    def nodes_for(self, requests: int, drafts: int) -> int:
        """As `Worker`, of requests whose choices are simple."""
        return drafts + self._others if drafts and requests <= self.most_trees else 0

    @torch.inference_mode()
    def exchange(self, step: Step) -> Outcome:
        """Run a step."""
        left = [(row, self._rows[row]) for row in step.caught_up]
        self._catch_up([Unseen(row, request, request.unseen) for row, request in left])
        self._update(step)
        if not step.work:
            return Outcome()
        work = [Part.of(item, self._rows[item.row]) for item in step.work]
        try:
            behind = [part for part in work if self._is_behind(part)]
            self._catch_up([Unseen(p.row, p.request, p.request.unseen - 1) for p in behind])
            branched = step.branch and self._grows(work)
            started = time.perf_counter()
            results = (self._run_tree(*work),) if branched else self._run(work, step)
        except torch.OutOfMemoryError:
            if not step.chunks:
                raise
            torch.cuda.empty_cache()
            return Outcome(step.number, refused=tuple(chunk.row for chunk in step.chunks))
        if step.chunks or self.cycle_seconds is None:
            return Outcome(step.number, results, branched=branched)
        seconds, drafts = time.perf_counter() - started, max(part.drafts for part in work)
        return Outcome(step.number, results, CycleTime(len(work), drafts, seconds), branched)

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
            if self._texts is not None:
                self._texts.begin(begin.row, begin.tokens)
        for cache in (self._cache, self._drafter_cache):
            if cache is not None:
                cache.clear(step.cleared)

    def _run(self, work: Sequence[Part], step: Step) -> tuple[Result, ...]:
        """One cycle for every part of a step, in their order."""
        proposal = self._draft(work)
        work = proposal.work
        seen = self._verify(work, proposal.tokens)
        decisions = self._accept(work, proposal.tokens, seen.logits)
        self._learn(proposal, decisions)
        first_chunk = sum(part.span.count for part in work[: len(step.cycles)])
        prompts = self._score_prompts(step.chunks, seen.hidden[first_chunk:])
        known = [decisions.get(part.row, UNDECIDED) for part in work]
        kept = self._kept(work, known, seen.features)  # where memory lacks, nothing has changed yet
        results, looked_up = [], proposal.sources
        for part, decision, features in zip(work, known, kept, strict=True):
            found = part.drafts > 0 and looked_up.get(part.row, False)
            result = Result(
                part.row,
                decision.tokens,
                decision.accepted,
                part.drafts,
                looked_up=found,
                pending=self._keep(part, decision, features),
                logprobs=decision.logprobs,
                prompt_logprobs=prompts.get(part.row, ()),
            )
            results.append(result)
        return tuple(results)

    def _grows(self, work: Sequence[Part]) -> bool:
        """Whether a step is a cycle of one request with room for a tree: where slots end a node
        might not see its parent."""
        part = work[0]
        nodes = self.nodes_for(len(work), part.drafts)
        return nodes > 0 and part.start + nodes < int(self._table.limits[part.row])

    def _run_tree(self, part: Part) -> Result:
        """A request's cycle, whose drafts branch (`ops.tree`)."""
        assert isinstance(self._drafter, ParallelDrafter)
        assert self._drafter_cache is not None
        row, request, k = part.row, part.request, part.drafts
        race = self._race([request])
        unseen = self._draft_work([Unseen(row, request, request.unseen)], (k,), race)
        tree, chain = self._drafter.grow(unseen, self._drafter_cache, self.nodes_for(1, k))
        root = torch.tensor(part.known, device=self._device)
        positions, attend = self._cache.open_tree(row, part.start, tree)
        tokens = torch.cat((root, tree.tokens[0].clamp(min=0)))
        seen = verify(self._target, tokens, positions, attend, None, self._taps)
        path = walk(tree, choose_at(seen.logits, request.settings, positions + 1)[None], k)
        accepted = int((path.drafts >= 0).sum())
        rows = path.rows[0, : accepted + 1]
        if rows.tolist() != [*range(len(rows))]:
            self._straighten(part, path)
        if chain is not None:
            self._temperatures.record(known_alternatives(chain, path), path.chosen)
        emitted = tuple(path.chosen[0, : accepted + 1].tolist())
        assert seen.features is not None
        kept = seen.features.index_select(0, rows)
        pending = self._keep(part, Decision(emitted, accepted, ()), kept)
        return Result(row, emitted, accepted, k, looked_up=False, pending=pending)

    def _straighten(self, part: Part, path: TreePath) -> None:
        """Move the keys of a tree's accepted path to where they would be without branches."""
        row, start = (torch.tensor([each], device=self._device) for each in (part.row, part.start))
        for tensor, slots in self._cache.tensors:
            compact(tensor, slots, row, start, self._table.limits, path.rows)

    def _is_behind(self, part: Part) -> bool:
        """Whether the drafter has missed more than it sees in a cycle, or than is kept for it.

        It follows a prompt chunk by chunk: the prefix cache knows blocks that it has seen.
        """
        follows = part.of_prompt or part.drafts
        most = self._most_pending if follows else MOST_UNSEEN - part.span.count
        return part.request.unseen > max(most, 1)

    def _catch_up(self, work: Sequence[Unseen]) -> None:
        """Have the drafter see positions without drafting, in one pass."""
        if work:
            self._propose(work, (0,) * len(work), None)
        for _, request, count in work:
            request.forget(count)

    def _draft(self, work: Sequence[Part]) -> Proposal:
        """Drafts of every request that wants some; also fills the drafter's cache."""
        drafting = tuple(part for part in work if part.drafts)
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        proposal = Proposal(tuple(work), none, drafting)
        if drafting and self._drafter is not None:
            race = self._race([part.request for part in drafting])
            unseen = [Unseen(part.row, part.request, part.request.unseen) for part in drafting]
            drafts = self._propose(unseen, tuple(part.drafts for part in drafting), race)
            proposal = Proposal(tuple(work), drafts.tokens, drafting, drafts)
        return proposal if self._texts is None else self._texts.propose(proposal)

    def _propose(self, work: Sequence[Unseen], ks: tuple[int, ...], race: Race | None) -> Drafts:
        """Drafts after what the drafter sees now [sum(ks)]; nothing is forgotten yet."""
        assert self._drafter is not None
        assert self._drafter_cache is not None
        return self._drafter.propose(self._draft_work(work, ks, race), self._drafter_cache)

    def _draft_work(
        self, work: Sequence[Unseen], ks: tuple[int, ...], race: Race | None
    ) -> DraftWork:
        """What the drafter sees now."""
        spans, following, features = [], [], []
        for row, request, count in work:
            start = request.computed - request.unseen
            spans.append(Span(row, start, count))
            following += request.tokens[start + 1 : start + 1 + count]
            features.append(torch.cat(request.features)[:count])
        tokens = torch.tensor(following, device=self._device)
        return DraftWork(tuple(spans), ks, tokens, torch.cat(features), race)

    def _race(self, requests: Sequence[Row]) -> Race | None:
        """The draws that the requests' drafts are for; None where all are greedy."""
        settings = [request.settings for request in requests]
        if all(each.temperature == 0 for each in settings):
            return None
        newest = [len(request.tokens) - 1 for request in requests]
        positions = torch.tensor(newest, device=self._device)
        every = torch.arange(len(requests), device=self._device)
        return self._temperatures.race(sampling_of(settings, self._device), positions, every)

    def _learn(self, proposal: Proposal, decisions: Mapping[int, Decision]) -> None:
        """Fit what later drafts depend on: the drafter's temperatures, and the use of lookups."""
        drafts, rivals = proposal.drafter, proposal.rivals
        if rivals is None and (drafts is None or drafts.alternatives is None):
            return
        ks = [part.drafts for part in proposal.drafting]
        tokens = [decisions[part.row].tokens for part in proposal.drafting]
        each = [[*known, *[-1] * (max(ks) + 1 - len(known))] for known in tokens]
        chosen = torch.tensor(each, device=self._device)
        if self._texts is not None and rivals is not None:
            self._texts.record(rivals, chosen)
        if drafts is not None and drafts.alternatives is not None:
            self._temperatures.record(drafts.padded(ks), chosen)

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

    def _accept(self, work: Sequence[Part], drafts: Tensor, logits: Tensor) -> dict[int, Decision]:
        """By table row, for those whose rows are sampled. logits: [sampled rows, vocab]."""
        sampled = {part.row: part.sampled for part in work if part.completes}
        if not sampled:
            return {}
        each = list(sampled.values())
        chosen = choose(logits, each, drafts, self._processor)
        emitted, accepted = accept(drafts, chosen, [rows.drafts for rows in each])
        shares = logits.split([rows.drafts + 1 for rows in each])
        scores = output_logprobs([rows.settings.logprobs for rows in each], shares, emitted)
        decisions = map(Decision, map(tuple, emitted), accepted, scores)
        return dict(zip(sampled, decisions, strict=True))

    def _score_prompts(
        self, chunks: Sequence[PromptChunk], hidden: Tensor
    ) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Log-probabilities of prompts' tokens, by table row. hidden: [chunks' rows, hidden]."""
        rows = scored_rows(chunks)
        if not rows:
            return {}
        tokens = [c.following[position - c.start] for c in chunks for position in c.scored]
        chosen, places = (upload(values, self._device) for values in (tokens, rows))
        scores = score(hidden.index_select(0, places), self._target.logits, chosen)
        return PromptLogprobs(chunks, scores).by_row()

    def _kept(
        self, work: Sequence[Part], decisions: Sequence[Decision], features: Tensor | None
    ) -> list[Tensor | None]:
        """Copies of the features of each part's positions that stay, where a drafter wants them.

        features: [rows, feature_size] of the whole pass, None where nobody does.
        """
        each = None if features is None else features.split([part.span.count for part in work])
        return [
            each[i][: len(part.known) + decision.accepted].clone()
            if each is not None and part.request.speculates
            else None
            for i, (part, decision) in enumerate(zip(work, decisions, strict=True))
        ]

    def _keep(self, part: Part, decision: Decision, features: Tensor | None) -> int:
        """Keep what the next step needs; returns how many positions the drafter has not seen."""
        request = part.request
        if part.drafts:
            request.forget(request.unseen)
        if self._texts is not None:
            self._texts.write(part.row, len(request.tokens), decision.tokens)
        request.tokens += decision.tokens
        request.computed = part.start + len(part.known) + decision.accepted
        if features is not None:
            request.keep(features)
        return request.unseen
