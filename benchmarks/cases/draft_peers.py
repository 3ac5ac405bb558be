"""The draft parts of a training step of EAGLE-3 and DSpark in plain torch: materialised logits, and flex attention.

They read the tensors of one of our heads, by their names in speculators' form, and the states of its target. The
draft part is one compiled function. Metrics, which ours computes in the same pass, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention

import ligermodels as lm
from ligermodels.layers.targets import shift_labels
from ligermodels.layers.tokens import token_layout
from ligermodels.speculative.block_training import sample_blocks
from ligermodels.speculative.draft_files import LM_HEAD, native_state

Weights = Mapping[str, Tensor]


def mask_of(sees: Any, batch: int | None, queries: int, keys: int, device: torch.device) -> Any:
    """The block mask of flex attention: sees(batch, head, query, key) -> whether the query sees the key."""
    return flex_attention.create_block_mask(sees, batch, None, queries, keys, device=device)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Flex attention of (B, T, heads, D), with a block mask of `mask_of` -> (B, T, Hq * D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flex_attention.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def trained_copy(model: Any) -> dict[str, Tensor]:
    """Copies of a head's tensors; those that the head trains require a gradient."""
    trained = {f"head.{name}" for name, _ in model.head.named_parameters()}
    trained |= {LM_HEAD} if model.lm_head is not None and model.lm_head.weight.requires_grad else set()
    entries = model.formats.weight_map(model.config, lm_head=model.lm_head is not None)
    tensors = {tensor.name: tensor.read().clone() for tensor in entries.export(native_state(model))}
    return {name: x.requires_grad_(name != LM_HEAD or LM_HEAD in trained) for name, x in tensors.items()}


def norm(x: Tensor, w: Weights, name: str, eps: float) -> Tensor:
    """An RMS norm."""
    return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x (B, T, heads, D), rotated by cos and sin (T or B, T, 1, D / 2)."""
    cos, sin = tables
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def rotary(positions: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin (..., 1, D / 2) of positions (...)."""
    powers = torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim
    angles = positions[..., None, None] / theta**powers
    return angles.cos(), angles.sin()


def heads(x: Tensor, w: Weights, layer: str, part: str, dim: int, eps: float) -> Tensor:
    """Queries, keys or values (..., heads, D), normalised where the layer has a norm for them."""
    found = F.linear(x, w[f"{layer}.self_attn.{part}_proj.weight"]).unflatten(-1, (-1, dim))
    name = f"{layer}.self_attn.{part}_norm"
    return norm(found, w, name, eps) if f"{name}.weight" in w else found


def mlp(x: Tensor, w: Weights, layer: str, eps: float) -> Tensor:
    """The gated feed-forward layer, after its norm."""
    y = norm(x, w, f"{layer}.post_attention_layernorm", eps)
    gate, up = (F.linear(y, w[f"{layer}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return F.linear(F.silu(gate) * up, w[f"{layer}.mlp.down_proj.weight"])


def divergence(log_q: Tensor, log_p: Tensor, counts: Tensor) -> Tensor:
    """The mean of KL(p || q) over the tokens that count."""
    losses = (log_p.exp() * (log_p - log_q)).sum(-1)
    return (losses * counts).sum() / counts.sum()


class PlainEagle3:
    """The loss of an EAGLE-3 head, of Llama's kind and without further norms, on unpacked sequences without padding.

    Args:
        model: our model with the head.
        batch: sequences in a batch.
        length: tokens of a sequence.
    """

    def __init__(self, model: lm.Eagle3Model, batch: int, length: int) -> None:
        self.model, self.weights = model, trained_copy(model)
        self.tokens = model.vocabulary.ids(torch.arange(len(model.vocabulary), device=model.base.device))

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) | ((key >= length) & (key % length == query))

        steps = range(1, model.num_heads + 1)
        self.masks = [mask_of(sees, None, length, step * length, model.base.device) for step in steps]
        self._draft = torch.compile(partial(self._loss, self.weights), dynamic=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """The loss of token ids (B, T), all of which count."""
        base = self.model.base
        states, last = lm.capture(base, ids, self.model.config.boundaries)
        with torch.no_grad():
            embeds, truth = base.decoder.embed(ids), last @ base.head.weight[self.tokens].t()
        loss: Tensor = self._draft(states, embeds, truth)
        return loss

    def _loss(self, w: Weights, states: Tensor, embeds: Tensor, truth: Tensor) -> Tensor:
        config, layer = self.model.config, "layers.0"
        eps, dim, length = config.decoder.norm.eps, config.mixer.head_dim, embeds.shape[1]
        z, keys, values = F.linear(states, w["fc.weight"]), list[Tensor](), list[Tensor]()
        log_p, index = truth.float().log_softmax(-1), torch.arange(length, device=embeds.device)
        total = torch.zeros((), device=embeds.device)
        for step in range(self.model.num_heads):
            e = F.pad(embeds[:, step + 1 :], (0, 0, 0, step + 1))
            u = [norm(e, w, f"{layer}.input_layernorm", eps), norm(z, w, f"{layer}.hidden_norm", eps)]
            q, k, v = (heads(torch.cat(u, -1), w, layer, part, dim, eps) for part in "qkv")
            tables = rotary(index + step, dim, config.mixer.rope.theta)
            keys.append(rotate(k, tables))
            values.append(v)
            mixed = attend(rotate(q, tables), torch.cat(keys, 1), torch.cat(values, 1), self.masks[step])
            m = z + F.linear(mixed, w[f"{layer}.self_attn.o_proj.weight"])
            z = m + mlp(m, w, layer, eps)
            log_q = F.linear(norm(z, w, "norm", eps), w[LM_HEAD]).float().log_softmax(-1)
            last = length - 2 - step  # tokens with a target
            counts = (index < last).expand(len(z), -1)
            ahead = F.pad(log_p[:, step + 1 :], (0, 0, 0, step + 1))
            total = total + self.model.decay**step * divergence(log_q, ahead, counts)
        return total


class PlainDSpark:
    """The loss of a DSpark head with a plain Markov head and a confidence head, on one sequence without padding. The
    anchors are ours.

    Args:
        model: our model with the head.
        ids: long (1, T).
    """

    def __init__(self, model: lm.DSparkModel, ids: Tensor) -> None:
        self.model, self.weights, options = model, trained_copy(model), model.training_options
        following = torch.stack([shift_labels(ids, ahead) for ahead in range(1, 1 + model.num_heads)])
        layout = token_layout((1, ids.shape[1]))
        self.blocks = sample_blocks(ids, following, layout.packing, options.num_anchors, options.seed)
        anchors, size, length = self.blocks.anchors, model.config.block_size, ids.shape[1]

        def sees(batch: Tensor, head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
            own = (key >= length) & ((key - length) // size == slot // size)
            return (key < anchors[slot // size]) | own

        slots = len(anchors) * size
        self.mask = mask_of(sees, None, slots, length + slots, ids.device)
        self._draft = torch.compile(partial(self._loss, self.weights), dynamic=False)

    def __call__(self, ids: Tensor) -> Tensor:
        """The loss of the token ids (1, T)."""
        base, blocks, config = self.model.base, self.blocks, self.model.config
        states, last = lm.capture(base, ids, config.boundaries)
        with torch.no_grad():
            tokens = torch.full((len(blocks.anchors), config.block_size), config.mask_token_id, device=ids.device)
            tokens[:, 0] = ids[0, blocks.anchors]
            embeds, truth = base.decoder.embed(tokens), blocks.after(last[0]) @ base.head.weight.t()
        loss: Tensor = self._draft(states, embeds, truth, blocks.after(ids[0]), base.head.weight)
        return loss

    def _loss(
        self, w: Weights, states: Tensor, embeds: Tensor, truth: Tensor, previous: Tensor, lm_head: Tensor
    ) -> Tensor:
        config, options, blocks = self.model.config, self.model.training_options, self.blocks
        eps, mixer = config.decoder.norm.eps, config.decoder.blocks[0].mixer
        dim, index = mixer.head_dim, torch.arange(states.shape[1], device=states.device)
        context = norm(F.linear(states, w["fc.weight"]), w, "hidden_norm", eps)
        slots = (blocks.anchors[:, None] + torch.arange(config.block_size, device=index.device)).flatten()
        x, places = embeds.flatten(0, 1)[None], torch.cat([index, slots])
        whole, own = (rotary(positions, dim, mixer.rope.theta) for positions in (places, slots))
        for layer in (f"layers.{i}" for i in range(len(config.decoder.blocks))):
            y = norm(x, w, f"{layer}.input_layernorm", eps)
            both = torch.cat([context, y], 1)
            q = rotate(heads(y, w, layer, "q", dim, eps), own)
            k = rotate(heads(both, w, layer, "k", dim, eps), whole)
            mixed = attend(q, k, heads(both, w, layer, "v", dim, eps), self.mask)
            x = x + F.linear(mixed, w[f"{layer}.self_attn.o_proj.weight"])
            x = x + mlp(x, w, layer, eps)
        hidden = norm(x, w, "norm", eps).view(embeds.shape)
        codes = F.embedding(previous, w["markov_head.markov_w1.weight"])
        logits = F.linear(hidden, lm_head) + F.linear(codes, w["markov_head.markov_w2.weight"])
        log_q, p = logits.float().log_softmax(-1), truth.float().softmax(-1)
        mask = blocks.targets >= 0
        weights = mask * torch.tensor(self.model.loss_weights(), device=mask.device)
        cross_entropy = -log_q.gather(-1, blocks.targets.clamp(min=0)[..., None])[..., 0]
        distance = (log_q.exp() - p).abs().sum(-1)
        features = torch.cat([hidden, codes], -1)
        proj = (w[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        confidence = F.linear(features, *proj)[..., 0].float()
        accepted = (1 - distance.detach() / 2).clamp(0, 1)
        losses = options.ce_weight * cross_entropy + options.divergence_weight * distance
        losses = losses + options.confidence_weight * F.binary_cross_entropy_with_logits(
            confidence, accepted, reduction="none"
        )
        return (losses * weights).sum() / weights.sum()
