"""Checks of the files of EAGLE-3, DFlash and DSpark heads, and the formulas of their layers in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.convert.reading import reading
from ligermodels.layers import RopeConfig
from ligermodels.models.capture import layer_ids_of
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative.block_head import BlockDraftConfig
from ligermodels.speculative.checks import HeadsReport, check_values, report_of, require
from ligermodels.speculative.draft_files import D2T, EMBEDDING, LM_HEAD, T2D, open_head
from ligermodels.speculative.draft_head import DraftHeadModel
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.eagle3_head import Eagle3Config
from ligermodels.speculative.head_files import allocated, head_state

Activation = Callable[[Tensor], Tensor]
Config = TypeVar("Config", Eagle3Config, BlockDraftConfig)


class DraftFiles(Generic[Config]):
    """The content of a head's folder.

    Args:
        base: the base model, on the meta device.
        folder: folder of the head.
        stored: config.json.
        tensors: the tensors by their names in speculators' form.
        model_class: the class of a model with such a head.
    """

    network: ClassVar[Any]
    """config -> the network of such heads."""

    def __init__(
        self,
        base: CausalLM,
        folder: Path,
        stored: dict[str, Any],
        tensors: dict[str, Tensor],
        model_class: type[DraftHeadModel],
    ) -> None:
        self.base, self.folder, self.stored, self.model_class = base, folder, stored, model_class
        self.formats: Any = model_class.formats
        self.tensors = {name: x for name, x in tensors.items() if not name.startswith("verifier_")}  # the model's own

    @classmethod
    def report(cls, base: CausalLM, folder: Path, model_class: type[DraftHeadModel]) -> HeadsReport:
        """The report of the checks. See the class for the arguments.

        Args:
            base: the base model.
            folder: local folder of the head.
            model_class: class of its model.
        """
        with reading(folder, partial(open_head, folder, names=model_class.formats.tensor_name)) as (stored, reader):
            return report_of(model_class.kind, cls(base, folder, stored, dict(reader.headers), model_class).checks())

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """The checks in order, name -> function: see `checks.report_of`."""
        raise NotImplementedError

    @property
    def config(self) -> Config:
        """The config of the head, from config.json."""
        return self.formats.read_config(self.stored, self.base.config)

    @property
    def named_boundaries(self) -> dict[str, tuple[int, ...]]:
        """The boundaries that each field of config.json names."""
        return self.formats.stored_boundaries(self.stored)

    def loaded(self) -> Any:
        """The network of the head with its tensors, in float32 on the CPU."""
        head = allocated(partial(self.network, self.config), torch.float32, torch.device("cpu")).eval()
        reader = StateDict({name: tensor for name, tensor in self.tensors.items() if name != LM_HEAD})
        self.formats.weight_map(self.config, lm_head=False).load(reader, head_state(head, "head"))
        return head

    def check_sizes(self) -> None:
        """Require the sizes of the base model."""
        config, target = self.config, self.base.config
        layers = len(target.blocks)
        sizes = (
            ("target_hidden_size", config.target_hidden_size, target.hidden_size),
            ("vocab_size", config.decoder.vocab_size, target.vocab_size),
            ("num_target_layers", self.stored.get("num_target_layers", layers), layers),
        )
        for name, ours, theirs in sizes:
            require(ours == theirs, f"{name}: is {ours}, and of the model {theirs}")

    def layer_ids(self) -> str:
        """The same layers in every field, that the model has, and as many as `fc` reads."""
        named, count = self.named_boundaries, len(self.base.config.blocks)
        for name, ids in named.items():
            outside = [boundary for boundary in ids if not 0 <= boundary <= count]
            require(not outside, f"{name}: boundary {outside[:1]}, where the model has {count} layers")
        same = len(set(named.values())) <= 1
        require(same, f"as boundaries, {' but '.join(f'{name} is {list(ids)}' for name, ids in named.items())}")
        boundaries, size = self.config.boundaries, self.base.config.hidden_size
        if (fc := self.tensors.get("fc.weight")) is not None:
            width = len(boundaries) * size
            problem = f"fc.weight: reads {fc.shape[1]} channels, where {len(boundaries)} layers have {width}"
            require(fc.shape[1] == width, problem)
        source = ", ".join(named) or "in no field, so the servers' defaults"
        return f"boundaries {list(boundaries)}, layer ids {list(layer_ids_of(boundaries))} ({source})"

    def vocabulary(self) -> str:
        """Tables of the draft vocabulary that agree, with offsets in `d2t`."""
        d2t, t2d, size = self.tensors.get(D2T), self.tensors.get(T2D), self.base.config.vocab_size
        count = self.config.draft_vocab_size
        if d2t is None:
            require(count == size, f"d2t: is missing, where draft_vocab_size is {count} of {size} tokens")
            return f"none: all {size:,} tokens"
        require(d2t.shape == (count,), f"d2t: has the shape {list(d2t.shape)}, and draft_vocab_size is {count}")
        require(t2d is None or t2d.shape == (size,), f"t2d: must have the shape [{size}]")
        ids = t2d is not None and d2t.dtype == torch.int64 and torch.equal(t2d.nonzero().flatten(), d2t)
        shown = d2t[:4].tolist()
        require(not ids or not d2t.any(), f"d2t: begins with {shown}, ids of tokens; it must be offsets, id - index")
        vocabulary = DraftVocabulary.from_tables(d2t, t2d, size)
        return f"{len(vocabulary):,} of {size:,} tokens; t2d {'missing' if t2d is None else 'agrees'}"

    def shapes(self) -> str:
        """Every tensor that the head needs, of its shape, and no other."""
        self.model_class.from_pretrained(self.base, self.folder)
        size = self.config.decoder.hidden_size
        for name, rows in ((EMBEDDING, self.base.config.vocab_size), (LM_HEAD, self.config.draft_vocab_size)):
            if (tensor := self.tensors.get(name)) is not None:
                require(tensor.shape == (rows, size), f"{name}: {list(tensor.shape)}, not {[rows, size]}")
        return f"{len(self.tensors)} tensors"

    def values(self) -> str:
        """Finite values, and weights of norms that are not stored as differences from 1."""
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and not name.endswith("bias"):
                require(bool(tensor.any()), f"{name}: all values are 0")
            if name.endswith("norm.weight"):
                mean = tensor.float().mean().item()
                wrong = f"{name}: its mean is {mean:.3f}; this head multiplies by the weight, not by 1 + weight"
                require(abs(mean) > 0.02, wrong)
        return check_values(self.tensors)


class Formulas:
    """The formulas of a layer, in float64.

    Args:
        tensors: the tensors by their names in speculators' form.
        eps: of the norms.
        rope: rotary position embeddings of the attention.
    """

    def __init__(self, tensors: Mapping[str, Tensor], eps: float, rope: RopeConfig) -> None:
        self.tensors, self.eps, self.rope = tensors, eps, rope

    def weight(self, name: str) -> Tensor:
        """The tensor of this name."""
        return self.tensors[name].double()

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The linear layer `name`, of x (..., in)."""
        bias = f"{name}.bias"
        return F.linear(x, self.weight(f"{name}.weight"), self.weight(bias) if bias in self.tensors else None)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The RMS norm `name`, of x (..., H)."""
        return self.divided(x) * self.weight(f"{name}.weight")

    def divided(self, x: Tensor) -> Tensor:
        """x (..., H) divided by its root mean square."""
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def rotate(self, x: Tensor, positions: Iterable[int]) -> Tensor:
        """x (T, heads, D), rotated by the angles of T positions."""
        angles = torch.tensor(list(positions)).double()[:, None, None] * self.rope.frequencies().double()
        cos, sin = angles.cos() * self.rope.attention_factor, angles.sin() * self.rope.attention_factor
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def heads(self, x: Tensor, layer: str, part: str, head_dim: int) -> Tensor:
        """Queries, keys or values (T, heads, D) of x (T, H), normalised where the layer has a norm for them.

        Args:
            x: (T, H).
            layer: prefix of the layer.
            part: "q", "k" or "v".
            head_dim: D.
        """
        projected = self.linear(x, f"{layer}.self_attn.{part}_proj").unflatten(-1, (-1, head_dim))
        name = f"{layer}.self_attn.{part}_norm"
        return self.norm(projected, name) if f"{name}.weight" in self.tensors else projected

    def mlp(
        self, x: Tensor, layer: str, norm: str = "post_attention_layernorm", activation: Activation = F.silu
    ) -> Tensor:
        """The gated feed-forward layer of x (T, H), after its norm.

        Args:
            x: (T, H).
            layer: prefix of the layer.
            norm: name of the norm.
            activation: of the gate.
        """
        y = self.norm(x, f"{layer}.{norm}")
        gate, up = (self.linear(y, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(activation(gate) * up, f"{layer}.mlp.down_proj")


def attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Grouped attention in plain torch.

    Args:
        q: (T, Hq, D).
        k: (S, Hkv, D).
        v: (S, Hkv, D).
        allowed: bool (T, S), the keys that each query sees; None for all.
        scale: of the scores; by default D ** -0.5.

    Returns:
        (T, Hq * D).
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
