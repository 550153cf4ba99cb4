"""Models as the commands load them."""

from typing import TYPE_CHECKING

import typer

from peagle.cli.interrupts import at_once
from peagle.config import ChatConfig, EngineConfig, SpeculativeConfig
from peagle.errors import ConfigError, InputError
from peagle.pair import bundled

if TYPE_CHECKING:
    from peagle.async_llm import AsyncLLM
    from peagle.llm import LLM


def choose_speculation(
    target: str | None, config: str | None, drafter: str | None = None, k: int | None = None
) -> SpeculativeConfig | None:
    """How to speculate: by vLLM's JSON `config`, with `drafter`, or with the bundled one.

    None when the target is the user's own and no drafter is given for it.
    """
    if config is not None:
        if drafter is not None or k is not None:
            raise InputError("give either --speculative-config or --drafter and --k")
        return read_speculation(config)
    if k is not None and k < 1:
        raise InputError(
            f"--k {k}: give at least 1; --target DIRECTORY without --drafter does not speculate"
        )
    if drafter is None and target:
        if k is not None:
            raise InputError("--k needs --drafter, since --target is not the bundled one")
        return None
    return SpeculativeConfig(model=drafter or str(bundled("peagle")), num_speculative_tokens=k)


def read_speculation(text: str) -> SpeculativeConfig:
    """The value of --speculative-config."""
    try:
        return SpeculativeConfig.from_json(text)
    except ConfigError as error:
        raise InputError(f"--speculative-config: {error.told()}") from None


def load_llm(
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    chat: ChatConfig | None = None,
) -> "LLM":
    """`target` or the bundled one, perhaps with a drafter; warns of a K beyond its training."""
    from peagle.llm import LLM

    llm = LLM(target or bundled("target"), speculation, config, chat)
    if llm.beyond_training:
        typer.echo(f"peagle: warning: {llm.beyond_training}", err=True)
    return llm


def open_async_llm(
    target: str | None,
    speculation: SpeculativeConfig | None,
    config: EngineConfig,
    chat: ChatConfig | None = None,
) -> "AsyncLLM":
    """Like `load_llm`, on the engine's own thread, which cannot be stopped while it loads."""
    with at_once():
        from peagle.async_llm import AsyncLLM

        return AsyncLLM(lambda: load_llm(target, speculation, config, chat))
