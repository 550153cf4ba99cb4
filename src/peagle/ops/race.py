"""Drafts that take part in the target's own draw.

Under sampling the target takes the token that arrives first: each has an exponential time, keyed by
(seed, position, token), divided by its probability. A draft is the token that would arrive first by
the drafter's probabilities with the *same* times. Since two distributions that are alike then tend
to choose alike, more drafts are accepted than of the most likely ones; and since a draft is only
compared with the target's choice, no way of drafting can change a token.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.ops.sampling import Sampling, arrival_times


@dataclass(frozen=True)
class Race:
    """The draws that some requests' drafts are for. A greedy request's drafts are the most likely
    candidates."""

    sampling: Sampling
    """[table rows]; top-p is not applied to drafts."""
    newest: Tensor
    """[table rows] position in its sequence of each request's newest token, which drafts follow."""
    requests: Tensor
    """[requests] rows of the table."""
    factors: Tensor
    """[factors] what a request's temperature may be multiplied by for its drafts."""
    chosen: Tensor
    """[depths] index into `factors` for the first draft, the second ..."""

    def of(self, requests: Tensor) -> "Race":
        """That of some of the requests."""
        return replace(self, requests=self.requests[requests])


def first_arrivals(scores: Tensor, tokens: Tensor, race: Race, depth: int) -> Tensor:
    """Which candidate arrives first, at each factor: [requests, slots, previous, factors].

    scores: [requests, slots, previous, candidates] a drafter's logits, for each of some drafts in
    the slot before; tokens: [requests, slots, candidates] target ids; depth: that of the first
    slot, 0 for the first draft.
    """
    columns = {name: column[race.requests] for name, column in vars(race.sampling).items()}
    rows, slots = Sampling(**columns), tokens.shape[1]
    depths = torch.arange(depth, depth + slots, device=tokens.device)
    places = race.newest[race.requests, None] + 1 + depths
    seeds = rows.seeds[:, None].expand_as(places)
    times = arrival_times(seeds.flatten(), places.flatten(), tokens.flatten(0, 1)).view_as(tokens)
    heat = (rows.temperature[:, None] * race.factors)[:, None, None, :, None]
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
