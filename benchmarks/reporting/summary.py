"""docs/results.md and the table of the README: rows of one run each, beside the fastest peer of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reporting.runs import broadest_run, is_float8, is_peer, last_run

Record = dict[str, Any]


class Row(NamedTuple):
    """A case of a benchmark, by a provider of ours, and the command that measures it.

    `key` is the compared value: tokens per second, or a time. `front`: the row is in the README too. Ours in bf16 is
    compared with peers in bf16, ours in float8 with all peers.
    """

    what: str
    benchmark: str
    case: str
    key: str
    command: str
    ours: str = "ligermodels"
    front: bool = False


TOKENS = "tokens_per_s"
STEP = "full fine-tuning step, {}"
FLOAT8 = "ligermodels + float8"
BESIDE = '--providers "ligermodels + float8" "transformers + liger" "transformers + torchao float8 + torch.compile"'
ROWS = (
    Row(STEP.format("Llama-3-8B 4 x 4096"), "training", "llama-3-8b 4x4096", TOKENS, 'training "llama-3-8b 4x4096"',
        front=True),
    Row(STEP.format("Llama-3-8B 1 x 4096"), "training", "llama-3-8b 1x4096", TOKENS, 'training "llama-3-8b 1x4096"'),
    Row(STEP.format("Llama-3.2-1B 4 x 4096"), "training", "llama-3.2-1b 4x4096", TOKENS,
        'training "llama-3.2-1b 4x4096"', front=True),
    Row(STEP.format("Gemma-2-2B 2 x 4096"), "training", "gemma-2-2b 2x4096", TOKENS, 'training "gemma-2-2b 2x4096"',
        front=True),
    *(
        Row(f"full fine-tuning step in float8, {name}", "training", case, TOKENS, f'training "{case}" {BESIDE}',
            ours=FLOAT8, front=case == "llama-3-8b 4x4096")
        for name, case in (
            ("Llama-3-8B 4 x 4096", "llama-3-8b 4x4096"), ("Llama-3-8B 1 x 4096", "llama-3-8b 1x4096"),
            ("Qwen2.5-7B 2 x 4096", "qwen2.5-7b 2x4096"), ("Llama-3.2-1B 4 x 4096", "llama-3.2-1b 4x4096"),
        )
    ),
    Row("LoRA step of rank 16, Llama-3-8B 4 x 4096", "training", "llama-3-8b 4x4096 LoRA 16", TOKENS,
        'training "llama-3-8b 4x4096 LoRA 16"', front=True),
    Row("same, float8 base", "training", "llama-3-8b 4x4096 LoRA 16", TOKENS,
        f'training "llama-3-8b 4x4096 LoRA 16" {BESIDE}', ours=FLOAT8),
    Row("`lm.nativize`d transformers model, Llama-3-8B 4 x 4096", "nativize", "llama-3-8b 4x4096", TOKENS,
        'training "llama-3-8b 4x4096" --providers "transformers + nativize" "transformers + liger"',
        ours="transformers + nativize", front=True),
    Row("Medusa stage 1, 5 heads, Llama-3-8B 4 x 4096", "medusa", "llama-3-8b 5 heads 4x4096 0% ignored", TOKENS,
        "medusa", front=True),
    Row("same, half of the labels ignored", "medusa", "llama-3-8b 5 heads 4x4096 50% ignored", TOKENS,
        "medusa --ignored 0.5"),
    Row("Medusa stage 1 as above, float8 backbone", "medusa", "llama-3-8b 5 heads 4x4096 0% ignored", TOKENS,
        'medusa --ignored 0 --providers "ligermodels float8" liger "liger + torchao float8"',
        ours="ligermodels float8"),
    Row("greedy decoding, Llama-3-8B, one sequence, beside transformers' `generate` as it is", "decoding",
        "llama-3-8b batch 1", "step_ms",
        "decoding --transformers"),
    Row("loading Llama-3-8B from the page cache to the GPU", "loading", "to bfloat16 on cuda", "load_s",
        "loading FOLDER", front=True),
    Row("linear + cross entropy, 8192 x 4096 x 128256", "ops", "linear_cross_entropy 8192x4096x128256", "both_ms",
        "ops linear_cross_entropy"),
    Row("log-probabilities of tokens, 8192 x 4096 x 151936", "ops", "linear_log_probs 8192x4096x151936", "both_ms",
        "ops linear_log_probs"),
    Row("same, frozen head", "ops", "linear_log_probs 8192x4096x151936 frozen head", "both_ms", "ops linear_log_probs"),
)  # fmt: skip

HYBRIDS = ("lfm2", "granite", "muse", "nemotron")
"""How the names of the hybrids' cases of `training` begin; muse_glimmer came with them."""
FAST_KERNELS = ("mamba-ssm", "causal-conv1d")
"""Packages whose kernels transformers takes for Mamba2 and convolutions."""

MARKS = ("<!-- results: written by `python -m benchmarks report` -->\n", "<!-- end of results -->\n")

HEAD = """# Results

`python -m benchmarks report` writes this page from the records in `benchmarks/results/`. One {gpu}, bf16, torch
{torch}, Triton {triton}, transformers {transformers}. Both sides of a row were measured in the same run; the peer is
the fastest one of that run. A ratio above 1 means faster, or less memory.

The records belong to the commits named [below](#commits-and-commands): `make bench` measures the present code on your
GPU.

## Training, loading and ops

"""

TAIL = """
## Commits and commands

`python -m benchmarks` precedes each command (`python -m benchmarks training ...`).

{commands}
## More

- [Method](benchmarks.md): the commands, the checks of each timed call, and the records that are compared.
- [All cases](benchmark-tables.md): the last record of every case and provider, and the targets.
- [History](benchmark-log.md): variants that were tried and removed, and the limits of each step.

`torch.compile` computes log-probabilities faster where its logits fit, which take several times the memory.
"""


class Result(NamedTuple):
    """A measured row: both records, and the ratios of speed and of memory (None if it is not recorded)."""

    row: Row
    ours: Record
    peer: Record
    speed: float
    memory: float | None


def results(found: Mapping[str, list[Record]]) -> list[Result]:
    """The result of each measured row: the last run with the most peers."""
    measured = (_measured(row, found.get(row.benchmark, [])) for row in ROWS)
    return [result for result in measured if result is not None]


def _measured(row: Row, records: list[Record]) -> Result | None:
    lower = row.key != TOKENS
    kept = (r for r in records if r["case"] == row.case and (is_float8(row.ours) or not is_float8(r["provider"])))
    run = {r["provider"]: r for r in broadest_run(kept, row.key)}
    ours, peers = run.get(row.ours), [r for provider, r in run.items() if is_peer(provider)]
    if ours is None or not peers:
        return None
    peer = (min if lower else max)(peers, key=lambda r: float(r[row.key]))
    speed = peer[row.key] / ours[row.key] if lower else ours[row.key] / peer[row.key]
    memory = (_gib(ours), _gib(peer))
    return Result(row, ours, peer, speed, memory[1] / memory[0] if memory[0] and memory[1] else None)


def _gib(record: Record) -> float | None:
    return record["peak_gib"] if "peak_gib" in record else record["peak_mib"] / 1024 if "peak_mib" in record else None


def _text(result: Result, record: Record) -> str:
    value, gib = float(record[result.row.key]), _gib(record)
    text = {TOKENS: f"{value:,.0f} tok/s", "load_s": f"{value:.2f} s"}.get(result.row.key, f"{value:.3g} ms")
    return text if gib is None else f"{text}, {gib:.1f} GiB"


def front(found: Mapping[str, list[Record]]) -> str:
    """The table of the README, in Markdown, between its marks."""
    chosen = [result for result in results(found) if result.row.front]
    lines = ["| | ligermodels | fastest peer of the same run | ratio |", "|---|---|---|---|"]
    for r in chosen:
        what = r.row.what[0].upper() + r.row.what[1:]
        lines.append(f"| {what} | {_text(r, r.ours)} | {_text(r, r.peer)} ({_peer_name(r)}) | **{r.speed:.2f}** |")
    return MARKS[0] + "\n".join(lines) + "\n" + MARKS[1]


def _peer_name(result: Result) -> str:
    name: str = str(result.peer["provider"]).replace("torch_chunked", "torch, by chunks")
    return name.replace("liger", "Liger").replace("transformers +", "transformers with")


def _short(commit: str) -> str:
    return commit[:7] if len(commit) == 40 else commit


def page(found: Mapping[str, list[Record]]) -> str:
    """docs/results.md."""
    measured = results(found)
    if not measured:
        return "# Results\n\nNo case has been measured beside a peer.\n"
    lines = ["| | ligermodels | fastest peer | speed | memory |", "|---|---|---|---|---|"]
    commands = ["| | commit | command |", "|---|---|---|"]
    for r in measured:
        memory = "" if r.memory is None else f"{r.memory:.2f}"
        commit = f"{_short(r.ours.get('commit', ''))}{', ' + r.ours['date'] if 'date' in r.ours else ''}"
        peer = f"{_text(r, r.peer)}, {_peer_name(r)}"
        lines.append(f"| {r.row.what} | {_text(r, r.ours)} | {peer} | **{r.speed:.2f}** | {memory} |")
        commands.append(f"| {r.row.what} | {commit} | `{r.row.command}` |")
    versions = {
        key: " and ".join(sorted({str(r.ours[key]) for r in measured if key in r.ours}))
        for key in ("gpu", "torch", "triton", "transformers")
    }
    return (
        HEAD.format(**versions)
        + "\n".join(lines)
        + "\n\n![Training steps](training.png)\n\n"
        + _mixtures(found.get("mixtures", []))
        + _hybrids(found.get("training", []))
        + "## Decoding\n"
        + _quantised(found.get("quantized", []))
        + _demo(found.get("demo", []))
        + TAIL.format(commands="\n".join(commands) + "\n")
    )


def _beside_transformers(records: Sequence[Record]) -> str:
    """A table of steps of ours and of transformers in the same run, the last record of each case; "" without any."""
    last = {(r["case"], r["commit"], r["provider"]): r for r in records}
    lines = []
    for case, commit in {case: commit for case, commit, provider in last if provider == "transformers"}.items():
        ours, peer = (last.get((case, commit, provider), {}) for provider in ("ligermodels", "transformers"))
        if "step_ms" not in ours:
            continue
        cells = [f"{r['tokens_per_s']:,.0f} tok/s, {r['peak_gib']:.1f} GiB" for r in (ours, peer) if "step_ms" in r]
        if "step_ms" in peer:
            speed = ours["tokens_per_s"] / peer["tokens_per_s"]
            cells += [f"**{speed:.2f}**", f"{peer['peak_gib'] / ours['peak_gib']:.2f}"]
        else:
            cells += [peer.get("failed", "not measured").split(":")[0], "", ""]
        kernels = [f"{name} {peer[name]}" for name in FAST_KERNELS if name in peer]
        lines.append(f"| {' | '.join((case, *cells, ', '.join(kernels) or '-', _short(ours['commit'])))} |")
    head = "| | ligermodels | transformers | speed | memory | kernels of transformers | commit |\n" + "|---" * 7 + "|\n"
    return head + "\n".join(lines) + "\n\n" if lines else ""


WITH_FLA = (
    "fla-core was installed, causal-conv1d not. On Hopper GPUs fla-core 0.6 refuses the backward pass of linear "
    "attention with Triton 3.4 to 3.7.0, so that Qwen3.5 of transformers ends in its error; in plain torch, on an "
    "H100, its step took 5.9 times as long as ours (`mixtures-h100.jsonl`)."
)
WITHOUT_FLA = (
    "fla-core and causal-conv1d were not installed: transformers computes linear attention and convolutions in plain "
    "torch."
)


def _mixtures(records: Sequence[Record]) -> str:
    """Training steps of mixtures beside transformers."""
    records = [record for record in records if not record["case"].startswith(HYBRIDS)]
    table = _beside_transformers(records)
    return table and (
        f"## Mixtures, one {records[-1]['gpu']}\n\n"
        "`mixtures`: full fine-tuning steps with AdamW in bf16 (LoRA where named), beside transformers "
        f"{records[-1]['transformers']}, whose experts run on `grouped_mm`, in the same run. Where the case names "
        "layers, the model is cut to them, and its vocabulary by the same factor. "
        + (WITH_FLA if "fla-core" in records[-1] else WITHOUT_FLA)
        + "\n\n"
        + table
    )


def _hybrids(records: Sequence[Record]) -> str:
    """Training steps of models with Mamba2 or convolutions, and of muse_glimmer, beside transformers."""
    records = [record for record in records if record["case"].startswith(HYBRIDS)]
    table = _beside_transformers(records)
    return table and (
        f"## Hybrids, one {records[-1]['gpu']}\n\n"
        "`training lfm2 granite muse nemotron --providers ligermodels transformers`: full fine-tuning steps "
        f"with AdamW in bf16, beside transformers {records[-1]['transformers']} in the same run, with the "
        "kernels that the row names. Where the case names layers, the model is cut to them, and its vocabulary by "
        "the same factor. "
        "`-`: none were installed, or the model has no use for them. Of mamba-ssm its Triton kernels were installed, "
        "which are those of Mamba2.\n\n" + table
    )


def _quantised(records: Sequence[Record]) -> str:
    """Decoding by the format of the weights, in Markdown, by the last record of each case; empty without records."""
    last = {(r["provider"], r["case"]): r for r in records if "step_ms" in r}
    if not last:
        return ""
    cases = list(dict.fromkeys(case for _, case in last))
    rows = ["| greedy decoding, weights in |" + "".join(f" {case} |" for case in cases)]
    rows.append("|---|" + "---|" * len(cases))
    for provider in dict.fromkeys(provider for provider, _ in last):
        cells = (last.get((provider, case)) for case in cases)
        rows.append(f"| {provider.removeprefix('ligermodels ')} |" + "".join(f" {_step(r)} |" for r in cells))
    commits = " and ".join(dict.fromkeys(_short(r.get("commit", "")) for r in last.values()))
    note = (
        f"`python -m benchmarks quantized_decoding --no-linears`, the last record of each, commits {commits}.\n"
        "In brackets: the rate of reading the weights over the rate of a large copy. `tree of 64` is a decode step\n"
        "with a candidate tree of 64 nodes, one sequence."
    )
    return "\n" + "\n".join(rows) + f"\n\n{note}\n"


def _step(record: Record | None) -> str:
    if record is None:
        return ""
    speed = f"{record['tokens_per_s']:,.0f} tok/s" if "tokens_per_s" in record else f"{record['step_ms']:.3g} ms"
    return f"{speed} ({record['of_limit']:.2f})"


def _demo(records: Sequence[Record]) -> str:
    """The GPU demo's speed-ups, in Markdown; empty without records."""
    if not records:
        return ""
    last = {(r["stage"], r["acceptance"], r["batch"]): r for r in last_run(records)}
    batches = sorted({batch for _, _, batch in last})
    rows = ["| Medusa, wall time without heads / with heads |" + "".join(f" batch {batch} |" for batch in batches)]
    rows.append("|---|" + "---|" * len(batches))
    for stage, acceptance in dict.fromkeys((stage, acceptance) for stage, acceptance, _ in last):
        cells = (last.get((stage, acceptance, batch)) for batch in batches)
        texts = "".join(f" {r['speed_up']:.2f} ({r['same']} of {r['prompts']}) |" if r else " |" for r in cells)
        rows.append(f"| stage {stage}, {acceptance} |{texts}")
    note = f"`python -m benchmarks demo`, commit {_short(records[-1].get('commit', ''))}. In brackets: prompts for"
    end = "which the tokens equal greedy decoding without heads."
    for r in last.values():
        if "float32_same" in r:
            end += (
                f"\nIn float32 stage 1, greedy, batch 1, gives them for {r['float32_same']} of {r['float32_prompts']},"
                f" over {r['float32_new_tokens']} new tokens each."
            )
    return "\n" + "\n".join(rows) + f"\n\n{note}\n{end}\n\n![demo](demo.png)\n"


def write_front(readme: Path, found: Mapping[str, list[Record]]) -> None:
    """Replace the table in a README."""
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    readme.write_text(before + front(found) + rest.split(MARKS[1])[1], encoding="utf-8")
