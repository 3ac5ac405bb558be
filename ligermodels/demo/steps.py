"""What the demos on a CPU and on a GPU share: their settings, their model, and the steps of training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ligermodels.console import ProgressUpdate
from ligermodels.data.batches import Batch
from ligermodels.data.documents import TokenDocuments
from ligermodels.data.packing import PackedBatches
from ligermodels.speculative.joint import JointMedusa
from ligermodels.speculative.medusa import MedusaModel
from ligermodels.training import StepMetrics, train, warmup_cosine
from ligermodels.training.loop import Trainable
from ligermodels.training.optimizer import optimizer_named, parameter_groups

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Sizes of the data, the model and its training, and the seed of everything random."""

    seed: int = 0
    corpus_bytes: int
    validation_fraction: float
    vocab_size: int
    hidden_size: int
    num_layers: int
    head_dim: int
    seq_len: int
    batch_size: int
    steps: int
    learning_rate: float
    num_heads: int = 4
    head_steps: int
    head_learning_rate: float
    joint_steps: int
    joint_learning_rate: float
    """Of the model; that of the heads is four times as high."""
    joint_heads_loss_weight: float = 0.2
    """Added to KL(initial model || model)."""
    prompts: int
    """Half of them to fit trees, half to measure decoding."""
    prompt_tokens: int
    new_tokens: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    initializer_range: float = 0.02

    def batches(self, documents: TokenDocuments, stage: int) -> PackedBatches:
        """Batches of a stage of training, without end."""
        seed = self.seed + stage
        return PackedBatches(documents, seq_len=self.seq_len, batch_size=self.batch_size, seed=seed)

    def validation_batches(self, documents: TokenDocuments) -> PackedBatches:
        """Batches of each document once."""
        return PackedBatches(documents, seq_len=self.seq_len, batch_size=self.batch_size, epochs=1)


def llama_config(s: TrainingSettings, end: int | None) -> dict[str, Any]:
    """A Hugging Face config of a Llama: two query heads to a key/value head, tied embeddings, `end` the EOS token."""
    heads = s.hidden_size // s.head_dim
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": 8 * s.hidden_size // 3,
        "num_hidden_layers": s.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": s.head_dim,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "initializer_range": s.initializer_range,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
        "torch_dtype": s.dtype,
    }


def learn(
    model: Trainable,
    rates: Sequence[tuple[Iterable[nn.Parameter], float]],
    data: Iterable[Batch],
    steps: int,
    update: ProgressUpdate,
    *,
    warmup_divisor: int = 20,
    weight_decay: float = 0.0,
    **options: Any,
) -> None:
    """Train groups of parameters at their learning rates for `steps`, 1 / `warmup_divisor` of them as warm-up.

    Updates of bfloat16 parameters are rounded stochastically.
    """
    groups = parameter_groups(rates, weight_decay)
    parameters = (parameter for group in groups for parameter in group["params"])
    rounding: Rounding = "stochastic" if next(parameters).dtype == torch.bfloat16 else "nearest"
    optimizer = optimizer_named("adamw", groups, betas=(0.9, 0.95), rounding=rounding)
    schedule = warmup_cosine(optimizer, steps, warmup_steps=steps // warmup_divisor)

    def report(at: StepMetrics) -> None:
        update(at.step, at.steps, f"loss {at.loss:.2f}, {at.tokens_per_second:,.0f} tokens/s")

    options |= {"on_step": report, "report_every": max(1, steps // 20)}
    train(model, data, steps=steps, optimizer=optimizer, schedule=schedule, **options)


def learn_jointly(
    medusa: MedusaModel, documents: TokenDocuments, s: TrainingSettings, update: ProgressUpdate
) -> MedusaModel:
    """Stage 2: a copy of the heads and their model, trained together. The model itself, unchanged, is the reference."""
    joint = copy.deepcopy(medusa)
    rates = [(joint.base.parameters(), s.joint_learning_rate), (joint.head_parameters(), 4 * s.joint_learning_rate)]
    options: dict[str, Any] = {"loss_options": lambda step: {"heads_loss_weight": s.joint_heads_loss_weight}}
    whole, data = JointMedusa(joint, medusa.base), s.batches(documents, 2)
    learn(whole, rates, data, s.joint_steps, update, warmup_divisor=10, **options)
    return joint


def equally_spaced(documents: list[list[int]], count: int, length: int) -> list[list[int]]:
    """`count` pieces of the documents, of `length` tokens each."""
    starts = [(text, at) for text in documents for at in range(len(text) - length)]
    apart = max(1, len(starts) // count)
    return [text[at : at + length] for text, at in starts[::apart][:count]]
