"""Activation checkpointing: computing activations again in the backward pass instead of keeping them in memory."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd  # of nn.Dropout, nn.AlphaDropout and others
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ligermodels.arguments import ActivationCheckpointing as ActivationCheckpointing
from ligermodels.errors import InputError
from ligermodels.layers.offload import moves, saved_in_host_memory
from ligermodels.layers.sequence_parallel import SequenceParts
from ligermodels.ops import set_batch_invariant
from ligermodels.ops.runtime.dispatch import is_recording
from ligermodels.ops.runtime.library import keeps_results

_PRODUCTS = {"mm": 1, "addmm": 2, "_grouped_mm": 1, "grouped_mm": 1, "bmm": 1}
"""torch's matrix products, and the position of their right operand (..., K, N)."""
_ATTENTION = ("attention", "flash_attn")
"""Parts of the names of attention ops of torch and of flash-attn."""


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of attention, and of matrix products whose output is at least as wide as their input.

    Our own ops declare in their registration which results are kept (`ops.runtime.library.custom_op`). A narrower
    product (the down projection) is computed again if the backward pass needs it; the last product of a block never is.
    """
    name = op.__name__.partition(".")[0]
    kept = keeps_results(op, args) or any(part in name for part in _ATTENTION)
    if name in _PRODUCTS:
        weight = args[_PRODUCTS[name]]
        kept = weight.shape[-1] >= weight.shape[-2]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def run(mode: ActivationCheckpointing, module: nn.Module, *args: Any, parts: SequenceParts | None = None) -> Any:
    """`module(*args)`, with activation checkpointing where gradients are recorded.

    Args:
        mode: "none"; "selective" keeps the results of expensive ops for the backward pass; "full" keeps only the
            inputs; "offload" keeps them in host memory if they are on a GPU.
        module: the module to run.
        args: its arguments.
        parts: how its tokens are divided over ranks, also where it is computed again; None where they are not.

    Returns:
        The module's output.

    Raises:
        InputError: "offload" while torch.compile traces or a CUDA graph is recorded, or dropout while one is.
    """
    function = module if parts is None else partial(parts.call, module)
    if mode == "none" or not torch.is_grad_enabled():
        return function(*args)
    if mode == "offload":
        _check_offload()
    if is_recording() and drops(module):
        raise InputError("a CUDA graph of activation checkpointing would draw dropout's random numbers twice")
    if mode == "selective" and parts is None:
        compiled = getattr(module, "compiled_selective", None)
        if compiled is not None:
            return compiled(module, *args)
    return _checkpoint(mode, function, *args)


def _check_offload() -> None:
    """Raise InputError where host memory cannot be used."""
    if torch.compiler.is_compiling():
        _refuse_compile()
    if is_recording():
        raise InputError(
            "activation_checkpointing: a CUDA graph cannot have 'offload', which uses host memory; use 'full'"
        )


@torch.compiler.disable(reason="activation_checkpointing='offload' needs blocks that are compiled one by one")
def _refuse_compile() -> None:
    # Raised in traced code, the error would only end the tracing.
    raise InputError(
        "activation_checkpointing: torch.compile of a whole model cannot have 'offload', which copies tensors between "
        "blocks; compile each block (compile='blocks' of a ParallelPlan, or block.compile()), or use 'full'"
    )


def call_selective(module: nn.Module, *args: Any) -> Any:
    """`module(*args)` with selective checkpointing, to be compiled.

    The checkpoint is inside the compiled function: outside, it would keep buffers that compiled code uses again.
    """
    return _checkpoint("selective", module._call_impl, *args)


def _batch_invariant(function: Any, *args: Any) -> Any:
    with set_batch_invariant(True):
        return function(*args)


def _checkpoint(mode: ActivationCheckpointing, function: Any, *args: Any) -> Any:
    if set_batch_invariant.value:  # where activations are computed again, the setting may have ended
        function = partial(_batch_invariant, function)
    # While a CUDA graph is recorded, the state of the random numbers cannot be read; `run` lets no dropout in.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not is_recording()}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # Its hooks also pass by autograd's own check for changes in place: they are used where a tensor moves.
    with saved_in_host_memory() if mode == "offload" and any(map(moves, args)) else nullcontext():
        return checkpoint(function, *args, **options)


def drops(module: nn.Module) -> bool:
    """Whether a module, or a module in it, drops elements now."""
    return any(
        module.training and module.p > 0 if isinstance(module, _DropoutNd) else getattr(module, "drops", False)
        for module in module.modules()
    )
