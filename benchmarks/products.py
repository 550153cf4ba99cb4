"""What memory and power allow a layer's products: after a pause, and after seconds of nothing else.

    python benchmarks/products.py --shape qwen3-8b --rows 256,512,8192
    python benchmarks/products.py --shape gpt-oss-20b --rows 1,8,64

Random weights, packed as the shape has them; the products are those of a pass over that many rows,
gates with SwiGLU, experts with their routing, each over layers in turn, so that no weight is found
in a cache.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from peagle.bench.random_weights import random_target
from peagle.bench.shapes import shape_of
from peagle.cli.script import run
from peagle.models.decoder import MLP, Decoder, DecoderLayer
from peagle.ops import residual
from peagle.ops.linear import Linear
from peagle.ops.moe import Experts, route
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peers import card
from records.measuring import begun, written
from records.result import Row

LAYERS = 8
PAUSE, SECONDS = 0.5, 2.0
"""Seconds of pause before a rested call, and of work before the card is read."""
MICRO, TERA = 1e6, 1e12
UNITS = {
    "rested_us": "us",
    "sustained_us": "us",
    "sustained_tflops": "TFLOP/s",
    "rested_tb_per_s": "TB/s",
    "clock_mhz": "MHz",
    "power_w": "W",
}
Run = Callable[[Normed, Linear], Any]


@dataclass(frozen=True)
class Product:
    """One of a layer's products, over all layers in turn."""

    name: str
    calls: Sequence[Callable[[], Any]]
    flops: int
    """Floating-point operations of one call."""
    nbytes: int
    """Bytes of weights that it reads; of experts, those that the rows chose."""


@dataclass(frozen=True)
class Rate:
    """One product, measured."""

    name: str
    rows: int
    rested_us: float
    sustained_us: float
    sustained_flops: float
    """Floating-point operations per second."""
    rested_bandwidth: float
    """Bytes of weights per second."""
    card: dict[str, str | float]
    """The card's reading while sustained."""

    @property
    def row(self) -> Row:
        """It as a row of a result."""
        return {
            "product": self.name,
            "rows": self.rows,
            "rested_us": self.rested_us,
            "sustained_us": self.sustained_us,
            "sustained_tflops": self.sustained_flops / TERA,
            "rested_tb_per_s": self.rested_bandwidth / TERA,
            "clock_mhz": float(self.card.get("clocks.sm", 0)),
            "power_w": float(self.card.get("power.draw", 0)),
        }

    def __str__(self) -> str:
        clock, watts = (self.card.get(name, "?") for name in ("clocks.sm", "power.draw"))
        return (
            f"{self.rows:6} rows {self.name:9}{self.rested_us:10.1f} us rested"
            f"{self.rested_bandwidth / TERA:6.2f} TB/s"
            f"{self.sustained_us:10.1f} sustained{self.sustained_flops / TERA:7.0f} TFLOP/s "
            f"at {clock} MHz, {watts} W"
        )


def main(
    shape: Annotated[str, typer.Option(help="A shape of peagle bench.")] = "qwen3-8b",
    rows: Annotated[str, typer.Option(help="Numbers of rows.")] = "256,512,8192",
    out: Annotated[Path | None, typer.Option(help="JSON file of the result.")] = None,
) -> None:
    """Print a line for each product and number of rows."""
    about = begun(f"A layer's products of {shape}, random weights", card.reading())
    with written(out, about, UNITS, shape=shape) as write:
        found = shape_of(shape)
        spec = replace(found.target, layers=LAYERS * found.target.layers[:1])
        target = random_target(spec, torch.device("cuda"), torch.bfloat16, found.weights)
        rates: list[Rate] = []
        for count in map(int, rows.split(",")):
            for product in products(target, count):
                rates.append(measure(product, count))
                print(rates[-1], flush=True)
                write([rate.row for rate in rates])


@torch.inference_mode()
def products(target: Decoder, rows: int) -> Iterator[Product]:
    """A layer's products or experts, and the head."""
    embeddings = target.embed.weight

    def inputs(width: int) -> Normed:
        x = torch.randn(rows, width, device=embeddings.device, dtype=embeddings.dtype)
        return Normed(x, None, 0.0)

    def product(name: str, run: Run, layers: Sequence[Linear]) -> Product:
        weight = layers[0].weight
        x = inputs(weight.shape[1])
        calls = [partial(run, x, layer) for layer in layers]
        return Product(name, calls, 2 * rows * weight.numel(), weight.nbytes)

    layers = [cast(DecoderLayer, layer) for layer in target.layers]
    yield product("q, k, v", residual.linear, [at.attention.qkv for at in layers])
    yield product("output", residual.linear, [at.attention.out for at in layers])
    if isinstance(layers[0].mlp, Experts):
        mixtures = [cast(Experts, at.mlp) for at in layers]
        yield _experts(mixtures, inputs(embeddings.shape[1]), target.norm)
    else:
        dense = [cast(MLP, at.mlp) for at in layers]
        gated = partial(residual.gated, gate=dense[0].gate)
        yield product("gates", gated, [mlp.gate_up for mlp in dense])
        yield product("down", residual.linear, [mlp.down for mlp in dense])
    yield product("head", residual.linear, [target.head])


def _experts(layers: list[Experts], x: Normed, norm: RMSNorm) -> Product:
    """Routing, gate and up, down, sum and norm."""
    first = layers[0]
    _, chosen = route(x.x, first.router, first.top_k, first.normalize)
    numbers = first.gate_up.numel() + first.down.numel()
    nbytes, count = first.gate_up.nbytes + first.down.nbytes, len(first.router)
    calls = [partial(residual.add_mixture, x, layer, x.x, norm) for layer in layers]
    used = len(chosen.unique())
    return Product("experts", calls, 2 * chosen.numel() * numbers // count, used * nbytes // count)


def measure(product: Product, rows: int) -> Rate:
    """Time a graph of a product's calls after a pause, and then repeatedly."""
    graph = _captured(product.calls)
    time.sleep(PAUSE)
    rested = _seconds(graph) / len(product.calls)
    times: list[float] = []
    reading = card.at_work(lambda: times.append(_seconds(graph)), SECONDS)
    sustained = statistics.median(times[len(times) // 2 :]) / len(product.calls)
    flops = product.flops / sustained
    bandwidth = product.nbytes / rested
    return Rate(product.name, rows, rested * MICRO, sustained * MICRO, flops, bandwidth, reading)


@torch.inference_mode()
def _captured(calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
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
