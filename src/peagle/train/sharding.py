"""A target too large for one GPU: every rank keeps a part of each layer (FSDP2)."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from peagle.models.decoder import Decoder
from peagle.models.loading import load_decoder, load_ends, load_layers, widen_on_cpu
from peagle.train.parallel import Ranks


def load_sharded(
    directory: Path, dtype: torch.dtype, device: torch.device, ranks: Ranks, lora: str | None = None
) -> Decoder:
    """A target of which a device holds only its parts of the layers and the layer that is running.

    Embeddings, final norm and head are whole on every rank: the loss reads them. All ranks have to
    run every pass together, since they gather each layer from one another just before it runs.
    """
    if ranks.size == 1:
        decoder = load_decoder(directory, dtype, device, lora=lora)
        widen_on_cpu(decoder, decoder.embed.weight)
        return decoder
    decoder = load_ends(directory, dtype, device, None, lora)
    mesh = init_device_mesh(device.type, (ranks.size,))
    ends = set(decoder.parameters())
    for layer in load_layers(directory, dtype, device, lora):
        fully_shard(layer, mesh=mesh)
        decoder.layers.append(layer)
    # With the decoder as root, the next layer is gathered while one runs.
    fully_shard(decoder, mesh=mesh, ignored_params=ends)
    return decoder
