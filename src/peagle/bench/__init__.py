"""Measuring: prompts, load, formulas and reports."""
