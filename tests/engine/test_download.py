import torch

from peagle.engine.download import Download


def test_it_is_what_the_tensor_was():
    tensor = torch.arange(6).view(2, 3)
    download = Download(tensor)
    tensor.zero_()
    assert download.tolist() == [[0, 1, 2], [3, 4, 5]]
