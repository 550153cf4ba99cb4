"""How the card's power limits a layer's products: after a pause, and after seconds of nothing else.

    python benchmarks/gpu/products.py --shape qwen3-8b --rows 256,512,8192

Random weights; the products are those of a pass over that many rows, gates with SwiGLU, each over
layers in turn, so that no weight is found in a cache.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import card
import torch
import typer
from torch import Tensor

from peagle.bench.environment import hardware, machine
from peagle.bench.random_weights import random_target
from peagle.bench.result_file import result_file
from peagle.bench.shapes import shape_of
from peagle.cli.script import run
from peagle.models.decoder import Decoder
from peagle.models.spec import ExpertsSpec
from peagle.ops import residual
from peagle.ops.products.normed import Normed

LAYERS = 8
PAUSE, SECONDS = 0.5, 2.0
"""Seconds of pause before a rested call, and of work before the card is read."""
MICRO, TERA = 1e6, 1e12


@dataclass(frozen=True)
class Product:
    """One of a layer's products, over all layers in turn."""

    name: str
    calls: list[Callable[[], Tensor]]
    flops: int
    """Floating-point operations of one call."""


@dataclass(frozen=True)
class Rate:
    """One product, measured."""

    name: str
    rows: int
    rested_us: float
    sustained_us: float
    sustained_flops: float
    """Floating-point operations per second."""
    card: dict[str, Any]
    """The card's reading while sustained."""

    def __str__(self) -> str:
        clock, watts = (self.card.get(name, "?") for name in ("clocks.sm", "power.draw"))
        return (
            f"{self.rows:6} rows {self.name:9}{self.rested_us:10.1f} us rested"
            f"{self.sustained_us:10.1f} sustained{self.sustained_flops / TERA:7.0f} TFLOP/s "
            f"at {clock} MHz, {watts} W"
        )


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "256,512,8192",
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each product and number of rows."""
    with result_file(out) as write:
        found = shape_of(shape)
        spec = found.target
        if isinstance(spec.layers[0].feed_forward, ExpertsSpec):
            raise typer.BadParameter(f"{shape} has experts; these are a dense layer's products")
        spec = replace(spec, layers=LAYERS * spec.layers[:1])
        target = random_target(spec, torch.device("cuda"), torch.bfloat16, found.weights)
        rates = []
        for count in map(int, rows.split(",")):
            for product in products(target, count):
                rates.append(measure(product, count))
                print(rates[-1], flush=True)
        facts = machine() | hardware("auto", "auto") | {"shape": shape}
        write(facts | {"products": [asdict(rate) for rate in rates]})


@torch.inference_mode()
def products(target: Decoder, rows: int) -> Iterator[Product]:
    """The products of a dense layer, and the head."""
    weights = target.embed.weight

    def inputs(width: int) -> Normed:
        x = torch.randn(rows, width, device=weights.device, dtype=weights.dtype)
        return Normed(x, None, 0.0)

    attention, mlp = target.layers[0].attention, target.layers[0].mlp
    hidden, values = inputs(weights.shape[1]), inputs(attention.out.weight.shape[1])
    inner = inputs(mlp.down.weight.shape[1])
    each: dict[str, list[Callable[[], Tensor]]] = {
        "q, k, v": [partial(residual.linear, hidden, at.attention.qkv) for at in target.layers],
        "output": [partial(residual.linear, values, at.attention.out) for at in target.layers],
        "gates": [partial(residual.gated, hidden, at.mlp.gate_up) for at in target.layers],
        "down": [partial(residual.linear, inner, at.mlp.down) for at in target.layers],
        "head": [partial(residual.linear, hidden, target.head)],
    }
    sizes = (attention.qkv, attention.out, mlp.gate_up, mlp.down, target.head)
    for (name, calls), layer in zip(each.items(), sizes, strict=True):
        yield Product(name, calls, 2 * rows * layer.weight.numel())


def measure(product: Product, rows: int) -> Rate:
    """Time a graph of a product's calls after a pause, and then repeatedly."""
    graph = _captured(product.calls)
    time.sleep(PAUSE)
    rested = _seconds(graph) / len(product.calls)
    times: list[float] = []
    reading = card.at_work(lambda: times.append(_seconds(graph)), SECONDS)
    sustained = statistics.median(times[len(times) // 2 :]) / len(product.calls)
    flops = product.flops / sustained
    return Rate(product.name, rows, rested * MICRO, sustained * MICRO, flops, reading)


@torch.inference_mode()
def _captured(calls: list[Callable[[], Tensor]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay, by the card's own clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    run(main)
