"""Targets of families that are not ours, as transformers runs them.

Code in a model's directory is never run.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from peagle.device import require_memory
from peagle.errors import InputError
from peagle.models.ends import Ends
from peagle.models.families import has_family, read_spec
from peagle.models.families.config import ROPE_KINDS, Values, attention, num_layers, reading, sizes
from peagle.models.loading import Stored
from peagle.models.spec import DecoderSpec, LayerSpec, MLPSpec, NormSpec
from peagle.models.weights import read_json, shortened

EXPERTS = ("num_experts_per_tok", "num_local_experts", "num_experts", "n_routed_experts")
"""Keys of the number of experts that an element uses, and of those that there are."""


def read_foreign_spec(directory: Path) -> DecoderSpec:
    """What drafters need to know of a target that transformers runs: its sizes, not its layers.

    Raises `InputError` for an encoder-decoder model, and for one that needs code of its own.
    """
    text = _read_config(directory).get_text_config()
    with reading(str(directory)):
        return _spec({**text.to_dict(), "num_hidden_layers": text.num_hidden_layers})


def read_target_spec(directory: Path) -> DecoderSpec:
    """What drafters need to know of any target. Raises `InputError`."""
    return read_spec(directory) if has_family(directory) else read_foreign_spec(directory)


def _read_config(directory: Path) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    values = read_json(directory / "config.json")
    if values.get("model_type") not in CONFIG_MAPPING:
        code = "; code in its directory is never run" * ("auto_map" in values)
        raise InputError(
            f"{directory}: transformers {__version__} does not know the model type "
            f"{values.get('model_type')}{code}"
        )
    config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
    if config.is_encoder_decoder:
        raise InputError(f"{directory}: an encoder-decoder model; drafters are for decoders alone")
    return config


def _spec(values: Values) -> DecoderSpec:
    """The spec of a text model's configuration; its layers stand for all that are there, alike."""
    values = {key: value for key, value in values.items() if value is not None}
    eps = float(values.get("rms_norm_eps", values.get("layer_norm_eps", 1e-6)))
    heads = attention({**values, "attention_bias": False, **_rope(values)}, partly_rotated=True)
    vocabulary, hidden = sizes(values, "vocab_size", "hidden_size")
    [length] = sizes({"max_position_embeddings": 2048, **values}, "max_position_embeddings")
    fed = MLPSpec(int(values.get("intermediate_size", 4 * hidden)))
    cap = values.get("final_logit_softcapping")
    return DecoderSpec(
        vocab_size=vocabulary,
        hidden_size=hidden,
        layers=(LayerSpec(heads, fed, NormSpec(eps)),) * num_layers(values),
        norm=NormSpec(eps),
        max_length=length,
        logit_softcap=None if cap is None else float(cap),
        logit_scale=_logit_scale(values, hidden),
    )


def _rope(values: Values) -> dict[str, Any]:
    """The rotation of some layer, plain where it is one that drafters do not have."""
    given = values.get("rope_parameters") or {}
    nested = [one for one in given.values() if isinstance(one, dict)]
    given = nested[0] if nested else given
    if given.get("rope_type", "default") not in ROPE_KINDS:
        given = {"rope_theta": given.get("rope_theta", 10_000.0)}
    return {"rope_parameters": given, "rope_scaling": None}


def _logit_scale(values: Values, hidden: int) -> float:
    """What a model multiplies by between its final norm and its logits, by each family's key."""
    scale = float(values.get("logit_scale", values.get("lm_head_multiplier", 1.0)))
    if "dim_model_base" in values:
        scale *= float(values["dim_model_base"]) / hidden
    return scale / float(values.get("logits_scaling", 1.0))


def load_foreign(
    directory: Path, dtype: torch.dtype, device: torch.device, *, layers: bool = True
) -> Any:
    """Transformers' model, for inference; without `layers` only what is before and behind them.

    Raises `InputError` for weights that are missing, damaged or larger than the device's memory.
    """
    from transformers.utils import logging

    config = _read_config(directory)
    text = config.get_text_config()
    if layers:
        stored = foreign_bytes(directory, dtype)
        require_memory(stored.ends + stored.layers, device, f"the weights of {directory}")
    else:
        text.num_hidden_layers = 0
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, report = _class_of(config, directory).from_pretrained(
            str(directory),
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (ImportError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        told = " ".join(str(error).split())
        raise InputError(f"{directory}: transformers cannot load it: {told}") from None
    if report["missing_keys"] or report["mismatched_keys"]:
        wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
        raise InputError(f"{directory}: missing or misshapen tensors: {shortened(wrong)}")
    return model.to(device).eval().requires_grad_(False)


def _class_of(config: Any, directory: Path) -> Any:
    """Transformers' class of models with a head for text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in kind._model_mapping:
            return kind
    raise InputError(f"{directory}: transformers has no language model of {config.model_type}")


def decoder_of(model: Any) -> tuple[Any, nn.ModuleList]:
    """A loaded model without its head and without towers for images, and its layers.

    Raises `InputError` where they are no plain list.
    """
    count = model.config.get_text_config().num_hidden_layers
    for part in model.get_decoder().modules():
        for child in part.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return part, child
    raise InputError(f"{model.config.model_type}: no list of {count} layers to read states of")


def ends_of(model: Any, spec: DecoderSpec) -> Ends:
    """A loaded model's embeddings and head, which takes the scale of its logits."""
    embedded, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if tuple(embedded.shape) != (spec.vocab_size, spec.hidden_size) or head.shape != embedded.shape:
        raise InputError(
            f"{model.config.model_type}: embeddings {list(embedded.shape)} and head "
            f"{list(head.shape)} are not both {spec.vocab_size} x {spec.hidden_size}"
        )
    with torch.device("meta"):
        ends = Ends(spec)
    ends.embed.weight = nn.Parameter(embedded.detach(), requires_grad=False)
    scaled = head.detach() * spec.logit_scale if spec.logit_scale != 1 else head.detach()
    ends.head.weight = nn.Parameter(scaled, requires_grad=False)
    return ends


def final_norm(model: Any) -> nn.Module:
    """What a loaded model has between its last layer and its head."""
    parts = [*decoder_of(model)[0].named_children()]
    return next(part for name, part in reversed(parts) if "norm" in name or "ln" in name)


def foreign_bytes(directory: Path, dtype: torch.dtype) -> Stored:
    """Memory of a target by its configuration alone; nothing counts as packed."""
    model = _without_values(directory)
    whole, layers = (_count(part.parameters()) for part in (model, decoder_of(model)[1]))
    return Stored((whole - layers) * dtype.itemsize, layers * dtype.itemsize)


def multiplied(directory: Path) -> int:
    """Parameters of the layers that an element is multiplied by; of experts its share."""
    layers = decoder_of(_without_values(directory))[1]
    values = _read_config(directory).get_text_config().to_dict()
    used, *there = (values.get(key) for key in EXPERTS)
    share = (used or 1) / next((count for count in there if count), used or 1)
    of_experts = _count(p for name, p in layers.named_parameters() if "expert" in name)
    return _count(layers.parameters()) - of_experts + round(share * of_experts)


def _count(parameters: Any) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _without_values(directory: Path) -> Any:
    config = _read_config(directory)
    with torch.device("meta"):
        return _class_of(config, directory).from_config(config)
