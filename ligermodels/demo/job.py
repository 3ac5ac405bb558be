"""The steps of the demo, from a tokenizer to exports, and the checks of the results."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import exp
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import ligermodels as lm
from ligermodels.console import say
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents, TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.demo.chats import ASKED, descriptions, fine_tune, right_answers, write_chats
from ligermodels.demo.corpus import END, python_sources, train_tokenizer
from ligermodels.demo.report import claim, sample, show, stage, write_results
from ligermodels.demo.steps import TrainingSettings, equally_spaced, learn, learn_jointly, llama_config
from ligermodels.errors import LigerModelsError
from ligermodels.speculative.benchmark import fit_tree
from ligermodels.speculative.evaluation import HeadScores, evaluate, evaluate_heads, evaluate_kl

TOP_K = (1, 5)


@dataclass(frozen=True, kw_only=True)
class DemoSettings(TrainingSettings):
    """Sizes of the demo. The defaults take about three minutes."""

    corpus_bytes: int = 8_000_000
    validation_fraction: float = 0.06
    validation_tokens: int = 2048
    """Tokens per document of the validation split."""
    vocab_size: int = 512
    hidden_size: int = 128
    num_layers: int = 2
    head_dim: int = 32
    initializer_range: float = 0.06
    seq_len: int = 256
    batch_size: int = 4
    steps: int = 1350
    learning_rate: float = 4e-3
    head_steps: int = 450
    head_learning_rate: float = 3e-3
    joint_steps: int = 150
    joint_learning_rate: float = 1e-3
    tree_nodes: int = 24
    prompts: int = 384
    """Fewer give more than 5 % noise in tokens per step."""
    prompt_tokens: int = 48
    new_tokens: int = 24
    chat_steps: int = 250
    chat_learning_rate: float = 4e-3
    lora_rank: int = 16
    lora_learning_rate: float = 1e-2
    tokens_per_step: float = 1.5
    """The demo fails below this."""
    check_accuracy: bool = True
    """Whether to check what the heads have learned; too small a training fails these checks."""


def run_demo(output: str | os.PathLike[str] = "demo-output", settings: DemoSettings | None = None) -> dict[str, Any]:
    """Train a model and Medusa heads on Python's own sources, decode with them, export them, fine-tune the model on
    chats, and check the results.

    Args:
        output: folder for `model` (a Hugging Face checkpoint), `exported` (the same, loaded and written again),
            `medusa` (the heads, in vLLM's format), `joint` (model and heads of stage 2), `chat` and `adapter` (the
            model fine-tuned on the chats in `chats.jsonl`, whole and by LoRA) and demo.json. An earlier demo's is
            replaced.
        settings: sizes, and the seed of everything random.

    Returns the results, as in demo.json.
    Raises CheckpointError when `output` holds something else, and LigerModelsError, naming it, when a check fails: they
    are in `_checks`.
    """
    folder, settings = Path(output), settings or DemoSettings()
    claim(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more do not help matrices this small, and sums have the same order on every machine
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            results = _main_job(folder, settings)
    finally:
        torch.set_num_threads(threads)
    write_results(folder, results)
    show(folder, results)
    if failed := [check for check, passed in results["checks"].items() if not passed]:
        raise LigerModelsError(f"the demo failed these checks: {'; '.join(failed)}")
    return results


def _main_job(folder: Path, s: DemoSettings) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    checkpoint = folder / "model"

    with stage("tokenizer", "a tokenizer, trained on Python's standard library", seconds):
        corpus = Corpus(python_sources(s.corpus_bytes))
        split = corpus.split(s.validation_fraction, s.seed)
        tokenizer = train_tokenizer((corpus.read(i)[0].decode() for i in split[0]), s.vocab_size, checkpoint)
        end = tokenizer.backend.token_to_id(END)
        documents = Documents(corpus, tokenizer, eos_token_id=end)
        tokens, validation_tokens = ([found.ids for found in documents.read(part) if found] for part in split)
        training = TokenDocuments.chunks(tokens, s.seq_len)
        validation = TokenDocuments(ids[: s.validation_tokens] for ids in validation_tokens)
        say(f"  {sum(map(len, tokens)):,} tokens; validation split: {sum(map(len, validation.documents)):,}")

    def validation_batches() -> PackedBatches:
        return s.validation_batches(validation)

    with stage("training", "a Llama, trained from scratch", seconds) as update:
        (checkpoint / "config.json").write_text(json.dumps(llama_config(s, end)))
        trained = lm.from_config(checkpoint)
        rates = [(trained.parameters(), s.learning_rate)]
        learn(trained, rates, s.batches(training, 0), s.steps, update, weight_decay=0.1)

    with stage("checkpoint", "a Hugging Face checkpoint, written and loaded", seconds):
        trained.save_pretrained(checkpoint, overwrite=True)
        model = lm.from_pretrained(checkpoint)
        loss = evaluate(model, validation_batches())
        say(f"  validation loss {loss:.3f}, perplexity {exp(loss):.1f} (untrained: {s.vocab_size})")

    with stage("heads", "Medusa heads, trained on the frozen model", seconds) as update:
        medusa = lm.MedusaModel.from_base(model, num_heads=s.num_heads)
        rates = [(medusa.head_parameters(), s.head_learning_rate)]
        learn(medusa, rates, s.batches(training, 1), s.head_steps, update)
        scores = evaluate_heads(medusa, validation_batches())

    with stage("longer", "as many further steps of stage 1 as stage 2 takes, for comparison", seconds) as update:
        longer = copy.deepcopy(medusa)
        rates = [(longer.head_parameters(), s.head_learning_rate)]
        learn(longer, rates, s.batches(training, 2), s.joint_steps, update, warmup_divisor=10)
        longer_scores = evaluate_heads(longer, validation_batches())

    with stage("joint", "stage 2: the model and the heads, trained together", seconds) as update:
        joint = learn_jointly(medusa, training, s, update)
        joint_scores = evaluate_heads(joint, validation_batches())
        kl = evaluate_kl(joint.base, model, validation_batches())

    with stage("decoding", "text, with the heads of stage 1 and without", seconds) as update:
        prompts = equally_spaced(validation.documents, s.prompts, s.prompt_tokens)
        fit = fit_tree(medusa, prompts, nodes=s.tree_nodes, max_new_tokens=s.new_tokens, progress=update)

        text = sample(medusa, lm.Tokenizer.from_pretrained(checkpoint), prompts[-1])

    with stage("export", "exports, for Hugging Face and for vLLM", seconds):
        medusa.base.save_pretrained(folder / "exported", overwrite=True)
        medusa.export(folder / "medusa", profile="vllm", overwrite=True)
        joint.export(folder / "joint", profile="full-hf", overwrite=True)
        written, again = (load_file(folder / name / "model.safetensors") for name in ("model", "exported"))

    known, chats, tuned = descriptions(), folder / "chats.jsonl", {}
    write_chats(chats, known)
    for name, title, rate, flags in (
        ("chat", "the whole model, fine-tuned on chats", s.chat_learning_rate, []),
        ("adapter", "LoRA on the same chats", s.lora_learning_rate, ["--lora-rank", s.lora_rank]),
    ):
        with stage(name, title, seconds):
            losses = fine_tune(checkpoint, chats, folder / name, [*flags, "--steps", s.chat_steps, "--lr", rate])
            tuned[name] = {**losses, "right_answers": right_answers(folder / name, known)}

    results = {
        "settings": asdict(s),
        "seconds": seconds,
        "loss": loss,
        "accuracy": _accuracies(scores),
        "baseline": {f"top-{k}": frequency_baseline(training.documents, validation.documents, k) for k in TOP_K},
        "follower_baseline": {
            f"top-{k}": [
                follower_baseline(training.documents, validation.documents, i + 2, k) for i in range(s.num_heads)
            ]
            for k in TOP_K
        },
        "longer": _accuracies(longer_scores),
        "joint": {**_accuracies(joint_scores), "perplexity_change": kl.perplexity_change, "kl": kl.kl},
        "fine_tuning": tuned,
        "sample": text,
        "decoding": {
            **asdict(fit.benchmark),
            "predicted_tokens_per_step": fit.predicted,
            "expected_tokens_per_step": fit.expected,
        },
    }
    is_same = written.keys() == again.keys() and all(torch.equal(written[name], again[name]) for name in written)
    return {**results, "checks": _checks(s, results, is_same)}


def _accuracies(scores: HeadScores) -> dict[str, list[float]]:
    return {f"top-{k}": scores.accuracy(k).tolist() for k in TOP_K}


def _checks(s: DemoSettings, results: dict[str, Any], is_same_checkpoint: bool) -> dict[str, bool]:
    """What must hold of the results -> whether it does."""
    decoding, accuracy, joint = results["decoding"], results["accuracy"]["top-1"], results["joint"]
    frequent, following = results["baseline"]["top-1"], results["follower_baseline"]["top-1"]
    found = {
        "decoding with the heads gives the same tokens": decoding["same"] == decoding["prompts"],
        f"it gives more than {s.tokens_per_step} tokens per step": decoding["tokens_per_step"] > s.tokens_per_step,
        "the exported checkpoint equals the loaded one, bit for bit": is_same_checkpoint,
    }
    if not s.check_accuracy:
        return found
    tuned = results["fine_tuning"]
    for name, what in (("chat", "fine-tuning on chats"), ("adapter", "LoRA")):
        found[f"{what} lowers the loss to less than a fifth"] = tuned[name]["loss"] < tuned[name]["first_loss"] / 5
        found[f"after {what} at least 3 of {ASKED} answers are right, word for word"] = (
            tuned[name]["right_answers"] >= 3
        )
    return found | {
        "tokens per step are within 5 % of the prediction from other prompts": (
            abs(decoding["tokens_per_step"] / decoding["predicted_tokens_per_step"] - 1) <= 0.05
        ),
        "accuracy falls from head to head": all(a > b for a, b in pairwise(accuracy)),
        "head 0 is right more than 3 times as often as the most frequent token, the others more than 1.5 times": (
            accuracy[0] > 3 * frequent and min(accuracy) > 1.5 * frequent
        ),
        "each head is right a tenth more often than the best guess from the current token alone": all(
            head > 1.1 * guess for head, guess in zip(accuracy, following, strict=True)
        ),
        "stage 2 improves head 0, and by more than as many further steps of stage 1": (
            joint["top-1"][0] > max(results["longer"]["top-1"][0], accuracy[0])
        ),
        "stage 2 costs the model no more than 1 % of its perplexity": joint["perplexity_change"] <= 0.01,
    }


def frequency_baseline(training: Sequence[Sequence[int]], validation: Sequence[Sequence[int]], k: int) -> float:
    """Top-k accuracy, on documents of the validation split, of always guessing the k most frequent training tokens."""
    frequent = torch.tensor([token for ids in training for token in ids]).bincount().topk(k).indices
    tokens = torch.tensor([token for ids in validation for token in ids])
    return float(torch.isin(tokens, frequent).double().mean())


def follower_baseline(
    training: Sequence[Sequence[int]], validation: Sequence[Sequence[int]], ahead: int, k: int
) -> float:
    """Top-k accuracy, on documents of the validation split, of guessing the token `ahead` positions on as those that
    follow the current token most often at this distance in the training documents."""
    (first, last), (current, target) = (_pairs(each, ahead) for each in (training, validation))
    size = 1 + max(int(tokens.max()) for tokens in (first, last, current, target))
    table = torch.bincount(first * size + last, minlength=size * size).view(size, size)
    best = table.argsort(descending=True, stable=True)[:, :k][current]
    return float((best == target[:, None]).any(1).double().mean())


def _pairs(documents: Sequence[Sequence[int]], ahead: int) -> tuple[Tensor, Tensor]:
    """All tokens, long (N,), that have another `ahead` of them in their document, and those others."""
    first = torch.tensor([token for ids in documents for token in ids[:-ahead]])
    return first, torch.tensor([token for ids in documents for token in ids[ahead:]])
