"""Tensor parallelism of models that were loaded on the CPU, on a GPU for each rank, and by gloo on the CPU."""

from pathlib import Path

import pytest
import torch
from test_parallel import batch, whole
from test_tensor_parallel import even
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_ranks
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm

ROPE = "decoder.ropes.0.frequencies"
MODELS = {
    "llama-3.2": {ROPE},
    "deepseek_v3": {ROPE, *(f"decoder.blocks.{i}.mlp.router.selection_bias" for i in (1, 2))},
    "qwen3_5_text": {ROPE},
}
"""Names of configs -> all buffers. Tied; a mixture with latent attention; Gated DeltaNet."""


def train(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Two steps beside the same model on one device."""
    for name, buffers in MODELS.items():
        plain = lm.from_pretrained(folder / name, dtype=torch.float32, device=mesh.device_type)
        model = lm.from_pretrained(folder / name, dtype=torch.float32, device="cpu")
        model = lm.parallelize(model, lm.ParallelPlan(tensor=2))
        held = dict(model.named_buffers())
        assert held.keys() == buffers
        held |= dict(model.named_parameters())
        assert {key: x.device.type for key, x in held.items()} == dict.fromkeys(held, mesh.device_type)
        losses = []
        for each in (plain, model):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for seed in range(2):
                loss = each(**{key: x.to(mesh.device_type) for key, x in batch(seed).items()}).loss
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
        assert losses[:2] == pytest.approx(losses[2:], rel=1e-4) and losses[0] != losses[1]
        for (key, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(found), wanted, rtol=1e-3, atol=1e-4, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
        ),
    ],
)
def test_a_model_loaded_on_the_cpu(device: str, tmp_path: Path) -> None:
    for name in MODELS:
        make_checkpoint(tmp_path / name, even(CONFIGS[name]))
    in_ranks(2, train, tmp_path, device=device)
