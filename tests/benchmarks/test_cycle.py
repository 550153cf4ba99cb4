"""The bytes of a cycle and the groups of its kernels, counted by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cycle import Cycle, always
from launches import OTHER, Kernel, group_of, grouped
from peagle import LLM
from peagle.bench.random_weights import random_target
from peagle.bench.shapes import Shape, random_drafter, shape_of
from peagle.config import EngineConfig, SamplingParams
from peagle.models.spec import ExpertsSpec, MixtureSpec, SandwichSpec
from peagle.pair import bundled
from peagle.speculative_config import SpeculativeConfig
from traffic import cycle_bytes, experts_met

CPU, BF16 = torch.device("cpu"), torch.bfloat16
HIDDEN, INNER, LAYERS, VOCAB, HEAD, QUERIES, PAIRS = 64, 128, 8, 512, 16, 4, 2
TINY = shape_of("tiny")


def attention(width: int) -> int:
    """Weights of q, k, v and the output, over inputs of a width."""
    return width * (QUERIES + 2 * PAIRS) * HEAD + QUERIES * HEAD * HIDDEN


MLP = 3 * HIDDEN * INNER
TARGET = LAYERS * (attention(HIDDEN) + MLP + 2 * HIDDEN + 2 * HEAD) + HIDDEN + VOCAB * HIDDEN
FIRST = attention(2 * HIDDEN) + MLP + 3 * HIDDEN
LATER = attention(HIDDEN) + MLP + 2 * HIDDEN
ENDS = HIDDEN + VOCAB * HIDDEN
"""A drafter's last norm and head."""
FC = 3 * HIDDEN * HIDDEN
POSITION = 2 * PAIRS * HEAD
"""Keys and values of a token in one layer."""


@pytest.fixture(scope="module")
def target():
    return random_target(TINY.target, CPU, BF16)


class TestBytes:
    def test_without_a_drafter(self, target):
        assert cycle_bytes(target, None, 0, 2, 30) == {
            "target weights": 2 * TARGET,
            "target keys and values": 2 * 30 * LAYERS * POSITION,
        }

    def test_peagle_reads_its_drafter_once(self, target):
        drafter = random_drafter(TINY, "peagle", CPU, BF16).model
        found = cycle_bytes(target, drafter, 7, 2, 30)
        assert found["drafter weights"] == 2 * (FC + FIRST + 3 * LATER + ENDS)
        assert found["drafter keys and values"] == 2 * 30 * 4 * POSITION

    def test_eagle3_reads_its_layer_k_times(self, target):
        drafter = random_drafter(TINY, "eagle3", CPU, BF16).model
        found = cycle_bytes(target, drafter, 3, 1, 10)
        assert found["drafter weights"] == 2 * (FC + 3 * (FIRST + ENDS))
        assert found["drafter keys and values"] == 2 * 3 * 10 * POSITION

    def test_experts_that_no_row_asks_are_not_read(self):
        layer = replace(TINY.target.layers[0], feed_forward=ExpertsSpec(8, 2, 32, INNER))
        shape = Shape(replace(TINY.target, layers=LAYERS * (layer,)), INNER)
        mixture = random_target(shape.target, CPU, BF16)
        each = LAYERS * 3 * HIDDEN * 32
        rest = TARGET + LAYERS * (8 * HIDDEN - MLP)
        assert cycle_bytes(mixture, None, 0, 1, 0)["target weights"] == 2 * (rest + 2 * each)
        assert cycle_bytes(mixture, None, 0, 10**6, 0)["target weights"] == 2 * (rest + 8 * each)
        assert experts_met(8, 2, 2) == pytest.approx(3.5)

    def test_nor_are_those_beside_an_mlp(self):
        beside = ExpertsSpec(8, 2, 32, 32, norm_topk_prob=True)
        layer = TINY.target.layers[0]
        mixture = MixtureSpec(layer.feed_forward, beside)
        layer = replace(layer, feed_forward=mixture, norms=SandwichSpec(scaled=True))
        target = random_target(replace(TINY.target, layers=LAYERS * (layer,)), CPU, BF16)
        one, all_of_them = (
            cycle_bytes(target, None, 0, rows, 0)["target weights"] for rows in (1, 10**6)
        )
        assert all_of_them - one == 2 * 6 * LAYERS * 3 * HIDDEN * 32


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("_product", "products with weights"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "products with weights"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products with weights"),
        ("_gate_up_kernel", "products with weights"),
        ("_chain", "products with weights"),
        ("_attend", "attention"),
        ("_store", "keys and values stored"),
        ("_route_few_kernel", "routing"),
        ("_commit", "choice, inputs, commit"),
        ("_verify_inputs", "choice, inputs, commit"),
        ("_part", "choice, inputs, commit"),
        ("_add_rms_norm", "norms, elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "norms, elementwise"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copies"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("something new", OTHER),
    ],
)
def test_groups(name: str, group: str):
    assert group_of(name) == group


def test_every_triton_kernel_has_a_group():
    """A new or renamed kernel of a cycle needs a group; helpers are never launched."""
    folder = Path(__file__).parents[2] / "src" / "peagle" / "ops" / "triton"
    text = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    compiled = re.findall(r"@(?:triton|gluon)\.jit.*\n(?:@.*\n)*def (\w+)", text)
    launched = {name for name in compiled if re.search(rf"\b{name}\[", text)}
    assert {"_attend", "_chain"} <= launched
    of_training = {"_gradient"}
    assert {name for name in launched if group_of(name) == OTHER} == of_training


def test_a_cycle_makes_as_many_drafts_as_asked():
    """Where nothing is said, K is by load, and a first cycle has seven."""
    speculation = SpeculativeConfig(model=str(bundled("peagle")), num_speculative_tokens=7)
    llm = LLM(bundled("target"), speculation, EngineConfig(dtype="float32", max_num_seqs=1))
    always(llm.engine.core, 3)
    [done] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=24, ignore_eos=True))
    assert done.speculation.cycles > 3
    assert (
        3 * done.speculation.cycles - 3 <= done.speculation.drafted <= 3 * done.speculation.cycles
    )


def test_a_cycle_has_a_row_and_each_of_its_kernels_one():
    kernels = [Kernel("_attend", 3.0, 6.0), Kernel("_product", 5.0, 20.0)]
    card = {"power.draw": 700.0, "clocks.sm": 1500.0}
    cycle = Cycle(2, 30, 10.0, {"target weights": 8_000_000}, 6.0, kernels, card)
    whole, *each = cycle.rows(4e12)
    assert whole["kernel"] is None
    assert (whole["of_floor"], whole["kernels_us"], whole["copy_tb_per_s"]) == (0.6, 8.0, 4.0)
    assert (whole["target_weights_MB"], whole["power_w"]) == (8.0, 700.0)
    assert [(row["kernel"], row["us"], row["tokens_cached"]) for row in each] == [
        ("_attend", 3.0, 30),
        ("_product", 5.0, 30),
    ]


def test_groups_add_up():
    kernels = [Kernel("_attend", 3.0, 6.0), Kernel("_product", 5.0, 20.0), Kernel("gemv", 1.0, 1.0)]
    assert grouped(kernels) == [
        Kernel("products with weights", 6.0, 21.0),
        Kernel("attention", 3.0, 6.0),
    ]
