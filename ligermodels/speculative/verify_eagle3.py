"""Checks of the files of an EAGLE-3 head, and its formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.convert.reading import reading
from ligermodels.layers.initialization import allocate, persistent_tensors, skip_init
from ligermodels.models.capture import layer_ids_of
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative import eagle3_formats as formats
from ligermodels.speculative.checks import ROWS, HeadsReport, check_values, compare, random, report_of, require
from ligermodels.speculative.draft_files import D2T, EMBEDDING, LM_HEAD, T2D, open_head
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.eagle3 import Eagle3Model
from ligermodels.speculative.eagle3_files import speculators_name
from ligermodels.speculative.eagle3_head import Eagle3Config, Eagle3Head

LENGTH, STEPS = 12, 3
LAYER = "layers.0"


def verify_eagle3(base: CausalLM, folder: Path) -> HeadsReport:
    """The checks of an EAGLE-3 head.

    Args:
        base: the base model, on the meta device.
        folder: folder of the head.
    """
    with reading(folder, partial(open_head, folder, names=speculators_name)) as (stored, reader):
        return report_of("EAGLE-3", _Eagle3Files(base, folder, stored, dict(reader.headers)).checks())


class _Eagle3Files:
    """The content of a head's folder: config.json, and the tensors by their names in speculators' form."""

    def __init__(self, base: CausalLM, folder: Path, stored: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.base, self.folder, self.stored, self.tensors = base, folder, stored, tensors

    @property
    def config(self) -> Eagle3Config:
        target = self.base.config
        return formats.read_config(self.stored, len(target.blocks), target.hidden_size)

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "config.json", self.fields
        yield "layer ids", self.layer_ids
        yield "norms", self.norms
        yield "vocabulary tables", self.vocabulary
        yield "shapes", self.shapes
        yield "values", self.values
        yield "logits", self.logits

    def fields(self) -> str:
        config, target = self.config, self.base.config
        sizes = (
            ("target_hidden_size", config.target_hidden_size, target.hidden_size),
            ("vocab_size", config.decoder.vocab_size, target.vocab_size),
            ("num_target_layers", self.stored.get("num_target_layers", len(target.blocks)), len(target.blocks)),
        )
        for name, ours, theirs in sizes:
            require(ours == theirs, f"{name}: is {ours}, and of the model {theirs}")
        return f"a layer of the kind {config.layer['model_type']}, hidden size {config.decoder.hidden_size}"

    def layer_ids(self) -> str:
        """The same layers in every field, that the model has, and as many as `fc` reads."""
        named, count = formats.stored_boundaries(self.stored), len(self.base.config.blocks)
        for name, boundaries in named.items():
            outside = [boundary for boundary in boundaries if not 0 <= boundary <= count]
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

    def norms(self) -> str:
        """Flags and tensors that say the same."""
        config, names = self.config, self.tensors
        flags = {
            "norm_before_fc": ("input_norm.weight", config.norm_before_fc),
            "fc_norm": ("fc_norm.0.weight", config.fc_norm),
            "model_type qwen3": (f"{LAYER}.self_attn.q_norm.weight", config.layer["model_type"] == "qwen3"),
        }
        for flag, (name, wanted) in flags.items():
            problem = f"{flag}: {'is set, and' if wanted else 'is not set, but'} the files have {'no ' * wanted}{name}"
            require((name in names) == wanted, problem)
        missing = [name for name in ("norm_before_residual", "norm_output") if name not in self.stored]
        values = ", ".join(f"{flag} {getattr(config, flag)}" for flag in formats.FLAGS)
        note = f"; {' and '.join(missing)} not in config.json, and servers differ in the default" if missing else ""
        return values + note

    def vocabulary(self) -> str:
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
        Eagle3Model.from_pretrained(self.base, self.folder)
        if (embedding := self.tensors.get(EMBEDDING)) is not None:
            wanted = (self.base.config.vocab_size, self.config.decoder.hidden_size)
            require(embedding.shape == wanted, f"embed_tokens.weight: {list(embedding.shape)}, not {list(wanted)}")
        return f"{len(self.tensors)} tensors"

    def values(self) -> str:
        """Finite values, and norms whose weights are not stored as differences from 1."""
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and not name.endswith("bias"):
                require(bool(tensor.any()), f"{name}: all values are 0")
            if name.endswith("norm.weight"):
                mean = tensor.float().mean().item()
                wrong = f"{name}: its mean is {mean:.3f}; this head multiplies by the weight, not by 1 + weight"
                require(abs(mean) > 0.02, wrong)
        return check_values(self.tensors)

    def logits(self) -> str:
        """The head with the states of a stub target: s_L are random numbers that depend on L alone."""
        config, tensors, count = self.config, self.tensors, len(self.base.config.blocks)
        named = formats.stored_boundaries(self.stored)
        states = [random(level, 1, LENGTH, config.target_hidden_size) for level in range(count + 1)]
        size, rows = config.decoder.hidden_size, min(ROWS, config.draft_vocab_size)
        lm_head = tensors.get(LM_HEAD, random(count + 1, rows, size))[:rows].float()
        ids = torch.randint(config.decoder.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0))
        own = tensors.get(EMBEDDING)
        embeds = random(count + 2, LENGTH, size) if own is None else own[ids].float()

        with torch.device("meta"), skip_init():
            head = Eagle3Head(config)
        allocate(head, torch.float32, torch.device("cpu"))
        state = {f"head.{name}": tensor.detach() for name, tensor in persistent_tensors(head).items()}
        reader = StateDict({name: tensor for name, tensor in tensors.items() if name != LM_HEAD})
        formats.weight_map(config, LAYER, lm_head=False).load(reader, state)
        chosen = torch.cat([states[level] for level in config.boundaries], dim=-1)
        # The formulas read config.json by themselves.
        levels = next(iter(named.values()), config.boundaries)
        formula = formulas(config, tensors, [states[level][0] for level in levels], embeds)
        with torch.no_grad():
            steps = list(head.eval().training_steps(chosen, embeds[None], STEPS))
        return compare(
            (f"step {step}", F.linear(ours[0], lm_head)[: LENGTH - 1 - step], F.linear(theirs, lm_head.double()))
            for step, (ours, theirs) in enumerate(zip(steps, formula, strict=True))
        )


def formulas(config: Eagle3Config, w: Mapping[str, Tensor], states: list[Tensor], embeds: Tensor) -> list[Tensor]:
    """The states before the lm_head of each step of training-time test, in float64, one step after another.

    Args:
        config: the head's config.
        w: the tensors, by their names in speculators' form.
        states: of each boundary, (T, H_target).
        embeds: (T, H), embeddings of the tokens.

    Returns:
        Of step k the states (T - 1 - k, H) of the positions with a next token.
    """
    mixer, length = config.mixer, len(embeds)

    def linear(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"{name}.bias")
        return F.linear(x, w[f"{name}.weight"].double(), None if bias is None else bias.double())

    def norm(x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config.decoder.norm.eps).rsqrt()
        return x * scale * w[f"{name}.weight"].double()

    def rotate(x: Tensor, step: int) -> Tensor:
        half = mixer.head_dim // 2
        inv_freq = rope.frequencies().double()
        angles = (torch.arange(length).double() + step)[:, None, None] * inv_freq
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    (rope,) = mixer.ropes
    parts = [part.double() for part in states]
    if config.fc_norm:
        parts = [norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
    c = torch.cat(parts, dim=-1)
    z = linear(norm(c, "input_norm") if config.norm_before_fc else c, "fc")
    kept, results, groups = list[tuple[Tensor, Tensor]](), list[Tensor](), mixer.num_heads // mixer.num_kv_heads
    index = torch.arange(length)
    for step in range(STEPS):
        e = F.pad(embeds.double()[step + 1 :], (0, 0, 0, step + 1))
        b = norm(z, f"{LAYER}.hidden_norm")
        u = torch.cat([norm(e, f"{LAYER}.input_layernorm"), b], dim=-1)
        q, k, v = (linear(u, f"{LAYER}.self_attn.{x}_proj").unflatten(-1, (-1, mixer.head_dim)) for x in "qkv")
        if f"{LAYER}.self_attn.q_norm.weight" in w:
            q, k = norm(q, f"{LAYER}.self_attn.q_norm"), norm(k, f"{LAYER}.self_attn.k_norm")
        q, k = rotate(q, step), rotate(k, step)
        kept.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        keys, values = (torch.cat(x) for x in zip(*kept, strict=True))
        n = torch.arange(len(keys))
        allowed = (n <= index[:, None]) | (n % length == index[:, None])  # step 0 up to t; each later step at t
        scores = torch.einsum("thd,shd->hts", q, keys) * mixer.head_dim**-0.5
        mixed = torch.einsum("hts,shd->thd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), values)
        m = (b if config.norm_before_residual else z) + linear(mixed.flatten(1), f"{LAYER}.self_attn.o_proj")
        y = norm(m, f"{LAYER}.post_attention_layernorm")
        gate, up = (linear(y, f"{LAYER}.mlp.{x}_proj") for x in ("gate", "up"))
        z = m + linear(F.silu(gate) * up, f"{LAYER}.mlp.down_proj")
        result = norm(z, "norm")
        results.append(result[: length - 1 - step])
        z = result if config.norm_output else z
    return results
