"""A language model as a Hugging Face checkpoint, on disk, on the hub and in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ligermodels.convert.export_spec import ExportSpec, Keep
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import ConfigError
from ligermodels.layers.initialization import persistent_tensors, skip_init
from ligermodels.layers.linear_parts import check_exportable
from ligermodels.layers.sharding import reshard
from ligermodels.models.differences import first_difference, module_difference
from ligermodels.models.families import family_of
from ligermodels.models.state_dict import export_state_dict, layout_in_memory, load_state_dict

if TYPE_CHECKING:
    from ligermodels.models.decoder import Decoder, DecoderConfig


class ExportMixin(nn.Module):
    """What a model with a `config` and an `export_spec` is exported by."""

    if TYPE_CHECKING:
        config: DecoderConfig
        export_spec: ExportSpec | None
        decoder: Decoder

    def checked_export_spec(self) -> ExportSpec:
        """The `export_spec`, if the checkpoint that it writes describes this model.

        Raises:
            ConfigError: config.json composes to another model.
            InputError: the model has LoRA or quantised weights.
        """
        from ligermodels.models.causal_lm import CausalLM  # imports this file

        check_exportable(self)
        spec = self.require_export_spec()
        composed = family_of(spec.hf_config).decoder_config(spec.hf_config)
        difference = first_difference(self.config, composed, "config")
        if difference is None:
            with torch.device("meta"), skip_init():
                difference = module_difference(self, CausalLM(composed, spec))
        if difference is not None:
            where, ours, theirs = difference
            raise ConfigError(
                f"model.{where} is {ours}, but the model's config.json composes to {theirs}: it would be loaded "
                "as another model. Change model.hf_config so that it says the same, or change the config back"
            )
        return spec

    def require_export_spec(self) -> ExportSpec:
        """The `export_spec`; ConfigError when there is none."""
        if (other := getattr(self.decoder, "exported_by", None)) is not None:
            raise ConfigError(f"this model computes by the modules of another one: export it by {other}")
        if self.export_spec is None:
            raise ConfigError(
                "this model was composed by hand: set model.export_spec (hf_config and weight map) to export it"
            )
        return self.export_spec

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        keep: Keep = "model",
    ) -> None:
        """Write a Hugging Face checkpoint: safetensors, config.json, tokenizer and generation files.

        With `keep` "all" it is the checkpoint that the model was loaded from, with the weights of the model in it and
        the others (a vision tower's) as they were; that must be where it was. Of a sharded model all ranks call this,
        and the first one writes.

        Raises:
            InputError: the model has LoRA, which `save_adapter` writes and `merge_lora` merges; or quantised weights,
                see `dequantize`.
            ConfigError: the model was composed by hand and has no `export_spec`; or its config is no longer what its
                config.json composes to: the field is named.
            CheckpointError: the folder is in use, or the disk is full; nothing is left half-written. Or the checkpoint
                that `keep` refers to is not there.
        """
        spec = self.checked_export_spec()
        reshard(self)
        spec.save(folder, persistent_tensors(self), max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "5GB",
        keep: Keep = "model",
    ) -> str:
        """Upload the checkpoint that `save_pretrained` writes, and return the URL of the commit or pull request.

        The repository is made if there is none. One without a README.md gets a model card, with license, language, tags
        and text of the base model's card; the base's license files go along. Of a sharded model all ranks call this:
        the first one uploads, and the others return "".

        Args:
            repo_id: "owner/name", or "name" for the owner of the token.
            commit_message: "Upload model" by default.
            private: of a new repository; by default the owner's setting.
            token: of the hub; by default the one that `hf auth login` or HF_TOKEN set.
            revision: the branch; made if there is none.
            create_pr: open a pull request instead.
            max_shard_size, keep: as of `save_pretrained`.

        Raises HubError when the repository cannot be written or the base's card cannot be fetched; else as
        `save_pretrained`.
        """
        from ligermodels.convert.publish import Destination, publish

        spec, state = self.checked_export_spec(), persistent_tensors(self)
        reshard(self)
        return publish(
            Destination(repo_id, commit_message, private, token, revision, create_pr),
            partial(spec.save, state=state, max_shard_size=max_shard_size, keep=keep),
            source=spec.source,
            ranks=Ranks(state.values()),
        )

    def hf_state_dict(self) -> dict[str, Tensor]:
        """The weights under the names, and in the shapes, of a loaded transformers model (5 or later), detached.

        Those that are stored alike share their memory with the model's, the others are copies. InputError of a model
        with LoRA: see `merge_lora`; or with quantised weights: see `dequantize`.
        """
        check_exportable(self)
        return export_state_dict(self, layout_in_memory(self.require_export_spec(), self.config))

    def load_hf_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the weights of a transformers model's `state_dict()`, or of a checkpoint, on any device.

        They are cast to the model's dtype. Raises CheckpointError that lists every missing, unexpected or misshapen
        tensor; then nothing has changed.
        """
        check_exportable(self)
        load_state_dict(self, state_dict)
