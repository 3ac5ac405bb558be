"""Processes that have imported everything before they begin: forks of one server, which imports it once."""

import multiprocessing
import os
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

# What the processes of most tests use. To import it runs no operation of torch's and so starts no thread, which a fork
# would be without.
PRELOADED = [
    "pytest",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "ligermodels.archs",
    "ligermodels.cli",
    "ligermodels.parallel",
    "ligermodels.speculative.joint",
    "ligermodels.training.medusa",
    "runs",
    "zoo",
    "frozen",
]


@cache
def forks() -> ForkServerContext:
    """The context to make them from. Their environment is that of the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as environment:
        # The server looks for modules where Python does, and ignores those that it does not find.
        environment.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        first = context.Process(target=int)  # With it the server starts.
        first.start()
    first.join()
    return context
