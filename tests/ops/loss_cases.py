"""The losses in plain torch, and the options and targets that both cross-entropy ops are tried with."""

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
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    return_rank: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Written by torch's own cross_entropy, over logits upcast as transformers upcasts them."""
    V = logits.shape[-1]
    x, y = wide(logits).reshape(-1, V) * logit_scale, target.reshape(-1)
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    losses = torch.nn.functional.cross_entropy(
        x, y, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    losses = losses + torch.where(y == ignore_index, 0.0, z_loss * torch.logsumexp(x, -1).pow(2))
    weights = (y != ignore_index).to(losses.dtype)
    if token_weights is not None:
        weights = weights * token_weights.reshape(-1).to(losses.dtype)
    losses = (losses * weights).view(target.shape)
    loss = {
        "none": losses,
        "sum": losses.sum(),
        "mean": losses.sum() / weights.sum() if weights.any() else losses.sum(),
    }
    if not return_rank:
        return loss[reduction]
    order = logits.reshape(-1, V).argsort(dim=-1, descending=True, stable=True)
    rank = (order == y.unsqueeze(-1)).int().argmax(-1).masked_fill(y == ignore_index, -1)
    return loss[reduction], rank.view(target.shape)


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


def options_for(name: str, target: torch.Tensor) -> dict[str, Any]:
    """The named options; token_weights True stands for random ones, False for zeros."""
    options = dict(OPTIONS[name])
    if "token_weights" in options:
        weights = torch.rand(target.shape, generator=torch.Generator().manual_seed(3)).to(target.device)
        options["token_weights"] = weights * options["token_weights"]
    return options


def targets(shape: tuple[int, ...], V: int, device: torch.device, ignored: float = 0.3) -> torch.Tensor:
    """Random classes, the first and the last among them, and some of them ignored."""
    y = torch.randint(V, shape)
    y = torch.where(torch.rand(shape) < ignored, -100, y)
    if y.numel() > 2:
        y.view(-1)[:2] = torch.tensor([0, V - 1])
    return y.to(device)
