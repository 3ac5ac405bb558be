"""Fine-tune a checkpoint on chats, and generate an answer: `python fine_tune.py [CHECKPOINT [CHATS]]`.

docs/fine-tuning.md; on the command line `ligermodels train CHECKPOINT --data CHATS --out tuned/`.
"""

import sys

import small_model
import torch

import ligermodels as lm
from ligermodels.console import progress, say
from ligermodels.training import Console, FineTuningRecipe, fine_tune

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
chats = sys.argv[2] if len(sys.argv) > 2 else small_model.chats_file()

recipe = FineTuningRecipe(
    base=base, data=chats, steps=10, learning_rate=1e-3, seq_len=64, batch_tokens=256, validation_fraction=0.1
)
device = "cuda" if torch.cuda.is_available() else "cpu"
outcome = fine_tune(recipe, "tuned/", device=device, overwrite=True, console=Console(say, progress))
print(f"{outcome.step} steps, perplexity of the validation split {outcome.evaluation.perplexity:.1f}")

model, tokenizer = lm.from_pretrained("tuned/", device=device), lm.Tokenizer.from_pretrained("tuned/")
prompt = tokenizer.encode("user:\nimport the module\nassistant:\n")
print(tokenizer.continuation(prompt, model.generate([prompt], max_new_tokens=12)[0, len(prompt) :].tolist()))
