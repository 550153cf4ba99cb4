"""Measuring: prompts, load, formulas and reports.

- What is measured: `case` (a method and its load), `workload` over `prompts`, by `target` and
  `pair`, or `smollm2`, which chats; or `shapes` with `random_weights`, whose acceptance is
  `synthetic`.
- Running it: `rounds` take turns of `runs`; `load` on an engine here, or a `server` (`server_case`,
  `server_metrics`, over `http`).
- What it says: `measures` (every formula), `verdict`, `advice`, `tables`, `report`, and the
  `environment` of a result.
"""
