"""The tensors of Medusa heads in files of other programs: which are written, and which repeat the base model's."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.linear_parts import check_exportable
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.files import Heads
from ligermodels.speculative.head_files import copies, head_state
from ligermodels.speculative.profiles import PROFILES, HeadsShape, Profile


def tensors_to_export(base: CausalLM, heads: nn.ModuleList, shape: HeadsShape, profile: Profile) -> dict[str, Tensor]:
    """The tensors of an export, by native name.

    Args:
        base: the base model.
        heads: its heads, each a `MedusaHead`.
        shape: numbers and sizes of the heads.
        profile: the format.

    Returns:
        The tensors of the heads; an lm_head for each projection of the format; and the base model's tensors, if the
        format holds the base model.

    Raises:
        InputError: the format cannot hold these heads.
        ConfigError: the format holds the base model, which has no config.json or no longer matches it.
    """
    reshard(base)
    reshard(heads)
    state = head_state(heads, "heads")
    if profile.lm_heads != "each" and any(".lm_head." in name for name in state):
        raise InputError(
            f"profile {profile.name!r} has one lm_head for all heads, but each of these heads has its own; profiles "
            f"with separate lm_heads: {', '.join(p.name for p in PROFILES.values() if p.lm_heads == 'each')}"
        )
    if profile.max_layers is not None and shape.num_layers > profile.max_layers:
        raise InputError(
            f"profile {profile.name!r} takes {profile.max_layers} ResBlock per head, but these heads have "
            f"{shape.num_layers}; choose another profile"
        )
    lm_head = base.head.state_dict()
    if "bias" in lm_head:
        raise InputError(f"profile {profile.name!r} cannot hold the bias of the lm_head")
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
            raise ConfigError(f"profile {profile.name!r} holds the base model too, but base has no export_spec")
        base.checked_export_spec()
        state = {**{name: tensor.detach() for name, tensor in persistent_tensors(base).items()}, **state}
    return state


def repeats_lm_head(base: CausalLM, folder: Path, stored: Heads) -> bool:
    """Whether every stored lm_head equals the base's lm_head bit for bit, in the base's dtype and quantisation.

    The lm_heads are compared one after another, a few rows at a time, until one differs.

    Args:
        base: the base model.
        folder: the folder of the heads, for messages.
        stored: the heads in the folder.

    Returns:
        The answer; True if no lm_head is stored.

    Raises:
        CheckpointError: the format has a single lm_head for all heads, and the stored one is missing or differs.
    """
    shape = HeadsShape(stored.num_heads, stored.num_layers, base.config.hidden_size, base.config.vocab_size)
    is_base = copies(base)
    for name in stored.profile.lm_head_names(shape):
        if name in stored.reader.headers and is_base(stored.reader.read(name)):
            continue
        if stored.profile.lm_heads == "one":
            raise CheckpointError(
                f"{folder}: no {name} that is the base model's lm_head [{shape.vocab_size}, {shape.hidden_size}]: the "
                "heads are incomplete, or were trained on another base model; give the base model of these heads"
            )
        return False
    return True
