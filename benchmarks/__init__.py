"""Benchmarks: ratios measured in one run, with every timed call verified. `python -m benchmarks NAME` runs one.

- `cases/`: the benchmarks, their models, inputs and peers.
- `timing/`: clocks, CUDA graphs, memory, and the checks of every timed call.
- `reporting/`: records of results, plots, tables and pages.
- `results/`: the records, as JSON lines.
"""
