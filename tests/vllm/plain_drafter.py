"""The bundled drafters as vLLM runs them: it knows no selector."""

import shutil
from pathlib import Path

from peagle.pair import bundled


def plain_drafter(name: str, place: Path) -> Path:
    """A copy of a bundled drafter in `place`, without what corrects its drafts."""
    copy = place / f"plain-{name}"
    if not copy.exists():
        shutil.copytree(bundled(name), copy, ignore=shutil.ignore_patterns("correction"))
    return copy
