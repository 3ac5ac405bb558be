"""The heads of a Medusa model, out to the formats of other programs and in from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from ligermodels.convert.medusa_files import Heads, save_heads
from ligermodels.convert.medusa_profiles import PROFILES, HeadsShape, Profile
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.medusa_head import MedusaHead
from ligermodels.model import CausalLM


def export_heads(
    base: CausalLM,
    heads: nn.ModuleList,
    shape: HeadsShape,
    folder: Path,
    profile: Profile,
    *,
    base_model: str | None,
    max_shard_size: int | str,
    overwrite: bool,
) -> None:
    """Write `heads`, each a `MedusaHead` on `base`; arguments and errors as of `MedusaModel.export`."""
    if profile.lm_heads != "each" and cast(MedusaHead, heads[0]).lm_head is not None:
        raise InputError(
            f"profile {profile.name!r} has one lm_head for all heads, but each of these has its own; the profiles of "
            f"separate lm_heads are {', '.join(p.name for p in PROFILES.values() if p.lm_heads == 'each')}"
        )
    if profile.max_layers is not None and shape.num_layers > profile.max_layers:
        raise InputError(
            f"profile {profile.name!r} takes {profile.max_layers} ResBlock a head, these have {shape.num_layers}"
        )
    if base.head.bias is not None:
        raise InputError(f"profile {profile.name!r} has no place for the lm_head's bias")
    state, origin = _state(base, heads, profile.projections(shape)), base.origin
    if profile.prefix:
        if origin is None:
            raise ConfigError(
                f"profile {profile.name!r} holds the base model too, which has no origin to be written as"
            )
        state = {**{name: p.data for name, p in base.named_parameters()}, **state}
    if base_model is None and origin is not None:
        base_model = origin.hf_config.get("_name_or_path") or None
    save_heads(
        folder,
        profile,
        shape,
        state,
        base_model=base_model,
        base=origin if profile.prefix else None,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


def load_heads(
    base: CausalLM,
    heads: nn.ModuleList,
    shape: HeadsShape,
    folder: Path,
    found: Heads,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill new `heads` on `base` with those `found` in `folder`; errors as of `MedusaModel.from_pretrained`."""
    state = _state(base, heads, found.profile.projections(shape))
    if not found.biases:
        state = {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}
    if copied := found.profile.lm_heads == "one":
        # The file's copy of the base's lm_head must not overwrite it, but has to be the same.
        state["heads.0.lm_head.weight"] = torch.empty_like(base.head.weight)
    weights = found.weight_map(shape)
    weights.plan(found.reader.headers, state)
    weights.load(found.reader, state, progress=progress)
    if copied and not torch.equal(state["heads.0.lm_head.weight"], base.head.weight):
        raise CheckpointError(f"{folder}: its lm_head is not the base model's: the heads were made for another")


def _state(base: CausalLM, heads: nn.ModuleList, lm_heads: int) -> dict[str, Tensor]:
    """Native name -> tensor: the heads' own, and the base's lm_head for those of the first `lm_heads` without one."""
    state = {f"heads.{name}": parameter.data for name, parameter in heads.named_parameters()}
    for i in range(lm_heads):
        state.setdefault(f"heads.{i}.lm_head.weight", base.head.weight.data)
    return state
