"""What a worker keeps of requests from step to step, but for how their tokens are chosen."""

from peagle.engine.capacity import Capacity
from peagle.engine.drafting import Drafting
from peagle.engine.history import History
from peagle.engine.kv_cache import KVCache
from peagle.engine.recurrent_states import RecurrentStates
from peagle.engine.request_table import RequestTable
from peagle.engine.step import Step
from peagle.models.decoder import Decoder


class RequestMemory:
    """The table of cache slots, and all that goes by its rows: keys, values, states and texts."""

    def __init__(
        self, target: Decoder, drafting: Drafting, capacity: Capacity, spare: int = 0
    ) -> None:
        """spare: rows of the table that belong to no request."""
        weight, needs, kept = target.embed.weight, drafting.needs, capacity.kv_dtype
        self.capacity = capacity
        self.table = table = RequestTable(
            capacity.num_seqs + spare,
            capacity.max_length,
            capacity.block_size,
            weight.device,
            null_slot=capacity.slots,
            windows=capacity.window_slots,
        )
        given = table, capacity.slots, weight.dtype
        self.target_cache = KVCache(target.spec, *given, table.windows, kept)
        self.network_cache: KVCache | None = None
        """The proposer's; None where it has no network."""
        if needs.cache is not None:
            self.network_cache = KVCache(needs.cache, *given, kept=kept)
        self.states: RecurrentStates | None = None
        """Of recurrent layers; None where there are none."""
        if target.spec.recurrent:
            sizes = len(table.limits), capacity.states or 0, drafting.k
            self.states = RecurrentStates(target.spec, *sizes, weight)
        self.history = History(table.slots.shape, weight.device) if needs.history else None
        """The texts, for a proposer that reads them."""

    def update(self, step: Step) -> None:
        """Let requests leave, begin and get blocks, as a step says."""
        self.table.update(step)
        if self.history is not None:
            for begin in step.begun:
                self.history.write(begin.row, 0, begin.tokens)
        if self.states is not None:
            self.states.begin(step.begun)
        self.target_cache.clear(step.cleared)
        if self.network_cache is not None:
            self.network_cache.clear(step.cleared)
