"""Checks of the files of an EAGLE-3 head, and its formulas in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.arguments import EAGLE_FLAGS
from ligermodels.speculative.checks import ROWS, compare, random, require
from ligermodels.speculative.draft_checks import DraftFiles, Formulas, attention
from ligermodels.speculative.draft_files import EMBEDDING, LM_HEAD
from ligermodels.speculative.eagle3_head import Eagle3Config, Eagle3Head

LENGTH, STEPS = 12, 3
LAYER = "layers.0"


class Eagle3Files(DraftFiles[Eagle3Config]):
    """The checks of an EAGLE-3 head."""

    network = Eagle3Head

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "config.json", self.fields
        yield "layer ids", self.layer_ids
        yield "norms", self.norms
        yield "vocabulary tables", self.vocabulary
        yield "shapes", self.shapes
        yield "values", self.values
        yield "logits", self.logits

    def fields(self) -> str:
        config = self.config
        self.check_sizes()
        return f"a layer of the kind {config.layer['model_type']}, hidden size {config.decoder.hidden_size}"

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
        values = ", ".join(f"{flag} {getattr(config, flag)}" for flag in EAGLE_FLAGS)
        note = f"; {' and '.join(missing)} not in config.json, and servers differ in the default" if missing else ""
        return values + note

    def logits(self) -> str:
        """The head with the states of a stub target: s_L are random numbers that depend on L alone."""
        config, tensors, count = self.config, self.tensors, len(self.base.config.blocks)
        states = [random(level, 1, LENGTH, config.target_hidden_size) for level in range(count + 1)]
        size, rows = config.decoder.hidden_size, min(ROWS, config.draft_vocab_size)
        lm_head = tensors.get(LM_HEAD, random(count + 1, rows, size))[:rows].float()
        ids = torch.randint(config.decoder.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0))
        own = tensors.get(EMBEDDING)
        embeds = random(count + 2, LENGTH, size) if own is None else own[ids].float()

        chosen = torch.cat([states[level] for level in config.boundaries], dim=-1)
        # The formulas read config.json by themselves.
        levels = next(iter(self.named_boundaries.values()), config.boundaries)
        formula = formulas(config, tensors, [states[level][0] for level in levels], embeds)
        with torch.no_grad():
            steps = list(self.loaded().training_steps(chosen, embeds[None], STEPS))
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
    (rope,) = mixer.ropes
    f = Formulas(w, config.decoder.norm.eps, rope)
    parts = [part.double() for part in states]
    if config.fc_norm:
        parts = [f.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
    c = torch.cat(parts, dim=-1)
    z = f.linear(f.norm(c, "input_norm") if config.norm_before_fc else c, "fc")
    kept, results = list[tuple[Tensor, Tensor]](), list[Tensor]()
    index = torch.arange(length)
    for step in range(STEPS):
        e = F.pad(embeds.double()[step + 1 :], (0, 0, 0, step + 1))
        b = f.norm(z, f"{LAYER}.hidden_norm")
        u = torch.cat([f.norm(e, f"{LAYER}.input_layernorm"), b], dim=-1)
        q, k, v = (f.heads(u, LAYER, part, mixer.head_dim) for part in "qkv")
        q, k = (f.rotate(x, range(step, length + step)) for x in (q, k))
        kept.append((k, v))
        keys, values = (torch.cat(x) for x in zip(*kept, strict=True))
        n = torch.arange(len(keys))
        allowed = (n <= index[:, None]) | (n % length == index[:, None])  # step 0 up to t; each later step at t
        mixed = f.linear(attention(q, keys, values, allowed), f"{LAYER}.self_attn.o_proj")
        m = (b if config.norm_before_residual else z) + mixed
        z = m + f.mlp(m, LAYER)
        result = f.norm(z, "norm")
        results.append(result[: length - 1 - step])
        z = result if config.norm_output else z
    return results
