import torch

from peagle.ops.rows import take


def test_rows_are_taken_and_their_gradients_put_back():
    x = torch.randn(5, 2, 3, requires_grad=True)
    rows, given = torch.tensor([4, 0, 2]), torch.randn(3, 2, 3)
    assert torch.equal(take(x, rows), x[rows])
    (found,) = torch.autograd.grad(take(x, rows), x, given)
    (wanted,) = torch.autograd.grad(x[rows], x, given)
    assert torch.equal(found, wanted)


def test_none_is_everything():
    x = torch.randn(2, 3)
    assert take(x, None) is x
