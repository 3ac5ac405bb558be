"""FSDP2 of a model by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ligermodels.errors import InputError
from ligermodels.layers import FullPrecision, LMHead
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import Decoder
from ligermodels.parallel.plan import ParallelPlan


def fsdp(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, experts: DeviceMesh | None = None) -> None:
    """Shard a model over `mesh`, whose dimensions are ("shard",) or ("replicate", "shard"), in place.

    Experts that are spread over ranks are a group of their own, over the mesh `experts` of the same dimensions; so are
    the router and what else is in the same module.

    Groups, each gathered as one: every block, embeddings and heads that are not tied, and the rest. Modules that stay
    float32 (`FullPrecision`) are a group before theirs, and compute in float32 whatever the plan. What is sharded
    already stays as it is. Without gradients a forward pass of a model leaves nothing gathered.
    """
    dtypes = {name: value and getattr(torch, value) for name, value in dict(plan).items() if name.endswith("dtype")}
    # Activations have the dtype that the embedding gives them; a cast of all inputs would round weights of losses too.
    policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    wide = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)

    def group(module: nn.Module, reshard_after_forward: bool | None = None) -> list[FSDPModule]:
        """The modules that stand for the groups, in the order in which they are gathered backwards."""
        if isinstance(module, FSDPModule):
            return [module]
        spread: list[nn.Module] = []
        kept: list[nn.Module] = [
            m for m in module.modules() if isinstance(m, FullPrecision) and not isinstance(m, FSDPModule)
        ]
        if kept:
            fully_shard(kept, mesh=mesh, mp_policy=wide)
        for mixture in module.modules() if experts is not None else ():
            if getattr(mixture, "_expert_mesh", None) is not None and not isinstance(mixture, FSDPModule):
                others = [m for m in mixture.children() if next(m.parameters(), None) is not None]
                fully_shard(others, mesh=mesh, mp_policy=policy)
                fully_shard(mixture, mesh=experts, mp_policy=policy)
                spread += [mixture, others[0]]
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        return [module, *spread, *kept[:1]]  # type: ignore[list-item]

    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    models = [module for module in model.modules() if isinstance(module, CausalLM)]
    for decoder in decoders:
        if isinstance(decoder.blocks[0], FSDPModule):
            continue
        blocks = [group(block) for block in decoder.blocks]
        for (before, *_), after in pairwise(blocks):  # while a block computes, the next one is gathered
            before.set_modules_to_forward_prefetch(after)
    heads = [module for module in model.modules() if isinstance(module, LMHead)]
    inputs = [each for decoder in decoders for each in (decoder.embed, decoder.per_layer_inputs) if each is not None]
    for part in _untied([*heads, *inputs]):
        # A model's head is followed by its backward pass, or by other calls of it: it stays gathered meanwhile.
        stays = any(part is each.head for each in models)
        (state, *_) = group(part, reshard_after_forward=False if stays else None)
        if isinstance(part, nn.Embedding):
            state.set_unshard_in_backward(False)  # its gradient is computed without its weight
    for each in (*models, model):  # models: also the base of a multi-head model, which is called by itself too
        if not isinstance(each, FSDPModule):
            group(each)
            each.register_forward_hook(_reshard_without_gradients)
            vars(each)["__deepcopy__"] = _no_deepcopy  # torch's own says no more than that there is none


def _no_deepcopy(_: Any) -> None:
    raise InputError(
        "copy.deepcopy: FSDP2 does not copy what it has sharded; of a CausalLM spread by a plan "
        "ligermodels.speculative.joint.frozen_copy(model) gives a frozen copy, spread alike"
    )


def _reshard_without_gradients(module: nn.Module, *_: Any) -> None:
    """FSDP2 keeps the root gathered up to its backward pass. Where none follows, an optimizer's step would not reach
    what is gathered, and an optimizer made meanwhile would get it in place of the parameters."""
    if not torch.is_grad_enabled():
        reshard(module)


def _untied(parts: list[nn.Module]) -> Iterator[nn.Module]:
    """Those that share no parameter with another one. Tied ones stay together, in the root's group."""
    uses = Counter(id(parameter) for part in parts for parameter in part.parameters())
    for part in parts:
        own = list(part.parameters())
        if own and all(uses[id(parameter)] == 1 for parameter in own):
            yield part
