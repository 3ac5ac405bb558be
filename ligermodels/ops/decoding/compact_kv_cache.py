"""Moving accepted slots of a preallocated cache next to each other, for all layers at once."""

import torch
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import check_tensor, check_tensors
from ligermodels.ops.runtime.devices import power_of_2_above
from ligermodels.ops.runtime.dispatch import tl, use_kernels
from ligermodels.ops.runtime.launcher import kernel
from ligermodels.ops.runtime.library import custom_op, is_fake, reject_dtensors

TILE = 4096  # elements per program
MAX_SLOTS = 512  # per sequence; the reference serves more


def compact_kv_cache(stored: Tensor, slots: Tensor) -> None:
    """Moves slot slots[b, i] of sequence b to slot slots[b, 0] + i, in place; all slots are read before any is written.

    Args:
        stored: (..., B, S, E), contiguous, any dtype: B sequences of S slots, E elements per slot.
        slots: long (B, P), in [0, S). This is not checked, but slots out of range are neither read nor written.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or `stored` is not contiguous.
    """
    check_tensors("compact_kv_cache", stored=stored)
    reject_dtensors("compact_kv_cache", stored, slots)
    if stored.dim() < 3 or not stored.is_contiguous():
        raise InputError(f"compact_kv_cache: stored must be (..., B, S, E) and contiguous, got {tuple(stored.shape)}")
    check_tensor("compact_kv_cache", "slots", slots, (stored.shape[-3], "P"), stored.device, torch.long)
    if not use_kernels(stored) or slots.shape[1] > MAX_SLOTS:
        compact_kv_cache_reference(stored, slots)
    else:
        _compact_kv_cache(stored, slots)


def compact_kv_cache_reference(stored: Tensor, slots: Tensor) -> None:
    """The specification of `compact_kv_cache`, in plain torch."""
    if not (slots.numel() and stored.numel()):
        return
    row, place = (torch.arange(size, device=slots.device) for size in slots.shape)
    target, last = slots[:, :1] + place, stored.shape[-2] - 1
    moved = (slots >= 0) & (slots <= last) & (target >= 0) & (target <= last)
    # Without a wait for the device: a slot that is not moved repeats a move of its row, or stays where there is none.
    place = torch.where(moved, place, moved.int().argmax(1, keepdim=True))
    target = target.gather(1, place).clamp(0, last)
    source = torch.where(moved.any(1, keepdim=True), slots.gather(1, place).clamp(0, last), target)
    stored[..., row[:, None], target, :] = stored[..., row[:, None], source, :]  # indexing copies first


@kernel
def _compact_kv_cache_kernel(stored, slots, B, S, E, P, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    """Each program moves some elements of all slots of a sequence in one layer."""
    layer_row = tl.program_id(0).to(tl.int64)
    row = layer_row % B
    place = tl.arange(0, BLOCK_P)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(slots + row * P + place, mask=place < P, other=-1)
    target = tl.load(slots + row * P) + place
    moved = (source >= 0) & (source < S) & (target >= 0) & (target < S)
    moved = moved[:, None] & (e < E)[None, :]
    stored += layer_row * S * E
    x = tl.load(stored + source[:, None] * E + e[None, :], mask=moved)
    tl.debug_barrier()  # all threads have read: a thread's target may be another thread's source
    tl.store(stored + target[:, None] * E + e[None, :], x, mask=moved)


@custom_op(mutates_args=("stored",))
def _compact_kv_cache(stored: Tensor, slots: Tensor) -> None:
    (B, P), (S, E) = slots.shape, stored.shape[-2:]
    if is_fake(stored) or not (stored.numel() and P):
        return
    block_p = power_of_2_above(P)
    block = min(power_of_2_above(E), TILE // block_p)
    _compact_kv_cache_kernel[(stored.numel() // (S * E), -(-E // block))](
        stored, slots.contiguous(), B, S, E, P, BLOCK_P=block_p, BLOCK=block, num_warps=4
    )
