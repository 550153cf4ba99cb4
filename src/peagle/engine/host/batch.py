"""The requests of one step on the host: cycles and prompt chunks, together in one pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.engine.cycle import Accept, Verified
from peagle.engine.host.attention import open_pass
from peagle.engine.host.proposals import HostProposals, Proposal
from peagle.engine.host.rows import RequestRows
from peagle.engine.host.sampler import choose
from peagle.engine.logits_processor import LogitsProcessor
from peagle.engine.logprobs import PromptLogprobs, output_logprobs, score, scored_rows
from peagle.engine.request_memory import RequestMemory
from peagle.engine.step import PromptChunk, Result, Step, TokenLogprobs
from peagle.models.decoder import Decoder
from peagle.ops.acceptance import Path
from peagle.ops.draft import NO_DRAFT, Draft
from peagle.ops.tree import compact
from peagle.transfer import upload


class Decision(NamedTuple):
    """What the target decided on one request's drafts."""

    tokens: tuple[int, ...]
    """The accepted drafts, then the target's own."""
    rows: tuple[int, ...]
    """The request's rows that stay: the newest token's, then those of accepted drafts."""
    logprobs: tuple[TokenLogprobs, ...]


UNDECIDED = Decision((), (0,), ())
"""The decision in the middle of a prompt."""


@dataclass(frozen=True)
class HostSide:
    """What a step on the host runs on."""

    target: Decoder
    memory: RequestMemory
    processor: LogitsProcessor
    proposals: HostProposals | None
    """What drafts; None where nothing does."""
    taps: tuple[int, ...]
    """Target layers whose streams the proposer reads."""
    accept: Accept

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return self.target.embed.weight.device


class HostBatch:
    """`CycleRows` of a step's requests, in the step's order; `results` once they are committed."""

    def __init__(self, side: HostSide, step: Step, parts: Sequence[RequestRows]) -> None:
        self._side, self._step, self._parts = side, step, list(parts)
        self._proposals: list[Proposal] = []
        self._prompts: Mapping[int, tuple[TokenLogprobs, ...]] = {}
        self.results: tuple[Result, ...] = ()

    @property
    def _sampled(self) -> list[RequestRows]:
        """The parts whose last rows give their requests tokens."""
        return [part for part in self._parts if part.item.completes]

    def draft(self) -> Draft:
        """Drafts of the requests whose rows are sampled; `NO_DRAFT` where one has fewer."""
        sampled = self._sampled
        if self._side.proposals is not None:
            self._proposals = self._side.proposals.propose(sampled, self._step.nodes)
        draft = self._joined(len(sampled))
        kept = iter(self._counts(draft))
        self._parts = [
            replace(part, drafts=next(kept)) if part.item.completes else part
            for part in self._parts
        ]
        return draft

    def _joined(self, sampled: int) -> Draft:
        """All proposals in one draft, a request behind another."""
        if len(self._proposals) == 1 and len(self._proposals[0].places) == sampled:
            return self._proposals[0].draft
        most = max((each.draft.tokens.shape[1] for each in self._proposals), default=0)
        tokens = torch.full((sampled, most), NO_DRAFT, device=self._side.device)
        for places, draft in self._proposals:
            tokens[list(places), : draft.tokens.shape[1]] = draft.tokens
        return Draft(tokens)

    def _counts(self, draft: Draft) -> list[int]:
        """How many rows each sampled request's drafts have."""
        if draft.tree is not None:
            return [draft.tokens.shape[1]]
        return (draft.tokens != NO_DRAFT).sum(dim=1).tolist()

    def verify(self, draft: Draft) -> Verified:
        """The target over newest tokens, drafts and prompt chunks; fills its cache."""
        side, parts = self._side, self._parts
        tokens, sampled = self._inputs(draft)
        spans, recur = [part.span for part in parts], None
        positions, attend = open_pass(side.memory.target_cache, spans, draft.tree)
        if (states := side.memory.states) is not None:
            recur = states.open(states.rows_of(spans, [len(part.known) for part in parts]))
        taps = side.taps if any(part.request.speculates for part in parts) else ()
        hidden, features = side.target(tokens, positions, attend, taps, recur)
        self._score_prompts(hidden)
        ends = hidden if sampled is None else hidden.index_select(0, sampled)
        return Verified(side.target.logits(ends), features)

    def _inputs(self, draft: Draft) -> tuple[Tensor, Tensor | None]:
        """The target's tokens [rows], and the rows whose logits are wanted (None: all)."""
        tokens: list[int] = []
        sampled: list[int] = []
        places: list[int] = []
        for part in self._parts:
            tokens += part.known
            places += range(len(tokens), len(tokens) + part.drafts)
            if part.item.completes:
                sampled += range(len(tokens) - 1, len(tokens) + part.drafts)
            tokens += [0] * part.drafts
        device = self._side.device
        inputs = torch.tensor(tokens, device=device)
        if places:
            # drafts are on the device already, and are not read back for this
            inputs[torch.tensor(places, device=device)] = self._flat(draft)
        # without prompt chunks in between no row has to be gathered
        if len(sampled) == len(tokens):
            return inputs, None
        return inputs, torch.tensor(sampled, dtype=torch.int64, device=device)

    def _flat(self, draft: Draft) -> Tensor:
        """The drafts of the rows that there are, a request behind another."""
        return draft.ids.flatten() if draft.tree else draft.tokens[draft.tokens != NO_DRAFT]

    def _score_prompts(self, hidden: Tensor) -> None:
        """Score prompts' tokens. hidden: [rows, hidden_size], chunks' rows last."""
        chunks: Sequence[PromptChunk] = self._step.chunks
        rows = scored_rows(chunks)
        if not rows:
            return
        side, first = self._side, len(hidden) - sum(chunk.rows for chunk in chunks)
        tokens = [c.following[position - c.start] for c in chunks for position in c.scored]
        chosen, places = (upload(values, side.device) for values in (tokens, rows))
        scores = score(hidden[first:].index_select(0, places), side.target.logits, chosen)
        self._prompts = PromptLogprobs(chunks, scores).by_row()

    def accept(self, draft: Draft, verified: Verified) -> Path:
        """Choose a token after each sampled row, and follow the choices."""
        sampled = self._sampled
        if not sampled:
            return Path(draft.tokens, draft.tokens.new_empty(0, 1))
        depths = None if draft.tree is None else draft.tree.depths[0].tolist()
        chosen = choose(verified.logits, sampled, self._flat(draft), self._side.processor, depths)
        counts = [part.drafts + 1 for part in sampled]
        # requests have different numbers of drafts; -1 equals none of them
        padded = chosen.new_full((len(counts), draft.tokens.shape[1] + 1), -1)
        for row, own in zip(padded, chosen.split(counts), strict=True):
            row[: len(own)] = own
        requests = torch.tensor([part.item.row for part in sampled], device=chosen.device)
        return self._side.accept(draft, padded, requests)

    def commit(self, draft: Draft, path: Path, verified: Verified) -> None:
        """Keep what the requests' next steps need, and say what each got."""
        decisions = self._decisions(path, verified.logits)
        kept = self._kept(decisions, verified.features)  # where memory lacks, nothing has changed
        if draft.tree is not None:
            self._straighten(path)
        if self._side.memory.states is not None:
            rows, device = [part.item.row for part in self._parts], self._side.device
            accepted = [len(decision.rows) - 1 for decision in decisions]
            self._side.memory.states.commit(upload(rows, device), upload(accepted, device))
        if self._side.proposals is not None:
            self._side.proposals.learn(self._proposals, path)
        self.results = tuple(
            Result(
                part.item.row,
                decision.tokens,
                len(decision.tokens[1:]),
                min(part.drafts, draft.depth),
                pending=self._keep(part, decision, features),
                logprobs=decision.logprobs,
                prompt_logprobs=self._prompts.get(part.item.row, ()),
            )
            for part, decision, features in zip(self._parts, decisions, kept, strict=True)
        )

    def _decisions(self, path: Path, logits: Tensor) -> list[Decision]:
        """What was decided on each part. logits: [sampled rows, vocab]."""
        sampled = self._sampled
        counts = path.accepted.tolist()
        emitted = [own[: n + 1] for own, n in zip(path.chosen.tolist(), counts, strict=True)]
        shares = logits.split([part.drafts + 1 for part in sampled])
        tops = [part.request.settings.params.logprobs for part in sampled]
        scores = output_logprobs(tops, shares, emitted)
        if path.rows is None:
            rows = [range(count + 1) for count in counts]
        else:
            rows = [own[: n + 1] for own, n in zip(path.rows.tolist(), counts, strict=True)]
        made = iter(map(Decision, map(tuple, emitted), map(tuple, rows), scores))
        return [next(made) if part.item.completes else UNDECIDED for part in self._parts]

    def _straighten(self, path: Path) -> None:
        """Move the keys of a tree's accepted path to where they would be without branches."""
        assert path.rows is not None
        memory, item = self._side.memory, self._parts[0].item
        row, start = upload([item.row, item.start], self._side.device).split(1)
        for tensor, slots in memory.target_cache.tensors:
            compact(tensor, slots, row, start, memory.table.limits, path.rows)

    def _kept(self, decisions: Sequence[Decision], features: Tensor | None) -> list[Tensor | None]:
        """Copies of the features of each part's positions that stay, where a drafter wants them.

        features: [rows, feature_size] of the whole pass, None where nobody does.
        """
        if features is None:
            return [None] * len(self._parts)
        each = features.split([part.span.count for part in self._parts])
        return [
            _stays(part, decision, own) if part.request.speculates else None
            for part, decision, own in zip(self._parts, decisions, each, strict=True)
        ]

    def _keep(self, part: RequestRows, decision: Decision, features: Tensor | None) -> int:
        """Keep what the next step needs; returns how many positions the drafter has not seen."""
        request, history = part.request, self._side.memory.history
        if part.drafts:
            # its draft has just shown the drafter all that it had not seen
            request.forget(request.unseen)
        if history is not None:
            history.write(part.item.row, len(request.tokens), decision.tokens)
        request.tokens += decision.tokens
        request.computed = part.item.start + len(part.known) + len(decision.rows) - 1
        if features is not None:
            request.keep(features)
        return request.unseen


def _stays(part: RequestRows, decision: Decision, features: Tensor) -> Tensor:
    """The features of known tokens and accepted drafts. features: [rows of the part, size]."""
    before = len(part.known) - 1
    rows = [*range(before), *(before + row for row in decision.rows)]
    if rows == [*range(len(rows))]:
        # a slice would hold the features of the whole pass
        return features[: len(rows)].clone()
    return features[rows]
