"""Expert parallelism: experts spread over ranks, beside one process with all of them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_parallel import batch, check_equal, check_training, from_first_rank
from test_parallel_runs import check_same, tuning
from test_parallel_runs import run as run_recipe
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from two_ranks import in_ranks
from typer.testing import CliRunner
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.layers import MLPConfig, MoEConfig, RouterConfig
from ligermodels.layers.context import ForwardContext
from ligermodels.layers.tokens import SelectedTokens
from ligermodels.parallel.apply import parallel_copy
from ligermodels.parallel.expert import expert_parallel
from ligermodels.training import FusedAdamW
from ligermodels.training.checkpoints import Checkpoints

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**CONFIGS["qwen3_moe"], "num_hidden_layers": 2, "mlp_only_layers": []},
    "glm4_moe": CONFIGS["glm4_moe"],
    "gpt_oss": {**CONFIGS["gpt_oss"], "num_local_experts": 6},
    "gemma4": {**CONFIGS["gemma4_text-experts"], "num_experts": 6, "num_kv_shared_layers": 1},
}
"""With a load-balancing loss; with shared experts; with biases; beside dense layers, with shared keys and values."""


_FEW = {"num_hidden_layers": 2}
_EVEN = {"intermediate_size": 96, "num_key_value_heads": 2, **_FEW}
SPLIT: dict[str, dict[str, Any]] = {
    "glm4_moe": {**FAMILIES["glm4_moe"], **_EVEN, "moe_intermediate_size": 18},  # with shared experts
    "gpt_oss": {**FAMILIES["gpt_oss"], **_EVEN},
}
"""Sizes that two ranks divide, beside experts on two ranks."""


def build(name: str) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config(FAMILIES[name], dtype=torch.float32)


def of_experts(model: nn.Module) -> dict[str, DTensor]:
    return {name: p for name, p in model.named_parameters() if name.endswith(("mlp.gate_up", "mlp.down"))}


def families(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for i, name in enumerate(FAMILIES):
        mode = ("none", "full", "selective", "selective")[i]  # in Gemma 4 the last block has experts
        plan = lm.ParallelPlan(expert=2, activation_checkpointing=mode)
        plain, model = build(name), lm.parallelize(build(name), plan)
        if name in ("qwen3_moe", "glm4_moe"):
            check_training(model, plain, torch.optim.SGD)
        # All tokens of both ranks to the experts of one of them.
        for each in (model, plain):
            for module in each.modules():
                if (bias := getattr(module, "selection_bias", None)) is not None:
                    bias[: len(bias) // 2] += 100.0
        if name in ("glm4_moe", "gemma4"):
            for each in (model, plain):
                each.zero_grad()
                each(**batch(0)).loss.backward()
            check_equal(model, plain, lambda p: p.grad)
    copied = parallel_copy(model)
    check_equal(copied, plain, lambda p: p.detach(), rtol=1e-3, atol=1e-4)
    ids = batch(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model(ids).logits)
        # The last block of Gemma 4 computes only the needed tokens: on one rank two, on the other all.
        needed = {"token_indices": torch.tensor([3, 20])} if rank == 0 else {}
        torch.testing.assert_close(model(ids, **needed).logits, plain(ids, **needed).logits, rtol=1e-3, atol=1e-4)
    assert torch.equal(*(each.generate(ids, max_new_tokens=4, eos_token_id=None) for each in (model, plain)))


def exchanges(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """One layer. Ranks have different numbers of tokens, one has none, and all tokens choose the same experts, or any.
    With two ranks, all tokens are gathered; with three, they go to the ranks of their two experts."""
    context, experts = ForwardContext(), 6
    for seed, router_scale in enumerate((1.0, 0.0, 1.0)):
        torch.manual_seed(seed)
        shared = MLPConfig(12) if seed else None
        config = MoEConfig(RouterConfig(experts, 2), 10, shared=shared, shared_gate=shared is not None, bias=seed == 1)
        plain = config.build(8).double()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.normal_()
            plain.router.weight *= router_scale  # 0: all tokens to the experts of one rank
        spread = copy.deepcopy(plain)
        expert_parallel(spread, mesh)
        counts = [7, 0, 4]
        tokens = [torch.randn(1, count, 8).double() for count in counts]
        directions = [torch.randn_like(x) for x in tokens]
        x, wanted_x = (tokens[rank].clone().requires_grad_() for _ in range(2))
        y, _ = spread(x, context)
        wanted, _ = plain(wanted_x)
        torch.testing.assert_close(y, wanted)
        for retain in (True, False):
            (found,) = torch.autograd.grad(y, x, directions[rank], retain_graph=True)
            (dx,) = torch.autograd.grad(wanted, wanted_x, directions[rank], retain_graph=True)
            torch.testing.assert_close(found, dx)
            y.backward(directions[rank], retain_graph=retain)
        plain.zero_grad()
        for each, direction in zip(tokens[: mesh.size()], directions, strict=False):
            for _ in range(2):
                plain(each)[0].backward(direction)
        for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
            if (parameter := getattr(plain, name)) is not None:
                mean = parameter.grad / mesh.size()
                torch.testing.assert_close(getattr(spread, name).grad.full_tensor(), mean)
    if mesh.size() == 2:
        assert context.agreed == {mesh.get_group().group_name: (counts[rank], 7)}
        with pytest.raises(RuntimeError, match=f"has 9 tokens, more than the {counts[rank]} of the pass"):
            spread(torch.randn(1, 9, 8).double(), context)  # on every rank: none waits for the others
        needed = torch.arange(2 if rank == 0 else 9)  # later mixtures may have all tokens of the pass
        context = ForwardContext(needed=SelectedTokens(needed, 1, 9))
        for tokens_given in (len(needed), 9):
            x = torch.randn(1, tokens_given, 8).double()
            torch.testing.assert_close(spread(x, context)[0], plain(x)[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges(ranks: int, tmp_path: Path) -> None:
    in_ranks(ranks, exchanges, tmp_path)


def by_plan(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Two of four ranks that shard, beside replicas, and over ranks of a context; files and checkpoints."""
    plans = {
        "shard": lm.ParallelPlan(expert=2),
        "replicate": lm.ParallelPlan(expert=2, replicate=2),
        "context": lm.ParallelPlan(expert=4, context=2),
    }
    for name, plan in plans.items():
        family = "glm4_moe" if name == "context" else "qwen3_moe"
        read: list[int] = []
        slices = Checkpoint.read_slice

        def counted(self: Checkpoint, name: str, start: int, count: int, read: Any = read, slices: Any = slices) -> Any:
            read.append(count)
            return slices(self, name, start, count)

        Checkpoint.read_slice = counted  # type: ignore[method-assign]
        model = lm.from_pretrained(folder / family, plan=plan)
        Checkpoint.read_slice = slices  # type: ignore[method-assign]
        plain = lm.from_pretrained(folder / family)
        # Less than an equal share and a row, or an expert, of each tensor.
        total, ranks = sum(p.numel() for p in plain.parameters()), 4 // plan.replicate
        rows = sum(p[:1].numel() for p in plain.parameters())
        assert sum(read) <= total / ranks + rows
        assert all(
            p.to_local().numel() <= -(-len(p) // ranks) * (p.numel() // len(p)) for p in of_experts(model).values()
        )
        check_equal(model, plain, lambda p: p.detach(), rtol=0, atol=0)
        model.save_pretrained(folder / name)
        check_training(model, plain, torch.optim.SGD, tensor=plan.context)
        if name != "shard":
            continue
        # Another plan resumes.
        optimizer = FusedAdamW(model.parameters(), lr=1e-2)
        model(**batch(0)).loss.backward()
        optimizer.step()
        checkpoints = Checkpoints(folder / f"checkpoints-{name}")
        checkpoints.save(1, model, optimizer, {})
        checkpoints.wait()
        other = lm.from_pretrained(folder / family, plan=lm.ParallelPlan())
        again = FusedAdamW(other.parameters(), lr=1e-2)
        checkpoints.load(1, other, again)
        for spread in (model, other):
            spread.zero_grad()
        found, wanted = ({n: p.full_tensor() for n, p in each.named_parameters()} for each in (other, model))
        assert all(torch.equal(found[key], value) for key, value in wanted.items())


def beside_tensor(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Two of four ranks have half of the experts, and of these half of the channels each."""
    for name, mode in zip(SPLIT, ("full", "selective"), strict=True):
        plan = lm.ParallelPlan(expert=2, tensor=2, activation_checkpointing=mode)
        model, plain = (lm.from_pretrained(folder / name, plan=each) for each in (plan, None))
        for parameter in of_experts(model).values():
            assert parameter.to_local().numel() * 4 == parameter.numel()
        check_equal(model, plain, lambda p: p.detach(), rtol=0, atol=0)
        model.save_pretrained(folder / "spread" / name)
        ids = batch(0)["input_ids"]
        if name == "gpt_oss":
            for each in (model, plain):
                each(ids, labels=ids).loss.backward()
            check_equal(model, plain, lambda p: p.grad)
            continue
        check_training(model, plain, torch.optim.SGD, tensor=2)
        from_first_rank(plain)
        assert torch.equal(*(each.generate(ids, max_new_tokens=4, eos_token_id=None) for each in (model, plain)))


def compiled(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    torch._dynamo.config.suppress_errors = False
    with torch._dynamo.config.patch(error_on_recompile=False):
        compile_layer, layers = nn.Module.compile, list[str]()

        def traced(self: nn.Module, *args: Any, **options: Any) -> None:
            layers.append(type(self).__name__)
            compile_layer(self, backend="aot_eager")

        nn.Module.compile = traced  # type: ignore[method-assign]
        plan = lm.ParallelPlan(expert=2, compile="blocks", activation_checkpointing="full")
        model, plain = lm.parallelize(build("glm4_moe"), plan), build("glm4_moe")
        nn.Module.compile = compile_layer  # type: ignore[method-assign]
        assert layers == ["FSDPBlock", "Attention"]  # the first layer is dense
        check_training(model, plain, torch.optim.SGD)


def runs(rank: int, folder: Path, mesh: DeviceMesh, recipe: Any) -> None:
    spread = recipe.changed({"lora_rank": 3, "parallel": {"expert": 2}})
    assert run_recipe(spread, folder / "lora").finished
    file = folder / f"{rank}.yaml"
    file.write_text(yaml.safe_dump(recipe.settings()))
    arguments = ["train", "--recipe", str(file), "--out", str(folder / "whole"), "--device", "cpu", "--expert", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_families(tmp_path: Path) -> None:
    in_ranks(2, families, tmp_path)


def test_beside_tensor(tmp_path: Path) -> None:
    for name, config in SPLIT.items():
        make_checkpoint(tmp_path / "made" / name, config)
        lm.from_pretrained(tmp_path / "made" / name).save_pretrained(tmp_path / name)
    in_ranks(4, beside_tensor, tmp_path)
    for name in SPLIT:
        files = [(tmp_path / where / name / "model.safetensors").read_bytes() for where in ("spread", "")]
        assert files[0] == files[1]


def test_compiled(tmp_path: Path) -> None:
    in_ranks(2, compiled, tmp_path)


def test_beside_other_degrees(tmp_path: Path) -> None:
    for name in ("qwen3_moe", "glm4_moe"):
        make_checkpoint(tmp_path / name, {**FAMILIES[name], **_FEW})
        lm.from_pretrained(tmp_path / name).save_pretrained(tmp_path / "one" / name)
    in_ranks(4, by_plan, tmp_path)
    for name, family in (("shard", "qwen3_moe"), ("replicate", "qwen3_moe"), ("context", "glm4_moe")):
        files = [(tmp_path / where / "model.safetensors").read_bytes() for where in (name, f"one/{family}")]
        assert files[0] == files[1]


@pytest.mark.usefixtures("one_thread")
def test_runs_are_those_of_one_process(base: Path, data: Path, tmp_path: Path) -> None:
    own = json.loads((base / "config.json").read_text())
    shutil.copytree(base, tmp_path / "base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "mlp_only_layers": []}
    config = {**FAMILIES["qwen3_moe"], **sizes, "vocab_size": own["vocab_size"]}
    make_checkpoint(tmp_path / "base", config)
    settings = {"dtype": "float64", "evaluate_every": None, "steps": 2, "checkpoint_every": None}
    recipe = tuning(tmp_path / "base", data, **settings, micro_batch_tokens=16)
    in_ranks(2, runs, tmp_path / "two", recipe)
    for name, changes in (("whole", {}), ("lora", {"lora_rank": 3})):
        run_recipe(recipe.changed(changes), tmp_path / "one" / name)
        check_same(tmp_path / "two" / name, tmp_path / "one" / name)
