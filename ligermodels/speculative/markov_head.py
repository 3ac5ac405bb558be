"""DSpark's Markov head, which corrects the logits of a slot by the token before it, and its confidence head."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn

from ligermodels.layers.linear import Linear

MarkovHeadType = Literal["vanilla", "gated", "rnn"]
MARKOV_HEAD_TYPES: tuple[str, ...] = get_args(MarkovHeadType)


class MarkovHead(nn.Module):
    """Logits W2 c of a slot, with a code c of rank r. With e the embedding W1 of the token before the slot, and h the
    slot's hidden state:

        vanilla: c = e        gated: c = sigmoid(G [h | e] + b) * e
        rnn: f, u, o = J [s | e | h] + b;  s' = sigmoid(f) s + (1 - sigmoid(f)) tanh(u);  c = tanh(o), from s = 0

    Args:
        vocab_size: V, number of tokens of the model.
        draft_vocab_size: number of tokens that the head can propose.
        hidden_size: H.
        rank: r.
        kind: "vanilla", "gated" or "rnn", as `markov_head_type` in config.json.
    """

    def __init__(
        self, vocab_size: int, draft_vocab_size: int, hidden_size: int, rank: int, kind: MarkovHeadType
    ) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        self.w1 = nn.Embedding(vocab_size, rank)
        self.w2 = Linear(rank, draft_vocab_size, bias=False)
        self.gate = Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint = Linear(hidden_size + 2 * rank, 3 * rank) if kind == "rnn" else None

    def step(self, embeds: Tensor, hidden: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The codes of slots, from embeddings (..., r) of the tokens before them and hidden states (..., H).

        Args:
            embeds: (..., r), `w1` of the tokens before the slots.
            hidden: (..., H), the hidden states of the slots.
            state: (..., r), of the rnn after the slots before; None for the first slots of blocks.

        Returns:
            Codes (..., r), and the next state of the rnn, (..., r) or None.
        """
        if self.gate is not None:
            return self.gate(torch.cat([hidden, embeds], dim=-1)).sigmoid() * embeds, None
        if self.joint is None:
            return embeds, None
        state = torch.zeros_like(embeds) if state is None else state
        forget, update, out = self.joint(torch.cat([state, embeds, hidden], dim=-1)).chunk(3, dim=-1)
        forget = forget.sigmoid()
        return out.tanh(), forget * state + (1 - forget) * update.tanh()

    def forward(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """The codes (N, K, r) of all slots of blocks, from embeddings (N, K, r) and hidden states (N, K, H)."""
        if self.joint is None:
            return self.step(embeds, hidden)[0]
        codes, state = list[Tensor](), None
        for slot in range(embeds.shape[1]):
            code, state = self.step(embeds[:, slot], hidden[:, slot], state)
            codes.append(code)
        return torch.stack(codes, dim=1)


class ConfidenceHead(nn.Module):
    """The logit of a slot's acceptance, given that the slots before it are accepted: a projection of [h | e], or of h.

    Args:
        hidden_size: H.
        rank: r, size of the Markov head's embeddings e; 0 to leave them out.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, embeds: Tensor | None) -> Tensor:
        """Logits (...) of hidden states (..., H) and embeddings (..., r) of the tokens before the slots."""
        features = torch.cat([hidden, cast(Tensor, embeds)], dim=-1) if self.rank else hidden
        return cast(Tensor, self.proj(features)).squeeze(-1)
