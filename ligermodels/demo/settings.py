"""Sizes of the demo, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the demo on a CPU. The defaults take a few minutes."""

    seed: int = 0
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    installed: bool = False
    """Train on the sources of installed packages too, not only on Python's standard library."""
    corpus_bytes: int = 8_000_000
    piece: int = 1000
    """Characters of the pieces that texts are cut into, so that batches mix files."""
    validation_fraction: float = 0.06
    validation_tokens: int | None = 20_000
    vocab_size: int = 512
    hidden_size: int = 128
    num_layers: int = 2
    head_dim: int = 32
    initializer_range: float = 0.06
    seq_len: int = 256
    batch_size: int = 4
    steps: int = 1350
    learning_rate: float = 4e-3
    num_heads: int = 4
    head_steps: int = 450
    head_learning_rate: float = 3e-3
    joint_steps: int = 150
    joint_learning_rate: float = 1e-3
    """Learning rate of the model; the heads have four times as much."""
    prompts: int = 192
    """Half of the prompts fit the trees, the other half measure decoding."""
    prompt_tokens: int = 48
    new_tokens: int = 24
    batch_sizes: tuple[int, ...] = (1,)
    """Batch sizes of decoding."""
    tree_sizes: tuple[int, ...] = (24,)
    """Candidates in a tree; the fastest tree is used."""
    temperature: float | None = None
    """Temperature of typical acceptance; None: only greedy acceptance is measured."""
    medusa_stages: bool = True
    """Train Medusa heads in two stages, measure decoding with them and export them."""
    draft_seconds: float = 0
    """Seconds of training of Medusa, EAGLE-3 and DSpark heads, which are then compared; 0: no comparison."""
    draft_steps: int = 7
    """Tokens that an EAGLE-3 head and a DSpark head propose."""
    draft_learning_rate: float = 6e-4
    """Learning rate of an EAGLE-3 head and a DSpark head, as DeepSpec publishes it for both."""
    chat_steps: int = 250
    """Steps of fine-tuning on chats; 0: none."""
    chat_learning_rate: float = 4e-3
    lora_rank: int = 16
    lora_learning_rate: float = 1e-2
    check: bool = True
    """Fail unless the model and the heads have learned enough."""


@dataclass(frozen=True, kw_only=True)
class GpuDemoSettings(DemoSettings):
    """Sizes of the demo on a GPU of 40 GB or more: 272 M parameters, steps of 16384 tokens. A prompt with its new
    tokens is as long as a training sequence. Without `draft_seconds` the demo took some six minutes on an H200."""

    device: str = "cuda"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    installed: bool = True
    corpus_bytes: int = 80_000_000
    piece: int = 500_000  # whole files
    validation_fraction: float = 0.02
    validation_tokens: int | None = None
    vocab_size: int = 8192
    hidden_size: int = 1536
    num_layers: int = 10
    head_dim: int = 128
    initializer_range: float = 0.02
    seq_len: int = 1024
    batch_size: int = 16
    steps: int = 1300
    learning_rate: float = 6e-4
    head_steps: int = 500
    head_learning_rate: float = 1e-3
    joint_steps: int = 200
    joint_learning_rate: float = 1e-4
    prompts: int = 32
    prompt_tokens: int = 128
    new_tokens: int = 896
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    tree_sizes: tuple[int, ...] = (8, 16, 32, 63)
    temperature: float | None = 0.7
    draft_seconds: float = 60
    chat_steps: int = 0
    check: bool = False


def llama_config(s: DemoSettings, eos_token_id: int | None) -> dict[str, Any]:
    """A Hugging Face config of a Llama: two query heads per key/value head, tied embeddings."""
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
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "torch_dtype": s.dtype,
    }
