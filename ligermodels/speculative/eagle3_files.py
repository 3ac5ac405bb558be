"""Files of EAGLE-3 heads: written in one of the formats, and read in the format that is recognised."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ligermodels.convert import hub
from ligermodels.convert.journal import reading
from ligermodels.errors import CheckpointError, InputError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import EAGLE_TYPE, require_type
from ligermodels.models.native import check_native
from ligermodels.speculative import eagle3_formats as formats
from ligermodels.speculative.draft_files import LM_HEAD, Target, load_tensors, open_head, stored_vocabulary, write_head

if TYPE_CHECKING:
    from ligermodels.speculative.eagle3 import Eagle3Model

Model = TypeVar("Model", bound="Eagle3Model")


def save_head(
    model: Eagle3Model,
    folder: str | os.PathLike[str],
    profile: str,
    base_model: str | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a head, completely or not at all.

    Args:
        model: the model with the head.
        folder: created if need be.
        profile: name of the format.
        base_model: the base model's hub id or folder, for config.json. Default: the checkpoint that the base model was
            loaded from.
        overwrite: replace a checkpoint in the folder.

    Raises:
        InputError: the profile is unknown, cannot hold this head, or needs `base_model`.
        CheckpointError: the folder is in use or cannot be written.
    """
    form, target = formats.profile_named(profile), Target.of(model, base_model)
    dtype = str(model.head.reader.fc.weight.dtype).removeprefix("torch.")
    config = form.config(model.config, target, formats.Training(model.num_heads, model.decay, dtype))
    weight_map = formats.weight_map(model.config, form.prefix)
    write_head(model, folder, weight_map, config, embedding=form.embedding, lm_head=True, overwrite=overwrite)


_AUX_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


def speculators_name(stored: str) -> str:
    """The name in speculators' form of a tensor in another form."""
    name = f"layers.0.{stored.removeprefix('midlayer.')}" if stored.startswith("midlayer.") else stored
    return _AUX_NORMS.get(name, name)


def load_head(
    model_class: type[Model],
    base: CausalLM,
    folder: str | os.PathLike[str],
    options: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a head, and freeze the base model's parameters. On the meta device only names and shapes are checked.

    Args:
        model_class: class of the model.
        base: the base model, in memory.
        folder: folder or hub id of the head.
        options: further arguments of the class.
        progress: called with (bytes loaded, bytes in total) of the head.

    Returns:
        The model with the head. A head without an lm_head uses the base model's, one without an embedding too.

    Raises:
        CheckpointError: files or tensors are missing, damaged, or made for another base model.
        ConfigError: config.json is not of an EAGLE-3 head, or has a bad value.
        HubError: the files cannot be fetched.
    """
    check_native(base, "base")
    path, target = hub.resolve(folder), base.config
    with reading(path, partial(open_head, path, names=speculators_name)) as (stored, reader):
        require_type(stored, EAGLE_TYPE, path)
        config = formats.read_config(stored, len(target.blocks), target.hidden_size)
        vocabulary, own = stored_vocabulary(reader.headers, target.vocab_size), LM_HEAD in reader.headers
        decay = formats.stored_decay(stored)
        defaults = {
            "num_steps": formats.stored_steps(stored) or formats.STEPS,
            "decay": formats.DECAY if decay is None else decay,
        }
        options = {**defaults, **{name: value for name, value in options.items() if value is not None}}
        try:
            model = model_class(base, config, vocabulary, lm_head="own" if own else "shared", **options)
        except InputError as error:
            raise CheckpointError(f"{path}: {error}") from None
        load_tensors(model, path, formats.weight_map(config, "layers.0", lm_head=own), reader, progress)
    return model
