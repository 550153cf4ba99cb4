"""The kinds of drafters with a network: what each is called, and what it does with its passes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A way of drafting with a network. There is one value of each, so `is` compares them."""

    name: str
    """The name that people read."""
    method: str
    """The name in recipes and benchmarks; as a flag, it gives the drafter's directory."""
    passes: str
    """What its passes give."""
    default_k: int
    """K where neither the user nor the drafter's files say it."""
    parallel_drafting: bool
    """The value of vLLM's key that asks for it."""


PEAGLE = Kind("P-EAGLE", "peagle", "K tokens in one pass", 7, True)
EAGLE3 = Kind("EAGLE-3", "eagle3", "K tokens in K passes", 3, False)
MTP = Kind("MTP", "mtp", "K tokens in K passes of the target's own head", 3, False)
DFLASH = Kind("DFlash", "dflash", "K tokens in one pass over a block", 15, True)
KINDS = PEAGLE, EAGLE3
"""Those that vLLM calls eagle3, both with a directory of their own."""
KIND_OF_METHOD = {kind.method: kind for kind in (*KINDS, DFLASH, MTP)}


def kind_asked(parallel_drafting: bool | None) -> Kind | None:
    """The kind that vLLM's key asks for; None: whatever the drafter's files hold."""
    return next((kind for kind in KINDS if kind.parallel_drafting is parallel_drafting), None)
