"""A native model as a transformers model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from ligermodels.convert.export_spec import as_json
from ligermodels.convert.source_checkpoint import SourceCheckpoint, headless
from ligermodels.errors import CheckpointWarning, ConfigError, InputError
from ligermodels.integrations.decoder import HFDecoder
from ligermodels.integrations.in_place import nativize, nativize_as
from ligermodels.integrations.modules import has_hooks
from ligermodels.integrations.settings import changed_setting
from ligermodels.layers.lm_head import scaled_logits
from ligermodels.layers.sharding import is_sharded
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.native import check_native
from ligermodels.models.state_dict import layout_in_memory


def wrap(model: CausalLM) -> Any:
    """Move a native model into a transformers model that computes natively (see `nativize`), for Trainer, TRL and PEFT.

    The weights get transformers' names, so that adapters find their projections. Frozen parameters stay frozen, and the
    attention backend stays. `model` stays usable: it shares its modules and parameters with the result, also trained or
    adapted ones. Make optimizers after this call, and export by `save_pretrained` of the result. While the weights
    move, memory holds them twice.

    A CheckpointWarning says so if the checkpoint has tensors outside the language model, which transformers does not
    write; a UserWarning, if the model has hooks on its modules, which are left out, or settings that transformers does
    not have (`activation_checkpointing`, `batch_invariant`, `router_z_loss_coef`). The routers are transformers':
    losses and log-probabilities of `model` are an InputError while losses of its routers have a weight.

    Raises:
        ConfigError: the model was composed by hand, or its config has been changed since it was composed from its
            config.json; or transformers has no model of its `model_type`.
        InputError: transformers' model of this family cannot compute natively; or `model` is no native model, or is
            wrapped already, or is sharded.

    Examples:
        >>> hf = wrap(lm.from_pretrained("Qwen/Qwen3-0.6B"))
        >>> trainer = SFTTrainer(hf, train_dataset=dataset)
    """
    check_native(model, "wrap")
    if isinstance(model.decoder, _Decoder):
        raise InputError("wrap: this model is wrapped already; use the transformers model that wrap returned")
    if is_sharded(model):
        raise InputError(
            "wrap: the model is sharded, and each rank would get whole weights; wrap it first, then let the trainer of "
            "the transformers model shard that"
        )
    spec = model.checked_export_spec()
    _warn_of_extra(spec.source)
    _warn_of_settings(model)
    fields = headless(spec.hf_config, spec.head_fields)  # transformers writes no draft heads
    fields.pop("architectures", None)
    try:
        config = AutoConfig.for_model(**fields)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (ValueError, KeyError):
        raise ConfigError(f"wrap: transformers has no model of model_type {fields['model_type']!r}") from None
    place: dict[str, Any] = {} if model.device.type == "cpu" else {"device_map": {"": model.device}}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    mappings = layout_in_memory(spec, model.config).mappings
    frozen_there = {view.source for mapping in mappings if mapping.target in frozen for view in mapping.views}
    hf = kind.from_pretrained(None, config=config, state_dict=model.hf_state_dict(), dtype=model.dtype, **place)
    # By its path, trainers load a reference model.
    hf.name_or_path = hf.config.name_or_path = "" if spec.source is None else str(spec.source.folder)
    if spec.generation_config is not None:
        hf.generation_config = _as_loaded(spec.generation_config)
    for name in {name for name, _ in hf.named_parameters()} & frozen_there:
        hf.get_parameter(name).requires_grad_(False)
    nativize_as(hf.train(model.training), partial(_with_backends_of, model.config))
    mode = model.activation_checkpointing
    model.decoder = _Decoder(hf, model)
    model.head = cast(Any, _Head(hf))
    model.activation_checkpointing = mode
    return hf


def _with_backends_of(ours: DecoderConfig, config: DecoderConfig) -> DecoderConfig:
    """`config` with the attention backends of `ours`, which no config.json names."""
    pairs = zip(ours.blocks, config.blocks, strict=True)
    blocks = (block.with_attention_backend(getattr(own.mixer, "backend", "auto")) for own, block in pairs)
    return replace(config, blocks=tuple(blocks))


def _as_loaded(fields: Mapping[str, Any]) -> GenerationConfig:
    """The generation config that transformers loads from a file. Unlike a config in memory it is saved again even if
    some of its values have no effect, such as a temperature without do_sample."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "generation_config.json").write_text(as_json(fields), encoding="utf-8")
        return GenerationConfig.from_pretrained(folder)


def _warn_of_extra(source: SourceCheckpoint | None) -> None:
    if source is not None and source.extra:
        warnings.warn(
            f"wrap: {len(source.extra)} tensors of {source.folder} are outside the language model, such as "
            f"{next(iter(source.extra))}; save_pretrained of the transformers model does not write them. After "
            "training, load_hf_state_dict of a native model takes the weights, and its save_pretrained writes all",
            CheckpointWarning,
            stacklevel=3,
        )


def _warn_of_settings(model: CausalLM) -> None:
    settings = {"activation_checkpointing": "none", "batch_invariant": False, "router_z_loss_coef": 0}
    kept = [name for name, default in settings.items() if getattr(model, name) != default]
    kept += ["hooks"] * has_hooks((*model.decoder.modules(), *model.head.modules()))
    if kept:
        warnings.warn(
            f"wrap: the transformers model does not get {' and '.join(kept)} of the native model; use its own, such as "
            "gradient_checkpointing_enable()",
            stacklevel=3,
        )


def from_pretrained(name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """transformers' `AutoModelForCausalLM.from_pretrained(name_or_path, **options)`, computing natively."""
    return nativize(AutoModelForCausalLM.from_pretrained(name_or_path, **options))


class _Decoder(HFDecoder):
    """The decoder of a native model on the modules of a transformers model."""

    exported_by = "the save_pretrained, push_to_hub or state_dict of the transformers model that wrap returned"

    def __init__(self, hf: Any, model: CausalLM) -> None:
        backbone = hf.get_decoder()
        super().__init__(backbone, hf.native.config, backbone.native.layer.ropes)
        self.hf = hf
        self.has_routers = any(block.expert_router is not None for block in self.config.blocks)
        self.__dict__["model"] = model  # no submodule

    def forward(self, input_ids: Tensor | None = None, **inputs: Any) -> Tensor:
        """See `Decoder.forward`."""
        if "native" not in vars(self.hf):
            raise InputError("restore has undone nativize on the transformers model of this one; nativize it again")
        if change := changed_setting(self.hf, self.hf.native.config_settings):
            raise InputError(f"{change} of the transformers model was changed after wrap; call that model instead")
        model: CausalLM = self.__dict__["model"]
        has_router_loss = model.config.router_aux_loss_coef or (model.training and model.router_z_loss_coef)
        if inputs.get("router_outputs") is not None and has_router_loss:
            raise InputError(
                "labels: losses of the routers (router_aux_loss_coef, router_z_loss_coef) are part of the loss, and "
                "this model has the routers of transformers. Call the transformers model that wrap returned, with "
                "output_router_logits=True; or set model.config = dataclasses.replace(model.config, "
                "router_aux_loss_coef=0.0) and model.router_z_loss_coef = 0"
            )
        return super().forward(input_ids, **inputs)


class _Head(nn.Module):
    """The head of a native model on the head of a transformers model."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.hf, self.config = hf, hf.native.config.head

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """See `LMHead.forward`."""
        if targets is not None:
            return self.hf.lm_head(hidden, targets, **loss_options)
        return scaled_logits(self.config, self.hf.lm_head(hidden))
