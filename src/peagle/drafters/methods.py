"""What drafts: the proposer that a configuration asks for."""

from collections.abc import Callable
from pathlib import Path

import torch

from peagle.drafters.checkpoint import read_drafter, ready
from peagle.drafters.dflash import DFlash
from peagle.drafters.dflash_checkpoint import is_dflash, read_dflash
from peagle.drafters.kind import DFLASH, MTP, PEAGLE, Kind, kind_asked
from peagle.drafters.lookup import Lookup
from peagle.drafters.mtp import is_mtp, load_mtp
from peagle.drafters.network import Network
from peagle.drafters.outside import load_outside
from peagle.drafters.peagle import PEagle
from peagle.drafters.proposer import Drafter, Proposer
from peagle.drafters.sequential import SequentialDrafter
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.models.weights import model_directory
from peagle.speculative_config import SpeculativeConfig

DRAFTERS: dict[Kind, type[Drafter]] = {PEAGLE: PEagle, DFLASH: DFlash}
"""What runs a network by its kind, where that is no sequential drafter."""


def drafter_for(model: Network) -> Drafter:
    """The drafter that runs a model, by its configuration."""
    return DRAFTERS.get(model.config.kind, SequentialDrafter)(model)


def kind_shown(directory: Path) -> Kind | None:
    """The kind of a head that its files show, whatever method is given: MTP or DFlash.

    None: it is one of `KINDS`, if it is a head.
    """
    return MTP if is_mtp(directory) else DFLASH if is_dflash(directory) else None


def load_network(speculation: SpeculativeConfig, directory: Path, target: Decoder) -> Network:
    """The network of a configuration that has one. directory: the target's.

    Raises `InputError` where its files are unusable or do not fit the target, or show a head that
    a key does not go with.
    """
    if speculation.model is None:
        return load_mtp(directory, target)
    place = model_directory(speculation.model, revision=speculation.revision)
    if speculation.method == "eagle3" and (shown := kind_shown(place)) is not None:
        speculation = speculation.with_method(shown.method)
    if speculation.method == MTP.method:
        return load_mtp(place, target)
    if speculation.method == DFLASH.method:
        network: Network = read_dflash(place, target)
    else:
        network = read_drafter(place, target, kind_asked(speculation.parallel_drafting))
    return ready(network, speculation.quantization)


def proposer_for(
    speculation: SpeculativeConfig | None,
    load: Callable[[SpeculativeConfig], Network],
    device: torch.device,
    vocab_size: int,
) -> tuple[Proposer | None, int]:
    """The proposer of a configuration, and K; None and 0 where nothing drafts.

    load: makes the network of a configuration that has one; vocab_size: that of the target.
    Raises `InputError` where the proposer of another package cannot be made.
    """
    if speculation is None:
        return None, 0
    k = speculation.num_speculative_tokens
    if not speculation.has_network:
        assert k is not None, "whatever has no drafter comes with its K"
        if speculation.lookup is None:
            return load_outside(speculation.method, vocab_size), k
        return Lookup(*speculation.lookup, device), k
    model = load(speculation)
    drafter, k = drafter_for(model), k or model.config.default_k
    most = model.config.most_tokens
    if most is not None and k > most:
        raise InputError(f"num_speculative_tokens {k} is above the {most} of its blocks; lower it")
    return drafter, k
