"""The properties of GPUs by which ops choose, as torch gives them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ligermodels.errors import BackendError
from ligermodels.ops import float8_cast, float8_unsupported
from ligermodels.ops.runtime import devices, dispatch
from ligermodels.ops.runtime.devices import num_sms, shared_memory

CASES: list[tuple[Any, ...]] = [  # capability, ROCm, bfloat16, PTX, float8, Hopper, chained products
    ((7, 5), None, False, False, False, False, False),
    ((8, 0), None, True, True, False, False, True),
    ((8, 9), None, True, True, True, False, True),
    ((9, 0), None, True, True, True, True, True),
    ((10, 3), None, True, True, True, False, False),
    ((12, 0), None, True, True, True, False, True),
    ((9, 4), "7.0", True, False, False, False, False),
]


@pytest.mark.parametrize(("capability", "hip", "bfloat16", "ptx", "float8", "hopper", "chained"), CASES)
def test_what_a_gpu_has(
    capability: tuple[int, int], hip: str | None, bfloat16: bool, ptx: bool, float8: bool, hopper: bool, chained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found = SimpleNamespace(name="Some GPU", multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = torch.device("cuda", 77)
    devices._properties.cache_clear()
    gpu = devices.gpu_of(device)
    assert gpu is not None
    assert gpu == ("Some GPU", capability, 48 * 1024, 7, hip is not None)
    properties = gpu.has_bfloat16, gpu.runs_ptx, gpu.has_float8, gpu.is_hopper, gpu.chains_products
    assert properties == (bfloat16, ptx, float8, hopper, chained)
    assert (num_sms(device), shared_memory(device)) == (7, 40 * 1024)
    assert (float8_unsupported(device) is None) is float8
    assert "Some GPU" in (float8_unsupported(device) or "Some GPU")

    found.shared_memory_per_block_optin = 227 * 1024
    devices._properties.cache_clear()
    assert shared_memory(device) == 219 * 1024
    devices._properties.cache_clear()


def test_float8_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "pretended", devices.GPU("NVIDIA A100", (8, 0), 2**16, 108))
    with pytest.raises(BackendError, match=r"^float8_cast: NVIDIA A100 has compute capability"):
        float8_cast(torch.ones(16, 16), torch.float8_e4m3fn)
    assert devices.gpu_of(torch.device("cpu")) is not None
