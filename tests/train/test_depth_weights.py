import pytest
import torch

from peagle.train.cod import Elements
from peagle.train.depth_weights import pace


def test_elements_weigh_what_is_expected_to_be_accepted_through_them():
    """Two chains, of three elements and of one, in any order."""
    anchors, depths = torch.tensor([4, 9, 4, 4]), torch.tensor([1, 0, 0, 2])
    confidence = torch.tensor([0.5, 0.2, 0.9, 0.4])
    a, b, c, alone = (0.5 * q + 0.5 for q in (0.9, 0.5, 0.4, 0.2))
    reached = [a * b + a * b * c, alone, a + a * b + a * b * c, a * b * c]
    mean = sum(reached) / 4
    found = pace(confidence, Elements(anchors, depths), 0.5)
    assert found.tolist() == pytest.approx([weight / mean for weight in reached])


def test_a_pass_may_have_no_elements():
    none = torch.empty(0, dtype=torch.int64)
    assert len(pace(torch.empty(0), Elements(none, none), 0.5)) == 0


def test_with_full_smoothing_a_depth_weighs_what_follows_it():
    elements = Elements(torch.tensor([0, 0, 0]), torch.arange(3))
    assert pace(torch.rand(3), elements, 1.0).tolist() == pytest.approx([1.5, 1.0, 0.5])
