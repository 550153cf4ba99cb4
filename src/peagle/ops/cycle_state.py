"""A cycle's inputs and outcome, read from and written to state that stays on the device.

A batch is padded with a row of the request table that belongs to no request and has no cache slots
(`limits` 0), so rows may repeat. The state of that row means nothing and stays small.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from peagle.ops.acceptance import Path
from peagle.ops.cached_attention import PassRows
from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.penalties import Penalties, count_emitted
from peagle.ops.triton import in_kernels


class CycleState(NamedTuple):
    """What the device knows of each live request, by its row in the request table."""

    # one request after a cycle that accepted two drafts, n = `computed`:
    #
    #   position   ... n-3   n-2   n-1    n          the target has the keys of those before n
    #   features          [ the `pending` 3 ]        which the drafter has yet to see, each with
    #   emitted             d1    d2    bonus        the token after it; the last is the newest
    slots: Tensor
    """[table rows, positions] cache slot of every position of every request."""
    limits: Tensor
    """[table rows] positions of a request that have a slot; nothing is written after them."""
    computed: Tensor
    """[table rows] positions whose keys the target has: the newest token's position."""
    pending: Tensor
    """[table rows] positions before `computed` that the drafter has not seen: 1 to K + 1 after a
    cycle with drafts, and one more after each without; of requests that accept none always 1."""
    emitted: Tensor
    """[table rows, most pending] the tokens after those positions; the last is the newest."""
    features: Tensor
    """[table rows, most pending, hidden_size] projected features of those positions."""
    ks: Tensor
    """[table rows] most drafts that a request accepts."""
    results: Tensor
    """[table rows, K + 3] number of accepted drafts, then the emitted tokens, -1 for NaN logits;
    last, 1 where the drafts were looked up."""
    penalties: Penalties

    @classmethod
    def empty(
        cls, slots: Tensor, limits: Tensor, features: Tensor, vocab: int, most_drafts: int
    ) -> Self:
        """The state of a table without requests. features: of zeros; most_drafts: K."""
        rows, positions, _ = features.shape

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=limits.device)

        return cls(
            slots=slots,
            limits=limits,
            computed=zeros(rows) + 1,
            pending=zeros(rows) + 1,
            emitted=zeros(rows, positions),
            features=features,
            ks=zeros(rows) + most_drafts,
            results=zeros(rows, most_drafts + 3),
            penalties=Penalties.none(rows, vocab, limits.device),
        )

    def newest(self, requests: Tensor) -> Tensor:
        """The newest token of some table rows: [requests] each."""
        last = self.pending.index_select(0, requests) - 1
        return self.emitted.index_select(0, requests).gather(1, last[:, None])[:, 0]

    def begin(self, rows: Tensor, first: Tensor, features: Tensor | None) -> None:
        """Set requests to right after their prompt; `computed` is written already.

        rows: [requests] table rows; first: [requests] their first tokens, -1 for NaN logits;
        features: [requests, hidden_size], projected. Assigning as `x[i] = 1` would wait for the
        device.
        """
        self.emitted[:, 0].index_copy_(0, rows, first.clamp(min=0))
        self.results[:, 1].index_copy_(0, rows, first)
        for column, value in ((self.pending, 1), (self.results[:, 0], 0)):
            column.index_fill_(0, rows, value)
        count_emitted(self.penalties, rows, self.emitted, self.pending)
        if features is not None:
            self.features[:, 0].index_copy_(0, rows, features)


@dataclass(frozen=True)
class DraftInputs:
    """What a drafter's first layer reads, request after request."""

    rows: PassRows
    x: Tensor
    """[most rows, 2 * hidden_size] normed embeddings beside normed features."""
    stream: Tensor
    """[most rows, hidden_size]"""
    reads: Tensor
    """[requests, reads] rows whose output is wanted: the newest token's, then the mask slots'."""


class FirstNorms(NamedTuple):
    """The drafter's embeddings and norms before its first layer."""

    embedding: Tensor
    """[vocab, hidden_size]"""
    input_weight: Tensor
    hidden_weight: Tensor
    eps: float
    mask_feature: Tensor
    """[hidden_size], projected; unused where no mask slots are asked for."""
    mask_token: int = 0
    before_residual: int = False
    """Whether the residual stream begins with the normed feature."""


@in_kernels("cycle_state")
def draft_inputs(
    state: CycleState, requests: Tensor, pending: int, masks: int, norms: FirstNorms
) -> DraftInputs:
    """Each request's pending positions with their real features, then `masks` mask slots.

    Rows have no gaps, so rejected drafts take no room. requests: [requests] table rows; pending:
    the most that one of them has.
    """
    most = (pending + masks) * len(requests)
    hidden = norms.embedding.shape[1]
    x = norms.embedding.new_zeros(most, 2 * hidden)
    stream = norms.embedding.new_zeros(most, hidden)
    known = state.pending[requests]
    counts = known + masks
    firsts = counts.cumsum(0) - counts
    for request, first, count in zip(requests, firsts.tolist(), known.tolist(), strict=True):
        masked = torch.full((masks,), norms.mask_token, device=x.device)
        tokens = torch.cat((state.emitted[request, :count], masked))
        slots = norms.mask_feature.expand(masks, hidden)
        feature = torch.cat((state.features[request, :count], slots))
        embedded = rms_norm(norms.embedding[tokens], norms.input_weight, norms.eps)
        scaled = rms_norm(feature, norms.hidden_weight, norms.eps)
        x[first : first + len(tokens)] = torch.cat((embedded, scaled), dim=1)
        stream[first : first + len(tokens)] = scaled if norms.before_residual else feature
    starts = state.computed[requests] - known
    reads = (firsts + known - 1)[:, None] + torch.arange(masks + 1, device=x.device)
    rows = _placed(state, requests, starts, counts, most, pending + masks)
    return DraftInputs(rows, x, stream, reads)


@in_kernels("cycle_state")
def verify_inputs(
    state: CycleState, requests: Tensor, drafts: Tensor, embedding: Tensor, norm: RMSNorm
) -> tuple[PassRows, Tensor, Tensor]:
    """The target's rows: each request's newest token, then its drafts [requests, drafts].

    Returns the rows, their embeddings [requests * (drafts + 1), hidden_size], and those normed.
    """
    newest = state.emitted[requests, state.pending[requests] - 1]
    tokens = torch.cat((newest[:, None], drafts), dim=1)
    count = tokens.shape[1]
    x = embedding[tokens.flatten()]
    counts = torch.full_like(requests, count)
    rows = _placed(state, requests, state.computed[requests], counts, len(x), count)
    return rows, x, rms_norm(x, norm.weight, norm.eps)


def _placed(
    state: CycleState, requests: Tensor, starts: Tensor, counts: Tensor, total: int, most: int
) -> PassRows:
    """Rows request after request, each with its position and slot, then padding up to `total`."""
    positions = torch.zeros(total, dtype=torch.int64, device=starts.device)
    writes = torch.full_like(positions, -1)
    firsts = counts.cumsum(0) - counts
    columns = (requests, starts, firsts, counts)
    for row, start, first, count in zip(*(c.tolist() for c in columns), strict=True):
        own = torch.arange(start, start + count, device=starts.device)
        positions[first : first + count] = own
        kept = int((own < state.limits[row]).sum())
        writes[first : first + kept] = state.slots[row, own[:kept]]
    places = (starts, firsts, counts, positions, writes)
    return PassRows(state.slots, state.limits, requests, *places, most)


def commit(state: CycleState, requests: Tensor, path: Path, features: Tensor | None) -> None:
    """Make each request's accepted drafts, and the target's token after them, its state.

    Where a cycle without drafts has features, the drafter still has to see those of earlier cycles,
    except of requests that accept no drafts.

    path: K drafts or fewer; features: [requests * (depth + 1), hidden_size] of its rows, projected,
    None without a drafter.
    """
    advance(state, requests, path, features)
    emitted, numbers = state.emitted, state.pending
    if not path.drafts.shape[1]:
        emitted, numbers = emitted.gather(1, numbers[:, None] - 1), torch.ones_like(numbers)
    count_emitted(state.penalties, requests, emitted, numbers)


@in_kernels("cycle_state")
def advance(state: CycleState, requests: Tensor, path: Path, features: Tensor | None) -> None:
    """The same as `commit`, without penalties."""
    counts, width = path.accepted, path.chosen.shape[1]
    for index, row in enumerate(requests.tolist()):
        accepted = min(int(counts[index]), int(state.ks[row]))
        emitted = path.chosen[index, : accepted + 1]
        state.results[row, 0] = accepted
        state.results[row, 1 : accepted + 2] = emitted
        # after a cycle without drafts the drafter still has to see what waited: this position comes
        # behind it
        waits = features is not None and width == 1 and bool(state.ks[row] > 0)
        first = int(state.pending[row]) if waits else 0
        state.emitted[row, first : first + accepted + 1] = emitted.clamp(min=0)
        lives = bool(state.limits[row] > 0)
        state.pending[row] = first + accepted + 1 if lives else 1
        state.computed[row] = state.computed[row] + accepted + 1 if lives else 1
        if features is not None:
            of_request = features[index * width : (index + 1) * width]
            state.features[row, first : first + width] = of_request
