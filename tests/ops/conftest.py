"""Where the ops' tests run: the reference on the CPU, the kernels in Triton's interpreter, the kernels on a GPU."""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from ligermodels.ops import set_backend
from ligermodels.ops.runtime import dispatch


class Where(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    place: str = "reference"


# The interpreter truncates on its way to bfloat16 where the hardware rounds; float16 stands in for it there.
PLACES = {
    "reference": (torch.float32, torch.bfloat16),
    "interpreter": (torch.float32, torch.float16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}
MARKS = {"reference": (), "interpreter": (pytest.mark.kernels,), "cuda": (pytest.mark.gpu, pytest.mark.kernels)}


@pytest.fixture(
    params=[
        pytest.param((place, dtype), id=f"{place}-{str(dtype).removeprefix('torch.')}", marks=MARKS[place])
        for place, dtypes in PLACES.items()
        if place == "reference" or (place == "cuda") == torch.cuda.is_available()
        for dtype in dtypes
    ]
)
def where(request: pytest.FixtureRequest) -> Iterator[Where]:
    """A device and a dtype, with the backend forced that is meant to run there."""
    place, dtype = request.param
    if place == "interpreter" and not dispatch.INTERPRETED:
        pytest.skip("Triton compiles here: the kernels run on the GPU")
    with set_backend("reference" if place == "reference" else "triton"):
        yield Where(torch.device("cuda" if place == "cuda" else "cpu"), dtype, place)


@pytest.fixture
def kernels_device() -> Iterator[torch.device]:
    """Where the kernels can run on this machine, for tests marked `kernels`."""
    with set_backend("triton"):
        yield torch.device("cpu" if dispatch.INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random operands whichever tests ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """torch.empty gives NaN (or the greatest integer), so that an element which nobody writes shows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations of torch's own without a deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)
