"""The bundled drafters as vLLM runs them: it knows no selector, and no packed drafter."""

from pathlib import Path

from peagle.drafters.checkpoint import unpacked
from peagle.pair import bundled


def plain_drafter(name: str, place: Path) -> Path:
    """A copy of a bundled drafter in `place`, without what corrects its drafts."""
    copy = place / f"plain-{name}"
    return copy if copy.exists() else unpacked(bundled(name), copy)
