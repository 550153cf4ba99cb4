import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.moe import Clamped, Experts, ExpertWeights, clamped_swiglu, moe, route


def made(experts: int, hidden: int = 24, inner: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """A router's weight, and the experts' gate and up, and down."""
    sizes = ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    router, gate_up, down = (torch.randn(size) * size[-1] ** -0.5 for size in sizes)
    return router, gate_up, down


def every_expert(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """All experts on all rows, in float64, those that a row does not have weighed by 0."""
    gate, up = torch.einsum("rh,eih->rei", x.double(), gate_up.double()).chunk(2, dim=-1)
    outputs = torch.einsum("rei,ehi->reh", F.silu(gate) * up, down.double())
    probabilities = (x.double() @ router.double().T).softmax(dim=-1)
    least = probabilities.sort(dim=-1).values[:, -top_k, None]
    weights = torch.where(probabilities >= least, probabilities, 0)
    return torch.einsum("re,reh->rh", weights / weights.sum(dim=-1, keepdim=True), outputs)


@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 1), (8, 3), (8, 8)])
def test_it_is_the_weighed_sum_of_the_likeliest_experts(rows: int, experts: int, top_k: int):
    x, weights = torch.randn(rows, 24), made(experts)
    expected = every_expert(x, *weights, top_k).float()
    torch.testing.assert_close(moe(x, ExpertWeights(*weights, top_k, True)), expected)


def test_weights_are_the_probabilities_unless_they_are_to_sum_to_one():
    x, (router, _, _) = torch.randn(5, 24), made(8)
    plain, experts = route(x, router, 3, False)
    probabilities = F.linear(x, router).softmax(dim=-1)
    torch.testing.assert_close(plain, probabilities.gather(1, experts))
    normalized, same = route(x, router, 3, True)
    assert torch.equal(experts, same)
    torch.testing.assert_close(normalized, plain / plain.sum(dim=-1, keepdim=True))


def test_of_experts_equally_likely_the_first_are_taken():
    weights, experts = route(torch.ones(2, 24), torch.ones(8, 24), 3, True)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_bfloat16_rows_are_routed_in_float32():
    x, router = torch.randn(5, 24).bfloat16(), made(8)[0].bfloat16()
    weights, _ = route(x, router, 3, True)
    logits = F.linear(x, router).float()
    expected = logits.softmax(dim=-1).topk(3).values
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, (expected / expected.sum(dim=-1, keepdim=True)).bfloat16())


def test_a_row_that_is_not_a_number_harms_no_other():
    x, weights = torch.randn(6, 24), made(8)
    expected = moe(x, ExpertWeights(*weights, 3, True))
    x[2] = float("nan")
    result = moe(x, ExpertWeights(*weights, 3, True))
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(result[others], expected[others])
    assert result[2].isnan().all()


def test_the_module_applies_its_weights():
    module = Experts(24, 16, 8, 3, normalize=False).requires_grad_(False)
    router, gate_up, down = made(8)
    module.router.data, module.gate_up.data, module.down.data = router, gate_up, down
    x = torch.randn(4, 24)
    assert torch.equal(module(x), moe(x, ExpertWeights(router, gate_up, down, 3, False)))


def test_the_clamped_activation_by_hand():
    """Gate is cut above only, up on both sides, and up passes by one more than it is."""
    gate, up = torch.tensor([0.5, 9.0, -9.0, 1.0]), torch.tensor([2.0, 0.0, 1.0, -9.0])
    cut, lifted = torch.tensor([0.5, 7.0, -9.0, 1.0]), torch.tensor([3.0, 1.0, 2.0, -6.0])
    expected = cut / (1 + torch.exp(-1.702 * cut)) * lifted
    torch.testing.assert_close(clamped_swiglu(gate, up, 7.0), expected)


def test_biases_of_clamped_experts():
    """The router's decides here who is asked."""
    x, (router, gate_up, down) = torch.randn(5, 24), made(4)
    biases = (torch.tensor([0.0, 50.0, 0.0, 0.0]), torch.randn(4, 32), torch.randn(4, 24))
    result = moe(x, ExpertWeights(router, gate_up, down, 1, True, Clamped(*biases, 0.5)))
    gate, up = (x @ gate_up[1].T + biases[1][1]).chunk(2, dim=-1)
    expected = clamped_swiglu(gate, up, 0.5) @ down[1].T + biases[2][1]
    torch.testing.assert_close(result, expected)


def test_the_module_s_clamped_form():
    module = Experts(24, 16, 8, 3, normalize=True, limit=0.5).requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    clamped = Clamped(module.router_bias, module.gate_up_bias, module.down_bias, 0.5)
    x, weights = torch.randn(4, 24), (module.router, module.gate_up, module.down)
    assert torch.equal(module(x), moe(x, ExpertWeights(*weights, 3, True, clamped)))
