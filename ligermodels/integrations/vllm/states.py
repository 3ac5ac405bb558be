"""vLLM's cache of recurrent states for a native model's mixers: Gated DeltaNet, Mamba2 and short convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from ligermodels.integrations.vllm.plan import StatePlan
from ligermodels.layers.external_states import RequestStates, rows_of_requests, run_requests


class EngineStates(MambaBase):
    """The states of one mixer in vLLM's cache, as `ExternalStates`. No module, so that it is no part of the native
    model; vLLM finds it by its name.

    A page of the cache has the widest dtype first, which aligns each tensor.

    Args:
        plan: the mixer's state.
        vllm_config: vLLM's config, which learns the layer's name.
        name: the layer's name in vLLM.
    """

    def __init__(self, plan: StatePlan, vllm_config: VllmConfig, name: str) -> None:
        self.plan, self.name = plan, name
        self.order = sorted(range(len(plan.shapes)), key=lambda i: -plan.dtypes[i].itemsize)
        self.tensors: tuple[Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def kv_cache(self) -> tuple[Tensor, ...]:
        """The tensors between whose blocks vLLM copies the state of a request: none on the CPU, which does not have its
        kernels. Steps do not need the copies: they read a state in the block of the last token before them."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_cpu)

    @kv_cache.setter
    def kv_cache(self, tensors: Sequence[Tensor]) -> None:
        """vLLM sets the layer's tensors (blocks, ...), and an empty sequence to free them."""
        self.tensors = tuple(tensors)

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors in a page of the cache."""
        return tuple(self.plan.shapes[i] for i in self.order)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the tensors in a page of the cache."""
        return tuple(self.plan.dtypes[i] for i in self.order)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The kind in vLLM's terms; `get_attn_backend` has another backend than this kind."""
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend, which prepares the requests of a step."""
        return StatesBackend

    def __call__(self, layer: nn.Module, x: Tensor) -> Tensor:
        """See `ExternalStates`. Outside of steps, while vLLM measures memory, all tokens are one request."""
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict) and self.name in metadata:
            tensors = [self.tensors[self.order.index(i)] for i in range(len(self.order))]
            return run_requests(layer, x, metadata[self.name], tensors, self.plan.make_state)
        shapes = zip(self.plan.shapes, self.plan.dtypes, strict=True)
        tensors = [x.new_zeros(1, *shape, dtype=dtype) for shape, dtype in shapes]
        slot = torch.zeros(1, dtype=torch.long, device=x.device)
        rows = [RequestStates(rows.to(x.device), slot, slot, slot > 0) for rows in rows_of_requests([0, x.shape[1]])]
        return run_requests(layer, x, rows, tensors, self.plan.make_state)


class StatesBuilder(AttentionMetadataBuilder[list[RequestStates]]):
    """Lays out the requests of a step as rows, once for all layers of a group.

    The rows depend on the number of tokens of each request, which a CUDA graph cannot.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.prefix_caching = vllm_config.cache_config.mamba_cache_mode == "align"

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> list[RequestStates]:
        """The rows of a step, and where their states are.

        Without prefix caching a request has one block for all its tokens. With it, a request has a block for every
        `block_size` tokens, which keeps the state after the last token of the block that a step ended with; vLLM ends
        steps of a prefill with full blocks.
        """
        blocks = common_attn_metadata.block_table_tensor.long()
        computed = common_attn_metadata.compute_num_computed_tokens()
        last = [computed, common_attn_metadata.seq_lens]  # the number of the last token before the step, and of its own
        size = self.kv_cache_spec.block_size
        columns = [(x - 1).clamp(min=0) // size if self.prefix_caching else torch.zeros_like(x) for x in last]
        sources, slots = (blocks.gather(1, column[:, None].long())[:, 0] for column in columns)
        bounds = common_attn_metadata.query_start_loc_cpu.tolist()
        rows = [rows.to(self.device) for rows in rows_of_requests(bounds)]
        return [RequestStates(r, *(x[r.requests] for x in (sources, slots, computed > 0))) for r in rows]


class StatesBackend(AttentionBackend):
    """The backend of `EngineStates`, which computes nothing itself."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's messages."""
        return "LIGERMODELS_STATES"

    @staticmethod
    def get_builder_cls() -> type[StatesBuilder]:
        """What prepares a step."""
        return StatesBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        """True: states have one size for any number of tokens."""
        return True
