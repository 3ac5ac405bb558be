"""`python -m benchmarks cpu_decoding [CASE ...] [--out FILE]`: decoding on one thread of a CPU, beside transformers.

Models have random weights in float32; prompts have 32 tokens. Whole calls of `generate` take turns, and the minimum of
the process's CPU time counts: other programs on the machine then disturb both models alike, and least. `ratio` is our
speed over the speed of transformers. `halves` has the ratio in the first and in the second half of the rounds; their
difference shows the noise. Greedy tokens must be equal.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import ligermodels as lm
from benchmarks.reporting import recording

LAYER_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
SIZES = {
    name: dict(zip(("num_hidden_layers", *LAYER_SIZES), sizes, strict=True))
    for name, sizes in {"tiny": (2, 128, 341, 4, 2, 512), "smollm-135m": (30, 576, 1536, 9, 3, 49152)}.items()
}
NEW_TOKENS, ROUNDS = {"tiny": 100, "smollm-135m": 20}, {"tiny": 60, "smollm-135m": 12}
PROMPT_TOKENS = 32
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
CASES = [f"{size} {kind} batch {batch}" for size in SIZES for kind in KINDS for batch in (1, 4)]


def models(size: str) -> tuple[Any, lm.CausalLM]:
    """A Llama of transformers, and the native model with its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    given = {**SIZES[size], "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **given)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return theirs, lm.from_pretrained(folder)


def least_seconds(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Minimum CPU seconds of each call in the first and in the second half of the rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            seconds[name].append(time.process_time() - start)
    half = rounds // 2
    return {name: [min(found[:half]), min(found[half:])] for name, found in seconds.items()}


def run(case: str) -> list[dict[str, Any]]:
    """The records of a case."""
    size, kind, _, batch = case.split()
    theirs, ours = models(size)
    ids = torch.randint(3, SIZES[size]["vocab_size"], (int(batch), PROMPT_TOKENS))
    options = {"max_new_tokens": NEW_TOKENS[size], "eos_token_id": None, "pad_token_id": 0, **KINDS[kind]}
    calls = {
        "ligermodels": partial(ours.generate, ids, **options),
        "transformers": partial(theirs.generate, ids, **options),
    }
    results = [call() for call in calls.values()]  # a warm-up too
    if kind == "greedy" and not torch.equal(*results):
        raise RuntimeError(f"{case}: the tokens are not those of transformers")
    found = least_seconds(calls, ROUNDS[size])
    tokens = int(batch) * NEW_TOKENS[size]
    halves = [b / a for a, b in zip(*found.values(), strict=True)]
    return [
        {"case": case, "provider": name, "tokens_per_s": tokens / min(seconds)}
        | ({"ratio": min(found["transformers"]) / min(seconds), "halves": halves} if name == "ligermodels" else {})
        for name, seconds in found.items()
    ]


def main() -> None:
    """Command line."""
    parser = recording.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"names of cases: {', '.join(CASES)} (all)")
    arguments = parser.parse_args()
    if unknown := [case for case in arguments.cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; give any of {', '.join(CASES)}")
    torch.set_num_threads(1)
    for case in arguments.cases or CASES:
        records = [{**record, **recording.facts(), "gpu": "CPU"} for record in run(case)]
        recording.write(arguments.out, records)
        ours, theirs = records
        halves = " and ".join(f"{ratio:.2f}" for ratio in ours["halves"])
        speeds = f"{ours['tokens_per_s']:,.0f} tokens/s, transformers {theirs['tokens_per_s']:,.0f}"
        print(f"{case}: {speeds}: {ours['ratio']:.2f} (by halves of the rounds {halves})", flush=True)
