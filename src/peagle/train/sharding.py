"""A target too large for one GPU: every rank keeps a part of each layer (FSDP2)."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from peagle.models.decoder import Decoder
from peagle.models.loading import load_decoder, load_ends, load_layers
from peagle.train.parallel import Ranks


def load_sharded(
    directory: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> Decoder:
    """A target that a device never holds more of than its parts and the layer at work.

    Embeddings, final norm and head are whole everywhere: the loss reads them. Every pass is one of
    all ranks, which then gather a layer from each other just before it runs.
    """
    if ranks.size == 1:
        return load_decoder(directory, dtype, device)
    decoder = load_ends(directory, dtype, device, max_length=None)
    mesh = init_device_mesh(device.type, (ranks.size,))
    ends = set(decoder.parameters())
    for layer in load_layers(directory, dtype, device):
        fully_shard(layer, mesh=mesh)
        decoder.layers.append(layer)
    # The whole is its layers' root, so that the next one is gathered while one runs.
    fully_shard(decoder, mesh=mesh, ignored_params=ends)
    return decoder
