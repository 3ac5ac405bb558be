"""Benchmarks: ratios measured in one run, every timed call verified."""
