"""The flags of `peagle bench --shape`: a published size with random weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.config import SamplingParams
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.case import Case
    from peagle.bench.synthetic import SyntheticWorkload
    from peagle.drafters.model import DrafterConfig


@dataclass(frozen=True)
class Synthetic:
    """The flags as given; without a shape all others must be left out."""

    shape: Annotated[
        str | None,
        typer.Option(help="Run a published size, not a model: qwen3-8b, ...", show_default="none"),
    ] = None
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Required by --shape: its weights are random.")
    ] = False
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(help="Acceptance length to simulate with --shape.", show_default="none"),
    ] = None
    prompt_tokens: Annotated[int, typer.Option(help="Prompt length with --shape.")] = 256
    routing: Annotated[
        str | None,
        typer.Option(
            help="How alike rows choose experts with --shape: independent, half.",
            show_default="the shape's",
        ),
    ] = None

    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Read the target of --shape from this directory.", show_default="it is made"
        ),
    ] = None

    def __post_init__(self) -> None:
        given = self.synthetic_acceptance, self.routing, self.checkpoint
        if self.shape is None and (self.random_weights or given != (None, None, None)):
            raise InputError(
                "--random-weights, --synthetic-acceptance, --routing and --checkpoint need --shape"
            )

    def drafters(self, methods: Sequence[str]) -> "dict[str, DrafterConfig]":
        """The drafters of the shape. Raises `InputError` for an unknown one."""
        from peagle.bench.shapes import draft_config, shape_of
        from peagle.bench.synthetic import DRAFT_LAYERS

        shape = shape_of(self.shape or "")
        if "mtp" in methods and not shape.target.recurrent:
            raise InputError(f"shape {self.shape} has no head of its own; leave out mtp")
        return {
            method: draft_config(shape, method == "peagle", DRAFT_LAYERS[method])
            for method in methods
            if method in DRAFT_LAYERS
        }

    def workload(
        self, cases: "Sequence[Case]", params: SamplingParams, hardware: Mapping[str, Any]
    ) -> "SyntheticWorkload":
        """What all cases share. Raises `InputError` for a size that does not fit the memory."""
        from peagle.bench.synthetic import SyntheticWorkload

        acceptance = self._acceptance(cases)
        if any(case.temperature for case in cases):
            raise InputError("--shape runs greedy: of random weights only the times mean anything")
        sizes = self.prompt_tokens, params.max_tokens
        workload = SyntheticWorkload(
            self.shape or "",
            acceptance,
            *sizes,
            routing=self.routing,
            checkpoint=self.checkpoint,
            **hardware,
        )
        workload.require_room({case.method for case in cases})
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
