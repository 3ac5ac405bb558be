"""`train --objective` against TRL: a model that was trained by it, evaluated by TRL's trainers on the same records."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="needs ligermodels[integrations]")
from test_trainers import QUIET
from test_trl_losses import trainer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import ligermodels as lm
from ligermodels.data.corpus import Corpus
from ligermodels.data.examples import ExampleBatches, Examples
from ligermodels.training import FineTuningRecipe, fine_tune
from ligermodels.training.objective_evaluation import evaluate_objective
from ligermodels.training.objective_losses import PREFERENCE
from ligermodels.training.preference import PreferenceModel, completion_log_probs

METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]


def conversational(count: int = 16) -> Dataset:
    """Pairs of chats whose prompt is implicit."""
    pairs = tiny.preferences(count)
    sides = {side: [turns(row["prompt"], row[side].strip()) for row in pairs] for side in ("chosen", "rejected")}
    return Dataset.from_dict(sides)


def written(data: Dataset, path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in data))
    return path


def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def agree(ours: dict[str, float], other: dict[str, float], names: tuple[str, ...]) -> None:
    for name in names:
        assert ours[name] == pytest.approx(other[f"eval_{name}"], rel=1e-4, abs=1e-5), name


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "dpo": (tiny.preferences, {}, {}),
    "dpo chats": (conversational, {"objective": "dpo"}, {}),
    "ipo": (tiny.preferences, {"objective": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
    "robust and sft": (
        tiny.preferences,
        {
            "objective": "dpo",
            "loss_type": ("robust", "sft"),
            "loss_weights": (1.0, 0.5),
            "label_smoothing": 0.1,
            "micro_batch_tokens": 64,
        },
        {"loss_type": ["robust", "sft"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.1},
    ),
    "apo_zero": (tiny.preferences, {"objective": "dpo", "loss_type": "apo_zero"}, {"loss_type": ["apo_zero"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_pairs(case: str, folder: Path, tmp_path: Path) -> None:
    """The validation metrics of a run are those of TRL's `evaluate` on the validation records, whatever the size of
    micro-batches."""
    make, settings, options = CASES[case]
    data = make()
    recipe = FineTuningRecipe(
        base=folder,
        data=written(data, tmp_path / "pairs.jsonl"),
        **{
            "objective": "dpo",
            "validation_fraction": 0.4,
            "seq_len": 32,
            "batch_tokens": 256,
            "steps": 6,
            "learning_rate": 1e-2,
            "seed": 1,
            **settings,
        },
    )
    outcome = fine_tune(recipe, tmp_path / "out")
    _, validation = Corpus([tmp_path / "pairs.jsonl"]).split(0.4, 1)
    arguments = DPOConfig(
        str(tmp_path / "trl"), **{**QUIET, "max_length": 32, "per_device_eval_batch_size": 16, **options}
    )
    judge = DPOTrainer(
        theirs(tmp_path / "out"), ref_model=theirs(folder), args=arguments, train_dataset=data,
        eval_dataset=data.select(validation), processing_class=tiny.tokenizer(),
    )  # fmt: skip
    evaluation: Any = outcome.evaluation
    found = evaluation.metrics()
    agree(found, judge.evaluate(), (*METRICS, "rewards/accuracies"))
    assert abs(found["rewards/margins"]) > 1e-2


def policy_and_batches(
    folder: Path, data: Dataset, path: Path, form: str, **options: Any
) -> tuple[Any, ExampleBatches]:
    """A model that differs from the checkpoint, and its reference's batch of all records."""
    documents: Any = Examples.of_checkpoint(
        folder, [written(data, path)], form=form, seq_len=32, mismatched=form == "unpaired"
    )
    model = lm.from_pretrained(folder)

    def batches(**settings: Any) -> ExampleBatches:
        return ExampleBatches(documents, seq_len=1024, batch_size=1, epochs=1, **options, **settings)

    (batch,) = batches()
    values = completion_log_probs(model, batch).view(-1, len(data)).T.numpy()
    documents.reference = torch.full((len(data), 4), torch.nan, dtype=torch.float64).numpy()
    documents.reference[batch["examples"][:, 0].numpy(), :2] = values
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    return model, batches()


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto(loss_type: str, folder: Path, tmp_path: Path) -> None:
    data = tiny.judged()
    model, batches = policy_and_batches(folder, data, tmp_path / "judged.jsonl", "unpaired")
    settings: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    ours = PreferenceModel(
        model, PREFERENCE["kto"], {**settings, "loss_type": (loss_type,)}, pairs=False
    )  # fmt: skip
    (batch,) = batches
    if loss_type != "kto":
        batch = type(batch)({name: tensor for name, tensor in batch.items() if not name.startswith("kl_")})
    found = evaluate_objective(ours, lambda: [batch]).metrics()
    model.save_pretrained(tmp_path / "policy")
    sizes = {"max_length": 32, "per_device_eval_batch_size": 16, "per_device_train_batch_size": 16}
    arguments = KTOConfig(str(tmp_path / "trl"), **{**QUIET, **sizes}, loss_type=loss_type, **settings)
    judge = KTOTrainer(
        theirs(tmp_path / "policy"), ref_model=theirs(folder), args=arguments, train_dataset=data, eval_dataset=data,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    agree(found, judge.evaluate(), (*METRICS, *(("kl",) if loss_type == "kto" else ())))


PAIRS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "orpo": (ORPOTrainer, {"beta": 0.3}, {"padding_value": 0}),
    "cpo": (
        CPOTrainer,
        {"cpo_alpha": 0.7, "label_smoothing": 0.1, "beta": 0.3},
        {"loss_type": "sigmoid", "cpo_alpha": 0.7, "label_smoothing": 0.1, "alpha": 0.0},
    ),
    "simpo": (
        CPOTrainer,
        {"simpo_gamma": 0.9, "beta": 0.3},
        {"loss_type": "simpo", "cpo_alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.9, "alpha": 0.0},
    ),
}


@pytest.mark.parametrize("objective", PAIRS)
def test_objectives_without_a_reference(objective: str, folder: Path, tmp_path: Path) -> None:
    """TRL's own loss and metrics of a padded batch that is written out here."""
    data, (kind, settings, attributes) = tiny.preferences(6), PAIRS[objective]
    model, _ = policy_and_batches(folder, data, tmp_path / "pairs.jsonl", "pairs")
    documents: Any = Examples.of_checkpoint(folder, [tmp_path / "pairs.jsonl"], form="pairs", seq_len=32)
    batches = ExampleBatches(
        documents, seq_len=64, batch_size=1, epochs=1, prompt_targets=objective == "orpo"
    )  # fmt: skip
    ours = PreferenceModel(model, PREFERENCE[objective], settings, pairs=True)
    parts = list(batches)
    assert len(parts) > 1
    found = evaluate_objective(ours, lambda: parts).metrics()

    encode = tiny.tokenizer().encode
    batch: dict[str, torch.Tensor] = {}
    for side in ("chosen", "rejected"):
        ids = [[*encode(row["prompt"] + row[side]), 2] for row in data]
        sizes = [len(encode(row["prompt"])) for row in data]
        width = 16
        rows = torch.tensor([row + [0] * (width - len(row)) for row in ids])
        attended = torch.tensor([[i < len(row) for i in range(width)] for row in ids])
        completion = attended & (torch.arange(width) >= torch.tensor(sizes)[:, None])
        batch |= {
            f"{side}_input_ids": rows,
            f"{side}_attention_mask": attended.long(),
            f"{side}_labels": torch.where(completion, rows, -100),
        }
    model.save_pretrained(tmp_path / "policy")
    judge = trainer(kind, is_encoder_decoder=False, pad_token_id=0, **attributes)
    judge.beta = 0.3
    policy = theirs(tmp_path / "policy")
    judge.model = SimpleNamespace(training=False)
    with torch.no_grad():
        loss, other = judge.get_batch_loss_metrics(policy, batch, "eval")
    agree(found, {**other, "eval_loss": loss.item()}, METRICS)
