"""Models as the commands load them."""

from typing import TYPE_CHECKING

import typer

from peagle.config import EngineConfig, SpeculativeConfig

if TYPE_CHECKING:
    from peagle.llm import LLM


def load_llm(
    target: str | None, speculation: SpeculativeConfig | None, config: EngineConfig
) -> "LLM":
    """A target or the bundled one, perhaps with a drafter; warns of a K beyond its training."""
    from peagle.llm import LLM
    from peagle.pair import bundled

    llm = LLM(target or bundled("target"), speculation, config)
    if llm.beyond_training:
        typer.echo(f"peagle: warning: {llm.beyond_training}", err=True)
    return llm
