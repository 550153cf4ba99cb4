"""Models as the commands load them."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from peagle.cli.interrupts import at_once
from peagle.cli.options import NamedDrafter, one_of
from peagle.config import ChatConfig, EngineConfig
from peagle.errors import ConfigError, InputError
from peagle.pair import or_bundled
from peagle.speculative_config import SpeculativeConfig, speculative_values

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.bench.prompts import Prompt
    from peagle.llm import LLM


def choose_speculation(target: str | None, drafting: NamedDrafter) -> SpeculativeConfig | None:
    """How to speculate: as the flags say, or with the bundled drafter.

    None when the target is the user's own and no drafter is given for it.
    """
    if drafting.speculative_config is not None:
        return read_speculation(drafting.speculative_config)
    drafter, k = drafting.drafter, drafting.k
    if drafter is None and target is not None:
        if k is not None:
            raise InputError("--k needs --drafter, since the target is not the bundled one")
        return None
    return SpeculativeConfig(model=or_bundled(drafter, "peagle"), num_speculative_tokens=k)


def named_pair(target: str | None, drafting: NamedDrafter) -> tuple[str | None, NamedDrafter]:
    """The target that a drafter's directory in speculators' format names, and that drafter.

    Any other target stays as it is. Raises `InputError` for a directory that names none.
    """
    from peagle.models.weights import model_directory, read_json

    place = None if target is None else model_directory(target, weights=False) / "config.json"
    config: Any = {} if place is None else read_json(place).get("speculators_config")
    if not config:
        return target, drafting
    try:
        named = str(config["verifier"]["name_or_path"])
    except (KeyError, TypeError):
        told = "is a drafter, and names no target; give the target, and this as --drafter"
        raise InputError(f"{target} {told}") from None
    if drafting.speculative_config is None:
        drafter = one_of(target, drafting.drafter, "drafter")
        return named, NamedDrafter(drafter=drafter, k=drafting.k)
    values = speculative_values(drafting.speculative_config) | {"model": target}
    return named, NamedDrafter(speculative_config=json.dumps(values))


def read_speculation(text: str) -> SpeculativeConfig:
    """The value of --speculative-config."""
    try:
        return SpeculativeConfig.from_json(text)
    except ConfigError as error:
        raise InputError(f"--speculative-config: {error.told()}") from None


def as_chats(prompts: "Sequence[Prompt]", target: str | None) -> "list[Prompt]":
    """Each prompt as a user's turn.

    Raises `InputError` for a target without a chat template, before anything large is loaded.
    """
    from peagle.models.tokenizer import load_tokenizer
    from peagle.models.weights import model_directory

    place = model_directory(or_bundled(target, "target"))
    if load_tokenizer(place).chat_template is None:
        raise InputError(f"{place} has no chat template; leave out --chat to give it plain text")
    return [prompt.as_chat() for prompt in prompts]


def load_llm(
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    chat: ChatConfig | None = None,
    own_process: bool = False,
    replicas: int = 1,
    fronts: int = 0,
) -> "LLM":
    """`target` or the bundled one, perhaps with a drafter; the rest as `LLM` has it.

    Warns of a K beyond its training, and of acceptance that is given.
    """
    from peagle.llm import LLM

    place = or_bundled(target, "target")
    llm = LLM(place, speculation, config, chat, own_process, replicas, fronts)
    if llm.beyond_training:
        typer.echo(f"peagle: warning: {llm.beyond_training}", err=True)
    if speculation is not None and speculation.synthetic_acceptance_rates is not None:
        told = "drafts are accepted by given rates, and the text means nothing"
        typer.echo(f"peagle: warning: SYNTHETIC: {told}", err=True)
    return llm


def wants_own_process(config: EngineConfig) -> bool:
    """Whether the engine shares no interpreter with HTTP and text.

    A GPU waits for whoever launches its work. On a CPU a step takes all processors anyway.
    """
    from peagle.device import resolve_device

    return resolve_device(config.device).type == "cuda"


def open_async_llm(
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    chat: ChatConfig | None = None,
    replicas: int = 1,
) -> "AsyncLLM":
    """Like `load_llm`, on the engine's own thread, which cannot be stopped while it loads."""
    own_process = wants_own_process(config)
    with at_once():
        from peagle.async_llm import AsyncLLM

        return AsyncLLM(lambda: load_llm(target, speculation, config, chat, own_process, replicas))
