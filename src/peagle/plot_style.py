"""What all plots look like."""

from pathlib import Path

STYLE = Path(__file__).with_name("plot.mplstyle")
"""Settings of matplotlib."""
