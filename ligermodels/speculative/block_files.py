"""Files of DFlash and DSpark heads: written in one of the formats, and read in the format that is recognised."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ligermodels.convert import hub
from ligermodels.convert.journal import reading
from ligermodels.errors import CheckpointError, InputError
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import DFLASH_TYPE, DSPARK_TYPE, require_type
from ligermodels.models.native import check_native
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative import block_formats as formats
from ligermodels.speculative.draft_files import LM_HEAD, Target, load_tensors, open_head, stored_vocabulary, write_head
from ligermodels.speculative.draft_projection import own_lm_head

if TYPE_CHECKING:
    from ligermodels.speculative.block_draft import BlockDraftModel

Model = TypeVar("Model", bound="BlockDraftModel")


def save_head(
    model: BlockDraftModel,
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
    form, target = formats.profile_named(profile, model.config), Target.of(model, base_model)
    config = form.config(model.config, target, model.training_options.num_anchors)
    config["dtype"] = str(model.head.dtype).removeprefix("torch.")
    if model.lm_head is not None and not form.heads:
        raise InputError(f"profile {profile!r}: holds no lm_head of the head's own; export another profile")
    weight_map = formats.weight_map(model.config, lm_head=form.heads)
    write_head(model, folder, weight_map, config, embedding=form.heads, lm_head=form.heads, overwrite=overwrite)


def load_head(
    model_class: type[Model],
    base: CausalLM,
    folder: str | os.PathLike[str],
    training: Mapping[str, Any],
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a head, and freeze the base model's parameters. On the meta device only names and shapes are checked.

    Args:
        model_class: class of the model.
        base: the base model, in memory.
        folder: folder or hub id of the head.
        training: fields of `BlockTraining`.
        progress: called with (bytes loaded, bytes in total) of the head.

    Returns:
        The model with the head. An embedding and an lm_head that equal the base model's are the base model's.

    Raises:
        CheckpointError: files or tensors are missing, damaged, or made for another base model.
        ConfigError: config.json is not of such a head, or has a bad value.
        HubError: the files cannot be fetched.
    """
    check_native(base, "base")
    path, target = hub.resolve(folder), base.config
    with reading(path, partial(open_head, path, names=formats.tensor_name)) as (stored, reader):
        kind = DSPARK_TYPE if model_class.from_anchor else DFLASH_TYPE
        require_type(stored, kind, path)
        config = formats.read_config(stored, kind, target.hidden_size)
        vocabulary = stored_vocabulary(reader.headers, target.vocab_size)
        try:
            model = model_class(base, config, vocabulary, **training)
        except InputError as error:
            raise CheckpointError(f"{path}: {error}") from None
        own = _has_other_lm_head(model, reader)
        if own:
            model.lm_head = own_lm_head(base, model.vocabulary).requires_grad_(False)
        load_tensors(model, path, formats.weight_map(config, lm_head=own), reader, progress)
    return model


def _has_other_lm_head(model: BlockDraftModel, reader: StateDict) -> bool:
    """Whether a file has an lm_head that differs from the base model's rows for the draft vocabulary."""
    if LM_HEAD not in reader.headers or model.base.device.type == "meta":
        return False
    stored, rows = reader.headers[LM_HEAD], model.projection.rows(model.base.dtype)
    return stored.shape != rows.shape or not torch.equal(stored.to(rows), rows)
