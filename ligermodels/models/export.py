"""Methods that export a model: to a Hugging Face checkpoint, to the hub, and to a state dict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ligermodels.convert.export_spec import ExportSpec, Keep
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.safetensors_writer import parse_size
from ligermodels.convert.weight_map import FLOATS, in_buckets
from ligermodels.errors import ConfigError, InputError, short
from ligermodels.layers.initialization import persistent_tensors, skip_init
from ligermodels.layers.linear_parts import check_exportable
from ligermodels.models.differences import first_difference, module_difference
from ligermodels.models.families import composed
from ligermodels.models.state_dict import export_state_dict, layout_in_memory, load_state_dict

if TYPE_CHECKING:
    from ligermodels.models.decoder import Decoder, DecoderConfig


class ExportMixin(nn.Module):
    """Export methods of a model that has a `config` and an `export_spec`."""

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
        config = composed(spec.hf_config)
        difference = first_difference(self.config, config, "config")
        if difference is None:
            with torch.device("meta"), skip_init():
                difference = module_difference(self, CausalLM(config, spec))
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
        keep: Keep = "all",
    ) -> None:
        """Write a Hugging Face checkpoint: safetensors, config.json, tokenizer and generation_config.json.

        Python modules of the checkpoint that `auto_map` in its configs names are copied. The files replace an older
        checkpoint all at once or, on an error, not at all. If the model is sharded, all ranks call this and rank 0
        writes.

        Args:
            folder: folder to write; it is created if it does not exist.
            max_shard_size: largest file in bytes, or text such as "5GB" (10^9) or "5GiB" (2^30).
            overwrite: replace a checkpoint that is in `folder`. Other files there stay.
            keep: "all" writes the whole checkpoint that the model was loaded from: tensors outside the language model
                (a vision tower, draft heads) are copied from it unchanged. "without-heads" leaves out draft heads, so
                that any loader opens the result. "model" writes the language model alone.

        Raises:
            InputError: the model has LoRA (call `save_adapter` or `merge_lora`) or quantised weights (call
                `dequantize`), or an argument is not usable.
            ConfigError: the model was built from a `DecoderConfig` and has no `export_spec`, or `model.config` differs
                from the config that its config.json composes to; the message names the field.
            CheckpointError: `folder` is not empty, in use, or cannot be written; or tensors outside the language model
                are to be written, and the checkpoint that holds them is gone, or they do not fit the model any more.

        Examples:
            >>> import ligermodels as lm
            >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B")
            >>> model.save_pretrained("out", max_shard_size="2GB")
        """
        spec = self.checked_export_spec()
        spec.save(folder, persistent_tensors(self), max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)

    def iter_hf_weights(
        self, *, dtype: torch.dtype | None = None, bucket_bytes: int | str = "1GB"
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """The weights with the names and shapes of `save_pretrained`, in buckets, to send them to a server: for the
        `load_weights` of vLLM or SGLang.

        If the model is sharded, all ranks call this and iterate to the end, and each rank gets all tensors. A bucket is
        gathered when the iterator reaches it; if that fails on one rank, the iterators of the other ranks raise a
        CheckpointError that names the rank. Nothing is copied to the host. Tensors that
        `save_pretrained` copies from the source checkpoint (a vision tower, draft heads) are left out, as is the head
        of a tied model.

        Args:
            dtype: dtype of floating-point tensors. Default: the dtypes that `save_pretrained` writes.
            bucket_bytes: largest bucket in bytes, or text such as "1GB" (10^9) or "1GiB" (2^30). A larger tensor is a
                bucket of its own.

        Returns:
            An iterator of buckets: lists of a name and a contiguous tensor on the model's device, detached. A tensor
            may share memory with the model: use it before the model changes.

        Raises:
            InputError: the model has LoRA (call `merge_lora`) or quantised weights (call `dequantize`), or an argument
                is not usable.
            ConfigError: the model was built from a `DecoderConfig` and has no `export_spec`, or `model.config` differs
                from the config that its config.json composes to; the message names the field.

        Examples:
            >>> import torch
            >>> import ligermodels as lm
            >>> model = lm.from_pretrained("Qwen/Qwen3-0.6B")
            >>> for bucket in model.iter_hf_weights(dtype=torch.bfloat16):
            ...     for name, tensor in bucket:
            ...         pass  # server.load_weights(bucket)
        """
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype in FLOATS)):
            raise InputError(f"dtype: must be one of {', '.join(sorted(map(str, FLOATS)))}, got {short(dtype)}")
        spec, limit = self.checked_export_spec(), parse_size(bucket_bytes, "bucket_bytes")
        state = persistent_tensors(self)
        return in_buckets(spec.whole_map.export(state), limit, dtype, Ranks.that_hold(state.values()))

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
        keep: Keep = "all",
    ) -> str:
        """Upload a Hugging Face checkpoint of the model to the hub.

        The repository is created if it does not exist; weights of an earlier checkpoint in it are removed. If it has
        no README.md, it gets a model card with license, language, tags and text of the base model's card. The base
        model's license files are uploaded too. If the model is sharded, all ranks call this and rank 0 uploads.

        Args:
            repo_id: "owner/name", or "name" for the owner of the token.
            commit_message: message of the commit. Default: "Upload model".
            private: whether a new repository is private. Default: the owner's setting.
            token: hub token. Default: the token that `hf auth login` or HF_TOKEN set.
            revision: branch to upload to; it is created if it does not exist. Default: "main".
            create_pr: open a pull request instead of committing to the branch.
            max_shard_size: largest file in bytes, or text such as "5GB" (10^9) or "5GiB" (2^30).
            keep: "all" uploads the whole checkpoint that the model was loaded from, including tensors outside the
                language model; "without-heads" leaves out draft heads; "model" uploads the language model alone.

        Returns:
            The URL of the commit or pull request; "" on ranks other than 0.

        Raises:
            HubError: the repository cannot be written, or the base model's card cannot be fetched.
            InputError: the model has LoRA (call `merge_lora`) or quantised weights (call `dequantize`), or an argument
                is not usable.
            ConfigError: the model was built from a `DecoderConfig` and has no `export_spec`, or `model.config` differs
                from the config that its config.json composes to; the message names the field.
            CheckpointError: the temporary files cannot be written; or tensors outside the language model are to be
                written, and the checkpoint that holds them is gone, or they do not fit the model any more.

        Examples:
            >>> model.push_to_hub("my-name/my-model", private=True)  # doctest: +SKIP
            'https://huggingface.co/my-name/my-model/commit/...'
        """
        from ligermodels.convert.publish import Destination, publish

        spec, state = self.checked_export_spec(), persistent_tensors(self)
        return publish(
            Destination(repo_id, commit_message, private, token, revision, create_pr),
            partial(spec.save, state=state, max_shard_size=max_shard_size, keep=keep),
            source=spec.source,
            ranks=Ranks(state.values()),
        )

    def hf_state_dict(self) -> dict[str, Tensor]:
        """The weights with the names and shapes of a loaded transformers model (5 or later), detached: of the language
        model alone.

        Tensors that transformers stores in the same way share memory with the model; parts of fused weights are copies.

        Raises:
            InputError: the model has LoRA (call `merge_lora`) or quantised weights (call `dequantize`).
        """
        check_exportable(self)
        return export_state_dict(self, layout_in_memory(self.require_export_spec(), self.config))

    def load_hf_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Copy the weights of a transformers model's `state_dict()`, or of a checkpoint, into this model.

        Args:
            state_dict: name -> tensor, on any device and in any float dtype; values are cast to the model's dtype. If
                the model was loaded from a checkpoint with more than a language model (a vision tower, draft heads),
                the names may also be of that whole checkpoint; tensors outside the language model are left out.

        Raises:
            CheckpointError: tensors are missing, unexpected or misshapen; the message lists all of them, and the model
                is unchanged.
            InputError: the model has LoRA (call `merge_lora`) or quantised weights (call `dequantize`).
        """
        check_exportable(self)
        load_state_dict(self, state_dict)
