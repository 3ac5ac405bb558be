"""Balancing of a mixture's experts by the routers' selection biases, the routers' z-loss, and metrics of the load."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses
from torch import Tensor
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import Router, RouterOutput, router_z_loss
from ligermodels.training import FineTuningRecipe, OutputMetrics, fine_tune, train, update_router_bias
from ligermodels.training.objective_losses import PREFERENCE
from ligermodels.training.preference import PreferenceModel
from ligermodels.training.router_bias import load_metrics

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 0.05


def build(name: str = "deepseek_v3") -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config(CONFIGS[name], dtype=torch.float32)


def biases(model: lm.CausalLM) -> Tensor:
    return torch.stack([m.selection_bias for m in model.modules() if isinstance(m, Router) and m.config.selection_bias])


def moved_by_hand(bias: Tensor, counts: list[list[int]], rate: float) -> Tensor:
    """Wang et al. (2024), algorithm 1."""
    result = bias.clone()
    for layer, loads in enumerate(counts):
        mean = sum(loads) / len(loads)
        for expert, load in enumerate(loads):
            error = mean - load
            result[layer, expert] += rate * (0 if error == 0 else math.copysign(1, error))
    return result


def counts_of(routing: Tensor, num_experts: int) -> Tensor:
    layers = routing.flatten(0, 1).unbind(1)
    return torch.stack([torch.bincount(layer.flatten().long(), minlength=num_experts) for layer in layers])


def test_an_update_by_hand() -> None:
    model = build()
    start = torch.randn_like(biases(model))
    for router, bias in zip((m for m in model.modules() if isinstance(m, Router)), start, strict=True):
        router.selection_bias.copy_(bias)
    counts = [[5, 5, 5, 5, 5, 5, 5, 5], [0, 40, 1, 0, 5, 6, 4, 0]]
    update_router_bias(model, torch.tensor(counts), rate=RATE)
    wanted = moved_by_hand(start, counts, RATE)
    assert torch.equal(biases(model), wanted) and torch.equal(wanted[0], start[0])
    with pytest.raises(InputError, match=r"must be \(layers, experts\), here \(2, 8\), got \(8,\)"):
        update_router_bias(model, torch.ones(8, dtype=torch.long), rate=RATE)
    for name in ("mixtral", "llama-3"):
        with pytest.raises(InputError, match=r"have no selection bias; DeepSeek-V3.*router_aux_loss_coef"):
            update_router_bias(build(name), torch.ones(3, 5, dtype=torch.long), rate=RATE)


@pytest.mark.parametrize("rate", [0, -0.1, float("nan"), "x", None, True])
def test_rates_are_checked_before_anything_changes(rate: Any) -> None:
    model = build()
    start = biases(model)
    with pytest.raises(InputError, match="rate: must be a number above 0"):
        update_router_bias(model, torch.ones(2, 8, dtype=torch.long), rate=rate)
    with pytest.raises(InputError, match="tokens_per_expert"):
        update_router_bias(model, None, rate=RATE)  # type: ignore[arg-type]
    assert torch.equal(biases(model), start)


def test_routers_of_draft_heads_are_not_balanced() -> None:
    model = build()
    mtp = lm.MTPModel.from_base(model)
    update_router_bias(mtp, torch.tensor([[9, *[1] * 7], [1] * 8]), rate=RATE)
    assert biases(model)[0].tolist() == pytest.approx([-RATE, *[RATE] * 7])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("deepseek_v3", {}, "needs output_metrics with tokens_per_expert"),
        ("mixtral", {"output_metrics": lambda out: OutputMetrics()}, "have no selection bias"),
        ("deepseek_v3", {"router_bias_update_rate": -1.0}, "router_bias_update_rate: must be a number of at least 0"),
    ],
)
def test_loops_that_cannot_balance_are_refused_before_the_first_step(
    name: str, options: dict[str, Any], message: str
) -> None:
    model = build(name)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ids = torch.randint(130, (2, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(InputError, match=message):
        train(
            model, [{"input_ids": ids, "labels": ids}], optimizer=optimizer, steps=1,
            **{"router_bias_update_rate": RATE, **options},
        )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_training_is_a_plain_loop() -> None:
    """Two micro-batches a step: the bias moves by the load of both, after the optimizer's step."""
    model, plain = build(), build()
    model.router_z_loss_coef = plain.router_z_loss_coef = 0.1
    ids = torch.randint(130, (8, 2, 9), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": x, "labels": x} for x in ids]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    reports: list[Any] = []
    train(
        model, batches, steps=4, optimizer=optimizers[0], max_grad_norm=None, accumulation_steps=2,  # type: ignore[arg-type]
        report_every=3, on_step=reports.append, router_bias_update_rate=RATE,
        output_metrics=lambda out: OutputMetrics({"z": out.router_z_loss}, tokens_per_expert=out.tokens_per_expert),
    )  # fmt: skip
    loads = []
    for step in range(4):
        loads.append(torch.zeros(2, 8, dtype=torch.long))
        for x in ids[2 * step : 2 * step + 2]:
            out = plain(x, labels=x, num_items_in_batch=32, return_routing=True)
            out.loss.backward()
            loads[-1] += counts_of(out.routing, 8)
        optimizers[1].step()
        optimizers[1].zero_grad()
        for router, bias in zip(
            (m for m in plain.modules() if isinstance(m, Router)),
            moved_by_hand(biases(plain), loads[-1].tolist(), RATE),
            strict=True,
        ):
            router.selection_bias.copy_(bias)
    assert torch.equal(biases(model), biases(plain)) and biases(model).any()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), plain.parameters(), strict=True))
    steps = [step for report in reports for step in report.each]
    for step, load in zip(steps, loads, strict=True):
        share = load.double() / load.sum(1, keepdim=True)
        violations = [max(row) / (sum(row) / 8) - 1 for row in load.tolist()]
        entropies = [-sum(p * math.log(p) for p in row if p) / math.log(8) for row in share.tolist()]
        assert step.load == pytest.approx(
            {
                "router_max_violation": sum(violations) / 2,
                "router_load_entropy": sum(entropies) / 2,
                "router_unused_experts": sum(row.count(0) for row in load.tolist()) / 16,
            }
        )
    with pytest.raises(InputError, match="router_bias_update_rate: needs output_metrics with tokens_per_expert"):
        train(model, batches, steps=1, optimizer=optimizers[0], router_bias_update_rate=RATE)  # type: ignore[arg-type]


def test_metrics_at_their_bounds() -> None:
    even, one = torch.full((1, 2, 4), 6), torch.tensor([[[24, 0, 0, 0]] * 2])
    names = "router_max_violation", "router_load_entropy", "router_unused_experts"
    assert load_metrics(torch.cat([even, one])) == [
        pytest.approx(dict(zip(names, (0.0, 1.0, 0.0), strict=True))),
        pytest.approx(dict(zip(names, (3.0, 0.0, 0.75), strict=True))),
    ]


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss(masked: bool) -> None:
    """As transformers has it for Switch Transformers, over the tokens of all layers."""
    logits = [(3 * torch.randn(10, 5)).requires_grad_() for _ in range(3)]
    mask = torch.rand(2, 5) < 0.6 if masked else torch.ones(2, 5, dtype=torch.bool)
    loss = router_z_loss([RouterOutput(each, 2) for each in logits], mask if masked else None)
    wanted = router_z_loss_func(torch.stack(logits)[:, mask.flatten()])
    torch.testing.assert_close(loss, wanted)
    for found, gradient in zip(torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, logits), strict=True):
        torch.testing.assert_close(found, gradient)


@pytest.mark.parametrize("name", ["mixtral", "gemma4_text-experts"])
def test_the_z_loss_of_a_model(name: str) -> None:
    """Added in training mode alone, by its weight, in the loss of labels; gradients reach the routers."""
    model = build(name)
    ids = torch.arange(2 * 9).view(2, 9)
    plain = model(ids, labels=ids)
    model.router_z_loss_coef = 0.25
    logits: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, result: logits.append(result.logits))
        for module in model.modules()
        if isinstance(module, Router)
    ]
    out = model(ids, labels=ids)
    for hook in hooks:
        hook.remove()
    wanted = torch.cat(logits).logsumexp(-1).square().mean()
    torch.testing.assert_close(out.router_z_loss, wanted)
    torch.testing.assert_close(out.loss, plain.loss + 0.25 * wanted)
    model.eval()
    quiet = model(ids, labels=ids)
    assert quiet.router_z_loss is None and torch.equal(quiet.loss, plain.loss)


def mixture(folder: Path, base: Path, name: str) -> Path:
    """A folder with a mixture's config and the tokenizer of `base`."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    config = {**CONFIGS[name], "vocab_size": vocabulary, "pad_token_id": None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def recipe_for(base: Path, data: Path, **changes: Any) -> FineTuningRecipe:
    settings: dict[str, Any] = {
        "base": base, "data": data, "max_bad_lines": 1, "validation_fraction": 0, "steps": 6, "seq_len": 16,
        "batch_tokens": 64, "micro_batch_tokens": 32, "checkpoint_every": 3, "learning_rate": 5e-3, "report_every": 2,
        "dtype": "float32",
    }  # fmt: skip
    return FineTuningRecipe().changed({**settings, **changes})


def test_a_run_that_is_resumed(base: Path, data: Path, tmp_path: Path) -> None:
    folder = mixture(tmp_path / "base", base, "glm4_moe")
    recipe = recipe_for(folder, data, router_bias_update_rate=RATE, router_z_loss_coef=0.01)
    fine_tune(recipe, tmp_path / "whole")
    resumed = Path(shutil.copytree(tmp_path / "whole", tmp_path / "resumed"))
    shutil.rmtree(resumed / "checkpoints" / "step-6")
    (resumed / "model.safetensors").unlink()
    fine_tune(recipe, resumed, resume=True)
    assert losses(resumed) == losses(tmp_path / "whole")
    written = [(each / "model.safetensors").read_bytes() for each in (tmp_path / "whole", resumed)]
    assert written[0] == written[1]
    # The biases moved by the rate in each of 6 steps, and are exported.
    found = biases(lm.from_pretrained(tmp_path / "whole"))
    moves = found / RATE
    assert found.any() and torch.allclose(moves, moves.round(), atol=1e-4) and moves.abs().max() <= 6.01
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 6
    for line in steps:
        assert line["router_z_loss"] > 0 and line["router_max_violation"] >= 0
        assert 0 < line["router_load_entropy"] <= 1 and 0 <= line["router_unused_experts"] < 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mixtral", {"router_bias_update_rate": 0.1}, "router_bias_update_rate: the routers of this model have no"),
        ("llama-3", {"router_bias_update_rate": 0.1}, "router_bias_update_rate: the routers of this model have no"),
        ("llama-3", {"router_z_loss_coef": 0.1}, "router_z_loss_coef: is for mixtures of experts"),
        ("glm4_moe", {"router_bias_update_rate": 0.1, "lora_rank": 2}, "router_bias_update_rate: changes the routers"),
        ("glm4_moe", {"router_bias_update_rate": -0.1}, "router_bias_update_rate: .*greater than or equal to 0"),
    ],
)
def test_refused(base: Path, data: Path, tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    folder = mixture(tmp_path / "base", base, name)
    with pytest.raises(ConfigError, match=message):
        fine_tune(recipe_for(folder, data, **changes), tmp_path / "out")


def test_steps_of_mixtures_on_preference_data_are_not_recorded() -> None:
    """A graph pads batches, and padding would count as load."""
    trainable = PreferenceModel(build(), PREFERENCE["simpo"], {}, pairs=True)
    assert "would count the padding" in trainable.unrecordable
    assert not PreferenceModel(build("llama-3"), PREFERENCE["simpo"], {}, pairs=True).unrecordable
