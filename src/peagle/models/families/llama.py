"""Llama: layers that are all alike, with a dense MLP. Drafters of its style read as it does."""

from peagle.models.families import config, tensors
from peagle.models.families.config import Values
from peagle.models.families.tensors import Place
from peagle.models.spec import DecoderSpec, LayerSpec
from peagle.models.weights import TensorRule

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
PREFIX = "model"
IGNORED = ()


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    config.refuse_windows(values)
    return config.dense(values, [config.attention(values)] * config.num_layers(values))


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer."""
    return tensors.dense_layer(spec, hidden_size, place)
