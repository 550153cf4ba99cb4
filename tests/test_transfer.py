import torch

from peagle.transfer import Download, to_device


def test_it_is_what_the_tensor_was():
    tensor = torch.arange(6).view(2, 3)
    download = Download(tensor)
    tensor.zero_()
    assert download.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tensors_that_move_together_come_as_they_were():
    tensors = torch.arange(6).view(2, 3), torch.tensor(7, dtype=torch.int32)
    for moved, tensor in zip(to_device(torch.device("cpu"), *tensors), tensors, strict=True):
        assert moved.tolist() == tensor.tolist()
        assert moved.dtype == tensor.dtype
