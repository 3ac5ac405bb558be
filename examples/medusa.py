"""Medusa heads on a model, from training to exports: `python medusa.py [CHECKPOINT]`. docs/medusa.md"""

import sys

import small_model
import torch

import ligermodels as lm

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
tokenizer = lm.Tokenizer.from_pretrained(base)
input_ids = torch.tensor([tokenizer.encode(small_model.text(1500))[:96]])


def train(model, parameters, steps):
    """Train on one batch, until the model has memorised it."""
    optimizer = torch.optim.AdamW(parameters, lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(input_ids, labels=input_ids)
        out.loss.backward()
        optimizer.step()
    return out


model = lm.from_pretrained(base)
train(model, model.parameters(), 60)
medusa = lm.MedusaModel.from_base(model, num_heads=3)  # freezes model
out = train(medusa, medusa.head_parameters(), 60)
print("loss of each head", *(f"{loss:.2f}" for loss in out.head_losses))

prompt = input_ids[:, :16]
plain = model.generate(prompt, max_new_tokens=48)
result = medusa.generate(prompt, max_new_tokens=48, return_stats=True)
assert torch.equal(result.sequences, plain)  # the same tokens, in fewer steps
print(f"{result.tokens_per_step:.2f} tokens per step")

medusa.save_pretrained("heads/", overwrite=True)
for profile in ("vllm", "tgi", "tensorrt-llm"):  # docs/serving.md
    medusa.export(f"heads-{profile}/", profile=profile, overwrite=True)
