"""The formulas of DFlash and DSpark heads in plain torch, from the tensors of their files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.layers import AttentionConfig
from ligermodels.speculative.block_head import GEMMA4, BlockDraftConfig
from ligermodels.speculative.draft_checks import Formulas, attention

MARKOV, CONFIDENCE = "markov_head", "confidence_head.proj"
GATES = {"gated": f"{MARKOV}.gate_proj", "rnn": f"{MARKOV}.joint_proj"}
"""Kind of Markov head -> its linear layer."""


class Slots(NamedTuple):
    """Results of the K slots of N blocks that propose tokens.

    hidden: (N, K, H), after the final norm.
    logits: (N, K, rows), without the Markov head's.
    corrected: (N, K, rows), with the Markov head's; None without one.
    confidence: (N, K), logits of the confidence head, or None.
    """

    hidden: Tensor
    logits: Tensor
    corrected: Tensor | None
    confidence: Tensor | None


def formulas(
    config: BlockDraftConfig,
    w: Mapping[str, Tensor],
    states: Tensor,
    embeds: Tensor,
    anchors: Sequence[int],
    previous: Tensor,
    lm_head: Tensor,
) -> Slots:
    """The results of the slots in float64, one block after another.

    Args:
        config: the head's config.
        w: the tensors, by their names in speculators' form.
        states: (T, n H_target), states of the boundaries, side by side.
        embeds: (N, B, H), embeddings of the tokens of the blocks.
        anchors: of each of the N blocks the position of its first slot; the block sees the states before it.
        previous: long (N, K), the token before the one that each slot predicts.
        lm_head: (rows, H), the first rows of the LM head.
    """
    mixer = cast(AttentionConfig, config.decoder.blocks[0].mixer)
    (rope,), gemma4 = mixer.ropes, config.layers["model_type"] in GEMMA4
    f = Formulas(w, config.decoder.norm.eps, rope)
    context = f.norm(f.linear(states, "fc"), "hidden_norm")
    hidden = []
    for anchor, x in zip(anchors, embeds, strict=True):
        end = anchor + config.block_size
        queries, keys = torch.arange(anchor, end)[:, None], torch.arange(end)
        for number in range(len(config.decoder.blocks)):
            layer, sees = f"layers.{number}", config.sees(number)
            allowed = (keys < anchor) | (keys <= queries) | (not sees["causal"])
            allowed &= keys > queries - (end if sees["window"] is None else sees["window"])
            y = f.norm(x, f"{layer}.input_layernorm")
            source = torch.cat([context[:anchor], y])
            q = f.rotate(f.heads(y, layer, "q", mixer.head_dim), range(anchor, end))
            k = f.rotate(f.heads(source, layer, "k", mixer.head_dim), range(end))
            if gemma4:
                part = "v" if f"{layer}.self_attn.v_proj.weight" in w else "k"
                v = f.divided(f.linear(source, f"{layer}.self_attn.{part}_proj").unflatten(-1, (-1, mixer.head_dim)))
                mixed = f.linear(attention(q, k, v, allowed, scale=1.0), f"{layer}.self_attn.o_proj")
                x = x + f.norm(mixed, f"{layer}.post_attention_layernorm")
                y = f.mlp(x, layer, "pre_feedforward_layernorm", partial(F.gelu, approximate="tanh"))
                x = (x + f.norm(y, f"{layer}.post_feedforward_layernorm")) * f.weight(f"{layer}.layer_scalar")
            else:
                v = f.heads(source, layer, "v", mixer.head_dim)
                x = x + f.linear(attention(q, k, v, allowed), f"{layer}.self_attn.o_proj")
                x = x + f.mlp(x, layer)
        hidden.append(f.norm(x, "norm")[config.block_size - config.num_drafts :])
    h = torch.stack(hidden)
    logits, confidence, corrected = F.linear(h, lm_head), None, None
    if (softcap := config.layers.get("final_logit_softcapping")) is not None:
        logits = softcap * (logits / softcap).tanh()
    e = f.weight(f"{MARKOV}.markov_w1.weight")[previous] if config.markov_rank else h[..., :0]
    if config.markov_rank:
        codes = torch.stack(_codes(f, config.markov_head_type, h.unbind(1), e.unbind(1)), dim=1)
        corrected = logits + F.linear(codes, f.weight(f"{MARKOV}.markov_w2.weight")[: len(lm_head)])
    if config.enable_confidence_head:
        features = torch.cat([h, e], dim=-1) if config.confidence_head_with_markov else h
        confidence = f.linear(features, CONFIDENCE)[..., 0]
    return Slots(h, logits, corrected, confidence)


def _codes(f: Formulas, kind: str, hidden: tuple[Tensor, ...], embeds: tuple[Tensor, ...]) -> list[Tensor]:
    """The Markov head's code (N, r) of each slot.

    Args:
        f: the formulas, with the tensors.
        kind: `markov_head_type`.
        hidden: (N, H) of each slot.
        embeds: (N, r) of each slot, the embedding of the token before.
    """
    if kind == "vanilla":
        return list(embeds)
    if kind == "gated":
        return [
            f.linear(torch.cat([h, e], dim=-1), GATES[kind]).sigmoid() * e for h, e in zip(hidden, embeds, strict=True)
        ]
    codes, state = [], torch.zeros_like(embeds[0])
    for h, e in zip(hidden, embeds, strict=True):
        forget, update, out = f.linear(torch.cat([state, e, h], dim=-1), GATES[kind]).chunk(3, dim=-1)
        state = forget.sigmoid() * state + (1 - forget.sigmoid()) * update.tanh()
        codes.append(out.tanh())
    return codes
