"""The flags of `peagle bench --shape`: a published size with random weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.cli.groups import Flags
from peagle.config import EngineConfig, SamplingParams
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.case import Case
    from peagle.bench.synthetic import SyntheticWorkload
    from peagle.drafters.network import NetworkConfig


class Synthetic(Flags):
    """The flags as given; without a shape all others must be left out."""

    shape: str | None = None
    """Run a published size, not a model: qwen3-8b, ..."""
    random_weights: bool = False
    """Required by --shape: its weights are random."""
    synthetic_acceptance: float | None = None
    """Acceptance length to simulate with --shape."""
    prompt_tokens: int = 256
    """Prompt length with --shape."""
    routing: str | None = None
    """How alike rows choose experts with --shape: independent, half. Default: the shape's"""
    checkpoint: Path | None = None
    """Read the target of --shape from this directory. Default: it is made"""

    def model_post_init(self, _: Any) -> None:
        given = self.synthetic_acceptance, self.routing, self.checkpoint
        if self.shape is None and (self.random_weights or given != (None, None, None)):
            raise InputError(
                "--random-weights, --synthetic-acceptance, --routing and --checkpoint need --shape"
            )

    def drafters(self, methods: Sequence[str]) -> "dict[str, NetworkConfig]":
        """The drafters of the shape that have sizes of their own. Raises `InputError` for an
        unknown shape."""
        from peagle.bench.shapes import DRAFT_LAYERS, block_config, draft_config, shape_of

        shape = shape_of(self.shape or "")
        if "mtp" in methods and not shape.target.recurrent:
            raise InputError(f"shape {self.shape} has no head of its own; leave out mtp")
        return {
            method: draft_config(shape, method) if method in DRAFT_LAYERS else block_config(shape)
            for method in methods
            if method in ("dflash", *DRAFT_LAYERS)
        }

    def workload(
        self, cases: "Sequence[Case]", params: SamplingParams, engine: EngineConfig
    ) -> "SyntheticWorkload":
        """What all cases share. Raises `InputError` for a size that does not fit the memory."""
        from peagle.bench.synthetic import SyntheticWorkload, require_room

        acceptance = self._acceptance(cases)
        if any(case.temperature for case in cases):
            raise InputError("--shape runs greedy: of random weights only the times mean anything")
        workload = SyntheticWorkload(
            self.shape or "",
            acceptance,
            self.prompt_tokens,
            params.max_tokens,
            engine,
            self.routing,
            self.checkpoint,
        )
        methods = {case.method for case in cases}
        require_room(workload.shape, methods, engine.dtype, engine.device)
        return workload

    def _acceptance(self, cases: "Sequence[Case]") -> float:
        if not self.random_weights:
            raise InputError("--shape has random weights; add --random-weights to confirm")
        length = self.synthetic_acceptance
        if all(case.k == 0 for case in cases):
            return length or 1.0
        if length is None:
            raise InputError(
                "random drafters are never right; add --synthetic-acceptance AL, such as 3.94"
            )
        least = min(case.k for case in cases if case.k)
        if length > least + 1:
            raise InputError(
                f"--synthetic-acceptance {length}: {least} drafts and the bonus make at most "
                f"{least + 1}"
            )
        return length
