"""A multi-token prediction head on a model without one: `python mtp.py [CHECKPOINT]`. docs/mtp.md"""

import sys

import small_model
import torch

import ligermodels as lm

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
tokenizer = lm.Tokenizer.from_pretrained(base)
input_ids = torch.tensor([tokenizer.encode(small_model.text(1500))[:96]])


def train(model, steps):
    """Train all parameters that are not frozen, on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids, labels=input_ids).loss.backward()
        optimizer.step()


model = lm.from_pretrained(base)
train(model, 40)  # the model memorises a text
mtp = lm.MTPModel.from_base(model, num_steps=3)  # freezes model
train(mtp, 40)

prompt = input_ids[:, :16]
plain = model.generate(prompt, max_new_tokens=48)
result = mtp.generate(prompt, max_new_tokens=48, return_stats=True)
assert torch.equal(result.sequences, plain)
print(f"{result.tokens_per_step:.2f} tokens per step")
mtp.save_head("mtp-head/", overwrite=True)  # the head alone
mtp.save_pretrained("with-mtp/", overwrite=True)  # the checkpoint with the head in it
