"""A drafter before its first step: the recipe's sizes, the target's embeddings and head."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafters.checkpoint import read_drafter
from peagle.drafters.config_file import config_problems, read_drafter_config
from peagle.drafters.dflash import BlockConfig, BlockModel
from peagle.drafters.dflash_checkpoint import is_dflash, read_block_config, read_dflash
from peagle.drafters.kind import PEAGLE
from peagle.drafters.model import DrafterConfig, DraftModel, default_taps, heads_like
from peagle.drafters.mtp import MTPConfig, MTPHead, read_mtp_config, trainable_mtp
from peagle.drafters.network import Network, NetworkConfig
from peagle.drafters.readout import Readout
from peagle.drafters.selector import Selector, SelectorConfig
from peagle.drafters.vocabulary import most_frequent, offsets
from peagle.errors import InputError, refuse
from peagle.models.decoder import Decoder
from peagle.models.ends import Embedding, Ends
from peagle.models.loading import LENGTHEN
from peagle.models.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from peagle.models.weights import model_directory
from peagle.ops.linear import Linear
from peagle.ops.weight import dense
from peagle.train.packing import PackedRows
from peagle.train.recipe import Recipe

SPREAD = 0.2
"""Size of a selector's first vectors: from larger ones it learns its few examples by heart."""


def drafter_config(recipe: Recipe, target: DecoderSpec) -> NetworkConfig:
    """The drafter a recipe asks for. Raises `InputError` with all that does not fit its target."""
    problems: list[str] = []
    if recipe.method == "mtp":
        config = _own_head(recipe, target)
    elif recipe.initial_drafter is None:
        config = _new(recipe, target)
        problems = config_problems(config, target, "taps", "mask_token_id")
        if isinstance(config, BlockConfig) and 0 in config.taps:
            problems.append("taps 0, the embeddings, has no name in DFlash's layout; leave it out")
    else:
        config = _continued(recipe, model_directory(recipe.initial_drafter), target)
    if config.draft_vocab_size > target.vocab_size:
        problems.append(
            f"its draft_vocab_size {config.draft_vocab_size} is above the target's vocabulary of "
            f"{target.vocab_size}; lower it, or leave it out to keep all"
        )
    if recipe.row_length > target.max_length:
        problems.append(
            f"its row_length {recipe.row_length} is above the target's context of "
            f"{target.max_length}; {LENGTHEN}"
        )
    refuse("the recipe does not fit the target", problems)
    return config


def _new(recipe: Recipe, target: DecoderSpec) -> NetworkConfig:
    """That of a drafter with new weights."""
    drafted, k = recipe.draft_vocab_size or target.vocab_size, recipe.num_speculative_tokens
    sizes: dict[str, Any] = {
        "transformer": _draft_layers(recipe, target),
        "target_hidden_size": target.hidden_size,
        "taps": recipe.taps or default_taps(len(target.layers)),
        "draft_vocab_size": drafted,
        "mask_token_id": recipe.mask_token_id,
        "trained_tokens": k,
    }
    if recipe.method == "dflash":
        return BlockConfig(**sizes, block_size=k + 1, target_layers=len(target.layers))
    norms, selector = recipe.norm_before_residual, _selector(recipe, drafted)
    return DrafterConfig(**sizes, norm_before_residual=norms, selector=selector)


def _own_head(recipe: Recipe, target: DecoderSpec) -> NetworkConfig:
    """That of the target's own head."""
    place = model_directory(recipe.initial_drafter or recipe.target, weights=False)
    return replace(read_mtp_config(place, target), trained_tokens=recipe.num_speculative_tokens)


def new_head(config: NetworkConfig, length: int, target: DecoderSpec) -> Network:
    """A drafter of its sizes, without values. length: positions that it has."""
    if isinstance(config, MTPConfig):
        return MTPHead(Decoder(target, length), config.trained_tokens)
    if isinstance(config, BlockConfig):
        return BlockModel(config, length)
    assert isinstance(config, DrafterConfig)
    return DraftModel(config, length)


def _continued(recipe: Recipe, directory: Path, target: DecoderSpec) -> NetworkConfig:
    """That of the drafter to train on from, with the recipe's selector."""
    read = read_block_config if is_dflash(directory) else read_drafter_config
    config = read(directory, target)
    if config.kind.method != recipe.method:
        raise InputError(
            f"initial_drafter is {config.kind.name}'s; set method to {config.kind.method}"
        )
    refuse("initial_drafter does not fit the target", config_problems(config, target))
    if config.mask_token_id != recipe.mask_token_id:
        raise InputError(
            f"initial_drafter has the mask token {config.mask_token_id}, the recipe has "
            f"mask_token_id {recipe.mask_token_id}; give the drafter's"
        )
    selector = _selector(recipe, config.draft_vocab_size) or config.selector
    if recipe.train == "selector" and selector is None:
        raise InputError("initial_drafter has no selector to train; set selector_rank")
    trained = config.trained_tokens if recipe.train == "selector" else None
    k = trained or recipe.num_speculative_tokens
    if not isinstance(config, BlockConfig):
        return replace(config, selector=selector, trained_tokens=k)
    if config.logit_scale != 1 or config.logit_softcap is not None:
        raise InputError(
            "initial_drafter scales or caps its logits, which training does not; take another head"
        )
    return replace(config, block_size=k + 1, trained_tokens=k)


def _selector(recipe: Recipe, drafted: int) -> SelectorConfig | None:
    """A new selector's sizes. drafted: tokens that the drafter has in its vocabulary."""
    if recipe.selector_rank is None:
        return None
    if recipe.selector_candidates > drafted:
        raise InputError(
            f"selector_candidates {recipe.selector_candidates} is above the {drafted} tokens that "
            "the drafter drafts; lower it"
        )
    return SelectorConfig(recipe.selector_rank, recipe.selector_candidates)


def _draft_layers(recipe: Recipe, target: DecoderSpec) -> DecoderSpec:
    """Layers with heads like the target's and its width, without its rest."""
    attention, fed = heads_like(target), target.layers[0].feed_forward
    blocks = recipe.method == "dflash"  # which see themselves both ways, but within windows
    qk_norm = True if blocks else recipe.qk_norm
    if qk_norm is not None:
        attention = replace(attention, qk_norm=qk_norm)
    mlp = MLPSpec(recipe.intermediate_size or fed.intermediate_size)
    norm = NormSpec(target.norm.eps * target.residual_multiplier**2)
    width, full = recipe.sliding_window, recipe.full_attention_layers
    windows = (None if layer in full else width for layer in range(recipe.num_hidden_layers))
    layers = (
        replace(attention, window=window, causal=not blocks or window is not None)
        for window in windows
    )
    stack = tuple(LayerSpec(each, mlp, norm) for each in layers)
    sizes = target.vocab_size, target.hidden_size
    return DecoderSpec(*sizes, stack, norm, target.max_length)


def initial_drafter(recipe: Recipe, target: Ends, rows: PackedRows) -> Network:
    """The recipe's drafter to train on from, else one with the target's embeddings and head.

    Everything else is drawn from the seed.

    It computes in the target's dtype, except that embeddings to be trained are float32: a batch
    reads few of their rows, so a copy to compute with would only take memory.
    """
    config = drafter_config(recipe, target.spec)
    check_mask_token(recipe, rows)
    torch.manual_seed(recipe.seed)
    if isinstance(config, MTPConfig):
        model: Network = _continued_head(recipe, target, config)
    elif recipe.initial_drafter is None:
        model = _new_drafter(recipe, target, config, rows)
    else:
        model = _continued_drafter(recipe, target, config)
    if recipe.selector_rank is not None:
        assert model.readout.selector is not None
        _begin_selector(model.readout.selector, model.readout, target.embed.weight)
    choose_trained(recipe, model)
    return model


def kept_tokens(config: NetworkConfig, rows: PackedRows) -> Tensor:
    """Target ids that a drafter with a reduced vocabulary drafts, ascending: the most frequent."""
    counts = torch.bincount(rows.tokens[rows.loss_mask], minlength=config.transformer.vocab_size)
    return most_frequent(counts, config.draft_vocab_size)


def _new_drafter(recipe: Recipe, target: Ends, config: NetworkConfig, rows: PackedRows) -> Network:
    model = new_head(config, recipe.row_length + recipe.num_speculative_tokens, target.spec)
    model.apply(_draw)
    if isinstance(model, DraftModel) and config.kind is PEAGLE:
        nn.init.normal_(model.mask_hidden)
    reduced = config.reduced_vocabulary
    kept = kept_tokens(config, rows) if reduced else torch.arange(config.draft_vocab_size)
    model.readout.d2t = offsets(kept)
    with torch.no_grad():
        model.embed.weight.copy_(target.embed.weight)
        head = dense(target.head.weight)
        dense(model.readout.head.weight).copy_(head[kept.to(head.device)])
    return model.to(target.embed.weight.device, target.embed.weight.dtype)


def _continued_drafter(recipe: Recipe, target: Ends, config: NetworkConfig) -> Network:
    """The drafter to train on from, with a new selector where the recipe wants one."""
    assert recipe.initial_drafter is not None
    directory = model_directory(recipe.initial_drafter)
    length = max(target.max_length, recipe.row_length + recipe.num_speculative_tokens)
    if isinstance(config, BlockConfig):
        read: Network = read_dflash(directory, target, length)
    else:
        read = read_drafter(directory, target, config.kind, length)
    model = copy.deepcopy(read)  # what is the target's stays as it is there
    model.readout.head = _of_its_own(model.readout.head, target.embed.weight.dtype)
    model.requires_grad_()
    model.config = config
    if recipe.selector_rank is not None:
        model.readout.selector = config.new_selector()
        model.readout.to(target.embed.weight.device, target.embed.weight.dtype)
    return model


def _continued_head(recipe: Recipe, target: Ends, config: MTPConfig) -> MTPHead:
    """The target's own head, with what is its own to learn."""
    assert isinstance(target, Decoder), "peagle runs every family that has one"
    place = model_directory(recipe.initial_drafter or recipe.target)
    model = trainable_mtp(place, target, recipe.row_length + recipe.num_speculative_tokens)
    model.config = config
    return model


def _of_its_own(head: Linear, dtype: torch.dtype) -> Linear:
    """A head with a weight that it shares with no embeddings, nor with a packed one."""
    weight = dense(head.weight).detach().to(dtype, copy=True)
    with torch.device("meta"):
        own = Linear(weight.shape[1], weight.shape[0])
    own.weight, own.bias = nn.Parameter(weight), copy.deepcopy(head.bias)
    return own


def check_mask_token(recipe: Recipe, rows: PackedRows) -> None:
    """Raise `InputError` when the data holds the mask token."""
    mask = recipe.mask_token_id
    if mask is None:
        return
    used = (rows.tokens == mask).any(1).nonzero().flatten()
    for document in rows.documents_of(used):  # some rows hold token 0 only as padding
        if mask in document.tokens:
            raise InputError(
                f"mask_token_id {mask} occurs in the data ({document.source}); choose an unused id"
            )


def choose_trained(recipe: Recipe, model: Network) -> None:
    """Freeze what the recipe does not train; embeddings that it trains become float32."""
    if recipe.train == "selector":
        model.requires_grad_(False)
        assert model.readout.selector is not None
        model.readout.selector.requires_grad_()
        return
    if not recipe.shares_embeddings:
        model.embed.float()
    model.embed.requires_grad_(not recipe.shares_embeddings)
    model.readout.head.requires_grad_(recipe.trains_head)


def _draw(module: nn.Module) -> None:
    if isinstance(module, Linear | Embedding):
        nn.init.normal_(dense(module.weight), std=0.02)


@torch.no_grad()
def _begin_selector(selector: Selector, readout: Readout, embeddings: Tensor) -> None:
    """A selector that does not correct yet, since its gates are 0.

    Its vectors are projections of the target's embeddings, so that what is learned of a token holds
    for those alike. embeddings: [vocab_size, hidden_size].
    """
    unit = embeddings.float() / embeddings.float().std()
    width, rank = unit.shape[1], selector.config.rank
    draws = SPREAD / width**0.5 * torch.randn(2, width, rank).to(unit.device)
    selector.predecessor.copy_(unit @ draws[0])
    selector.successor.copy_(unit[readout.vocabulary.to(unit.device)] @ draws[1])
    nn.init.zeros_(dense(selector.projection.weight))
