"""What a target family is."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from peagle.models.families import tensors
from peagle.models.families.config import Values, text
from peagle.models.families.tensors import Place
from peagle.models.spec import DecoderSpec, LayerSpec
from peagle.models.weights import TensorRule


@dataclass(frozen=True)
class Family:
    """Targets whose configuration and tensors are told alike."""

    model_type: str
    architecture: str
    """Both as `config.json` names them."""
    spec: Callable[[Values], DecoderSpec]
    """What the values of a `config.json` mean; called within `reading`."""
    layer: Callable[[LayerSpec, int, Place], list[TensorRule]] = tensors.layer
    """The tensors of one layer, whose hidden size is given."""
    prefix: str = "model"
    """How the names of the decoder's tensors begin."""
    ignored: tuple[str, ...] = ()
    """How those of tensors begin that its files hold besides."""

    def as_named(self, names: Collection[str]) -> "Family":
        """The same, by the names of a file's tensors: newer writers, and some of a language model
        alone, name them as those of a model that has a language model beside others."""
        newer = "model.language_model"
        if f"{newer}.embed_tokens.weight" not in names or self.prefix == newer:
            return self
        others = tuple(f"model.{name}" for name in self.ignored)
        return replace(self, prefix=newer, ignored=self.ignored + others)

    def within(
        self, model_type: str, architecture: str, prefix: str, ignored: tuple[str, ...] = ()
    ) -> "Family":
        """Models that have one of these as their `text_config`, and others' beside it."""
        return replace(
            self,
            model_type=model_type,
            architecture=architecture,
            spec=lambda values: self.spec(text(values)),
            prefix=prefix,
            ignored=self.ignored + ignored,
        )
