"""Targets of this project on an H200, and the measured values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.reporting import loss_curves
from benchmarks.reporting.runs import last_run, run_of

Record = dict[str, Any]


class Target(NamedTuple):
    """A target: `measured` should be `sign` (≥ or ≤) `bound`. `limit`: the best possible value, from the same run."""

    what: str
    sign: str
    bound: float
    measured: float
    limit: float | None = None

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.measured >= self.bound if self.sign == "≥" else self.measured <= self.bound


MEMORY_BOUND = {
    "rms_norm": (0.92, 0.88),
    "add_rms_norm": (0.92, 0.88),
    "layer_norm": (0.92, 0.88),
    "swiglu": (0.97, 0.97),
    "geglu": (0.97, 0.97),
    "rope": (0.93, 0.93),
    "qk_norm_rope": (0.90, 0.85),
}
"""Op -> fraction of the copy rate, forward and in both passes, at 16384 tokens."""

AGAINST_LIGER = {
    "llama-3-8b 1x4096": 1.10,
    "llama-3-8b 4x4096": 1.04,
    "llama-3.2-1b 4x4096": 1.06,
    "llama-3.2-1b 4x4096 50% ignored": 1.20,
    "gemma-2-2b 2x4096": 1.35,
    "mistral-7b 2x4096": 1.04,
    "qwen2.5-7b 2x4096": 1.04,
    "qwen3-1.7b 4x4096": 1.06,
}
"""Case -> ratio of tokens/s to transformers + Liger."""

AGAINST_TRANSFORMERS = ("qwen3.5-9b 1x4096", "gemma-4-e4b 1x4096", "ministral-3-8b 2x4096")
"""Training cases beside plain transformers: 1.25 times its tokens/s, and no more memory."""
OF_THE_GEMMS = {"llama-3-8b": 0.85, "qwen3.5-9b": 0.8, "gemma-4-e4b": 0.8}
"""Model -> decode speed of one sequence, as a fraction of the speed of its GEMMs."""

FLOAT8_OVER_BF16 = {
    "llama-3-8b 4x4096": 1.40,
    "llama-3-8b 1x4096": 1.30,
    "qwen2.5-7b 2x4096": 1.35,
    "llama-3.2-1b 4x4096": 1.12,
}
"""Case -> ratio of training tokens/s in float8 to bf16."""
FLOAT8_SPEED = {"llama-3-8b 4x4096": (17_500, 18_800), "llama-3-8b 4x4096 LoRA 16": (24_000,)}
"""Case -> tokens/s of training in float8."""
QUANTISED_SPEED = {"float8": 360, "int4": 500, "int4, head int4": 500}
"""Format of the weights -> tokens/s of decoding one sequence with Llama-3-8B."""

LARGE_LOSSES = ("8192x4096x128256", "32768x4096x128256", "16384x2048x128256", "8192x2304x256000")


def latest(records: list[Record]) -> list[Record]:
    """The last record of each case and provider."""
    return list({(r["case"], r["provider"]): r for r in records}.values())


class Results:
    """Values of the last record of a case and provider, and ratios; None if a record is missing."""

    def __init__(self, records: list[Record]) -> None:
        self.records = {(r["case"], r["provider"]): r for r in records}
        self.runs = list(dict.fromkeys(map(run_of, reversed(records))))
        self.of_runs = {(r["case"], r["provider"], run_of(r)): r for r in records}

    def value(self, case: str, key: str, provider: str = "ligermodels") -> float | None:
        """The value of `key` in the last record of a case and provider."""
        record = self.records.get((case, provider), {})
        return float(record[key]) if key in record else None

    def bound(self, case: str, provider: str = "ligermodels") -> float | None:
        """Tokens/s of the roofline of the record."""
        speed, share = (self.value(case, key, provider) for key in ("tokens_per_s", "of_floor"))
        return speed / share if speed and share else None

    def ratio(
        self, case: str, key: str, provider: str, of: str | None = None, ours: str = "ligermodels"
    ) -> float | None:
        """Ratio of our value to a provider's value, in the last run that has both; None if one failed there.

        Args:
            case: Case of ours.
            key: The compared value.
            provider: The provider.
            of: Case of the provider; `case` if None.
            ours: Name of our provider.
        """
        pair = ((case, ours), (of or case, provider))
        for run in self.runs:
            upper, lower = (self.of_runs.get((*each, run)) for each in pair)
            if upper is not None and lower is not None:
                return float(upper[key]) / float(lower[key]) if key in upper and lower.get(key) else None
        return None


def targets(found: Mapping[str, list[Record]]) -> list[Target]:
    """The targets with results."""
    ops, training, decoding, medusa = (Results(found[name]) for name in ("ops", "training", "decoding", "medusa"))
    every = [*_ops(ops), *_attention(latest(found["attention"])), *_training(training), *_generation(decoding)]
    every += _float8(training, medusa, Results(found.get("quantized", [])))
    every += [*_medusa(medusa), *_demo(last_run(found.get("demo", []))), *_loading(latest(found["loading"]))]
    every += [*_loss_curves(found)]
    return [Target(*row[:3], row[3], *row[4:]) for row in every if row[3] is not None]


Row = tuple[str, str, float, "float | None"] | tuple[str, str, float, "float | None", "float | None"]


def _ops(results: Results) -> Iterator[Row]:
    for case, provider in results.records:
        op, _, size = case.partition(" ")
        if provider == "ligermodels" and op in MEMORY_BOUND and size.startswith("16384x"):
            for pass_, name, bound in zip(
                ("forward", "both"), ("forward", "both passes"), MEMORY_BOUND[op], strict=True
            ):
                # from Python, both passes of small ops take as long as their launches
                share, at_size = (results.value(case, f"{pass_}_row_of_copy{end}") for end in ("", "_at_size"))
                copy = share / at_size if share and at_size else None
                yield f"{case}, {name}, of the copy rate, in a row", "≥", bound, share, copy
        if provider == "ligermodels" and op == "small":
            yield f"{case}, from Python, over torch's time", "≤", 2, results.ratio(case, "eager_us", "torch")
            yield f"{case}, in a CUDA graph, over torch's time", "≤", 1, results.ratio(case, "graph_us", "torch")
    yield from _losses(results)


def _losses(results: Results) -> Iterator[Row]:
    case = "cross_entropy in place 8192x128256"
    yield f"{case}, over one read and one write", "≤", 1.15, _inverse(results.value(case, "both_of_copy_at_size"))
    for shape in LARGE_LOSSES:
        case, sizes = f"linear_cross_entropy {shape}", tuple(map(int, shape.split("x")))
        time = _inverse(results.value(case, "both_of_limit"))
        yield f"{case}, over its GEMMs alone", "≤", 1.05, time, _apart(results, case, *sizes)
        memory = results.value(case, "beyond_gradients_mib")
        yield f"{case}, MiB beyond the gradients", "≤", 1024, memory, _least_mib(*sizes)
    for case, provider in results.records:
        if provider == "ligermodels" and case.startswith("linear_log_probs"):
            yield f"{case}, over its GEMMs alone", "≤", 1.1, _inverse(results.value(case, "both_of_limit"))
            yield f"{case}, MiB beyond the gradients", "≤", 1024, results.value(case, "beyond_gradients_mib")
    full = f"linear_cross_entropy {LARGE_LOSSES[0]}"
    for part, bound in (("50% ignored", 0.6), ("frozen head", 0.75), ("frozen hidden", 0.75)):
        share = results.ratio(f"{full} {part}", "both_ms", "ligermodels", of=full)
        yield f"{full} {part}, over the full time", "≤", bound, share


def _apart(results: Results, case: str, tokens: int, _: int, vocab: int) -> float | None:
    """Time of the GEMMs plus one read and one write of the logits at the copy rate, over the time of the GEMMs."""
    gemms, rate = results.value(case, "both_limit_ms"), results.value(case, "copy_bytes_per_s")
    return 1 + 4 * tokens * vocab / rate * 1e3 / gemms if gemms and rate else None


def _least_mib(tokens: int, hidden: int, vocab: int) -> float:
    """MiB of all logits; or of the float32 sum beyond the gradient in bf16, plus the logits of 128 rows."""
    return 2 * vocab * min(tokens, hidden + 128) / 2**20


def _attention(records: list[Record]) -> Iterator[Row]:
    for record in records:
        if record["provider"] == "ligermodels":
            what = f"attention {record['case']}, both, the best backend's time over that of the chosen one"
            yield what, "≥", 0.97, record.get("best_both")


def _training(results: Results) -> Iterator[Row]:
    for case, bound in AGAINST_LIGER.items():
        speed = results.ratio(case, "tokens_per_s", "transformers + liger")
        yield f"{case}, tokens/s over transformers + Liger", "≥", bound, speed
    case = "llama-3-8b 4x4096"
    yield f"{case}, memory over its", "≤", 0.88, results.ratio(case, "peak_gib", "transformers + liger")
    yield "llama-3-8b 5x4096, GB at most", "≤", 141, _times(results.value("llama-3-8b 5x4096", "peak_gib"), 1.0737)
    case = "gemma-2-2b 2x4096"
    speed = results.ratio(case, "tokens_per_s", "transformers + torch.compile")
    yield f"{case}, tokens/s over transformers + torch.compile", "≥", 1.25, speed
    for case in AGAINST_TRANSFORMERS:
        speed, memory = (results.ratio(case, key, "transformers") for key in ("tokens_per_s", "peak_gib"))
        yield f"{case}, tokens/s over transformers", "≥", 1.25, speed
        yield f"{case}, memory over its", "≤", 1, memory
    case, peer = "llama-3-8b 4x4096 LoRA 16", "transformers + liger"
    yield f"{case}, tokens/s", "≥", 17_000, results.value(case, "tokens_per_s"), results.bound(case)
    yield f"{case}, tokens/s over transformers + PEFT + Liger", "≥", 1.1, results.ratio(case, "tokens_per_s", peer)
    yield f"{case}, memory over its", "≤", 1, results.ratio(case, "peak_gib", peer)
    case = "ligermodels train, llama-3.2-1b 4x4096"
    yield f"{case}, tokens/s over the bare step", "≥", 0.98, results.ratio(case, "tokens_per_s", "bare step")
    for (case, provider), record in results.records.items():
        if provider == "ligermodels" and record.get("lora_rank") is None:  # the bound leaves out LoRA's products
            yield f"{case}, share of the floor", "≥", 0.95, results.value(case, "of_floor")


def _float8(training: Results, medusa: Results, quantised: Results) -> Iterator[Row]:
    ours = "ligermodels + float8"
    for case, bound in FLOAT8_OVER_BF16.items():
        share = training.ratio(case, "tokens_per_s", "ligermodels", ours=ours)
        yield f"{case} in float8, tokens/s over bf16", "≥", bound, share
    for case, bounds in FLOAT8_SPEED.items():
        for bound in bounds:
            speed = training.value(case, "tokens_per_s", ours)
            yield f"{case} in float8, tokens/s", "≥", bound, speed, training.bound(case, ours)
    case = "llama-3-8b 4x4096"
    share, gib = training.ratio(case, "peak_gib", "ligermodels", ours=ours), training.value(case, "peak_gib", ours)
    yield f"{case} in float8, MiB beyond those of bf16", "≤", 0, share and gib and 1024 * gib * (1 - 1 / share)
    case = "llama-3-8b 5 heads 4x4096 0% ignored"
    for provider, how in (("ligermodels float8", ""), ("ligermodels float8 whole", ", all logits at once")):
        speed, most = medusa.value(case, "tokens_per_s", provider), medusa.bound(case, provider)
        yield f"Medusa stage 1, {case}, in float8{how}, tokens/s", "≥", 25_000, speed, most
    case, plain = "llama-3-8b tree of 64", "llama-3-8b batch 1"
    step = quantised.ratio(case, "step_ms", "ligermodels bf16", of=plain, ours="ligermodels bf16")
    yield "decoding, llama-3-8b batch 1, Medusa's tree step over a plain one", "≤", 1.2, step
    for kind, bound in QUANTISED_SPEED.items():
        speed = quantised.value("llama-3-8b batch 1", "tokens_per_s", f"ligermodels {kind}")
        yield f"decoding, llama-3-8b batch 1, {kind}, tokens/s", "≥", bound, speed


def _generation(results: Results) -> Iterator[Row]:
    for model, bound in OF_THE_GEMMS.items():
        case = f"{model} batch 1"
        yield f"decoding, {case}, of its GEMMs alone", "≥", bound, results.value(case, "of_limit")


def _medusa(results: Results) -> Iterator[Row]:
    name = "llama-3-8b 5 heads 4x4096"
    for ignored, provider, bound in (("0%", "torch", 1.10), ("0%", "liger", 1.05), ("50%", "torch", 1.45)):
        case = f"{name} {ignored} ignored"
        speed = results.ratio(case, "tokens_per_s", provider)
        yield f"Medusa stage 1, {case}, tokens/s over {provider}", "≥", bound, speed
    case = f"{name} 0% ignored"
    parts = [results.value(case, key) for key in ("peak_gib", "held_gib", "gradients_gib")]
    known = [part for part in parts if part is not None]
    above = known[0] - known[1] - known[2] if len(known) == len(parts) else None
    yield f"Medusa stage 1, {case}, GiB beyond weights, states and gradients", "≤", 2, above


def _demo(records: list[Record]) -> Iterator[Row]:
    greedy = [r for r in records if r["acceptance"] == "greedy"]
    alone = [float(r["speed_up"]) for r in greedy if r["batch"] == 1]
    same = [r["same"] / r["prompts"] for r in greedy]
    exact = [r["float32_same"] / r["float32_prompts"] for r in greedy if "float32_same" in r]
    yield "GPU demo, speed-up at batch 1, greedy", "≥", 1.7, max(alone, default=None)
    yield "GPU demo, sequences as without heads, greedy", "≥", 1, min(same, default=None)
    yield "GPU demo, sequences as without heads, greedy, float32", "≥", 1, min(exact, default=None)


def _loading(records: list[Record]) -> Iterator[Row]:
    by_provider = {r["provider"]: r["ready_s"] for r in records if "ready_s" in r}
    if {"ligermodels", "transformers"} <= by_provider.keys():
        share = by_provider["transformers"] / by_provider["ligermodels"]
        yield "loading, transformers' time over ours", "≥", 1, share


def _loss_curves(found: Mapping[str, list[Record]]) -> Iterator[Row]:
    for comparison in loss_curves.COMPARISONS.values():
        baseline, other = comparison.names
        what = (
            f"{other}, held-out loss: distance from {baseline}, means of seeds, over the spread of seeds of {baseline}"
        )
        yield what, "≤", 1, loss_curves.of_spread(found.get("float8-loss", []), comparison)


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
