"""transformers' Trainer on a model that computes natively: `python trainer.py [CHECKPOINT]`.

docs/trainers.md; needs transformers, datasets and accelerate. TRL's trainers accept the same model.
"""

import sys

import small_model
import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from ligermodels.integrations import from_pretrained

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
tokenizer = AutoTokenizer.from_pretrained(base)
tokenizer.pad_token = tokenizer.eos_token
model = from_pretrained(base, dtype=torch.float32)
rows = [small_model.text(6000)[i : i + 300] for i in range(0, 6000, 300)]
data = Dataset.from_dict({"text": rows}).map(lambda row: tokenizer(row["text"]), remove_columns="text")

trainer = Trainer(
    model,
    TrainingArguments(
        "trainer-out/", per_device_train_batch_size=4, max_steps=5, report_to=[], use_cpu=not torch.cuda.is_available()
    ),
    DataCollatorForLanguageModeling(tokenizer, mlm=False),
    data,
)
print(trainer.train().metrics["train_loss"])
trainer.save_model("trainer-out/")  # a Hugging Face checkpoint
