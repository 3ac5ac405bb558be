"""The model classes that vLLM runs: a native model around vLLM's attention layers and caches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, get_temporal_copy_spec
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsEagle3, SupportsMRoPE
from vllm.utils.torch_utils import set_default_torch_dtype

from ligermodels.convert.source_checkpoint import SourceCheckpoint
from ligermodels.convert.weight_stream import WeightStream
from ligermodels.errors import CheckpointError, ConfigError, LigerModelsError
from ligermodels.integrations.vllm import HYBRID_ARCHITECTURE
from ligermodels.integrations.vllm.mixers import replace_caches
from ligermodels.integrations.vllm.options import EngineOptions
from ligermodels.integrations.vllm.plan import StatePlan, plan_mixers
from ligermodels.integrations.vllm.states import EngineStates
from ligermodels.layers import Block
from ligermodels.layers.initialization import allocate, initialize_buffers, persistent_tensors
from ligermodels.layers.sharding import is_tensor_parallel
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.inputs import check_boundaries
from ligermodels.models.state_dict import known_layouts
from ligermodels.parallel.tensor import check_tensor_parallel, tensor_parallel
from ligermodels.pretrained import from_pretrained

NATIVE = "native"
"""Name of the native model in vLLM's, and so the prefix of its parameters."""

READABLE = ("auto", "hf", "safetensors")
"""Loaders of vLLM in whose place `from_pretrained` may read a checkpoint."""

UNREAD = {"quantization_config": None}
"""Override of config.json with which vLLM takes a checkpoint in a format that it does not know."""


class LigerModelsForCausalLM(nn.Module, SupportsEagle3, SupportsMRoPE):
    """A native `CausalLM` in vLLM's interface for text generation, with hidden states for draft heads.

    vLLM schedules the requests, keeps keys and values, and samples. Weights are read by the weight map of the
    checkpoint, tensor by tensor, from whatever loader vLLM uses. With `tensor_parallel_size`, the layers are divided
    over vLLM's process group, and each rank copies its part of the weights. A quantised checkpoint is read by
    `from_pretrained`, and so is any checkpoint whose weights are to be quantised: see `EngineOptions`.

    Args:
        vllm_config: vLLM's configuration.
        prefix: prefix of the names of the attention layers in vLLM.

    Raises:
        ConfigError: a part of the model, or a setting of vLLM, is not supported; the message names it.
        HubError: the repository cannot be found or reached.
        CheckpointError: files or tensors are missing or do not fit; the message names all of them.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        _check_settings(vllm_config)
        model_config, options = vllm_config.model_config, EngineOptions.of(vllm_config)
        device = torch.get_default_device()
        load: Callable[..., CausalLM] = partial(
            from_pretrained,
            model_config.model, dtype=model_config.dtype, revision=model_config.revision,
            token=model_config.hf_token if isinstance(model_config.hf_token, str) else None,
            cache_dir=vllm_config.load_config.download_dir,
        )  # fmt: skip
        with set_default_torch_dtype(torch.float32):
            model = load(device="meta", **asdict(options))
            ranks, config = vllm_config.parallel_config.tensor_parallel_size, model.config
            self._is_quantized = options.quantize is not None
            self._is_read = _is_read(vllm_config, model, self._is_quantized)
            if ranks > 1:
                check_tensor_parallel(config, ranks)
                config = replace(config, blocks=tuple(block.tensor_shard(ranks) for block in config.blocks))
            plans = plan_mixers(config, model_config.max_model_len, model_config.dtype)
            self._check_states([name for name, plan in plans.items() if isinstance(plan, StatePlan)], vllm_config)
            _check_feed_forward(model)
            if model.config.token_scale != 1.0 and vllm_config.speculative_config is not None:
                raise ConfigError("token_scale: draft heads share the embedding without this factor; leave them out")
            if self._is_read:
                model = load(device=device, mapped=False, **asdict(options))
            else:
                allocate(model, model_config.dtype, "meta")
                if ranks > 1:
                    mesh = DeviceMesh.from_group(get_tp_group().device_group, device.type)
                    tensor_parallel(model, mesh, sequence_parallel=False)
                model.to_empty(device=device)
                initialize_buffers(model, model.config.initializer_range)
        self.native = model.requires_grad_(False)
        self.attention = replace_caches(model.decoder, plans, vllm_config, prefix)
        self._boundaries: tuple[int, ...] = ()
        self._channels, self._model_config = model_config.mrope_num_dims, model_config
        # vLLM moves parameters to the meta device while it reloads weights, and then puts these tensors back.
        self._tensors = persistent_tensors(model)
        layouts = known_layouts(model.require_export_spec(), model.config)
        self._stream = None if self._is_quantized else WeightStream(layouts, self._tensors)

    @classmethod
    def _check_states(cls, recurrent: list[str], vllm_config: VllmConfig) -> None:
        """ConfigError if the model has `recurrent` mixers, by their names, whose states vLLM would not keep."""
        if recurrent:
            raise ConfigError(
                f"{recurrent[0]}: keeps a recurrent state, which vLLM has for hybrid models only; give --hf-overrides "
                f"""'{{"architectures": ["{HYBRID_ARCHITECTURE}"]}}'"""
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings (tokens, H) of ids (tokens,), as `forward` takes them in their place."""
        embeddings: Tensor = self.native.decoder.embed(input_ids) * self.native.config.token_scale
        return embeddings

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Hidden states after the final norm.

        Args:
            input_ids: long (tokens,), the tokens of all requests of this step one after another.
            positions: long (tokens,), the position of each token in its request; or (channels, tokens), equal in all
                channels of a model that has positions of images.
            intermediate_tensors: vLLM's argument for pipeline parallelism, which is not supported: always None.
            inputs_embeds: (tokens, H), in place of `input_ids`.

        Returns:
            (tokens, H); with layers set for a draft head also the residual streams (tokens, H) before these layers.
        """
        positions = positions if positions.dim() == 1 else positions[0]
        states = dict.fromkeys(self._boundaries, positions)  # the decoder replaces the values
        hidden: Tensor = self.native.decoder(
            None if input_ids is None or inputs_embeds is not None else input_ids[None],
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            hidden_states=states or None,
        )
        return (hidden[0], [states[boundary][0] for boundary in self._boundaries]) if states else hidden[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits (tokens, V) of hidden states (tokens, H)."""
        logits: Tensor = self.native.head(hidden_states)
        return logits

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[Tensor, int]:
        """Positions of a prompt (channels, tokens) for a model that has positions of images; and 0, by which later
        positions differ from the number of tokens. This class takes text alone, so that all channels are equal."""
        return torch.arange(len(input_tokens)).expand(self._channels, -1), 0

    @property
    def model(self) -> Any:
        """Where vLLM looks for the embedding that an EAGLE-3 head may share."""
        embed = self.native.decoder.embed
        return SimpleNamespace(embed_tokens=_DividedEmbedding(embed) if is_tensor_parallel(embed) else embed)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Let `forward` return the residual stream before these layers, counted from 0, for a draft head."""
        self._boundaries = tuple(sorted(set(check_boundaries("layers", layers, len(self.native.decoder.blocks)))))

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The layers of EAGLE-3 where its config names none, as for vLLM's models."""
        count = len(self.native.decoder.blocks)
        return 2, count // 2, count - 3

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy checkpoint tensors into the model: all of them, or the part that an update sends. After an error the
        model has its tensors as before the call, but those that were already copied.

        For a model that `from_pretrained` has read, the first call, by vLLM's loader, copies nothing.

        Args:
            weights: names and tensors in a layout of the model's family, such as the layout of `save_pretrained`.

        Returns:
            Names of the parameters that were loaded as a whole.

        Raises:
            CheckpointError: a tensor is unknown or does not fit; the message names it.
            ConfigError: see `begin_update`.
        """
        if self._is_read:
            self._is_read = False
            return {name for name, _ in self.named_parameters()}
        try:
            self.begin_update()
            self.update(weights)
        except LigerModelsError:
            # While vLLM reloads weights, tensors without memory stand in for the parameters; this puts them back.
            finalize_layerwise_reload(self, self._model_config)
            raise
        return {f"{NATIVE}.{name}" for name in self._updated().loaded()}

    def _updated(self) -> WeightStream:
        if self._stream is None:
            raise ConfigError(
                f"{EngineOptions.NAME}: the weights have been quantised while they were read, and new ones cannot be "
                "taken: start another engine, or leave quantize out"
            )
        return self._stream

    def begin_update(self) -> None:
        """Begin to count the tensors of `update`. ConfigError for a model that has been quantised."""
        self._updated().begin()

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy checkpoint tensors into the model, as `load_weights` does: one of several parts of an update."""
        stream = self._updated()
        for name, tensor in weights:
            if tensor.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{name}: is {tensor.dtype}, and a running engine takes weights that are not quantised; send them "
                    "dequantised, as update_weights sends the weights of a model"
                )
            stream.load(name, tensor)

    def not_updated(self) -> list[str]:
        """Names of the parameters of which the parts since `begin_update` have not had all values."""
        return sorted(f"{NATIVE}.{name}" for name in self._tensors.keys() - self._updated().loaded())


class _DividedEmbedding(nn.Module):
    """An embedding that is divided over ranks, for a draft head without its own. It shows no weight: vLLM compares the
    target's weight with the head's own, to keep equal ones once, and divides them otherwise."""

    weight = None

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embeddings (tokens, H) of ids (tokens,)."""
        embeddings: Tensor = self.embed(input_ids)
        return embeddings


class LigerModelsHybridForCausalLM(LigerModelsForCausalLM, HasInnerState, IsHybrid):
    """`LigerModelsForCausalLM` for models with recurrent mixers, whose states vLLM keeps beside keys and values."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True

    @classmethod
    def _check_states(cls, recurrent: list[str], vllm_config: VllmConfig) -> None:
        """ConfigError if there are no `recurrent` mixers, or for settings that their states do not follow."""
        cache = vllm_config.cache_config
        if not recurrent:
            raise ConfigError(
                f"architectures: {cls.__name__} is for models with recurrent mixers, and this one has none; give "
                f"{LigerModelsForCausalLM.__name__}"
            )
        if vllm_config.speculative_config is not None:
            raise ConfigError(
                f"speculative_config: {cls.__name__} does not take recurrent states back after rejected drafts; leave "
                "it out"
            )
        if cache.prefix_match_unit is not None:
            raise ConfigError(f"prefix_match_unit: {cls.__name__} keeps states of whole blocks alone; leave it out")
        for name in ("mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            if (dtype := getattr(cache, name)) not in ("auto", "float32"):
                raise ConfigError(f"{name}: must be auto or float32 for {cls.__name__}, got {dtype}")

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Shapes of the largest state of a mixer of the model, which vLLM has made before it asks."""
        return cls._largest_state(vllm_config).get_state_shape()

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """Dtypes of the tensors of `get_mamba_state_shape_from_config`."""
        return cls._largest_state(vllm_config).get_state_dtype()

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """How vLLM copies states between the blocks of a request, which `EngineStates` does not need: whole tensors."""
        return (get_temporal_copy_spec,)

    @staticmethod
    def _largest_state(vllm_config: VllmConfig) -> EngineStates:
        layers = get_layers_from_vllm_config(vllm_config, EngineStates)
        return max(layers.values(), key=lambda layer: layer.get_kv_cache_spec(vllm_config).page_size_bytes)


def _check_settings(vllm_config: VllmConfig) -> None:
    """ConfigError for settings of vLLM that a native model does not follow."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigError(f"{name}: must be 1 for {LigerModelsForCausalLM.__name__}, got {size}")
    if parallel.enable_expert_parallel:
        raise ConfigError(
            "enable_expert_parallel: tensor_parallel_size divides the channels of each expert here; leave it out"
        )
    overrides = model.hf_overrides or {}
    if callable(overrides) or {**UNREAD, **overrides, "architectures": None} != {**UNREAD, "architectures": None}:
        raise ConfigError(
            "hf_overrides: may name architectures, and quantization_config as null; write other changes into "
            "config.json, which the native model is composed from"
        )
    if getattr(model, "hf_config_path", None) is not None:
        raise ConfigError("hf_config_path: must be None; the native model is composed from the model's own config.json")
    if vllm_config.lora_config is not None:
        raise ConfigError(f"enable_lora: adapters are not applied by {LigerModelsForCausalLM.__name__}; merge them")
    if model.use_mla:
        raise ConfigError(
            "latent attention: runs here with the keys and values of all heads in the cache; set VLLM_MLA_DISABLE=1, "
            "so that vLLM lays out its cache for them"
        )


def _is_read(vllm_config: VllmConfig, model: CausalLM, is_quantized: bool) -> bool:
    """Whether `from_pretrained` reads the weights in place of vLLM's loader: of a quantised checkpoint, and of one
    that is quantised while it is read.

    Raises ConfigError for a quantisation by vLLM, and for settings with which quantised weights are not read."""
    is_encoded = cast(SourceCheckpoint, model.require_export_spec().source).quantization is not None
    if vllm_config.quant_config is not None and not is_encoded:
        example = json.dumps({EngineOptions.KEY: {"quantize": "int4"}})
        raise ConfigError(
            f"quantization: {vllm_config.model_config.quantization} is vLLM's, and the weights are plain; give "
            f"--additional-config '{example}' (or float8, nf4, mxfp4)"
        )
    load_format, ranks = vllm_config.load_config.load_format, vllm_config.parallel_config.tensor_parallel_size
    if load_format == "dummy" and not is_quantized:
        return False
    if (is_encoded or is_quantized) and load_format not in READABLE:
        raise ConfigError(f"load_format: must be {' or '.join(READABLE)} for quantised weights, got {load_format}")
    if (is_encoded or is_quantized) and ranks > 1:
        raise ConfigError(
            f"tensor_parallel_size: must be 1 for quantised weights, got {ranks}; write a quantised checkpoint "
            "dequantised first (from_pretrained, then save_pretrained)"
        )
    return is_encoded or is_quantized


def _check_feed_forward(model: CausalLM) -> None:
    """ConfigError if a feed-forward layer mixes tokens, which here belong to several requests."""
    for number, config in enumerate(model.config.blocks):
        layers = cast(Block, model.decoder.blocks[number]).declarations()
        for name in layers.keys() - {"mixer"}:
            routed = name == "mlp" and config.expert_router is not None  # mixes tokens in its loss alone
            if not (layers[name].token_wise or routed):
                raise ConfigError(
                    f"blocks[{number}].{name}: {type(layers[name]).__name__} is not token_wise, and a batch of vLLM "
                    "holds tokens of several requests"
                )
