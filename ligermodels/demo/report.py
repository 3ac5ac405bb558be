"""Output of the demo: progress, its folder and results, and tables of them."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import exp
from pathlib import Path
from typing import Any

from ligermodels.console import ProgressUpdate, progress, say, show_table
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.demo.chats import ASKED
from ligermodels.errors import CheckpointError
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.training.folder import write_atomically

STAGES = 10
SAMPLE_TOKENS, PROMPT_LINES = 80, 4
"""Of the sample of text: new tokens, and lines of the prompt that are shown."""
RESULTS = "demo.json"
"""The file of results; it marks a folder as a demo's, which another demo may replace."""
WRITTEN = {
    "model": "the model: a Hugging Face checkpoint",
    "exported": "the same, loaded and written again",
    "medusa": "the heads of stage 1, as vLLM loads them",
    "joint": "the model and the heads of stage 2, in one checkpoint",
    "chat": "the model, fine-tuned on chats: a Hugging Face checkpoint",
    "adapter": "LoRA of the same chats, in PEFT's format",
    RESULTS: "these results",
}
NEXT = """
Next, with what is there now:
  ligermodels generate {out}/model --medusa {out}/medusa --prompt "def main("
  ligermodels generate {out}/joint --medusa {out}/joint --prompt "def main("
  ligermodels chat {out}/chat
  ligermodels chat {out}/adapter
  ligermodels verify {out}/model
With a real checkpoint (on a GPU) and your texts, lines of {{"text": ...}}:
  ligermodels medusa train meta-llama/Llama-3.2-1B --data texts.jsonl --out heads
  ligermodels medusa eval meta-llama/Llama-3.2-1B heads --data validation.jsonl"""


def claim(folder: Path) -> None:
    """Create `folder` and mark it as a demo's. Raises CheckpointError when it holds something else."""
    try:
        if folder.exists() and not (folder / RESULTS).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder}: holds something other than a demo's output; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_results(folder, {"finished": False})
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None


def sample(model: MultiHeadModel, tokenizer: Tokenizer, prompt: Sequence[int]) -> dict[str, str]:
    """A prompt, and what the model continues it with by its heads."""
    new = model.generate([list(prompt)], SAMPLE_TOKENS)[0, len(prompt) :].tolist()
    return {"prompt": tokenizer.decode(prompt), "continuation": tokenizer.continuation(prompt, new)}


def show_sample(found: Mapping[str, str]) -> None:
    """Print a `sample`: the last lines of the prompt, and the continuation."""
    opening = "\n".join(found["prompt"].splitlines()[-PROMPT_LINES:])
    text = f"{opening}«{found['continuation'].rstrip()}»"
    print("A sample of text; what the model has written is in « »:\n")
    print(textwrap.indent(text, "  "), end="\n\n", flush=True)


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write demo.json, atomically."""
    write_atomically(folder / RESULTS, f"{json.dumps(results, indent=2)}\n".encode())


@contextmanager
def stage(name: str, title: str, seconds: dict[str, float], stages: int = STAGES) -> Iterator[ProgressUpdate]:
    """Announce one of some stages, show its progress, and record its seconds."""
    start = time.perf_counter()
    say(f"{len(seconds) + 1}/{stages} {title}")
    with progress(f"  {name}") as update:
        yield update
    seconds[name] = time.perf_counter() - start


def show(folder: Path, results: dict[str, Any]) -> None:
    """Print a sample of text, a table of the heads' accuracies, one of the other results, and suggested commands."""
    show_sample(results["sample"])
    decoding, seconds = results["decoding"], results["seconds"]
    plain, medusa = (decoding["tokens"] / decoding[f"{name}_seconds"] for name in ("plain", "medusa"))
    accuracy, joint = results["accuracy"], results["joint"]
    tables = {
        "": accuracy,
        "longer: ": results["longer"],
        "stage 2: ": joint,
        "from the current token alone: ": results["follower_baseline"],
    }
    columns = [f"{when}{k}" for k in accuracy for when in tables]
    rows = [
        (f"{i}, of t+{i + 2}", *(f"{each[k][i]:.1%}" for k in accuracy for each in tables.values()))
        for i in range(results["settings"]["num_heads"])
    ]
    show_table(["Medusa head", *columns], rows, numbers=range(1, len(columns) + 1))
    checks = results["checks"].items()
    show_table(
        ["result", ""],
        [
            ("validation loss", f"{results['loss']:.3f} (perplexity {exp(results['loss']):.1f})"),
            (
                "stage 2: change of the model's perplexity, KL to the reference",
                f"{joint['perplexity_change']:+.2%}, {joint['kl']:.4f} nats per token",
            ),
            (
                "tokens per step with Medusa",
                f"{decoding['tokens_per_step']:.2f} (predicted from other prompts: "
                f"{decoding['predicted_tokens_per_step']:.2f}, if heads err independently: "
                f"{decoding['expected_tokens_per_step']:.2f}, without: 1)",
            ),
            *(
                (
                    f"fine-tuned on chats, {what}: loss before and after, right answers",
                    f"{found['first_loss']:.2f}, {found['loss']:.2f} on the validation split, "
                    f"{found['right_answers']} of {ASKED}",
                )
                for what, found in zip(("whole", "by LoRA"), results["fine_tuning"].values(), strict=True)
            ),
            ("accuracy of always guessing the most frequent token", f"{results['baseline']['top-1']:.1%}"),
            ("tokens per second", f"{medusa:.0f} with Medusa, {plain:.0f} without"),
            *((check, "yes" if passed else "NO") for check, passed in checks),
            *((f"seconds: {name}", f"{taken:.1f}") for name, taken in seconds.items()),
            ("seconds in all", f"{sum(seconds.values()):.1f}"),
            *((str(folder / name), what) for name, what in WRITTEN.items()),
        ],
    )
    say(NEXT.format(out=folder))
