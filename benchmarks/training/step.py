"""One training step of a P-EAGLE drafter on given features: milliseconds, gigabytes, a profile.

    python benchmarks/training/step.py --length 8192

Sizes are Qwen3-8B's: 4 draft layers, 32,000 draft tokens, K = 8, r = 0.8, floor 0.2, a frozen head,
and one document whose first eighth is the prompt. Weights and features are random: the cost of a
step does not depend on them. speculators' step on the same work is measured beside it.
"""

import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from peagle.bench.environment import machine
from peagle.cli.script import run
from peagle.drafters.model import DrafterConfig, DraftModel
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.ops.linear import Linear
from peagle.ops.rope import RopeConfig
from peagle.train.cod import depth_shares, sample_chains
from peagle.train.features import Features
from peagle.train.loss import Comparison
from peagle.train.mask import BLOCK, rows_in_step
from peagle.train.optimizer import DraftOptimizer
from peagle.train.packing import Batch
from peagle.train.partition import ParallelPass, Pass, Reach
from peagle.train.recipe import Recipe

K, RATIO, FLOOR, LAYERS, DRAFT_VOCAB = 8, 0.8, 0.2, 4, 32000
GB = 1e9
CUDA = torch.device("cuda")


def main(
    length: Annotated[int, typer.Option(help="Tokens of the document.")] = 8192,
    segment: Annotated[int, typer.Option(help="Deeper elements that run together.")] = 6144,
    checkpoint: Annotated[bool, typer.Option(help="Recompute depth 0's activations.")] = False,
    steps: Annotated[int, typer.Option(help="Steps; the second half is measured.")] = 16,
    profile: Annotated[Path | None, typer.Option(help="Write a table of kernels here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the result to this file.")] = None,
) -> None:
    """Measure and print one line."""
    work = Work(length, segment, checkpoint)
    seconds = [_timed(work.step) for _ in range(steps)]
    torch.cuda.reset_peak_memory_stats()
    seconds[steps // 2 :] = [_timed(work.step) for _ in range(steps - steps // 2)]
    in_a_row = _timed(lambda: [work.step() for _ in range(steps // 2)]) / (steps // 2)
    median = statistics.median(seconds[steps // 2 :])
    result = machine() | {
        "gpu": torch.cuda.get_device_name(),
        "length": length,
        "elements_per_segment": segment,
        "activation_checkpointing": checkpoint,
        "elements": work.elements,
        "segments": work.segments,
        "step_ms": round(median * 1e3, 1),
        "step_in_a_row_ms": round(in_a_row * 1e3, 1),
        "first_step_s": round(seconds[0], 1),
        "us_per_token": round(median * 1e6 / length, 2),
        "charged_per_s": round(work.loss_elements / median),
        "mask_ms": round(1e3 * work.masking(), 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / GB, 2),
        "beyond_state_gb": round((torch.cuda.max_memory_allocated() - work.state_bytes) / GB, 2),
        "loss": round(float(work.loss), 4),
    }
    print(json.dumps(result), flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    if profile is not None:
        profile.write_text(_profiled(work))


class Work:
    """The model, its optimizer, and one document's features."""

    def __init__(self, length: int, segment: int, checkpoint: bool) -> None:
        torch.manual_seed(0)
        self._batch = Batch(
            tokens=torch.randint(0, 151_000, (length,)),
            positions=torch.arange(length),
            loss_mask=torch.arange(length) >= length // 8,
        )
        heads = AttentionSpec(32, 8, 128, rope=RopeConfig(theta=1e6), qk_norm=True)
        shape = DecoderSpec(151936, 4096, LAYERS * (LayerSpec(heads, MLPSpec(12288)),))
        config = DrafterConfig(shape, 4096, (2, 18, 33), DRAFT_VOCAB, mask_token_id=151669)
        recipe = Recipe(
            target="-", data=("-",), output="-", mask_token_id=151669, steps=1, train_head=False
        )
        with CUDA:
            self.model = _random(DraftModel(config, length + K))
            target: Any = SimpleNamespace(head=_random(Linear(4096, 151936)).bfloat16())
            features = torch.randn(length, 4 * 4096, dtype=torch.bfloat16)
        self._features = Features(features[:, : 3 * 4096], features[:, 3 * 4096 :])
        self.model.to(CUDA, torch.bfloat16).embed.float()
        self.model.readout.head.requires_grad_(False)
        self._compare = Comparison(self.model, target, "kl")
        del target
        self._optimizer = DraftOptimizer(self.model, recipe)
        self._segment, self._checkpoint = segment, checkpoint
        self._generator = torch.Generator().manual_seed(0)
        self.loss = torch.zeros(())

    @property
    def state_bytes(self) -> int:
        """Float32 weights, gradients and AdamW's two moments; the frozen heads."""
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        return 16 * trained + 2 * 2 * self.model.readout.head.weight.numel()

    def step(self) -> None:
        """Sampling, both passes, and the optimizer."""
        shares = depth_shares(K, RATIO, FLOOR)
        chains = sample_chains(self._batch, shares, self._generator)
        weight = chains.loss_weight(1.0)

        def loss_of(part: Pass) -> Tensor:
            weights = torch.full((len(part.elements),), 1 / weight, device=CUDA)
            places = part.elements.places
            return self._compare.loss(part.hidden, self._features.final, places, weights)

        run = ParallelPass(
            self.model, self._batch, self._features, chains, self._segment, self._checkpoint
        )
        self.loss = run.backward(loss_of)
        self._optimizer.step(1e-4, 1.0)
        self.loss_elements = int(chains.lengths.sum())
        self.elements = len(self._batch) + len(chains.deeper())
        self.segments = len(list(chains.segments(self._segment, rows_in_step(CUDA))))

    def masking(self) -> float:
        """Seconds to build all masks of a step: the median of several runs."""
        chains = sample_chains(self._batch, depth_shares(K, RATIO, FLOOR), self._generator)
        parts = chains.segments(self._segment, rows_in_step(CUDA))
        segments = [elements.padded(BLOCK) for elements in parts]

        def build() -> None:
            for elements in segments:
                Reach.of(elements, self._batch).visibility.block_mask(CUDA)

        return statistics.median(_timed(build) for _ in range(9))


def _random(module: Any) -> Any:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    return module


def _timed(step: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _profiled(work: Work) -> str:
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work.step()
        torch.cuda.synchronize()
    table: str = profile.key_averages().table(
        sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
    )
    return table


if __name__ == "__main__":
    run(main)
