"""A tiny random model and tokenizer, made offline, and texts and chats for the trainers of other packages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import ligermodels as lm
from ligermodels.integrations import wrap

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>", "<end>"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}<assistant> {% generation %}"
    "{{ message['content'] }} <end>{% endgeneration %} {% else %}<user> {{ message['content'] }} <end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words and special tokens, a chat template that marks what the assistant says, padding on the right."""
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template, made.padding_side, made.model_max_length = TEMPLATE, "right", 64
    made.add_special_tokens({"additional_special_tokens": SPECIAL[4:]})
    return made


def save(folder: Path, model_type: str = "llama", **fields: Any) -> Path:
    """A checkpoint with its tokenizer; the same random weights for the same arguments."""
    sizes = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    tokens = {
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model(model_type, **{**sizes, **heads, **tokens, **fields})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    made.generation_config.pad_token_id = 0
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sentence(seed: int, length: int) -> str:
    """Words that follow from one another."""
    return " ".join(WORDS[(seed * 7 + i * i + i) % len(WORDS)] for i in range(length))


def texts(count: int = 24) -> Dataset:
    """A column `text`, of different lengths."""
    return Dataset.from_dict({"text": [sentence(i, 5 + i % 9) for i in range(count)]})


def chats(count: int = 24) -> Dataset:
    """A column `messages`."""
    rows = [
        [{"role": "user", "content": sentence(i, 4)}, {"role": "assistant", "content": sentence(i + 1, 3 + i % 5)}]
        for i in range(count)
    ]
    return Dataset.from_dict({"messages": rows})


def preferences(count: int = 16) -> Dataset:
    """Columns `prompt`, `chosen` and `rejected`."""
    return Dataset.from_dict(
        {
            "prompt": [sentence(i, 4) for i in range(count)],
            "chosen": [" " + sentence(i + 1, 3 + i % 4) for i in range(count)],
            "rejected": [" " + sentence(i + 5, 3 + i % 3) for i in range(count)],
        }
    )


def judged(count: int = 16) -> Dataset:
    """Columns `prompt`, `completion` and `label`."""
    pairs = preferences(count)
    labels = [i % 3 > 0 for i in range(count)]
    completions = [row["chosen" if label else "rejected"] for row, label in zip(pairs, labels, strict=True)]
    return Dataset.from_dict({"prompt": pairs["prompt"], "completion": completions, "label": labels})


def theirs(folder: Path) -> Any:
    """transformers' own model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


NATIVE: dict[str, Callable[[Path], Any]] = {
    "nativize": lambda folder: lm.nativize(theirs(folder)),
    "wrap": lambda folder: wrap(lm.from_pretrained(folder, dtype=torch.float32)),
}
"""How a checkpoint becomes a transformers model that computes natively."""
