"""DPO without logits in memory: `python dpo.py [CHECKPOINT]`. docs/objectives.md"""

import copy
import sys

import small_model
import torch

import ligermodels as lm
from ligermodels.losses import dpo_loss

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
tokenizer = lm.Tokenizer.from_pretrained(base)
model = lm.from_pretrained(base).train()
reference = copy.deepcopy(model).requires_grad_(False)

prompt = tokenizer.encode("import ")
answers = [tokenizer.encode(text)[:6] for text in ("sys, os and then more", "!!!! ???? !!!! ???? !!!!")]
input_ids = torch.tensor([prompt + answer for answer in answers])  # the chosen sequence, then the rejected one
labels = input_ids.clone()
labels[:, : len(prompt)] = -100
mask = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))  # log_probs[:, t] belongs to labels[:, t + 1]

with torch.no_grad():
    ref_log_probs = reference.log_probs(input_ids, labels).log_probs
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    optimizer.zero_grad()
    log_probs = model.log_probs(input_ids, labels).log_probs
    result = dpo_loss(log_probs, ref_log_probs, mask, beta=0.1)
    result.loss.backward()
    optimizer.step()
    print(f"step {step}: loss {result.loss.item():.4f}")
assert result.chosen_rewards > result.rejected_rewards
