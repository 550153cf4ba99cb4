"""The `peagle` command, also `python -m peagle`; handles Ctrl-C before any slow import."""

import sys

from peagle.cli import interrupts, stdout


def main() -> int:
    """Run the command line and return its exit code."""
    interrupts.install()
    stdout.install()
    from peagle.cli.app import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
