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


@pytest.mark.parametrize(("device", "initialized"), [("cuda", False), ("cuda:1", True), ("cpu", True)])
@pytest.mark.parametrize("seed", [None, 3])
def test_random_numbers_of_all_gpus_are_as_before(
    device: str, initialized: bool, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of those that a computation does not use: `torch.manual_seed` seeds all."""
    states = {0: 10, 1: 11}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: states.update({index: state}))
    monkeypatch.setattr(torch, "manual_seed", lambda seed: states.update(dict.fromkeys(states, seed)))
    before = torch.get_rng_state()
    with pytest.raises(KeyError), devices.own_random_numbers(device, seed):
        assert states == ({0: 10, 1: 11} if seed is None else {0: 3, 1: 3})
        states[0] = int(torch.randint(9, ()))
        raise KeyError
    assert states == {0: 10, 1: 11} and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [None, 3])
def test_gpus_that_are_used_later_have_the_programs_seed(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [0]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with torch.random.fork_rng([]):
        torch.manual_seed(7)
        with devices.own_random_numbers("cpu", seed):
            torch.manual_seed(5)
            torch.rand(3)
        assert seeds[-1] == torch.initial_seed() == 7


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_random_numbers_of_two_gpus_are_as_before() -> None:
    before = torch.cuda.get_rng_state_all()
    with devices.own_random_numbers("cuda:1", 3):
        torch.rand(3, device="cuda:1")
    assert all(map(torch.equal, torch.cuda.get_rng_state_all(), before))
