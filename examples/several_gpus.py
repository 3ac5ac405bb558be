"""Full fine-tuning sharded by FSDP2: `torchrun --nproc-per-node 8 several_gpus.py [CHECKPOINT]`. docs/several-gpus.md

Without torchrun the same program runs in one process; without GPUs the ranks are processes on the CPU.
"""

import os
import sys

import small_model
import torch
import torch.distributed as dist

import ligermodels as lm
from ligermodels.training import adamw

on_gpu = torch.cuda.is_available()
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
base = sys.argv[1] if len(sys.argv) > 1 else "tiny-llama"
if len(sys.argv) == 1 and rank == 0:
    small_model.checkpoint(base)
if ranks > 1:
    dist.barrier()

plan = lm.ParallelPlan(activation_checkpointing="selective")
model = lm.from_pretrained(base, device="cuda" if on_gpu else "cpu", plan=plan if ranks > 1 else None).train()
optimizer = adamw(model.parameters(), lr=1e-3)  # after the model is sharded

generator = torch.Generator().manual_seed(rank)  # different sequences on each rank
for step in range(3):
    input_ids = torch.randint(1, 500, (2, 48), generator=generator).to(model.device)
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()  # gradients are averaged over the ranks
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}: step {step}, loss {loss.item():.3f}")
model.save_pretrained("sharded-out/", overwrite=True)  # all ranks call it, and rank 0 writes
if ranks > 1:
    dist.destroy_process_group()
