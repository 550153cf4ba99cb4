"""Which products are measured, and how the card is read beside them."""

from dataclasses import replace

import pytest
import torch

from peagle.bench.random_weights import Weights, random_target
from peagle.bench.shapes import shape_of
from peers import card
from products import Rate, products

HIDDEN, INNER, LAYERS, VOCAB, HEAD, QUERIES, PAIRS = 64, 128, 8, 512, 16, 4, 2
ROWS = 3


def test_a_layers_products_and_the_head():
    target = random_target(shape_of("tiny").target, torch.device("cpu"), torch.float32)
    found = list(products(target, ROWS))
    sizes = {
        "q, k, v": (HIDDEN, (QUERIES + 2 * PAIRS) * HEAD),
        "output": (QUERIES * HEAD, HIDDEN),
        "gates": (HIDDEN, 2 * INNER),
        "down": (INNER, HIDDEN),
        "head": (HIDDEN, VOCAB),
    }
    flops = {name: 2 * ROWS * depth * outputs for name, (depth, outputs) in sizes.items()}
    assert {product.name: product.flops for product in found} == flops
    widths = {product.name: product.calls[0]().shape for product in found}
    expected = {name: (ROWS, outputs) for name, (_, outputs) in sizes.items()}
    assert widths == expected | {"gates": (ROWS, INNER)}
    assert [len(product.calls) for product in found] == [LAYERS] * 4 + [1]
    assert [p.nbytes for p in found] == [4 * depth * out for depth, out in sizes.values()]


def test_experts_count_what_rows_chose():
    """Of 128 experts three rows choose 8 each, and read no others."""
    spec = shape_of("qwen3-30b-a3b-fp8").target
    fed = replace(spec.layers[0].feed_forward, moe_intermediate_size=INNER)
    layer = replace(spec.layers[0], feed_forward=fed)
    spec = replace(spec, vocab_size=VOCAB, hidden_size=128, layers=(layer,))
    target = random_target(spec, torch.device("cpu"), torch.float32, Weights("fp8"))
    experts = next(product for product in products(target, ROWS) if product.name == "experts")
    assert experts.flops == 2 * ROWS * 8 * 3 * 128 * INNER
    one = 3 * (128 * INNER + 4)  # a scale for each block
    assert experts.nbytes % one == 0
    assert 8 <= experts.nbytes // one <= 8 * ROWS
    total, _ = experts.calls[0]()
    assert total.shape == (ROWS, 128)


def test_layers_have_weights_of_their_own():
    target = random_target(shape_of("tiny").target, torch.device("cpu"), torch.float32)
    down = next(product for product in products(target, ROWS) if product.name == "down")
    first, second = (call() for call in down.calls[:2])
    assert not torch.equal(first, second)


def test_work_goes_on_until_the_card_is_read(monkeypatch: pytest.MonkeyPatch):
    done: list[int] = []
    monkeypatch.setattr(card, "reading", lambda: {"power.draw": float(len(done) > 0)})
    assert card.at_work(lambda: done.append(1), seconds=0.05) == {"power.draw": 1.0}


def test_a_line_names_what_the_card_gave():
    reading = {"clocks.sm": 1470.0, "power.draw": 699.0}
    line = str(Rate("down", 512, 72.0, 84.0, 614e12, 1.5e12, reading))
    assert "614 TFLOP/s at 1470.0 MHz, 699.0 W" in line
    assert "1.50 TB/s" in line
    assert "at ? MHz" in str(Rate("down", 512, 72.0, 84.0, 614e12, 1.5e12, {}))
