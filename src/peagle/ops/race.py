"""Drafts that take part in the target's own draw.

Under sampling the target takes the token that arrives first: each has an exponential time, keyed by
(seed, position, token), divided by its probability. A draft is the token that would arrive first by
the drafter's probabilities with the *same* times. Since two distributions that are alike then tend
to choose alike, more drafts are accepted than of the most likely ones; and since a draft is only
compared with the target's choice, no way of drafting can change a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.ops.sampling import Sampling, arrival_times

FACTORS = (0.0, 0.5, 0.7, 0.85, 1.0, 1.2)
"""What a request's temperature may be multiplied by for its drafts; 0 drafts greedily."""


@dataclass(frozen=True)
class Race:
    """The draws that drafts are for. A greedy request's drafts are the most likely candidates."""

    sampling: Sampling
    """[requests]; top-p is not applied to drafts."""
    positions: Tensor
    """[requests] position in its sequence of each request's first draft."""
    chosen: Tensor
    """[depths] index into `FACTORS` for the first draft, the second ..."""

    def of(self, requests: Tensor) -> "Race":
        """That of some of the requests."""
        columns = {name: column[requests] for name, column in vars(self.sampling).items()}
        return Race(Sampling(**columns), self.positions[requests], self.chosen)


def first_arrivals(scores: Tensor, tokens: Tensor, race: Race, depth: int) -> Tensor:
    """Which candidate arrives first, at each of `FACTORS`: [requests, slots, previous, factors].

    scores: [requests, slots, previous, candidates] a drafter's logits, for each of some drafts in
    the slot before; tokens: [requests, slots, candidates] target ids; depth: that of the first
    slot, 0 for the first draft.
    """
    rows, slots = race.sampling, tokens.shape[1]
    places = race.positions[:, None] + torch.arange(depth, depth + slots, device=tokens.device)
    seeds = rows.seeds[:, None].expand_as(places)
    times = arrival_times(seeds.flatten(), places.flatten(), tokens.flatten(0, 1)).view_as(tokens)
    factors = torch.tensor(FACTORS, device=tokens.device)
    heat = (rows.temperature[:, None] * factors)[:, None, None, :, None]
    greedy = heat == 0
    delays = times.log()[:, :, None, None, :].masked_fill(greedy, 0.0)
    scaled = _kept(scores.float(), rows)[..., None, :] / heat.masked_fill(greedy, 1.0)
    return (scaled - delays).argmax(dim=-1)


def _kept(scores: Tensor, rows: Sampling) -> Tensor:
    """Scores with those outside top-k and below min-p at -inf."""
    most = scores.shape[-1]
    temperature = torch.where(rows.temperature == 0, 1.0, rows.temperature)[:, None, None, None]
    floor = scores.amax(dim=-1, keepdim=True) + temperature * rows.min_p.log()[:, None, None, None]
    rank = torch.where(rows.top_k > 0, rows.top_k, most).clamp(max=most) - 1
    index = rank[:, None, None, None].expand(*scores.shape[:-1], 1)
    floor = floor.maximum(scores.sort(dim=-1, descending=True).values.gather(-1, index))
    return scores.masked_fill(scores < floor, float("-inf"))
