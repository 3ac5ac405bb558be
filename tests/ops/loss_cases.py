"""The losses in plain torch, and the options and targets that both cross-entropy ops are tried with."""

from collections.abc import Callable
from typing import Any

import torch
from op_harness import wide


def plain_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    token_weights: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    token_scaling: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
    return_z_loss: bool = False,
    return_predicted: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Written by torch's own cross_entropy, over logits upcast as transformers upcasts them."""
    V = logits.shape[-1]
    x, y = wide(logits).reshape(-1, V) * logit_scale, target.reshape(-1)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    of_class = None if class_weights is None else class_weights.to(x.dtype)
    losses = torch.nn.functional.cross_entropy(
        x, y, of_class, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    valid = y != ignore_index
    z_losses = torch.where(valid, z_loss * torch.logsumexp(x, -1).pow(2), 0.0)
    weights = valid.to(losses.dtype)
    if token_weights is not None:
        weights = weights * token_weights.reshape(-1).to(losses.dtype)
    denominator, of_z_loss = weights if of_class is None else weights * of_class[y.where(valid, 0)], weights
    if token_scaling:
        weights = weights * x.softmax(-1).gather(-1, y.where(valid, 0)[:, None])[:, 0].detach()
    losses, z_losses = ((each * weights).view(target.shape) for each in (losses, z_losses))
    if reduction == "mean":
        losses = losses / (denominator.sum() if denominator.any() else 1)
        z_losses = z_losses / (of_z_loss.sum() if of_z_loss.any() else 1)
    losses = losses + z_losses
    found = [losses if reduction == "none" else losses.sum()]
    order = logits.reshape(-1, V).argsort(dim=-1, descending=True, stable=True)
    if return_rank:
        rank = (order == y.unsqueeze(-1)).int().argmax(-1).masked_fill(~valid, -1)
        found.append(rank.view(target.shape))
    if return_z_loss:
        found.append((z_losses if reduction == "none" else z_losses.sum()).detach())
    if return_predicted:
        found.append(order[:, 0].masked_fill(~valid, -1).view(target.shape))
    return tuple(found) if len(found) > 1 else found[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "scale": {"logit_scale": 0.37},
    "rank": {"return_rank": True},
    "weights": {"token_weights": True},
    "zero weights": {"token_weights": False},
    "ignore 0": {"ignore_index": 0},
    "all": dict(
        label_smoothing=0.2, z_loss=1e-2, softcap=5.0, logit_scale=0.7, return_rank=True, token_weights=True,
        ignore_index=2, reduction="none",
    ),
}  # fmt: skip


RETURNS = dict.fromkeys(("return_rank", "return_z_loss", "return_predicted"), True)
TERMS: dict[str, dict[str, Any]] = {
    "predicted": {"return_predicted": True},
    "z-loss apart": {"z_loss": 1e-2, "return_z_loss": True, "token_weights": True},
    "each z-loss": {"z_loss": 1e-2, "reduction": "none", "softcap": 3.0, **RETURNS},
    "no z-loss": {"return_z_loss": True},
    "class weights": {"class_weights": True, **RETURNS},
    "class weights of no class": {"class_weights": False, "label_smoothing": 0.1, "z_loss": 1e-2},
    "class weights and smoothing": {"class_weights": True, "label_smoothing": 0.1, "token_weights": True},
    "class weights and z-loss": {"class_weights": True, "z_loss": 1e-2, "return_z_loss": True, "ignore_index": 0},
    "scaled": {"token_scaling": True},
    "scaled and smoothed": {"token_scaling": True, "label_smoothing": 0.1, "reduction": "sum"},
    "all terms": dict(
        class_weights=True, token_scaling=True, label_smoothing=0.2, z_loss=1e-2, softcap=5.0, logit_scale=0.7,
        token_weights=True, reduction="none", **RETURNS,
    ),
    "mean of all terms": dict(
        class_weights=True, token_scaling=True, label_smoothing=0.2, z_loss=1e-2, token_weights=True, **RETURNS
    ),
}  # fmt: skip
"""Options of `loss_terms`, and what else may be returned."""


def options_for(name: str, target: torch.Tensor, V: int = 0) -> dict[str, Any]:
    """The named options; token_weights and class_weights True stand for random ones, False for zeros."""
    options = dict((OPTIONS | TERMS)[name])
    for weights, shape in (("token_weights", target.shape), ("class_weights", (V,))):
        if weights in options:
            values = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(target.device)
            options[weights] = values * options[weights]
    return options


def targets(shape: tuple[int, ...], V: int, device: torch.device, ignored: float = 0.3) -> torch.Tensor:
    """Random classes, the first and the last among them, and some of them ignored."""
    y = torch.randint(V, shape)
    y = torch.where(torch.rand(shape) < ignored, -100, y)
    if y.numel() > 2:
        y.view(-1)[:2] = torch.tensor([0, V - 1])
    return y.to(device)


def gemms(call: Callable[[], Any], of_one: int) -> tuple[Any, float]:
    """What a call returns, and its products of numbers in GEMMs, in those of one whole GEMM."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        result = call()
    first = {"aten::mm": 0, "aten::addmm": 1}  # of the two factors among the inputs
    events = profile.profiler.kineto_results.events()  # profile.events() takes most of a second
    shapes = [event.shapes()[first[event.name()] :] for event in events if event.name() in first]
    products = sum(a[0] * a[1] * b[1] for a, b, *_ in shapes)
    return result, products / of_one


def two_roundings(x: torch.Tensor) -> float:
    """How much worse gradients may be whose logits a backward pass computes anew, by chunks of classes: these are
    rounded apart from those of the rows' sums. In 16 bits that is beside the point."""
    return 3.0 if x.dtype == torch.float32 else 1.0
