"""A transformers model that computes natively, and a native copy: `python from_transformers.py [CHECKPOINT]`.

docs/transformers.md; needs transformers.
"""

import sys

import small_model
import torch
from transformers import AutoModelForCausalLM

import ligermodels as lm

base = sys.argv[1] if len(sys.argv) > 1 else small_model.checkpoint()
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
input_ids = torch.randint(1, 500, (2, 48), generator=torch.Generator().manual_seed(0))

expected = model(input_ids=input_ids, labels=input_ids).loss
lm.nativize(model)  # the same object
loss = model(input_ids=input_ids, labels=input_ids).loss
loss.backward()
print(f"loss of transformers {expected.item():.5f}, computed natively {loss.item():.5f}")
torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
lm.restore(model)

native = lm.from_transformers(model)  # a native model with the same weights
native.save_pretrained("from-transformers/", overwrite=True)
