"""The stages of the demo, from a tokenizer to chats; their results are written to demo.json."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ligermodels as lm
from ligermodels.arguments import check_number
from ligermodels.console import progress, say
from ligermodels.data.chat import ChatTemplate
from ligermodels.data.documents import Documents
from ligermodels.demo import corpus, drafts
from ligermodels.demo.corpus import descriptions, right_answers, write_chats
from ligermodels.demo.decoding import decoding_speeds
from ligermodels.demo.report import DATA, FILES, RESULTS, checks_of, show
from ligermodels.demo.settings import DemoSettings, llama_config
from ligermodels.errors import CheckpointError, InputError, LigerModelsError
from ligermodels.speculative.benchmark import benchmark_decoding
from ligermodels.speculative.load import load_multi_head
from ligermodels.speculative.multi_head import MultiHeadModel
from ligermodels.training import Callback, Console, FineTuningRecipe, MedusaRecipe, Outcome, fine_tune, train_heads
from ligermodels.training.folder import write_atomically
from ligermodels.training.recipe import R

SAMPLE_TOKENS = 80
FLOAT32_TOKENS = 128
"""New tokens per prompt for the comparison in float32."""


def run_demo(output: str | os.PathLike[str] = "demo-output", settings: DemoSettings | None = None) -> dict[str, Any]:
    """Train a model and Medusa heads on Python sources, decode, export, and fine-tune the model on chats.

    demo.json is written after each stage, so that a demo that is cut off leaves its results; "finished" is false until
    the end. Greedy decoding with heads is lossless up to rounding: in bfloat16 kernels of other shapes may decide
    otherwise between two tokens that are about equally likely, so the tokens are compared in float32 too.

    Args:
        output: folder for the files in FILES. The folder of an earlier demo is replaced.
        settings: sizes; by default the sizes for a CPU.

    Returns:
        The results, as in demo.json.

    Raises:
        CheckpointError: `output` holds something other than a demo.
        InputError: there is no such device; or `draft_seconds` is negative, or 0 without the stages of Medusa heads.
        LigerModelsError: a check of the results fails; the message names it.
    """
    folder, s = Path(output), settings or DemoSettings()
    if s.device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device {s.device!r}: torch sees no CUDA GPU; the demo of size cpu needs none")
    check_number("draft_seconds", s.draft_seconds, positive=not s.medusa_stages)
    _claim(folder)
    demo, threads = _Demo(folder, s), torch.get_num_threads()
    torch.set_num_threads(1 if s.device == "cpu" else threads)  # small matrices; sums in the same order everywhere
    try:
        with torch.random.fork_rng():
            torch.manual_seed(s.seed)
            demo.pretrain()
            if s.medusa_stages:
                demo.train_heads()
                demo.decode()
                demo.export()
            if s.draft_seconds:
                demo.compare_drafts()
            if s.chat_steps:
                demo.fine_tune()
    finally:
        torch.set_num_threads(threads)
    checks = checks_of(s, demo.results)
    demo.results |= {"checks": checks, "finished": True}
    demo.write()
    show(folder, demo.results)
    if failed := [check for check, passed in checks.items() if not passed]:
        raise LigerModelsError(f"the demo failed these checks: {'; '.join(failed)}")
    return demo.results


def _claim(folder: Path) -> None:
    """Make `folder`, and remove the results of an earlier demo, which belong to another model.

    Raises CheckpointError when it holds something other than a demo, or cannot be written.
    """
    try:
        if folder.exists() and not (folder / RESULTS).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise CheckpointError(f"{folder}: holds something other than a demo's output; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in FILES):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        (folder / RESULTS).write_text("{}")
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None


class _Demo:
    """The stages of a demo. Each adds to `results` and writes them."""

    def __init__(self, folder: Path, s: DemoSettings) -> None:
        self.folder, self.s = folder, s
        gpu = torch.cuda.get_device_name(s.device) if s.device.startswith("cuda") else "CPU"
        date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        self.results: dict[str, Any] = {
            "settings": asdict(s), "finished": False, "gpu": gpu, "torch": torch.__version__, "date": date,
            "seconds": {}, "loss": {}, "accuracy": {}, "decoding": [], "fine_tuning": {},
        }  # fmt: skip

    def write(self) -> None:
        write_atomically(self.folder / RESULTS, f"{json.dumps(self.results, indent=2)}\n".encode())

    @contextmanager
    def stage(self, name: str, title: str) -> Iterator[None]:
        """Announce a stage, record its seconds and write the results."""
        start = time.perf_counter()
        say(f"{name}: {title}")
        yield
        self.results["seconds"][name] = time.perf_counter() - start
        self.write()

    def recipe(self, kind: type[R], steps: int, learning_rate: float, **settings: Any) -> R:
        s = self.s
        common = {
            "validation_fraction": s.validation_fraction, "validation_tokens": s.validation_tokens, "dtype": s.dtype,
            "seq_len": s.seq_len, "batch_tokens": s.seq_len * s.batch_size, "seed": s.seed, "checkpoint_every": None,
            "warmup_steps": steps // 20, "report_every": max(1, steps // 20),
        }  # fmt: skip
        return kind(steps=steps, learning_rate=learning_rate, **{**common, **settings})

    def run(self, train: Any, recipe: Any, name: str, *callbacks: Callback) -> Outcome:
        console = Console(lambda message: None, progress)
        options = {"device": self.s.device, "console": console, "overwrite": True, "callbacks": callbacks}
        outcome: Outcome = train(recipe, self.folder / name, **options)
        return outcome

    def pretrain(self) -> None:
        """A tokenizer, and a Llama from random weights."""
        s, folder = self.s, self.folder
        with self.stage("tokenizer", "a tokenizer for Python sources"):
            files = (corpus.installed_sources if s.installed else corpus.python_sources)(s.corpus_bytes)
            texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
            corpus.write_pieces(folder / DATA, texts, s.piece)
            tokenizer = corpus.train_tokenizer(
                corpus.first_texts(texts, corpus.TOKENIZER_BYTES), s.vocab_size, folder / "config"
            )
            config = llama_config(s, tokenizer.backend.token_to_id(corpus.END))
            (folder / "config" / "config.json").write_text(json.dumps(config))
        with self.stage("training", f"a Llama, trained from scratch in {s.dtype}"):
            recipe = self.recipe(
                FineTuningRecipe, s.steps, s.learning_rate, base=folder / "config", data=folder / DATA, weight_decay=0.1
            )
            evaluation = self.run(fine_tune, recipe, "model").evaluation
            self.model = lm.from_pretrained(folder / "model", device=s.device)
            self.results["loss"]["model"] = evaluation.loss
            self.results["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
            self.documents = Documents.of_checkpoint(folder / "model", [folder / DATA])
            validation = self.documents.corpus.split(s.validation_fraction, s.seed)[1]
            encoded = [document.ids for document in self.documents.read(validation) if document]
            self.prompts = corpus.equally_spaced(encoded, s.prompts, s.prompt_tokens)
            say(f"  validation loss {evaluation.loss:.3f}, perplexity {evaluation.perplexity:.1f}")

    def train_heads(self) -> None:
        """Medusa heads on the frozen model, then together with the model."""
        s, common = self.s, {"base": self.folder / "model", "data": self.folder / DATA, "num_heads": self.s.num_heads}
        with self.stage("heads", "Medusa heads, trained on the frozen model (stage 1)"):
            recipe = self.recipe(MedusaRecipe, s.head_steps, s.head_learning_rate, **common)
            scores = self.run(train_heads, recipe, "medusa").evaluation.scores
            self.results["accuracy"]["stage 1"] = scores.accuracy(1).tolist()
        with self.stage("joint", "the model and the heads, trained together (stage 2)"):
            stage_2 = {"stage": 2, "distill": True, "start_from": self.folder / "medusa"}
            recipe = self.recipe(MedusaRecipe, s.joint_steps, s.joint_learning_rate, **common, **stage_2)
            evaluation = self.run(train_heads, recipe, "joint").evaluation
            self.results["accuracy"]["stage 2"] = evaluation.scores.accuracy(1).tolist()
            self.results["joint"] = {"kl": evaluation.kl.kl, "perplexity_change": evaluation.kl.perplexity_change}
            self.results["loss"]["stage 2"] = evaluation.kl.loss

    def decode(self) -> None:
        """Text with the heads and without, from prompts of the validation split."""
        s, folder, prompts = self.s, self.folder, self.prompts
        with self.stage("decoding", "text, with the heads and without"):
            joint = lm.from_pretrained(folder / "joint", device=s.device)
            self.medusa = lm.MedusaModel.from_pretrained(self.model, folder / "medusa")
            self.results["sample"] = _sample(self.medusa, self.documents, prompts[-1])
            if s.dtype != "float32":
                copied, new_tokens = copy.deepcopy(self.medusa).float(), min(FLOAT32_TOKENS, s.new_tokens)
                exact = benchmark_decoding(copied, prompts[1::2], tree=copied.default_tree(), max_new_tokens=new_tokens)
                self.results["float32"] = {"prompts": exact.prompts, "same": exact.same, "tokens": exact.tokens}
            for stage, model in ((1, self.medusa), (2, lm.MedusaModel.from_pretrained(joint, folder / "joint"))):
                for record in decoding_speeds(model, prompts, s):
                    self.results["decoding"].append({"stage": stage, **record})
                    say(f"  {json.dumps(self.results['decoding'][-1])}")
                    self.write()

    def export(self) -> None:
        """The heads, in the format of vLLM."""
        with self.stage("export", "the heads, for vLLM"):
            self.medusa.export(self.folder / "medusa-vllm", profile="vllm", overwrite=True)

    def compare_drafts(self) -> None:
        """Medusa, EAGLE-3 and DSpark heads of the same training time, greedy and sampled decoding with each."""
        s, folder, models = self.s, self.folder, dict[str, MultiHeadModel]()
        common = {"base": folder / "model", "data": folder / DATA}
        with self.stage("drafts", f"Medusa, EAGLE-3 and DSpark heads, {s.draft_seconds:g} seconds of training each"):
            for kind, (recipe_class, train) in drafts.KINDS.items():
                settings, name = {**common, **drafts.settings_of(kind, s)}, f"drafts-{kind}"
                rate, clock = settings.pop("learning_rate"), drafts.StepSeconds(s.device)
                trial = self.recipe(recipe_class, drafts.WARM_UP + drafts.TIMED, rate, **settings, evaluate_every=None)
                self.run(train, trial, name, clock)
                steps = max(1, int(s.draft_seconds / clock.seconds))
                evaluation = self.run(train, self.recipe(recipe_class, steps, rate, **settings), name).evaluation
                self.results.setdefault("draft_training", {})[kind] = {
                    "steps": steps, "step_seconds": clock.seconds, **evaluation.metrics(),
                }  # fmt: skip
                models[kind] = load_multi_head(self.model, folder / name)
            self.results["drafts"] = []
            for record in drafts.compare_drafts(models, self.prompts, s):
                self.results["drafts"].append(record)
                say(f"  {json.dumps(record)}")
                self.write()

    def fine_tune(self) -> None:
        """The model and LoRA on it, fine-tuned on chats."""
        s, folder, sentences = self.s, self.folder, descriptions()
        chats, base = folder / "chats.jsonl", folder / "model"
        write_chats(chats, sentences)
        common = {"base": base, "data": chats, "seq_len": 128, "batch_tokens": 1024, "validation_fraction": 0.2}
        tokenizer, template = lm.Tokenizer.from_pretrained(base), ChatTemplate.from_folder(base)
        for name, title, rate, lora in (
            ("chat", "the whole model, fine-tuned on chats", s.chat_learning_rate, {}),
            ("adapter", "LoRA on the same chats", s.lora_learning_rate, {"lora_rank": s.lora_rank}),
        ):
            with self.stage(name, title):
                recipe = self.recipe(FineTuningRecipe, s.chat_steps, rate, **common, **lora)
                loss = self.run(fine_tune, recipe, name).evaluation.loss
                model = lm.from_pretrained(base if lora else folder / name, device=s.device)
                if lora:
                    lm.load_adapter(model, folder / name)
                right = right_answers(model, tokenizer, template, sentences)
                self.results["fine_tuning"][name] = {"loss": loss, "right_answers": right}


def _sample(model: lm.MedusaModel, documents: Documents, prompt: list[int]) -> dict[str, str]:
    """A prompt, and its continuation by decoding with heads."""
    new = model.generate([prompt], SAMPLE_TOKENS)[0, len(prompt) :].tolist()
    tokenizer = documents.tokenizer
    return {"prompt": tokenizer.decode(prompt), "continuation": tokenizer.continuation(prompt, new)}
