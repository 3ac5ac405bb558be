"""FSDP2: shard a model by block, or as a whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import KeepsDtype, LMHead
from ligermodels.layers.modules import modules_of
from ligermodels.layers.sharding import (
    gather_before_inference,
    reshard,
    reshard_before_pass,
    set_root,
    shard_after_error,
    start_at_root,
)
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import Decoder
from ligermodels.ops.runtime.tensors import dtype_named
from ligermodels.parallel.expert import of_experts
from ligermodels.parallel.plan import ParallelPlan


def fsdp(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, experts: DeviceMesh | None = None) -> None:
    """Shard a model with FSDP2, in place.

    FSDP2 gathers one group of parameters at a time: a block, an untied embedding, an untied head, the other parameters;
    or, if the plan's `fsdp_unit` is "model", all of them at once (see `check_one_unit`).

    Modules that keep their dtypes (`KeepsDtype`), such as quantised weights, are a group within their block for either
    unit, and compute in these dtypes whatever the plan. LoRA on them is in the block's group, in the plan's
    `param_dtype`. Experts that are distributed over ranks are a group of their own, and so are the router and the other
    submodules of their mixture. Modules that are already sharded are not changed. After a forward pass without
    gradients, or with an error, all parameters are sharded again.

    Parameters that tensor or expert parallelism divides over all ranks remain as they are, unless the plan computes in
    another dtype: FSDP2 over one rank would copy all of them in each pass.

    Args:
        model: a `CausalLM`, or a module that contains a `Decoder`.
        mesh: a mesh with the dimensions ("shard",) or ("replicate", "shard").
        plan: its `param_dtype`, `reduce_dtype`, `reshard_after_forward` and `fsdp_unit` are used.
        experts: a mesh with the same dimensions, for experts that are distributed over ranks. Default: None, there are
            none.
    """
    decoders, models = modules_of(model, Decoder), modules_of(model, CausalLM)
    roots = (*models, model)  # the base of a multi-head model too: users also call it alone
    for root in roots:
        vars(root)["__deepcopy__"] = _no_deepcopy  # torch's own error gives no advice
    if plan.tensor > 1 and _only_copies(mesh, plan):
        for buffer in model.buffers():  # FSDP2 would move them to the rank's device, where the parameters are
            if not buffer.is_meta:
                buffer.data = buffer.to(_device_of(mesh))
        return
    sharder = _Sharder.of(mesh, plan, experts)
    if plan.fsdp_unit == "block":
        for decoder in decoders:
            _shard_blocks(decoder, sharder, plan.reshard_after_forward)
        _shard_ends(model, models, decoders, sharder)
    else:
        for block in chain.from_iterable(decoder.blocks for decoder in decoders):
            # Gathered until their backward pass, as the rest: selective checkpointing fails on collectives in its own.
            sharder.shard_kept(block, reshard_after_forward=False)
    for root in roots:
        if not isinstance(root, FSDPModule):
            sharder.shard(root)
            root.register_forward_pre_hook(_shard_before_pass, prepend=True)  # before FSDP2's own
            root.register_forward_hook(_reshard_without_backward, always_call=True)
    set_root(model)


def check_one_unit(model: nn.Module, degrees: Mapping[str, int], param_dtype: str | None) -> None:
    """Raise ConfigError unless all parameters of a model can be one group of FSDP2 (`ParallelPlan.fsdp_unit`).

    Args:
        model: the model.
        degrees: "replicate", "shard", "context" and "expert" of the plan.
        param_dtype: as in `ParallelPlan`.
    """
    kept = {parameter for module in modules_of(model, KeepsDtype) for parameter in module.parameters()}
    trained = {p.dtype: name for name, p in model.named_parameters() if p.requires_grad and p not in kept}
    if len(trained) > 1:
        several = " and ".join(f"{name} {dtype}" for dtype, name in trained.items())
        raise ConfigError(
            f"fsdp_unit: 'model' reduces gradients of one dtype, and of the trained parameters {several}; give them "
            "one dtype, or leave it 'block'"
        )
    expert, ranks = degrees["expert"], degrees["shard"] * degrees["context"]
    # FSDP2 gathers the experts of each mixture by themselves over ranks that have the same, replicas included.
    if expert > 1 and (expert != ranks or degrees["replicate"] > 1 or param_dtype is not None):
        raise ConfigError(
            f"fsdp_unit: 'model' goes with experts that FSDP2 does not gather: give expert "
            f"{ranks * degrees['replicate']} (shard x context), replicate 1 and no param_dtype, or leave it 'block'"
        )


def _only_copies(mesh: DeviceMesh, plan: ParallelPlan) -> bool:
    """Whether FSDP2 over `mesh` would neither divide nor cast parameters, but only copy them."""
    return mesh.size() == 1 and plan.param_dtype is None


def _device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank in a mesh."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


class _Sharder(NamedTuple):
    """The meshes and the mixed precision of `fsdp`. `experts` is None if experts are not distributed over ranks, or if
    each rank keeps its own as they are."""

    mesh: DeviceMesh
    experts: DeviceMesh | None
    policy: MixedPrecisionPolicy
    uncast: MixedPrecisionPolicy

    @classmethod
    def of(cls, mesh: DeviceMesh, plan: ParallelPlan, experts: DeviceMesh | None) -> _Sharder:
        param_dtype, reduce_dtype = map(dtype_named, (plan.param_dtype, plan.reduce_dtype))
        # The embedding determines the dtype of activations. A cast of all inputs would also round loss weights. Without
        # a reduce_dtype, torch 2.15 sums in the parameters' own dtype, earlier releases in that of the computation.
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype or param_dtype, cast_forward_inputs=False)
        uncast = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        return cls(mesh, None if experts is None or _only_copies(experts, plan) else experts, policy, uncast)

    def shard_kept(self, module: nn.Module, reshard_after_forward: bool | None = None) -> list[nn.Module]:
        """Shard the `KeepsDtype` modules within a module that are not sharded yet, as one group, and return them."""
        unsharded = (submodule for submodule in module.modules() if not isinstance(submodule, FSDPModule))
        kept: list[nn.Module] = [submodule for submodule in unsharded if isinstance(submodule, KeepsDtype)]
        if kept:
            fully_shard(kept, mesh=self.mesh, mp_policy=self.uncast, reshard_after_forward=reshard_after_forward)
        return kept

    def shard(self, module: nn.Module, reshard_after_forward: bool | None = None) -> list[FSDPModule]:
        """Shard a module, and return one module for each of its groups, its own group first."""
        if isinstance(module, FSDPModule):
            return [module]
        unsharded = [submodule for submodule in module.modules() if not isinstance(submodule, FSDPModule)]
        kept = self.shard_kept(module)
        spread = [mixture for mixture in unsharded if vars(mixture).get("_expert_mesh") is not None]
        copied: set[nn.Parameter] = set()
        groups: list[nn.Module] = []
        for mixture in spread:
            if self.experts is None:
                copied |= set(of_experts(mixture).values())
                continue
            names = type(mixture).expert_parallel  # type: ignore[attr-defined]
            children = [child for name, child in mixture.named_children() if name not in names and child not in kept]
            others = [child for child in children if next(child.parameters(), None) is not None]
            if others:
                fully_shard(others, mesh=self.mesh, mp_policy=self.policy)
            fully_shard(mixture, mesh=self.experts, mp_policy=self.policy)
            groups += [mixture, *others[:1]]
        fully_shard(
            module,
            mesh=self.mesh,
            mp_policy=self.policy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=copied,
        )
        return [module, *groups, *kept[:1]]  # type: ignore[list-item]


def _shard_blocks(decoder: Decoder, sharder: _Sharder, reshard_after_forward: bool) -> None:
    if isinstance(decoder.blocks[0], FSDPModule):
        return
    groups = [sharder.shard(block) for block in decoder.blocks]
    if not reshard_after_forward:
        for group in chain.from_iterable(groups):
            group.set_reshard_after_forward(False, recurse=False)
    for before, after in pairwise(groups):  # while a block computes, the next one is gathered
        before[0].set_modules_to_forward_prefetch(after)
    # Also the inner groups of the block itself: selective checkpointing, which computes it again, fails where they are
    # gathered then and were not in its forward pass.
    for i, (block, *inner) in enumerate(groups):
        block.set_modules_to_backward_prefetch([*inner, *(groups[i - 1] if i else ())])


def _shard_ends(model: nn.Module, models: list[CausalLM], decoders: list[Decoder], sharder: _Sharder) -> None:
    """Shard the embeddings and heads of a model that share no parameter with other parts of it."""
    inputs = [
        module for decoder in decoders for module in (decoder.embed, decoder.per_layer_inputs) if module is not None
    ]
    for part in _untied([*modules_of(model, LMHead), *inputs]):
        # The head of a model stays gathered: its backward pass, or another call of it, follows its forward pass.
        stays = any(part is causal_lm.head for causal_lm in models)
        (state, *_) = sharder.shard(part, reshard_after_forward=False if stays else None)
        if isinstance(part, nn.Embedding):
            state.set_unshard_in_backward(False)  # its gradient is computed without its weight


def _no_deepcopy(_: Any) -> None:
    raise InputError(
        "copy.deepcopy: distributed modules are not copied; for a CausalLM that lm.parallelize has distributed, "
        "ligermodels.speculative.joint.frozen_copy(model) returns a frozen copy, distributed by the same plan"
    )


def _shard_before_pass(module: nn.Module, *_: Any) -> None:
    """Forward pre-hook of a root: each pass gathers the parameters as they are now.

    Between an earlier pass, without a backward pass, and this one an optimizer may have changed the shards.
    """
    start_at_root(module)
    reshard_before_pass(module)
    gather_before_inference(module)


def _reshard_without_backward(module: nn.Module, _: Any, output: Any) -> None:
    """Forward hook of a root: shard its parameters again after a forward pass without gradients, or with an error.

    FSDP2 keeps the parameters of a root gathered until its backward pass. Without one, an optimizer's step would not
    change the gathered parameters, and a new optimizer would receive them in place of the shards.
    """
    if output is None:  # an error
        shard_after_error(module)
    elif not torch.is_grad_enabled():
        reshard(module)


def _untied(parts: list[nn.Module]) -> Iterator[nn.Module]:
    """The parts that have parameters and share none with another part. Tied parts stay in the root's group."""
    uses = Counter(id(parameter) for part in parts for parameter in part.parameters())
    for part in parts:
        own = list(part.parameters())
        if own and all(uses[id(parameter)] == 1 for parameter in own):
            yield part
