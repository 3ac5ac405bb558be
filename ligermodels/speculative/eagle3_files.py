"""Files of EAGLE-3 heads: written in one of the formats, and read in the format that is recognised."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ligermodels.convert import hub
from ligermodels.convert.config_json import read_json
from ligermodels.convert.export_spec import as_json
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.convert.safetensors_writer import save_checkpoint
from ligermodels.convert.weight_map import LazyTensor
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.families import family_of
from ligermodels.models.native import check_native
from ligermodels.models.state_dict import StateDict
from ligermodels.speculative import eagle3_formats as formats
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.files import TorchFile

if TYPE_CHECKING:
    from ligermodels.speculative.eagle3 import Eagle3Model

CONFIG, TORCH_FILE, LM_HEAD = "config.json", "pytorch_model.bin", "lm_head.weight"

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
    form, base, spec = formats.profile_named(profile), model.base, model.base.export_spec
    name = base_model if base_model is not None or spec is None else spec.base_name
    if name is None:
        raise InputError("base_model: config.json names the base model; give its folder or hub id")
    architectures = () if spec is None else _architectures(spec.hf_config)
    target = formats.Target(name, architectures, len(base.config.blocks))
    reshard(model)
    state = _state(model)
    if model.lm_head is None:
        state[LM_HEAD] = model.projection.rows(base.dtype)
    further = {} if model.vocabulary.is_whole else model.vocabulary.tables()  # vLLM refuses tables of all tokens
    if form.embedding:
        further[formats.EMBEDDING] = _embedding(model)
    dtype = str(model.head.reader.fc.weight.dtype).removeprefix("torch.")
    training = formats.Training(model.num_heads, model.decay, dtype)
    save_checkpoint(
        folder_to_write(folder),
        [
            *formats.weight_map(model.config, form.prefix).export(state),
            *(LazyTensor(key, tuple(x.shape), x.dtype, partial(torch.clone, x)) for key, x in further.items()),
        ],
        max_shard_size=2**63 - 1,
        files={CONFIG: as_json(form.config(model.config, target, training))},
        overwrite=overwrite,
        ranks=Ranks(state.values()),
    )


_AUX_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


def open_head(folder: Path, opened: ExitStack) -> tuple[dict[str, Any], StateDict]:
    """config.json, and the tensors by their names in speculators' form.

    Args:
        folder: folder of the head.
        opened: keeps the files open.

    Raises:
        CheckpointError: a file is missing or damaged, or two tensors have the same name in speculators' form.
    """
    config = read_json(folder / CONFIG)
    if (folder / TORCH_FILE).is_file() and not list(folder.glob("*.safetensors")):
        files: Any = TorchFile(folder / TORCH_FILE)
    else:
        files = opened.enter_context(Checkpoint(folder))
    tensors = dict[str, Tensor]()
    for name in files.headers:
        ours = name.removeprefix("model.")
        ours = f"layers.0.{ours.removeprefix('midlayer.')}" if ours.startswith("midlayer.") else ours
        ours = _AUX_NORMS.get(ours, ours)
        if ours in tensors:
            raise CheckpointError(f"{folder}: has two tensors for {ours}, one of them {name}")
        tensors[ours] = files.read(name)
    return config, StateDict(tensors)


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
    with reading(path, partial(open_head, path)) as (stored, reader):
        config = formats.read_config(stored, len(target.blocks), target.hidden_size)
        names, vocabulary = reader.headers, None
        if formats.D2T in names:
            vocabulary = DraftVocabulary.from_tables(names[formats.D2T], names.get(formats.T2D), target.vocab_size)
        own = LM_HEAD in names
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
        weight_map = formats.weight_map(config, "layers.0", lm_head=own)
        if base.device.type == "meta":
            weight_map.plan(names, _state(model))
        else:
            weight_map.load(reader, _state(model), progress)
            if formats.EMBEDDING in names:
                _take_embedding(model, path, names[formats.EMBEDDING])
    base.requires_grad_(False)
    return model


def _architectures(hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(hf_config.get("architectures") or [family_of(hf_config).causal_lm])


def _state(model: Eagle3Model) -> dict[str, Tensor]:
    state = {f"head.{name}": tensor.detach() for name, tensor in persistent_tensors(model.head).items()}
    return state if model.lm_head is None else state | {LM_HEAD: model.lm_head.weight.detach()}


@torch.no_grad()
def _embedding(model: Eagle3Model) -> Tensor:
    """(V, H), the embeddings that the head reads: where they are the base model's, scaled as it scales them."""
    return model.embeddings(torch.arange(model.base.config.vocab_size, device=model.base.device)[None])[0]


def _take_embedding(model: Eagle3Model, path: Path, stored: Tensor) -> None:
    """Keep the embedding of a head, frozen, unless it is the base model's."""
    ours = _embedding(model)
    if stored.shape != ours.shape:
        raise CheckpointError(
            f"{path}: {formats.EMBEDDING} has the shape {tuple(stored.shape)}, the model's {tuple(ours.shape)}"
        )
    own = stored.to(ours)
    if not torch.equal(own, ours):
        model.embed = nn.Embedding.from_pretrained(own, freeze=True)
