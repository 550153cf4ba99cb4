"""The `peagle` command, also `python -m peagle`; handles Ctrl-C before any slow import."""

import sys

from peagle.cli import interrupts, stdout
from peagle.errors import InputError
from peagle.installation import installed_version, not_installed


def main() -> int:
    """Run the command line and return its exit code."""
    interrupts.install()
    stdout.install()
    try:
        installed_version()
        from peagle.cli.app import main

        code = main()
        stdout.flush()
        return code
    except InputError as error:
        return _end(str(error))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("peagle."):
            raise
        return _end(not_installed(error))


def _end(message: str) -> int:
    print(f"peagle: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
