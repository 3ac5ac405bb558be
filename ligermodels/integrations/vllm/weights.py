"""New weights for a running engine in the same process, from a native model that is being trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ligermodels.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM


def update_weights(engine: Any, model: CausalLM, *, bucket_bytes: int | str = "1GB") -> None:
    """Copy the weights of a native model into a vLLM engine of this process that serves the same architecture.

    The engine's tensors are overwritten in place, one bucket after another, and cast to its dtype: its memory grows by
    at most one bucket. Its prefix cache is emptied, because cached keys and values belong to the old weights.

    Args:
        engine: a `vllm.LLM` of `LigerModelsForCausalLM`, started with VLLM_ENABLE_V1_MULTIPROCESSING=0.
        model: the model with the new weights, of any parallel plan; if it is sharded, all ranks call this.
        bucket_bytes: largest bucket in bytes, or text such as "1GB"; see `iter_hf_weights`.

    Raises:
        InputError: the engine runs in other processes, as with tensor_parallel_size > 1, serves another class, or has
            unfinished requests; or the model has LoRA (call `merge_lora`) or quantised weights (call `dequantize`).
        CheckpointError: a tensor is unknown to the served model, or one of its tensors is not sent; the message names
            it. Tensors that came before have their new values.

    Examples:
        >>> from vllm import LLM  # doctest: +SKIP
        >>> engine = LLM("model/", hf_overrides={"architectures": ["LigerModelsForCausalLM"]})  # doctest: +SKIP
        >>> update_weights(engine, model)  # doctest: +SKIP
    """
    served = _served(engine)
    weights = (weight for bucket in model.iter_hf_weights(bucket_bytes=bucket_bytes) for weight in bucket)
    try:
        loaded = served.load_weights(weights)
    finally:
        engine.reset_prefix_cache()  # after an error too: some weights are new by then
    missing = sorted(served.parameter_names() - loaded)
    if missing:
        raise CheckpointError(f"the served model has tensors that the update does not: {', '.join(missing[:20])}")


def _served(engine: Any) -> Any:
    """The `LigerModelsForCausalLM` of an engine in this process; InputError if there is none."""
    core = getattr(engine, "llm_engine", None)
    if core is None:
        raise InputError(f"engine: must be a vllm.LLM, got a {type(engine).__name__}")
    if core.has_unfinished_requests():
        raise InputError("engine: has unfinished requests, which would mix old and new weights; finish them first")
    executor = getattr(core, "model_executor", None)
    if executor is None:
        raise InputError(
            "engine: runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before it is made, or use vLLM's "
            "weight transfer with model.iter_hf_weights"
        )
    if (size := core.vllm_config.parallel_config.world_size) > 1:
        raise InputError(
            f"engine: runs in {size} workers, other processes; use vLLM's weight transfer with model.iter_hf_weights"
        )
    from ligermodels.integrations.vllm.model import LigerModelsForCausalLM

    (model,) = core.apply_model(lambda model: model)
    if not isinstance(model, LigerModelsForCausalLM):
        raise InputError(
            f"engine: serves {type(model).__name__}; start it with "
            f'hf_overrides={{"architectures": ["{LigerModelsForCausalLM.__name__}"]}}'
        )
    return model
