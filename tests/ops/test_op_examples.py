"""The examples in the docstrings of public ops run, and print the results that they show."""

import doctest

import pytest
import torch

from ligermodels import ops

EXAMPLES = [name for name in ops.__all__ if ">>>" in (getattr(ops, name).__doc__ or "")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(
        getattr(ops, name), name, globs=vars(ops) | {"ops": ops, "torch": torch}
    )
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_most_used_ops_have_examples() -> None:
    assert {"attention", "rms_norm", "swiglu", "rope_qkv", "adamw_step"} <= {*EXAMPLES}
