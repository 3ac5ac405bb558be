"""Arguments of loading for the device and dtype of the parameters, with the names that transformers uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import torch

from ligermodels.convert.json_values import is_int
from ligermodels.convert.loading import Spec
from ligermodels.convert.weight_map import FLOAT_NAMES, FLOATS, float_dtype
from ligermodels.errors import InputError, short

DtypeLike: TypeAlias = torch.dtype | str
DeviceLike: TypeAlias = torch.device | str | int
DeviceMap: TypeAlias = DeviceLike | Mapping[str, DeviceLike]

SHARD = (
    "to shard a model over devices, start the program by torchrun and give from_pretrained(..., plan=ParallelPlan())"
)


def resolve_dtype(dtype: DtypeLike | None, torch_dtype: DtypeLike | None) -> torch.dtype | None:
    """The dtype that the arguments name; None if the checkpoint decides.

    Args:
        dtype: a floating dtype or its name in torch ("bfloat16"); None or "auto" for the checkpoint's.
        torch_dtype: transformers' older name of `dtype`.

    Raises:
        InputError: a dtype that is unknown or not floating, or two different dtypes.
    """
    arguments = {"dtype": dtype, "torch_dtype": torch_dtype}
    dtypes = {name: _dtype(name, value) for name, value in arguments.items() if value is not None}
    if len(set(dtypes.values())) > 1:
        raise InputError(f"dtype is {dtype} and torch_dtype, its older name, is {torch_dtype}: give one of them")
    return next(iter(dtypes.values()), None)


def _dtype(name: str, value: object) -> torch.dtype | None:
    """The dtype of argument `name`, or None for "auto"."""
    if value == "auto":
        return None
    if (dtype := float_dtype(value)) is None:
        raise InputError(
            f"{name}: {short(value)} is not one of {', '.join(FLOAT_NAMES)}, as a name or a torch.dtype, or 'auto'"
        )
    return dtype


def stored_dtype(tensors: Mapping[str, Spec]) -> torch.dtype:
    """The dtype of FLOATS that most numbers of these tensors have; float32 if none has one."""
    numbers = Counter[torch.dtype]()
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            numbers[tensor.dtype] += math.prod(tensor.shape)
    return max(numbers, key=numbers.__getitem__, default=torch.float32)


def resolve_device(
    device: DeviceLike | None, device_map: DeviceMap | None, default: torch.device | None = None
) -> torch.device:
    """The device of all parameters.

    Args:
        device: a torch device, its name, or the index of a CUDA device.
        device_map: the same; `{"": device}`; or "auto" for the current CUDA device (the CPU if there is none).
        default: the device if neither argument is given; None for torch's default device.

    Raises:
        InputError: an unknown device, a map of several devices or of submodules, or two different devices.
    """
    devices = {}
    if device is not None:
        devices["device"] = _device("device", device)
    if device_map is not None:
        devices["device_map"] = _device("device_map", _whole(device_map))
    if len(set(devices.values())) > 1:
        raise InputError(f"device is {device} and device_map {device_map}: give one of them")
    return next(iter(devices.values()), None) or default or torch.get_default_device()


def _whole(device_map: DeviceMap) -> DeviceLike:
    """The device of `{"": device}`."""
    if not isinstance(device_map, Mapping):
        return device_map
    if set(device_map) != {""}:
        raise InputError(
            f"device_map: has entries of submodules ({', '.join(map(repr, list(device_map)[:3]))}), but a model lies "
            f'on one device: {{"": device}}; {SHARD}'
        )
    return device_map[""]


def _device(name: str, value: object) -> torch.device:
    if value == "auto" and name == "device_map":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if isinstance(value, torch.device):
        return value
    try:
        if is_int(value) and value >= 0:
            return torch.device("cuda", value)
        if isinstance(value, str):
            return torch.device(value)
    except (RuntimeError, ValueError):  # an unknown name, or an index out of range
        pass
    known = "a torch.device, its name ('cpu', 'cuda', 'cuda:1', ...), the index of a CUDA device"
    if name == "device_map":
        known += f", {{'': device}} or 'auto', the current CUDA device; {SHARD}"
    raise InputError(f"{name}: {short(value)} is not {known}")


def require_device(device: torch.device) -> torch.device:
    """`device`; InputError unless torch can place a tensor there, on this machine."""
    if device.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=device)
        except Exception as error:  # backends of devices raise different classes
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise InputError(f"device: {device} is not there, or not usable: {reason}") from None
    return device
