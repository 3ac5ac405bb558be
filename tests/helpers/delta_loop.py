"""The gated delta rule as it is defined, token by token, and random operands of it."""

import torch
from torch import Tensor

GROUPS, HEADS, K, V = 2, 6, 5, 7


def operands(
    batch: int, tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0, *, by_channel: bool = False
) -> dict[str, Tensor]:
    """Decays from nearly none to nearly all; with `by_channel` in each head, for each key channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64).to(dtype)

    g = -normal(HEADS, *[K] * by_channel).mul(2).exp()
    return {"q": normal(GROUPS, K), "k": normal(GROUPS, K), "v": normal(HEADS, V), "g": g,
            "beta": normal(HEADS).sigmoid()}  # fmt: skip


def some_state(batch: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, HEADS, K, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and the last state; g is (B, T, R) or (B, T, R, K)."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q / q.shape[-1] ** 0.5, k))
    decays = (g if g.dim() == 4 else g[..., None])[..., None].exp()
    outputs = []
    for t in range(q.shape[1]):
        state = state * decays[:, t]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("brkv,brk->brv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        outputs.append(torch.einsum("brkv,brk->brv", state, q[:, t]))
    return torch.stack(outputs, 1), state
