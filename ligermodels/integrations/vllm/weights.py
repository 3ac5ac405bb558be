"""New weights for a running engine on the same host, from a native model that is being trained."""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ligermodels import errors
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import CheckpointError, EngineWarning, InputError
from ligermodels.integrations.vllm import ARCHITECTURE, RECEIVER
from ligermodels.integrations.vllm.shared_buckets import SharedBuckets
from ligermodels.layers.initialization import persistent_tensors

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM

Bucket = list[tuple[str, Tensor]]
Buckets = Iterable[Bucket]

_WITHOUT_CUDA_IPC: WeakSet[Any] = WeakSet()
"""The `llm_engine` of engines with a worker that cannot open the trainer's GPU memory."""


def update_weights(engine: Any, model: CausalLM, *, bucket_bytes: int | str = "1GB") -> None:
    """Copy the weights of a native model into a vLLM engine on this host that serves the same architecture.

    The engine's tensors are overwritten in place, one bucket after another, and cast to its dtype. Its prefix cache is
    emptied, because cached keys and values belong to the old weights. Draft heads keep their weights.

    An engine whose worker is this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`, `external_launcher`) copies from the
    model's tensors. The workers of other engines, also of tensor parallelism, copy their parts from a buffer of one
    bucket: in the model's GPU if all of them read it directly (CUDA IPC), else in shared memory of the host. If CUDA
    IPC is forbidden, an `EngineWarning` says so.

    Args:
        engine: a `vllm.LLM` of `LigerModelsForCausalLM` or `LigerModelsHybridForCausalLM`. On several ranks, rank 0 has
            the engine, and the others give None, or engines of their own. With vLLM's `external_launcher` each rank
            has an engine, and gives it; all ranks call this.
        model: the model with the new weights, of any parallel plan; if it is sharded, all ranks call this.
        bucket_bytes: largest bucket in bytes, or text such as "1GB"; see `iter_hf_weights`.

    Raises:
        InputError: the engine serves another class, has unfinished requests, runs on another host, or does not empty
            its prefix cache; a rank of `external_launcher` gives None; or the model has LoRA (call `merge_lora`) or
            quantised weights (call `dequantize`).
        CheckpointError: a tensor is unknown to the served model, or one of its tensors is not sent; the message names
            it. Tensors that came before have their new values. On several ranks of a sharded model, or of
            `external_launcher`, also if another rank fails; the message names the rank and its error.

    Examples:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> engine = LLM("model/", hf_overrides={"architectures": ["LigerModelsForCausalLM"]})  # doctest: +SKIP
        >>> update_weights(engine, model)  # doctest: +SKIP
    """
    has_peers = _has_peers(engine)
    ranks = Ranks.of_group() if has_peers else Ranks(persistent_tensors(model).values())
    sends = engine is not None or has_peers or Ranks.of_group().rank == 0
    with ranks.step("update_weights", ""):  # before any rank gathers a tensor
        buckets = model.iter_hf_weights(bucket_bytes=bucket_bytes)
        if engine is None and has_peers:
            raise InputError("engine: with external_launcher each rank gives its engine; got None")
        target = _checked(engine) if sends else None
    with ranks.step("update_weights", ""):
        try:
            if target is not None:
                _update(target, buckets, model.device)
        finally:
            for _ in buckets:  # takes part in gathering, without an engine and after an error of the engine
                pass


def _has_peers(engine: Any) -> bool:
    """Whether this process has one of several workers that vLLM's `external_launcher` started; for None by the process
    group of a worker in this process."""
    if engine is None:
        state = sys.modules.get("vllm.distributed.parallel_state")
        return state is not None and state.model_parallel_is_initialized() and state.get_world_group().world_size > 1
    parallel = getattr(getattr(getattr(engine, "llm_engine", None), "vllm_config", None), "parallel_config", None)
    backend = getattr(parallel, "distributed_executor_backend", None)
    return backend == "external_launcher" and getattr(parallel, "world_size", 1) > 1


class _Target(NamedTuple):
    """An engine, its `llm_engine`, and its model if the engine's worker is this process."""

    engine: Any
    core: Any
    served: Any


def _checked(engine: Any) -> _Target:
    """An engine that takes weights."""
    core = _idle_core(engine)
    served = _served_here(core)
    if served is None:
        _check_receiver(core)
    return _Target(engine, core, served)


def _update(target: _Target, buckets: Buckets, device: torch.device) -> None:
    """Copy the buckets of a model on `device` into an engine."""
    engine, core, served = target
    try:
        missing = _update_workers(core, buckets, device) if served is None else _update_here(served, buckets)
    finally:
        is_empty = engine.reset_prefix_cache()  # after an error too: some weights are new by then
    if not is_empty:
        raise InputError(
            "engine: did not empty its prefix cache, whose keys and values belong to the old weights; call its "
            "reset_prefix_cache until it returns True"
        )
    if missing:
        raise CheckpointError(f"the served model has tensors that the update does not: {', '.join(missing[:20])}")


def _update_here(served: Any, buckets: Buckets) -> list[str]:
    """Copy buckets into a model of this process. Returns names of tensors that were not sent."""
    served.begin_update()
    for bucket in buckets:
        served.update(bucket)
    missing: list[str] = served.not_updated()
    return missing


def _update_workers(core: Any, buckets: Buckets, device: torch.device) -> list[str]:
    """Copy buckets into the models of an engine's workers. Returns names of tensors that were not sent."""
    readers = core.collective_rpc("begin_weight_update")
    if None in readers:
        raise _serves_another_class(core)
    with SharedBuckets(device, readers) as shared:
        if shared.device.type == "cuda":
            _try_cuda_ipc(core, shared)
        for bucket in buckets:
            _send(core, shared, bucket)
    missing: list[str] = core.collective_rpc("missing_weights")[0]
    return missing


def _try_cuda_ipc(core: Any, shared: SharedBuckets) -> None:
    """Send an empty bucket; if a worker cannot open it, take shared memory of the host for this engine."""
    try:
        if core not in _WITHOUT_CUDA_IPC:
            _send(core, shared, [])
    except InputError as error:
        _WITHOUT_CUDA_IPC.add(core)  # one warning, and one buffer that CUDA keeps for the worker
        warnings.warn(f"{error}. New weights go through shared memory of the host.", EngineWarning, stacklevel=5)
    if core in _WITHOUT_CUDA_IPC:
        shared.use_host()


def _send(core: Any, shared: SharedBuckets, bucket: Bucket) -> None:
    """Copy a bucket into the models of all workers. Raises the first error of a worker."""
    for error in filter(None, core.collective_rpc("load_shared_weights", args=shared.pack(bucket))):
        kind, message = error
        raise getattr(errors, kind)(message)


def _idle_core(engine: Any) -> Any:
    """The `llm_engine` of an engine without requests."""
    core = getattr(engine, "llm_engine", None)
    if core is None:
        raise InputError(f"engine: must be a vllm.LLM, got a {type(engine).__name__}")
    if core.has_unfinished_requests():
        raise InputError("engine: has unfinished requests, which would mix old and new weights; finish them first")
    return core


def _served_here(core: Any) -> Any:
    """The model of an engine whose worker is this process, by the type of its executor; None for workers in others."""
    executor = getattr(core, "model_executor", None)
    if executor is None:  # the engine runs in another process
        return None
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if not isinstance(executor, UniProcExecutor):
        return None
    from ligermodels.integrations.vllm.model import LigerModelsForCausalLM

    (model,) = core.apply_model(lambda model: model)
    if not isinstance(model, LigerModelsForCausalLM):
        raise _serves_another_class(core)
    return model


def _check_receiver(core: Any) -> None:
    """InputError if workers in other processes have no methods to take weights."""
    extension = core.vllm_config.parallel_config.worker_extension_cls
    if not extension:
        raise _serves_another_class(core)
    if extension != RECEIVER and not hasattr(pkgutil.resolve_name(extension), "load_shared_weights"):
        raise InputError(
            f"engine: worker_extension_cls is {extension}; let it inherit from {RECEIVER}, or leave it out"
        )


def _serves_another_class(core: Any) -> InputError:
    return InputError(
        f"engine: serves {core.vllm_config.model_config.architecture}; start it with "
        f'hf_overrides={{"architectures": ["{ARCHITECTURE}"]}}'
    )
