"""What is installed beside this code: peagle's own version, and what to do where a part is missing.

Only Python's own modules are needed to read it.
"""

from importlib.metadata import version
from pathlib import Path

from peagle.errors import InputError


def installed_version() -> str:
    """peagle's version. Raises `InputError` for a source tree that was never installed."""
    try:
        return version("peagle")
    except ModuleNotFoundError as error:
        raise InputError(not_installed(error)) from None


CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"
"""What stands there if this code is a checkout's; a wheel's has no such file above it."""


def not_installed(error: ModuleNotFoundError) -> str:
    """What to do about a package that is missing, peagle's own metadata included."""
    cure = "pip install 'peagle[serve,structured]'"
    if CHECKOUT.exists() or error.name == "peagle":
        cure = (
            "in peagle's checkout: pip install '.[serve,structured]', or make demo, which sets up "
            ".venv"
        )
    return f"{error.name} is not installed for this Python; {cure}"
