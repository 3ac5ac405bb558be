"""What every test stands on: few threads, fixed seeds, and the reference ops unless a test is marked `kernels`.

Without a CUDA device the Triton kernels run in Triton's interpreter, which is asked for before the first kernel is
defined. It is slow, so only tests marked `kernels` meet it: for all others, and for the processes they start, the
request is withdrawn and the ops are held to the reference. With a CUDA device nothing is forced.
"""

import atexit
import gc
import logging
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before torch is imported, and inherited by the processes that tests start. One thread: threads that spin for one
# another on cores that other processes use take several times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import filelock
import hypothesis
import numpy
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
KEPT_BYTES = 2**30
"""Bytes of GPU memory that a process may keep after a test."""
MOST_BYTES = {False: 4 * 2**30, True: 40 * 2**30}
"""Bytes of GPU memory that a test may take, and one marked `large`, before a warning names it."""
MEMORY = Path("/dev/shm")
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
    # Files in memory, if it has room: a disk may take milliseconds for each file that is flushed or removed.
    if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 8 * 2**30:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)
if "LIGERMODELS_CACHE" not in os.environ:
    os.environ["LIGERMODELS_CACHE"] = tempfile.mkdtemp(prefix="ligermodels-cache-")
    atexit.register(shutil.rmtree, os.environ["LIGERMODELS_CACHE"], ignore_errors=True)

# pytest collects also from loggers that do not propagate. torch makes texts of all graphs if somebody collects them.
logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]

gc.disable()  # until all tests are collected

hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="run whole products of parameters")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n auto`: three quarters of the cores, whose other quarter compiles; 6 GiB of a GPU for each.

    The largest tests take turns with a third of an 80 GB GPU.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not HAS_CUDA:
        return cores
    return max(1, min(cores * 3 // 4, torch.cuda.get_device_properties(0).total_memory // (6 * 2**30)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU skip tests marked `gpu`; cover products of parameters pairwise: the interpreter is slow, and so is
    the compiler of kernels. On a GPU the large tests come first, so that one process runs them: they take turns."""
    if HAS_CUDA:
        items.sort(key=lambda item: item.get_closest_marker("large") is None)
    else:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--every-case"):
        from pairwise import pairwise

        kept = set(pairwise(items, has_gpu=HAS_CUDA))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep garbage collections from modules and tests, a million objects that live until the end. Without a GPU, where
    tests leave little behind, run full collections a tenth as often, and all of them after many more objects."""
    gc.collect()
    gc.freeze()
    if not HAS_CUDA:
        gc.set_threshold(20_000, 10, 100)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def reference_ops() -> Iterator[None]:
    """Where only the interpreter could run the kernels, hold the ops to the reference, here and in child processes."""
    if HAS_CUDA:
        yield
        return
    from ligermodels.ops.runtime import dispatch  # defines every kernel, with the interpreter still asked for

    if find_spec("triton"):
        from interpreter import quicken

        quicken()
    with pytest.MonkeyPatch.context() as environment, dispatch.set_backend("reference"):
        environment.delenv("TRITON_INTERPRET")
        yield


@pytest.fixture(scope="session", autouse=True)
def repeated_work() -> None:
    """After collection, when the modules of all tests are imported."""
    from repeated import leave_out

    leave_out()


@pytest.fixture(autouse=True)
def interpreted_kernels(request: pytest.FixtureRequest, reference_ops: None) -> Iterator[None]:
    """Let a test marked `kernels` reach the kernels: the ops choose for themselves again."""
    if HAS_CUDA or not request.node.get_closest_marker("kernels"):
        yield
        return
    from ligermodels.ops.runtime import dispatch

    with pytest.MonkeyPatch.context() as environment, dispatch.set_backend(None):
        environment.setenv("TRITON_INTERPRET", "1")
        yield


lost: list[str] = []
"""The test that left this process's CUDA context unusable, by a kernel with an illegal access."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if lost:
        pytest.skip(f"nothing can run on the GPU in this process after {lost[0]}")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Kernels report such an access late: it is that of the test that has just run."""
    if HAS_CUDA and not lost:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            lost.append(item.nodeid)
            raise


@pytest.fixture(autouse=True)
def gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests marked `large` take turns, and each test gives memory back, so that many processes share one GPU."""
    if not HAS_CUDA:
        yield
        return
    lock = filelock.FileLock(Path(tempfile.gettempdir()) / f"ligermodels-tests-{os.getuid()}.lock")
    large = request.node.get_closest_marker("large") is not None
    with lock if large else nullcontext():
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        yield
        if (used := torch.cuda.max_memory_allocated()) > MOST_BYTES[large]:
            warnings.warn(f"{request.node.nodeid} took {used / 2**30:.0f} GiB of the GPU", stacklevel=1)
        if torch.cuda.memory_reserved() > KEPT_BYTES:
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Each test draws the same random numbers, alone or in any order."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch's: for matrices this small more are slower, much so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of runs."""
    from runs import make_base

    folder = tmp_path_factory.mktemp("runs") / "model"
    make_base(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their data."""
    from runs import make_data

    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    make_data(path)
    return path


@pytest.fixture(scope="module")
def children() -> Any:
    """Processes that have imported everything before they begin."""
    from children import forks

    return forks()
