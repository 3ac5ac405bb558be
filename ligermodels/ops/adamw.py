"""One step of AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), in one pass over memory."""

import torch

from ligermodels.errors import InputError
from ligermodels.ops.dispatch import tl, triton, use_kernels

BLOCK = 2048


@torch.no_grad()
def adamw_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Changes the parameter and the averages of its gradient in place, as `torch.optim.AdamW` does at step `step` >= 1.

    parameter, gradient, exp_avg, exp_avg_sq: of one shape and device, any floating dtypes; float32 inside (float64 for
    float64), each rounded once to its dtype. Raises InputError if they do not fit, or are not contiguous (but for the
    gradient, of which a copy is made then).
    """
    for name, x in (("gradient", gradient), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if x.shape != parameter.shape or x.device != parameter.device or not x.is_floating_point():
            raise InputError(
                f"adamw_step: {name} must be floating {tuple(parameter.shape)} on {parameter.device}, as the parameter "
                f"is; got {x.dtype} {tuple(x.shape)} on {x.device}"
            )
    for name, x in (("parameter", parameter), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not x.is_contiguous():
            raise InputError(f"adamw_step: {name} must be contiguous, has strides {x.stride()}")
    tensors = parameter, gradient.contiguous(), exp_avg, exp_avg_sq
    size, root = lr / (1 - betas[0] ** step), (1 - betas[1] ** step) ** 0.5
    numbers = 1 - lr * weight_decay, size, root, *betas, eps
    torch.autograd.graph.increment_version([parameter, exp_avg, exp_avg_sq])
    if not use_kernels(*tensors):
        _step_reference(*tensors, *numbers)
    elif n := parameter.numel():
        with torch.cuda.device_of(parameter):
            _step_kernel[(-(-n // BLOCK),)](*tensors, n, *numbers, BLOCK=BLOCK, num_warps=8)


def _step_reference(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    keep: float,
    size: float,
    root: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """The specification of the kernel, in plain torch."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    g = gradient.to(dtype)
    m = exp_avg.to(dtype).lerp(g, 1 - beta1)
    v = beta2 * exp_avg_sq.to(dtype) + (1 - beta2) * g * g
    parameter.copy_(parameter.to(dtype) * keep - size * m / (v.sqrt() / root + eps))
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


@triton.jit
def _step_kernel(parameter, gradient, exp_avg, exp_avg_sq, n, keep, size, root, beta1, beta2, eps, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    p = tl.load(parameter + i, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + i, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + i, mask=inside, other=0.0).to(tl.float32)
    m = m + (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    p = p * keep - size * m / (tl.sqrt(v) / root + eps)
    tl.store(parameter + i, p.to(parameter.dtype.element_ty), mask=inside)
    tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + i, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
