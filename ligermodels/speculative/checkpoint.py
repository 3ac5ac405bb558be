"""The heads of a Medusa model, out to the formats of other programs and in from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.linear_parts import check_exportable
from ligermodels.layers.quantized import weight_codes
from ligermodels.layers.sharding import gathered, reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.files import Heads
from ligermodels.speculative.profiles import PROFILES, HeadsShape, Profile

ROWS = 4096
"""Of an lm_head, compared at a time."""


def tensors_to_export(base: CausalLM, heads: nn.ModuleList, shape: HeadsShape, profile: Profile) -> dict[str, Tensor]:
    """Native name -> tensor of `heads`, each a `MedusaHead` on `base`, and of what else `profile` holds.

    Raises InputError for heads that it cannot hold, ConfigError for a base model that it cannot.
    """
    reshard(base)
    reshard(heads)
    state = _state(heads)
    if profile.lm_heads != "each" and any(".lm_head." in name for name in state):
        raise InputError(
            f"profile {profile.name!r} has one lm_head for all heads, but each of these has its own; the profiles of "
            f"separate lm_heads are {', '.join(p.name for p in PROFILES.values() if p.lm_heads == 'each')}"
        )
    if profile.max_layers is not None and shape.num_layers > profile.max_layers:
        raise InputError(
            f"profile {profile.name!r} takes {profile.max_layers} ResBlock a head, these have {shape.num_layers}"
        )
    lm_head = base.head.state_dict()
    if "bias" in lm_head:
        raise InputError(f"profile {profile.name!r} has no place for the lm_head's bias")
    if not any(".lm_head." in name for name in state):
        for i in range(profile.projections(shape)):
            check_exportable(base.head)
            if lm_head.keys() != {"weight"}:
                raise InputError(
                    f"profile {profile.name!r} repeats the base's lm_head, but base.head is a "
                    f"{type(base.head).__name__} of {', '.join(lm_head)}: put an LMHead in its place"
                )
            state[f"heads.{i}.lm_head.weight"] = lm_head["weight"]
    if profile.prefix:
        if base.export_spec is None:
            raise ConfigError(f"profile {profile.name!r} holds the base model too, which has no export_spec")
        base.checked_export_spec()
        state = {**{name: tensor.detach() for name, tensor in persistent_tensors(base).items()}, **state}
    return state


def repeats_lm_head(base: CausalLM, folder: Path, found: Heads) -> bool:
    """Whether all lm_heads `found` in `folder`, if any, are that of `base`: bit for bit, once cast to its dtype, and
    rounded as it is.

    They are compared one by one, a few rows at a time, up to the first that differ. Raises CheckpointError when one
    lm_head is for all heads, and is not the base's.
    """
    shape = HeadsShape(found.num_heads, found.num_layers, base.config.hidden_size, base.config.vocab_size)
    is_base = _comparison(base)
    for name in found.profile.lm_head_names(shape):
        if name in found.reader.headers and is_base(found.reader.read(name)):
            continue
        if found.profile.lm_heads == "one":
            raise CheckpointError(
                f"{folder}: no {name} that is the base model's lm_head [{shape.vocab_size}, {shape.hidden_size}]: the "
                "heads are incomplete, or were made for another; give the base they were trained on"
            )
        return False
    return True


def load_heads(
    heads: nn.ModuleList,
    shape: HeadsShape,
    found: Heads,
    repeated: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Fill new `heads` with those `found`; errors as of `MedusaModel.from_pretrained`.

    repeated: the file's lm_heads are the base's (`repeats_lm_head`), as those of new heads are, and are passed over.
    """
    state = _state(heads)
    if not found.biases:
        state = {name: tensor for name, tensor in state.items() if not name.endswith(".linear.bias")}
    if repeated:
        state = {name: tensor for name, tensor in state.items() if ".lm_head." not in name}
    found.weight_map(shape, lm_heads=not repeated).load(found.reader, state, progress=progress)


def _comparison(base: CausalLM) -> Callable[[Tensor], bool]:
    """Whether a stored lm_head is that of `base`, which one with a bias never is."""
    codes = weight_codes(base.head)
    if codes is not None and base.head.bias is None:
        return partial(codes.is_of, dtype=base.dtype)
    lm_head = base.head.state_dict()
    if lm_head.keys() != {"weight"}:
        return lambda _: False
    return partial(_same_bits, weight=gathered(lm_head["weight"]))


def _same_bits(stored: Tensor, weight: Tensor) -> bool:
    return stored.shape == weight.shape and all(
        torch.equal(_bits(rows.to(weight)), _bits(own))
        for rows, own in zip(stored.split(ROWS), weight.split(ROWS), strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _state(heads: nn.ModuleList) -> dict[str, Tensor]:
    return {f"heads.{name}": parameter.data for name, parameter in heads.named_parameters()}
