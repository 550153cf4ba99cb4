"""Whether served tokens are the target's own, judged by one prefill of prompt and answer.

A choice is a function of prompt, seed and position, so every token of an answer can be made again
from the tokens before it: the argmax, or the first of a race whose times are known. A margin says
by how many logits a token loses to what should stand in its place: 0 where they agree. Noise of d
logits moves it by 2 d at most, whatever the temperature.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from peagle.completion import Completion
from peagle.config import MAX_LOGPROBS, SamplingParams
from peagle.engine.step import TokenLogprobs
from peagle.errors import InputError, reason
from peagle.live_request import Prepared
from peagle.ops.sampling import arrival_times

BOUND = 0.5
"""Margins up to here are rounding in 16 bits: four times the largest of 4,096 healthy tokens
(0.125, one unit of logits between 16 and 32), half of the median of drafts accepted falsely."""
EXACT_BOUND = 0.01
"""The same in float32, whose rounding moves logits by 1e-4."""
BEFORE = 32
"""Served tokens before a finding from which it is decoded again."""
LAST = 1 << 40
"""The priority of what waits for everything else."""
Cause = Literal["model", "drafts", "not_reproduced"]


@dataclass(frozen=True)
class Finding:
    """What an audit found in an answer."""

    margins: tuple[float, ...]
    """The margin of each token."""
    bound: float

    @property
    def margin(self) -> float:
        """The largest one."""
        return max(self.margins)

    @property
    def result(self) -> Literal["equal", "near_tie", "different"]:
        """What the answer is."""
        return "different" if self.margin > self.bound else "near_tie" if self.margin else "equal"

    @property
    def first(self) -> int:
        """The first token beyond the bound."""
        return next(i for i, margin in enumerate(self.margins) if margin > self.bound)


@dataclass(frozen=True)
class AuditCase:
    """An answer that was served, and what it depends on."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, request: Prepared, done: Completion) -> Self | None:
        """None: it cannot be judged, as what was chosen from depends on more than the tokens, or
        lies beyond the likeliest ones, which alone are read."""
        params, narrow = request.params, 0 < request.params.top_k <= MAX_LOGPROBS
        plain = params.temperature in (0, 1) and params.top_k <= 0 and not params.min_p
        ended = done.finish_reason in ("stop", "length", "repetition") and done.token_ids
        bound = request.form is not None or params.logit_bias or params.min_tokens
        beyond = params.top_p < 1 and not narrow and not plain
        if not ended or bound or params.penalized or beyond:
            return None
        shape = params.temperature, max(params.top_k, 0), params.top_p, params.min_p
        return cls(done.prompt_token_ids, done.token_ids, done.seed, *shape)

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a file of `save`. Raises `InputError` for any other."""
        try:
            values = json.loads(path.read_text())
            return cls(**values | {name: tuple(values[name]) for name in ("prompt", "answer")})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path} is no case of an audit: {reason(error)}") from None

    def save(self, path: Path) -> None:
        """Write it for its owner's eyes alone: it holds the tokens."""
        path.touch(mode=0o600)
        path.write_text(json.dumps(asdict(self)))

    @property
    def scoring(self) -> Prepared:
        """The request whose completion `judge` takes."""
        # a greedy token is judged by the likeliest one alone, and each one more takes time
        likely = MAX_LOGPROBS if self.temperature else 1
        params = {"max_tokens": 0, "prompt_logprobs": likely, "num_speculative_tokens": 0}
        return self._request((*self.prompt, *self.answer), len(self.prompt), **params)

    def replay(self, place: int, **changes: Any) -> Prepared:
        """The request that makes the token at a place again, from some served tokens before it."""
        given = max(place - BEFORE, 0)
        tokens = self.prompt + self.answer[:given]
        shape = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        own = {"max_tokens": place - given + 1, "ignore_eos": True, "seed": self.seed}
        return self._request(tokens, len(tokens), **shape, **own, **changes)

    def _request(self, tokens: Sequence[int], judged: int, **params: Any) -> Prepared:
        own = SamplingParams(unrecorded_from=judged, priority=LAST, **params)
        return Prepared(list(tokens), own, None)

    def judge(self, scored: Completion, bound: float) -> Finding:
        """What a completion of `scoring` says."""
        entries = [entry for entry in scored.prompt_logprobs if entry is not None]
        if len(entries) != len(self.answer):
            raise InputError(f"the audit ended early: {scored.failure or scored.finish_reason}")
        return Finding(tuple(self._margins(entries, bound).tolist()), bound)

    def cause(self, place: int, alone: Completion, drafted: Completion) -> Cause:
        """Why a token differs, by completions of its `replay` without drafts and with them."""
        served = self.answer[place]
        if alone.token_ids[-1:] == (served,):
            return "model"
        return "drafts" if drafted.token_ids[-1:] == (served,) else "not_reproduced"

    def _margins(self, entries: Sequence[TokenLogprobs], bound: float) -> Tensor:
        """[tokens]"""
        own = torch.tensor([entry.chosen for entry in entries], dtype=torch.float64)
        tops = [list(zip(*entry.top, strict=True)) for entry in entries]
        ids = torch.tensor([[token, *top[0]] for token, top in zip(self.answer, tops, strict=True)])
        likely = torch.tensor([top[1] for top in tops], dtype=torch.float64)
        if self.temperature == 0:
            return (likely[:, 0] - own).clamp(min=0)
        places = len(self.prompt) + torch.arange(len(entries))
        times = arrival_times(torch.full_like(places, self.seed), places, ids).double().log()
        raced = torch.cat((own[:, None], likely), dim=1) - self.temperature * times
        rivals = raced[:, 1:].masked_fill(~self._kept(likely, bound), -math.inf).amax(dim=1)
        ranks = torch.tensor([entry.rank for entry in entries])
        return torch.maximum(rivals - raced[:, 0], self._outside(own, ranks, likely)).clamp(min=0)

    def _kept(self, likely: Tensor, bound: float) -> Tensor:
        """Which of the likeliest tokens filters keep, though all logits were off by the bound."""
        heat, count = self.temperature, likely.shape[1]
        kept = torch.ones_like(likely, dtype=torch.bool)
        if self.min_p:
            kept &= likely - likely[:, :1] >= heat * math.log(self.min_p) + bound
        if self.top_k:
            kept &= likely - likely[:, min(self.top_k, count - 1), None] >= bound
        if self.top_p < 1:
            shares = likely.exp()
            if self.top_k:
                shares = (likely[:, : self.top_k] / heat).softmax(dim=1)
                shares = torch.nn.functional.pad(shares, (0, count - shares.shape[1]))
            before = shares.cumsum(dim=1) - shares
            kept &= before * math.exp(bound / heat) < self.top_p
        kept[:, 0] = True
        return kept

    def _outside(self, own: Tensor, ranks: Tensor, likely: Tensor) -> Tensor:
        """How far below the filters' edges the served tokens are. [tokens]"""
        far = torch.zeros_like(own)
        if self.min_p:
            far = torch.maximum(far, likely[:, 0] + self.temperature * math.log(self.min_p) - own)
        if 0 < self.top_k <= likely.shape[1]:
            below = likely[:, self.top_k - 1] - own
            far = torch.maximum(far, below.masked_fill(ranks <= self.top_k, 0.0))
        return far
