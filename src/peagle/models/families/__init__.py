"""Target families: modules that say what a `config.json` means and what its tensors are called.
config and tensors hold what they have in common.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from peagle.errors import InputError
from peagle.models.families.config import Values, architecture_of, reading
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place, ends
from peagle.models.spec import DecoderSpec
from peagle.models.weights import TensorRule, known_names, read_json

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for module in iter_modules(__path__)
    for family in vars(import_module(f"{__name__}.{module.name}")).values()
    if isinstance(family, Family)
}
"""Those of all modules here, by architecture."""


def read_family(directory: Path) -> tuple[Family, DecoderSpec]:
    """A target's family, by the names in its files, and what its `config.json` says.

    Raises `InputError` as `read_values` does.
    """
    family, spec = read_values(read_json(directory / "config.json"), str(directory))
    return family.as_named(known_names(directory)), spec


def read_spec(directory: Path) -> DecoderSpec:
    """What a target's `config.json` says. Raises `InputError` as `read_values` does."""
    return read_values(read_json(directory / "config.json"), str(directory))[1]


def read_values(values: Values, source: str) -> tuple[Family, DecoderSpec]:
    """The family that the values of a target's `config.json` name, and what they mean.

    Raises `InputError` for an architecture or a setting that the decoder does not have, a missing
    key and a value of the wrong kind.
    """
    refuse_drafter(values, source)
    architecture = architecture_of(values)
    if architecture not in FAMILIES:
        raise InputError(
            f"{source}: architecture {architecture} is not supported; peagle runs "
            f"{', '.join(sorted(FAMILIES))}; for others it trains drafters, which vLLM serves"
        )
    family = FAMILIES[architecture]
    with reading(source):
        return family, family.spec(values)


def has_family(directory: Path) -> bool:
    """Whether a directory's architecture is one of ours."""
    return architecture_of(read_json(directory / "config.json")) in FAMILIES


def refuse_drafter(values: Values, source: str) -> None:
    """Raise `InputError` for the `config.json` of a drafter."""
    named = str(values.get("architectures")).lower()
    if "eagle" in named or "speculator" in named:
        raise InputError(f"{source} is a drafter; give the model that it drafts for as the target")


def decoder_rules(family: Family, spec: DecoderSpec) -> list[TensorRule]:
    """Every tensor of a target."""
    rules = end_rules(family, spec)
    for index in range(len(spec.layers)):
        rules += layer_rules(family, spec, index, f"layers.{index}")
    return rules


def end_rules(family: Family, spec: DecoderSpec) -> list[TensorRule]:
    """The tensors of all but the layers."""
    return ends(spec, family.prefix)


def layer_rules(family: Family, spec: DecoderSpec, index: int, ours: str) -> list[TensorRule]:
    """The tensors of one layer, which our module calls `ours`."""
    place = Place(ours, f"{family.prefix}.layers.{index}")
    return family.layer(spec.layers[index], spec.hidden_size, place)
