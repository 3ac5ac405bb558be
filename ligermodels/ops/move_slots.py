"""Moving slots of a preallocated cache, of all its layers at once."""

import torch

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import power_of_2_above, tl, use_kernels
from ligermodels.ops.launcher import after_previous_kernel, kernel
from ligermodels.ops.library import opaque_op

TILE = 4096  # elements that a program moves
MOST = 512  # slots a row; the reference serves more


def move_slots(stored: torch.Tensor, slots: torch.Tensor) -> None:
    """Move slot slots[b, i] of row b to slot slots[b, 0] + i, in place, as if all were read before one is written.

    stored: (..., B, S, E), contiguous, of any dtype: B rows of S slots.
    slots: long (B, P), in [0, S). Nobody looks, but the kernel reads and writes no slot that is not there.
    Raises InputError if shapes, dtypes or devices do not fit.
    """
    if stored.dim() < 3 or not stored.is_contiguous():
        raise InputError(f"move_slots: stored must be (..., B, S, E) and contiguous, got {tuple(stored.shape)}")
    B = stored.shape[-3]
    if slots.dim() != 2 or len(slots) != B or slots.dtype != torch.long or slots.device != stored.device:
        raise InputError(
            f"move_slots: slots must be long of shape ({B}, P) on {stored.device}, "
            f"got {slots.dtype} {tuple(slots.shape)} on {slots.device}"
        )
    if not use_kernels(stored) or slots.shape[1] > MOST:
        move_slots_reference(stored, slots)
    else:
        _move_slots(stored, slots)


def move_slots_reference(stored: torch.Tensor, slots: torch.Tensor) -> None:
    """The specification of `move_slots`, in plain torch."""
    row = torch.arange(len(slots), device=slots.device)[:, None]
    target = slots[:, :1] + torch.arange(slots.shape[1], device=slots.device)
    stored[..., row, target, :] = stored[..., row, slots, :]  # indexing copies first


@kernel
def _move_slots_kernel(stored, slots, B, S, E, P, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr):
    """Each program moves some elements of all of a row's slots, in one layer."""
    after_previous_kernel()
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
    tl.debug_barrier()  # all threads have read: targets are others' sources
    tl.store(stored + target[:, None] * E + e[None, :], x, mask=moved)


def _fake(stored: torch.Tensor, slots: torch.Tensor) -> None:
    pass


@opaque_op(_fake, mutates=("stored",))
def _move_slots(stored: torch.Tensor, slots: torch.Tensor) -> None:
    (B, P), (S, E) = slots.shape, stored.shape[-2:]
    if not (stored.numel() and P):
        return
    block_p = power_of_2_above(P)
    block = min(power_of_2_above(E), TILE // block_p)
    _move_slots_kernel[(stored.numel() // (S * E), -(-E // block))](
        stored, slots.contiguous(), B, S, E, P, BLOCK_P=block_p, BLOCK=block, num_warps=4
    )
