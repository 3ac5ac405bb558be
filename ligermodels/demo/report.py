"""Checks of the results of the demo, and how they are printed."""

from __future__ import annotations

import shlex
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

from ligermodels.console import say, show_table
from ligermodels.demo.corpus import ASKED
from ligermodels.demo.settings import DemoSettings

DATA = "sources.jsonl"
RESULTS = "demo.json"
"""The file of results. It marks the folder of a demo, and another demo may replace such a folder."""
FILES = {
    DATA: "the texts",
    "model": "the model: a Hugging Face checkpoint",
    "medusa": "the heads of stage 1",
    "medusa-vllm": "the heads of stage 1, as vLLM loads them",
    "joint": "the model and the heads of stage 2, in one checkpoint",
    "drafts-medusa": "Medusa heads of the comparison",
    "drafts-eagle": "an EAGLE-3 head of the comparison",
    "drafts-dspark": "a DSpark head of the comparison",
    "chat": "the model, fine-tuned on chats: a Hugging Face checkpoint",
    "adapter": "LoRA of the same chats, in PEFT's format",
    RESULTS: "these results",
}
NEXT = """
Next, with these files:
  ligermodels generate {model} --medusa {medusa} --prompt "def main("
  ligermodels generate {joint} --medusa {joint} --prompt "def main("
  ligermodels chat {chat}
  ligermodels chat {adapter}
  ligermodels verify {model}
With a real checkpoint (on a GPU) and your texts, lines of {{"text": ...}}:
  ligermodels medusa train meta-llama/Llama-3.2-1B --data texts.jsonl --out heads
  ligermodels medusa eval meta-llama/Llama-3.2-1B heads --data validation.jsonl"""


def checks_of(s: DemoSettings, results: dict[str, Any]) -> dict[str, bool]:
    """Check -> whether the results pass it."""
    greedy = [record for record in results["decoding"] if record["acceptance"] == "greedy"]
    checks: dict[str, bool] = {}
    if not s.medusa_stages:
        return checks
    if s.dtype == "float32":  # in other dtypes rounding may decide
        checks["decoding with the heads gives the same tokens"] = all(r["same"] == r["prompts"] for r in greedy)
    if not s.check:
        return checks
    heads, joint = results["accuracy"]["stage 1"], results["accuracy"]["stage 2"]
    right = [found["right_answers"] for found in results["fine_tuning"].values()]
    return checks | {
        "it gives more than 1.5 tokens per step": min(record["tokens_per_step"] for record in greedy) > 1.5,
        "accuracy falls from head to head": all(a > b for a, b in pairwise(heads)),
        "stage 2 improves head 0": joint[0] > heads[0],
        "stage 2 costs the model no more than 1 % of its perplexity": results["joint"]["perplexity_change"] <= 0.01,
        f"after fine-tuning at least 3 of {ASKED} answers are right, word for word": min(right) >= 3,
    }


def _show_drafts(records: list[dict[str, Any]]) -> None:
    """Print a table of decoding with heads of the same training time, if there is one."""
    if not records:
        return
    show_table(
        ["heads", "batch", "decoding", "drafts", "tokens per step", "seconds", "without heads", "speed-up"],
        [
            (
                *(str(r[name]) for name in ("kind", "batch", "decoding", "tree")),
                *(f"{r[name]:.2f}" for name in ("tokens_per_step", "seconds", "plain_seconds", "speed_up")),
            )
            for r in records
        ],
        numbers=(1, 4, 5, 6, 7),
    )


def show(folder: Path, results: dict[str, Any]) -> None:
    """Print a sample of text, tables of the results, and commands to try."""
    if results["settings"]["medusa_stages"]:
        _show_medusa(results)
    _show_drafts(results.get("drafts", []))
    joint, float32 = results.get("joint"), results.get("float32")
    lines = [
        ("validation loss", f"{results['loss']['model']:.3f}"),
        *([("stage 2: change of the perplexity, KL", _change(joint))] if joint else []),
        *([("same tokens in float32", f"{float32['same']} of {float32['prompts']}")] if float32 else []),
        *(
            (f"{name}: validation loss, right answers", f"{found['loss']:.2f}, {found['right_answers']} of {ASKED}")
            for name, found in results["fine_tuning"].items()
        ),
        *((check, "yes" if passed else "NO") for check, passed in results["checks"].items()),
        *((f"seconds: {name}", f"{seconds:.1f}") for name, seconds in results["seconds"].items()),
        *((str(folder / name), title) for name, title in FILES.items() if (folder / name).exists()),
    ]
    show_table(["result", ""], lines)
    if results["fine_tuning"]:
        say(NEXT.format_map({name: shlex.quote(str(folder / name)) for name in FILES}))


def _change(joint: dict[str, float]) -> str:
    return f"{joint['perplexity_change']:+.2%}, {joint['kl']:.4f} nats per token"


def _show_medusa(results: dict[str, Any]) -> None:
    """Print a sample of text, and tables of the Medusa heads and of decoding with them."""
    opening = "\n".join(results["sample"]["prompt"].splitlines()[-4:])
    print("A sample of text; the model has written the text in « »:\n")
    print(textwrap.indent(f"{opening}«{results['sample']['continuation'].rstrip()}»", "  "), end="\n\n", flush=True)
    accuracy = results["accuracy"]
    rows = [
        (f"{head}, of t+{head + 2}", *(f"{values[head]:.1%}" for values in accuracy.values()))
        for head in range(results["settings"]["num_heads"])
    ]
    show_table(["Medusa head", *(f"{stage}: top-1" for stage in accuracy)], rows, numbers=(1, 2))
    rows = [
        (
            f"stage {r['stage']}, batch {r['batch']}, {r['acceptance']}",
            str(r["tree"]),
            f"{r['tokens_per_step']:.2f}",
            f"{r['speed_up']:.2f}",
            f"{r['same']} of {r['prompts']}",
        )
        for r in results["decoding"]
    ]
    show_table(["heads", "tree", "tokens per step", "speed-up", "same tokens"], rows, numbers=range(1, 5))
