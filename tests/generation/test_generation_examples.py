"""The examples in the docstrings of `ligermodels.generation` run, and print the results that they show."""

import doctest

import pytest
import torch
from zoo import CONFIGS

import ligermodels as lm
from ligermodels import generation

EXAMPLES = [name for name in generation.__all__ if ">>>" in (getattr(generation, name).__doc__ or "")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    names = {**vars(generation), "lm": lm, "torch": torch, "CONFIG": CONFIGS["llama-3"]}
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(generation, name), name, globs=names)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_functions_called_first_have_examples() -> None:
    assert {"generate", "stream", "sample", "sample_with_log_probs"} <= {*EXAMPLES}
