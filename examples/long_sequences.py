"""Activation checkpointing and packed documents: `python long_sequences.py [CHECKPOINT]`. docs/long-sequences.md"""

import sys

import small_model
import torch

import ligermodels as lm

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
model = lm.from_pretrained(base).train()
input_ids = torch.randint(1, 500, (1, 300), generator=torch.Generator().manual_seed(0))
cu_seqlens = torch.tensor([0, 120, 300], dtype=torch.int32)  # two documents in one row

results = {}
for mode in ("none", "selective", "full", "offload"):
    model.activation_checkpointing = mode  # less memory, the same losses and gradients
    model.zero_grad()
    loss = model(input_ids, labels=input_ids, cu_seqlens=cu_seqlens).loss
    loss.backward()
    results[mode] = (loss.item(), sum(p.grad.norm().item() for p in model.parameters()))
    print(f"{mode}: loss {results[mode][0]:.6f}, gradient norms {results[mode][1]:.6f}")
assert len(set(results.values())) == 1
