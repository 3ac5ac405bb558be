"""The benchmarks: their cases, models and peers. A module with a function `main` is a command."""
