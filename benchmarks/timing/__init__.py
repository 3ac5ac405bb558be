"""Timing: clocks, CUDA graphs, memory, profiles, and the checks that every timed call of an op must pass."""
