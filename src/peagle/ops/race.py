"""Drafts that take part in the target's own draw.

Under sampling the target takes the token that arrives first: each has an exponential time, keyed by
(seed, position, token), divided by its probability. A draft is the token that would arrive first by
the drafter's probabilities with the *same* times. Since two distributions that are alike then tend
to choose alike, more drafts are accepted than of the most likely ones; and since a draft is only
compared with the target's choice, no way of drafting can change a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.ops.sampling import Sampling, arrival_times

SHARPENING = 0.85
"""The factor of a request's temperature for its drafts: drafters are a little flatter than their
targets. No factor changes a token; to fit one at each depth gave no longer acceptance."""


class Race(NamedTuple):
    """The draws that some requests' drafts are for.

    A greedy request's drafts are the most likely candidates.
    """

    sampling: Sampling
    """[table rows]; top-p is not applied to drafts."""
    newest: Tensor
    """[table rows] position in its sequence of each request's newest token, which drafts follow."""
    requests: Tensor
    """[requests] rows of the table."""


def draft_scores(scores: Tensor, tokens: Tensor, race: Race, depth: int = 0) -> Tensor:
    """The drafter's own logits less the draws' delays; the highest one is the draft.

    scores: [requests, slots, previous, candidates] a drafter's logits, for each of some drafts in
    the slot before; tokens: [requests, slots, candidates] target ids; depth: that of the first
    slot, 0 for the first draft.
    """
    rows = race.sampling.of(race.requests)
    heat = (rows.temperature * SHARPENING)[:, None, None, None]
    delays = _delays(tokens, rows, race, depth)[:, :, None]
    return _raced(_kept(scores.float(), rows), delays, heat)


def arrivals(scores: Tensor, tokens: Tensor, race: Race, depth: int) -> Tensor:
    """What orders drafts by their arrival at the request's temperature, the highest first; of
    greedy requests their scores. scores, tokens: [requests, slots, candidates]; depth: that of the
    first slot."""
    rows = race.sampling.of(race.requests)
    heat = rows.temperature[:, None, None]
    kept = _kept(scores[:, :, None], rows)[:, :, 0]
    return torch.where(heat == 0, scores, _raced(kept, _delays(tokens, rows, race, depth), heat))


def _delays(tokens: Tensor, rows: Sampling, race: Race, depth: int) -> Tensor:
    """Logarithms of the arrival times of tokens [requests, slots, candidates]."""
    depths = torch.arange(depth, depth + tokens.shape[1], device=tokens.device)
    # the first draft stands right behind the newest token
    places = race.newest[race.requests, None] + 1 + depths
    seeds = rows.seeds[:, None].expand_as(places)
    times = arrival_times(seeds.flatten(), places.flatten(), tokens.flatten(0, 1))
    return times.view_as(tokens).log()


def _raced(scores: Tensor, delays: Tensor, heat: Tensor) -> Tensor:
    """Scores at a temperature, less the delays; at 0 the scores alone."""
    greedy = heat == 0
    return scores / heat.masked_fill(greedy, 1.0) - delays.masked_fill(greedy, 0.0)


def _kept(scores: Tensor, rows: Sampling) -> Tensor:
    """Scores with those outside top-k and below min-p at -inf."""
    # most requests ask for neither, and need no sort
    if not bool((rows.top_k > 0).any() | (rows.min_p > 0).any()):
        return scores
    most = scores.shape[-1]
    temperature = torch.where(rows.temperature == 0, 1.0, rows.temperature)[:, None, None, None]
    floor = scores.amax(dim=-1, keepdim=True) + temperature * rows.min_p.log()[:, None, None, None]
    rank = torch.where(rows.top_k > 0, rows.top_k, most).clamp(max=most) - 1
    index = rank[:, None, None, None].expand(*scores.shape[:-1], 1)
    # both filters are lower bounds of scores, of which the higher one holds
    floor = floor.maximum(scores.sort(dim=-1, descending=True).values.gather(-1, index))
    return scores.masked_fill(scores < floor, float("-inf"))
