"""Train LoRA, save the adapter in PEFT's format, load it and merge it: `python lora.py [CHECKPOINT]`. docs/peft.md"""

import sys

import small_model
import torch

import ligermodels as lm

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
tokenizer = lm.Tokenizer.from_pretrained(base)
input_ids = torch.tensor([tokenizer.encode(small_model.text(2000))[:64]])

model = lm.add_lora(lm.from_pretrained(base), r=8, lora_alpha=16).train()  # freezes all other parameters
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
losses = []
for _ in range(10):
    optimizer.zero_grad()
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("loss", *(f"{loss:.3f}" for loss in losses))
assert losses[-1] < losses[0]

lm.save_adapter(model, "adapter/", overwrite=True)  # PeftModel.from_pretrained opens it
reloaded = lm.load_adapter(lm.from_pretrained(base), "adapter/")
assert torch.equal(reloaded(input_ids).logits, model.eval()(input_ids).logits)
lm.merge_lora(reloaded).save_pretrained("merged/", overwrite=True)  # a checkpoint without adapters
