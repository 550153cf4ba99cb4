"""`peagle check`: what drafts, and what is wrong with it.

Examples:
  peagle check ./my-drafter
  peagle check ./my-drafter --target Qwen/Qwen3-0.6B
  peagle check --speculative-config '{"method": "ngram", "num_speculative_tokens": 8}'
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.cli.groups import from_flags
from peagle.cli.loading import choose_speculation
from peagle.cli.options import NamedDrafter, one_of
from peagle.cli.tables import print_table
from peagle.configuration import PositiveInt
from peagle.errors import InputError
from peagle.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from peagle.drafters.diagnosis import Diagnosis

PROBLEMS_FOUND = 2


class Checked(NamedDrafter):
    """A drafter as a flag, and what it should be like."""

    drafter: str | None = None
    """The drafter, as a flag."""
    k: PositiveInt | None = None
    """K that it should have been trained for."""
    target: str | None = None
    """Target that it should fit: directory or hub id."""
    lora: str | None = None
    """LoRA adapter to merge into the target, too."""
    replay: Path | None = None
    """Judge again what a server's --audit-dump has kept."""


def check(
    place: Annotated[
        str | None,
        typer.Argument(help="Drafter: directory or hub id.", metavar="drafter", show_default=False),
    ] = None,
    *,
    asked: Checked,
) -> None:
    """Say what drafts, a drafter or a lookup, and whether it fits its target.

    Facts go to stdout. Problems, each with its fix, go to stderr, one per line, and make the exit
    code 2.
    """
    from peagle.drafters.diagnosis import foreign_facts, target_problems
    from peagle.models.weights import model_directory

    given = one_of(place, asked.drafter, "drafter")
    if given is None and asked.speculative_config is None:
        raise InputError("no drafter: give its directory or hub id")
    with from_flags():
        named = NamedDrafter(drafter=given, k=asked.k, speculative_config=asked.speculative_config)
    speculation, target = choose_speculation(None, named), asked.target
    assert speculation is not None, "it is named"
    if asked.lora is not None and target is None:
        raise InputError("--lora is merged into a target: give --target")
    if asked.replay is not None:
        _replay(asked.replay, target, speculation, asked.lora)
        return
    beside = model_directory(target) if target is not None else None
    facts, problems = _drafter(speculation, beside)
    if beside is not None and speculation.has_network:
        facts |= foreign_facts(beside)
    problems += target_problems(beside, asked.lora) if beside is not None else []
    _print_facts({**facts, **_proposer(speculation), **_answers(beside)})
    for problem in dict.fromkeys(problems):  # a directory may be read for two questions
        typer.echo(f"problem: {' '.join(problem.split())}", err=True)
    if problems:
        raise typer.Exit(PROBLEMS_FOUND)
    typer.echo("no problem found" if target is None else f"no problem found; it fits {target}")


def _replay(
    file: Path, target: str | None, speculation: SpeculativeConfig, lora: str | None
) -> None:
    """Judge a case of an audit here, and what differs once more as it was served."""
    from peagle.audit import BOUND, EXACT_BOUND, AuditCase
    from peagle.cli.loading import load_llm
    from peagle.config import EngineConfig

    case = AuditCase.load(file)
    llm = load_llm(target, speculation, EngineConfig(lora=lora))
    bound = EXACT_BOUND if llm.engine.facts.is_exact else BOUND
    verdict = case.judge(llm.complete(case.scoring), bound)
    typer.echo(
        f"{verdict.result}: the largest margin of {len(case.answer)} tokens is "
        f"{verdict.margin:.3f} (bound {bound}), of token {verdict.margins.index(verdict.margin)}"
    )
    if verdict.result == "different":
        place = verdict.first
        alone = llm.complete(case.replay(place, num_speculative_tokens=0))
        typer.echo(f"decoded again: {case.cause(place, alone, llm.complete(case.replay(place)))}")
        raise typer.Exit(PROBLEMS_FOUND)


def _drafter(
    speculation: SpeculativeConfig, target: "Path | None"
) -> tuple[dict[str, str], list[str]]:
    """Facts and problems of the drafter; those of a target that is to do without one."""
    from peagle.drafters.diagnosis import diagnose, diagnose_mtp
    from peagle.drafters.kind import DFLASH, MTP, kind_asked
    from peagle.models.families import read_spec
    from peagle.models.weights import model_directory

    k = speculation.num_speculative_tokens
    if not speculation.has_network:
        try:
            context = None if target is None else read_spec(target).max_length
        except InputError as error:
            return {}, [str(error)]
        if k is None or context is None or k < context:
            return {}, []
        return {}, [f"K = {k} drafts do not fit into the target's context of {context}; lower K"]
    if speculation.model is not None:
        place = model_directory(speculation.model, revision=speculation.revision)
    elif target is not None:
        place = target
    else:
        raise InputError("method mtp drafts by the target's own tensors: give --target")
    if speculation.method == MTP.method:
        found = diagnose_mtp(place, target)
    else:
        asked = kind_asked(speculation.parallel_drafting)
        found = diagnose(place, target, DFLASH if speculation.method == DFLASH.method else asked)
    facts = {"directory": str(place), **found.facts}
    return facts, [*found.problems, *_too_many(k, found)]


def _proposer(speculation: SpeculativeConfig) -> dict[str, str]:
    """What proposes drafts without a network; nothing where one does."""
    most = speculation.num_speculative_tokens
    if speculation.lookup is None:
        named = {"proposer": f"{speculation.method}, at most {most} drafts"}
        return {} if speculation.has_network else named
    shortest, longest = speculation.lookup
    return {"lookup": f"at most {most} drafts after a match of {shortest} to {longest} tokens"}


def _answers(target: "Path | None") -> dict[str, str]:
    """How the target's answers to conversations are read; nothing where that cannot be told."""
    from peagle.config import ChatConfig
    from peagle.dialects.detection import find_dialect, told_dialect
    from peagle.models.tokenizer import load_tokenizer

    if target is None:
        return {}
    try:
        tokenizer, chat = load_tokenizer(target), ChatConfig()
        return {"answers": told_dialect(find_dialect(tokenizer, chat), tokenizer, chat)}
    except InputError:  # told among the problems
        return {}


def _too_many(k: int | None, found: "Diagnosis") -> Iterable[str]:
    """That K is more than the drafter was trained for."""
    trained = found.config.trained_tokens if found.config is not None else None
    if k is not None and trained is not None and k > trained:
        yield (
            f"K = {k} is beyond the {trained} tokens that it was trained for; give --k {trained} "
            "at most"
        )


def _print_facts(facts: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    for label, value in facts.items():
        table.add_row(f"[dim]{label}[/]", escape(value))
    print_table(Console(highlight=False), table)
