"""Muon: its matrices, its steps beside torch's own and beside float64, and runs."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses, recipe_for
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.ops.optimizer.muon import COEFFICIENTS
from ligermodels.training import FineTuningRecipe, Muon, fine_tune, hidden_matrices, muon, train_heads
from ligermodels.training.fused_adamw import FusedAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(name: str = "llama-2", dtype: torch.dtype = torch.float64) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config(CONFIGS[name], dtype=dtype)


def names_of(model: nn.Module) -> dict[str, list[int]]:
    """Name -> rows of each matrix."""
    found = hidden_matrices(model)
    return {name: [len(rows) for rows in found[p]] for name, p in model.named_parameters() if p in found}


def test_matrices() -> None:
    """q, k and v apart, gate and up apart, experts; not embeddings, heads, routers, convolutions, vectors."""
    block = "decoder.blocks.1."
    found = {name.removeprefix(block): sizes for name, sizes in names_of(tiny()).items() if name.startswith(block)}
    assert found == {
        "mixer.qkv.weight": [84, 84, 84],
        "mixer.o.weight": [84],
        "mlp.gate_up.weight": [97, 97],
        "mlp.down.weight": [84],
    }
    found = {name.removeprefix(block) for name in names_of(tiny("qwen3_moe"))}
    assert {"mlp.gate_up", "mlp.down"} <= found and "mlp.router.weight" not in found
    found = {name.rpartition("blocks.0.")[2]: sizes for name, sizes in names_of(tiny("qwen3_5_text")).items()}
    assert found["mixer.in_proj.weight"] == [82, 42, 6, 6] and "mixer.conv.weight" not in found
    adapter = names_of(lm.add_lora(tiny(), r=3))
    assert adapter["decoder.blocks.0.mixer.qkv.update.lora_A"] == [3, 3, 3]
    assert adapter["decoder.blocks.0.mixer.qkv.update.lora_B_k_proj"] == [84]
    assert len(adapter) == len(tiny().decoder.blocks) * (4 + 7)  # four A, and a B of each of seven layers
    medusa = names_of(lm.MedusaModel.from_base(tiny(), num_heads=2))
    assert medusa and all("linear.weight" in name for name in medusa)
    mtp = names_of(lm.MTPModel.from_base(tiny("qwen3_5_text")))
    assert mtp["head.fc.weight"] == [60] and mtp["head.block.mixer.qkv.weight"] == [192, 32, 32]


def polynomial(x: Tensor) -> Tensor:
    """Newton-Schulz as a function of singular values."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("name", ["llama-2", "qwen3_moe"])
def test_a_model_beside_the_formula(name: str) -> None:
    """Three steps in float64, of each matrix of the Hugging Face checkpoint; the other parameters are AdamW's."""
    model = tiny(name)
    twin = copy.deepcopy(model)
    optimizer = muon(model, 0.01, weight_decay=0.1)
    other = FusedAdamW([p for p in twin.parameters() if p not in hidden_matrices(twin)], lr=0.01, betas=(0.9, 0.95))
    for group in other.param_groups:
        group["weight_decay"] = 0.0
    ids = torch.randint(3, 131, (2, 12))
    momenta: dict[str, Tensor] = {}

    def state() -> dict[str, Tensor]:
        return {key: tensor.clone() for key, tensor in twin.hf_state_dict().items()}

    def exchange() -> None:
        for p in twin.parameters():
            p.data, p.grad = p.grad, p.data

    for _ in range(3):
        for each in (model, twin):
            each(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = state()
        exchange()
        gradients = state()  # by their names in the checkpoint
        exchange()
        other.step()
        after = state()
        for key, weight in before.items():
            views = matrices_in(key, gradients[key])
            if weight.ndim > 1:
                after[key] -= 0.01 * 0.1 * weight
            if views:
                momentum = momenta.setdefault(key, torch.zeros_like(weight)).lerp_(gradients[key], 0.05)
                ahead = gradients[key].lerp(momentum, 0.95)
                for target, x in zip(matrices_in(key, after[key]), matrices_in(key, ahead), strict=True):
                    target -= 0.01 * 0.2 * math.sqrt(max(x.shape)) * polynomial(x)
        twin.load_hf_state_dict(after)
        twin.zero_grad()
    found = model.hf_state_dict()
    assert momenta
    for key, wanted in twin.hf_state_dict().items():
        torch.testing.assert_close(found[key], wanted, rtol=1e-7, atol=1e-9, msg=key)


def matrices_in(key: str, tensor: Tensor) -> list[Tensor]:
    """Views of the hidden matrices in a tensor of a transformers model; of experts gate and up are one tensor."""
    if tensor.ndim == 3:
        halves = tensor.chunk(2, dim=1) if "gate_up" in key else (tensor,)
        return [matrix for half in halves for matrix in half]
    return [tensor] if any(f".{name}_proj." in key for name in ["q", "k", "v", "o", "gate", "up", "down"]) else []


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_one_matrix_is_that_of_torch(adjust: Any) -> None:
    """In float32, of tall and wide ones; the same in the backward pass; and a copy, and one that is resumed."""
    for shape in ((24, 40), (40, 24)):
        ours, inside, theirs = (nn.Parameter(torch.ones(shape).tril()) for _ in range(3))
        options = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": adjust}
        rows = (torch.arange(shape[0]),)
        optimizers = [Muon([p], matrices={p: rows}, **options) for p in (ours, inside)]
        optimizers[1].step_in_backward()
        optimizers.append(torch.optim.Muon([theirs], **options))
        for step in range(4):
            x = torch.randn(shape)
            for p in (ours, inside, theirs):
                (p * x).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step == 1:
                state, p = copy.deepcopy(optimizers[0].state_dict()), nn.Parameter(ours.detach().clone())
                ours, optimizers[0] = p, Muon([p], matrices={p: rows}, **options)
                optimizers[0].load_state_dict(state)
            if step == 2:
                optimizers[0] = copy.deepcopy(optimizers[0])
                ours = optimizers[0].param_groups[0]["params"][0]
        # Newton-Schulz is in bfloat16, and its products are not those of every version of torch.
        factor = 0.2 * max(shape) ** 0.5 if adjust == "match_rms_adamw" else max(1, shape[0] / shape[1]) ** 0.5
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * 0.05 * factor)
        assert torch.equal(ours, inside)


def test_momentum_of_a_group_is_that_of_torch() -> None:
    """Also where it changes from step to step, and of loaded groups."""
    parameters = [[nn.Parameter(torch.ones(24, 24).tril() + i) for i in range(2)] for _ in range(2)]
    rows = (torch.arange(24),)
    groups = [[{"params": [a], "momentum": 0.5}, {"params": [b], "nesterov": False}] for a, b in parameters]
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "adjust_lr_fn": "original"}
    optimizers: list[torch.optim.Optimizer] = [
        Muon(groups[0], matrices={p: rows for p in parameters[0]}, **options), torch.optim.Muon(groups[1], **options)
    ]  # fmt: skip
    for step in range(4):
        for ps, optimizer in zip(parameters, optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            for p in ps:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.param_groups[1]["momentum"] = 0.2 * step
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.step()
    for ours, theirs in zip(*parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * 0.05)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"momentum": 1.0}, "momentum: must be below 1"),
        ({"ns_steps": 3}, "ns_steps: is the same for all groups; give it to Muon instead"),
        ({"rounding": "stochastic"}, "rounding: is the same for all groups"),
        ({"state_bits": 8}, "state_bits: is the same for all groups"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay: FusedAdamW does not implement False"),
        ({"differentiable": True}, "differentiable: FusedAdamW does not implement it"),
    ],
)
def test_options_that_a_group_cannot_have_are_refused(option: dict[str, Any], message: str) -> None:
    """They were ignored."""
    with pytest.raises(InputError, match=message):
        Muon([{"params": [nn.Parameter(torch.zeros(4, 4))], **option}], matrices={})


def test_matrices_of_a_group_that_is_added_later() -> None:
    """As by unfreezing a model step by step: AdamW updated them. A copy of the optimizer keeps what it has."""
    ends, ids = [], torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    for later in (False, True):
        model = tiny(dtype=torch.float32)
        parameters = list(model.parameters())
        optimizer = Muon(parameters[: 9 if later else None], lr=1e-2, matrices=hidden_matrices(model))
        if later:
            optimizer.add_param_group({"params": parameters[9:]})
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer = copy.copy(optimizer)
        ends.append(parameters)
    assert all(map(torch.equal, *ends))


def test_bad_arguments() -> None:
    p = nn.Parameter(torch.zeros(4, 4))
    vector = nn.Parameter(torch.zeros(4))
    for options, message in (
        ({"momentum": 1.0}, "momentum: must be below 1"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn: must be 'match_rms_adamw' or 'original', got 'none'"),
        (
            {"matrices": {nn.Parameter(p.clone()): (torch.arange(4),)}},
            "matrices: none of these parameters is in params",
        ),
        ({"matrices": {vector: (torch.arange(4),)}}, r"matrices: must have 2 or 3 dimensions, one has shape \(4,\)"),
    ):
        with pytest.raises(InputError, match=message):
            Muon([p, vector], **{"matrices": {}, **options})


def test_runs(base: Path, data: Path, tmp_path: Path) -> None:
    """Of the whole model, of LoRA and of Medusa heads, resumed bit for bit."""
    changes = {"optimizer": "muon", "dtype": "bfloat16", "evaluate_every": None, "steps": 4, "checkpoint_every": 2}
    heads = recipe_for(base, data, **changes, lm_head="own")
    names = FineTuningRecipe.model_fields
    whole = FineTuningRecipe(**{name: value for name, value in heads.settings().items() if name in names})
    for name, recipe, run in (
        ("heads", heads, train_heads),
        ("whole", whole, fine_tune),
        ("lora", whole.changed({"lora_rank": 2}), fine_tune),
    ):
        out = tmp_path / name
        run(recipe.changed({"schedule": "constant"}), out)
        run(recipe.changed({"schedule": "constant", "steps": 2}), tmp_path / "again" / name)
        run(recipe.changed({"schedule": "constant"}), tmp_path / "again" / name, resume=True)
        assert losses(tmp_path / "again" / name) == losses(out) and len(losses(out)) == 4
        about = json.loads((out / "checkpoints/step-4/run.json").read_text())
        assert about["recipe"]["optimizer"] == "muon"
