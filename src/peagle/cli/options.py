"""Options that several commands share, each named and explained once."""

import os
from typing import Annotated, Any

import typer

from peagle.cli.groups import Flags, fields, group
from peagle.config import EngineConfig
from peagle.configuration import PositiveInt
from peagle.errors import InputError

BOTH_FORMS = "give either --speculative-config or --drafter and --k"

TargetArgument = Annotated[
    str | None,
    typer.Argument(help="Target model: directory or hub id.", show_default="the bundled one"),
]
TargetFlag = Annotated[str | None, typer.Option("--target", help="The target, as a flag.")]
Hardware = Annotated[
    dict[str, Any],
    fields(EngineConfig, "dtype lora device kv_cache_dtype batch_invariant quantize_activations"),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="CPU threads.", show_default="OMP_NUM_THREADS, or 7 of every 8 cores"),
]
CORES_PER_SPARE = 8
"""One core in this many is left to others. All threads wait for the slowest one: with a thread on
each of 16 cores, one busy process beside them took 5/6 of the tokens; with 14 threads, none."""


def one_of(argument: str | None, flag: str | None, name: str) -> str | None:
    """What an argument and the flag of the same meaning say. Raises `InputError` if both do."""
    if argument is not None and flag is not None:
        raise InputError(f"{argument} and --{name} {flag}: give the {name} once")
    return flag if argument is None else argument


def _target(target: TargetArgument = None, target_flag: TargetFlag = None) -> str | None:
    return one_of(target, target_flag, "target")


Target = Annotated[str | None, group(_target)]


class BothDrafters(Flags):
    """A drafter of each kind."""

    eagle3: str | None = None
    """EAGLE-3 drafter: directory or hub id. Default: the bundled one"""
    peagle: str | None = None
    """P-EAGLE drafter: directory or hub id. Default: the bundled one"""


class NamedDrafter(Flags):
    """A drafter and its K as the flags name them: in vLLM's JSON, or one by one."""

    drafter: str | None = None
    """Drafter: directory or hub id. Default: only the bundled target has one"""
    k: PositiveInt | None = None
    """Tokens to draft per cycle. Default: as trained"""
    speculative_config: str | None = None
    """vLLM's JSON, in place of --drafter and --k."""

    def model_post_init(self, _: Any) -> None:
        if self.speculative_config is not None and (self.drafter, self.k) != (None, None):
            raise InputError(BOTH_FORMS)


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads for this process and those that it starts.

    None: OMP_NUM_THREADS, or some cores are left to others, and an engine may run with fewer.
    """
    import torch

    if threads is None:
        threads = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            threads -= threads // CORES_PER_SPARE
    else:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
