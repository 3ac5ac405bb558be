"""`lm.parallelize`: plans, and FSDP2 and HSDP on two and four processes with gloo, beside one process."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from two_ranks import in_ranks, own_parts
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.convert.safetensors_reader import Checkpoint
from ligermodels.data.batches import Batch
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import FullPrecision
from ligermodels.models.decoder import Decoder
from ligermodels.parallel import DataRanks
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.training import FusedAdamW, StepMetrics, train

FAMILIES = ("llama-3.2", "qwen3_moe", "qwen3_5_text")
"""Tied; a mixture of experts; a recurrent mixer, with buffers and modules that stay float32."""


FEWER: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 2, "mlp_only_layers": []},
    "qwen3_5_text": {"num_hidden_layers": 2, "full_attention_interval": 2},
}
"""Two layers in place of four: one of each kind."""


def config_of(name: str) -> dict[str, Any]:
    return {**CONFIGS[name], **FEWER.get(name, {})}


def build(name: str, dtype: torch.dtype | None = torch.float32, **fields: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config({**config_of(name), **fields}, dtype=dtype)


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 131, (2, 13), generator=generator)
    # The number of targets differs from batch to batch.
    return Batch({"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -100)})


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_equal(
    spread: nn.Module, plain: nn.Module, what: Callable[[nn.Parameter], Tensor | None], **close: Any
) -> None:
    """Each rank compares its own parts."""
    wanted = {name: what(p) for name, p in plain.named_parameters()}
    found = {name: what(p) for name, p in spread.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor is None:
            assert found[name] is None, name
        else:
            options = {"rtol": 2e-4, "atol": 2e-6, **close}
            own = own_parts(found[name], tensor)
            torch.testing.assert_close(*own, **options, msg=lambda m, n=name: f"{n}: {m}")


def from_first_rank(plain: nn.Module, *others: Tensor) -> None:
    """Give every rank what the first one has computed: gradients, parameters and buffers of `plain`, and `others`."""
    parameters = dict(plain.named_parameters())
    trained = [{name for name, p in parameters.items() if p.grad is not None}]
    dist.broadcast_object_list(trained)
    for name, p in parameters.items():
        p.grad = (torch.zeros_like(p) if p.grad is None else p.grad) if name in trained[0] else None
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    for x in (*others, *plain.buffers(), *(p.data for p in parameters.values()), *gradients):
        dist.broadcast(x, 0)


def check_training(
    spread: Any, plain: Any, make: Callable[..., torch.optim.Optimizer], tensor: int = 1, **close: Any
) -> None:
    """A step with accumulation and clipping, then a gradient of the weights that it wrote: those of one process, the
    first rank, on the batches of all ranks, of which `tensor` neighbours have the same."""
    ranks, is_first = DataRanks.of(spread), dist.get_rank() == 0
    assert ranks.size == dist.get_world_size() // tensor and ranks.rank == dist.get_rank() // tensor
    every = [batch(i) for i in range(2 * ranks.size)]
    reports: list[list[StepMetrics]] = [[], []]
    jobs = [(spread, every[ranks.rank :: ranks.size], 2, reports[0]), (plain, every, 2 * ranks.size, reports[1])]
    for model, share, steps, out in jobs if is_first else jobs[:1]:
        model.zero_grad()
        trained = [p for p in model.parameters() if p.requires_grad]
        train(
            model,
            share,
            steps=1,
            optimizer=make(trained, lr=1e-2),
            accumulation_steps=steps,
            max_grad_norm=0.5,
            on_step=out.append,
            report_every=1,
        )
    from_first_rank(plain)
    dist.broadcast_object_list(one_process := [reports[1]])
    for found, wanted in zip(reports[0], one_process[0], strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert (found.targets, found.each[0].tokens) == (wanted.targets, wanted.each[0].tokens)
    check_equal(spread, plain, lambda p: p.detach(), **close)
    spread.zero_grad(), plain.zero_grad()
    items = torch.stack([plain.num_targets(each["labels"]) for each in every[: ranks.size]]).sum(0)
    loss = spread(**every[ranks.rank], num_items_in_batch=items).loss
    (loss * ranks.size).backward()
    total = torch.zeros(())
    for each in every[: ranks.size] if is_first else ():
        one = plain(**each, num_items_in_batch=items).loss
        one.backward()
        total += one.detach()
    from_first_rank(plain, total)
    torch.testing.assert_close(ranks.sum(loss), total)
    check_equal(spread, plain, lambda p: p.grad, **close)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "world", "wanted"),
    [
        ({}, 1, (1, 1)),
        ({}, 8, (1, 8)),
        ({"replicate": 2}, 8, (2, 4)),
        ({"replicate": 2, "shard": 4}, 8, (2, 4)),
        ({"replicate": 3}, 8, "replicate 3: does not divide the number of ranks, which is 8; .* a multiple of 3"),
        ({"shard": 3}, 8, "shard: 3, times 1, is 3 ranks, and there are 8; give shard 8, or -1"),
        ({"shard": 0}, 8, "shard: must be at least 1, or -1"),
        ({"replicate": "2"}, 8, "replicate: must be a valid integer, got '2'"),
        ({"shards": 2}, 8, "shards: "),
    ],
)
def test_degrees(settings: dict[str, Any], world: int, wanted: Any) -> None:
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            lm.ParallelPlan(**settings).degrees(world)
    else:
        degrees = lm.ParallelPlan(**settings).degrees(world)
        assert (degrees["replicate"], degrees["shard"]) == wanted


def check_untouched(model: nn.Module) -> None:
    decoder = next(m for m in model.modules() if isinstance(m, Decoder))
    assert decoder.activation_checkpointing == "none"
    assert not any(block._compiled_call_impl or block._forward_hooks for block in decoder.blocks)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_plans_that_a_model_does_not_fit() -> None:
    model = build("llama-3")
    modes: dict[str, Any] = {"activation_checkpointing": "full", "compile": "blocks"}
    with pytest.raises(
        ConfigError, match=r"num_kv_heads .*: 2 cannot be split.* over 4 ranks.*work for this model: 1$"
    ):
        lm.parallelize(model, lm.ParallelPlan(tensor=4, **modes))
    with pytest.raises(ConfigError, match="expert: the model has no mixture of experts"):
        lm.parallelize(model, lm.ParallelPlan(expert=2, activation_checkpointing="full"))
    with pytest.raises(
        ConfigError, match=r"expert: decoder.blocks.*gate_up: num_experts: 6 cannot be split evenly over 4"
    ):
        lm.parallelize(build("qwen3_moe"), lm.ParallelPlan(expert=4))
    with pytest.raises(ConfigError, match="expert: 2 does not divide the 1 ranks"):
        lm.parallelize(build("qwen3_moe"), lm.ParallelPlan(expert=2))
    mixture = build("qwen3_moe")
    mixture.activation_checkpointing = "selective"
    with pytest.raises(ConfigError, match="activation_checkpointing: 'selective' is not supported where experts are"):
        lm.parallelize(mixture, lm.ParallelPlan(expert=2, compile="blocks"))
    with pytest.raises(InputError, match="takes a native CausalLM or a model around one, got a Linear without"):
        lm.parallelize(nn.Linear(2, 2), lm.ParallelPlan(context=2))
    with pytest.raises(ConfigError, match=r"context 2: does not divide the number of ranks, which is 1; .*torchrun"):
        lm.parallelize(model, lm.ParallelPlan(context=2, **modes))
    with pytest.raises(ConfigError, match="there are 1; give shard 1"):
        lm.parallelize(model, lm.ParallelPlan(shard=2, **modes))
    with pytest.raises(InputError, match="needs a process group; start by torchrun"):
        lm.parallelize(model, lm.ParallelPlan(param_dtype="bfloat16", **modes))
    with pytest.warns(UserWarning, match="reshard_after_forward: has no effect in one process"):
        lm.parallelize(model, lm.ParallelPlan(reshard_after_forward=False))
    check_untouched(model)
    assert lm.parallelize(model, lm.ParallelPlan(activation_checkpointing="full")) is model
    assert model.activation_checkpointing == "full" and not any(isinstance(m, FSDPModule) for m in model.modules())


def test_blocks_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    whole_blocks = lm.parallelize(build("glm4_moe"), lm.ParallelPlan(compile="blocks"))  # in one process
    assert all(block._compiled_call_impl for block in whole_blocks.decoder.blocks)

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, backend=backend, fullgraph=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, model = build("llama-3"), lm.parallelize(build("llama-3"), lm.ParallelPlan(compile="blocks"))
        for each in (plain, model):
            each(**batch(0)).loss.backward()
        assert graphs
        check_equal(model, plain, lambda p: p.grad)
        # FSDP2 gathers modules that keep their dtypes within a block: the layers without any are compiled.
        graphs.clear()
        plain, kept = build("glm4_moe"), lm.parallelize(build("glm4_moe"), lm.ParallelPlan(compile="blocks"))
        for each in (plain, kept):
            each(**batch(0)).loss.backward()
        assert graphs
        compiled = [
            [part is not None and part._compiled_call_impl is not None for part in (block, block.mixer, block.mlp)]
            for block in kept.decoder.blocks
        ]
        assert [False, True, False] in compiled and all(True in parts for parts in compiled)
        check_equal(kept, plain, lambda p: p.grad)
        refused = lm.quantize(build("llama-3"), "int4")
        with pytest.raises(ConfigError, match="compile: all layers of this model contain modules that keep their"):
            lm.parallelize(refused, lm.ParallelPlan(compile="blocks"))
        check_untouched(refused)
        with pytest.raises(InputError, match="deepcopy: distributed modules are not copied"):
            copy.deepcopy(model)
    finally:
        dist.destroy_process_group()


# -- on several processes ----------------------------------------------------------------------------------------------


def families(rank: int, folder: Path, mesh: DeviceMesh, names: Sequence[str], *plans: lm.ParallelPlan) -> None:
    """Each family by one of the plans, in turn, and in one mode of checkpointing."""
    for i, name in enumerate(names):
        mode = ("none", "selective", "full")[i % 3]
        plan = plans[i % len(plans)].model_copy(update={"activation_checkpointing": mode})
        plain, model = build(name), lm.parallelize(build(name), plan)
        assert model.activation_checkpointing == mode
        check_training(model, plain, torch.optim.SGD)


def jobs(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Medusa, the optimizer inside the backward pass, mixed dtypes, and what may not be done."""
    for name, lm_head in (("llama-3", "own"), ("gemma2", "shared")):
        several: list[lm.MedusaModel] = []
        for spread in (False, True):
            model = lm.MedusaModel.from_base(build(name), num_heads=2, lm_head=lm_head)
            torch.manual_seed(1)
            for parameter in model.heads.parameters():
                nn.init.normal_(parameter, std=0.05)
            several.append(lm.parallelize(model) if spread else model)
        plain, model = several
        frozen = {name: whole(p).clone() for name, p in model.base.named_parameters()}
        summed = sums_of_gradients(model, batch(rank))
        # Of the heads' parameters alone, and of rows that fill the last shard up.
        count = sum(p.to_local().numel() for p in model.heads.parameters())
        assert summed and count <= sum(summed) <= count + sum(p[:1].numel() for p in model.heads.parameters())
        plain.zero_grad(), model.zero_grad()
        check_training(model, plain, torch.optim.SGD)
        assert all(torch.equal(whole(p), frozen[name]) for name, p in model.base.named_parameters())
        # Stage 2, with a reference and without one.
        references = [frozen_copy(each.base) for each in several]
        joint = [JointMedusa(m, r if lm_head == "own" else None) for m, r in zip(several, references, strict=True)]
        for each in joint:
            each.zero_grad()
        check_training(joint[1], joint[0], torch.optim.SGD, rtol=1e-3, atol=1e-5)
        with pytest.raises(InputError, match=r"reference: .*for a sharded model"):
            frozen_copy(model.base, "cpu_offload")

    # Blocks that stay gathered between their passes, and are sharded again after the backward pass or without one.
    plain, model = build("qwen3_moe"), lm.parallelize(build("qwen3_moe"), lm.ParallelPlan(reshard_after_forward=False))
    loss = model(**batch(rank)).loss
    assert not any(isinstance(p, DTensor) for p in model.decoder.blocks.parameters())
    loss.backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with torch.no_grad():
        model(**batch(rank))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    check_training(model, plain, torch.optim.SGD)

    # bfloat16, with modules that stay float32; the update within the backward pass; its noise is that of one process.
    plain, model = build("qwen3_5_text", torch.bfloat16), build("qwen3_5_text", torch.bfloat16)
    lm.parallelize(model, lm.ParallelPlan(reduce_dtype="float32"))
    before = [p.detach().clone() for p in model.parameters()]
    optimizers = [FusedAdamW(each.parameters(), lr=1e-3, rounding="stochastic") for each in (plain, model)]
    handles = optimizers[1].step_in_backward()
    model(**batch(rank)).loss.backward()
    assert all(p.grad is None for p in model.parameters()) and handles
    assert any(not torch.equal(whole(p), whole(q)) for p, q in zip(model.parameters(), before, strict=True))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.data.copy_(whole(q.data))
    optimizers = [FusedAdamW(each.parameters(), lr=1e-3, rounding="stochastic", seed=7) for each in (plain, model)]
    for handle in handles:
        handle.remove()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.manual_seed(len(p))
        p.grad = torch.randn(p.shape, dtype=p.dtype)
        q.grad = torch.distributed.tensor.distribute_tensor(p.grad, q.device_mesh, q.placements)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(p, whole(q)) for p, q in zip(plain.parameters(), model.parameters(), strict=True))

    # Mixed precision: the blocks compute in bfloat16, what is to stay float32 in that.
    model = lm.parallelize(build("qwen3_5_text"), lm.ParallelPlan(param_dtype="bfloat16", reduce_dtype="float32"))
    seen: dict[type, set[torch.dtype]] = {}

    def note(module: nn.Module, *_: Any) -> None:
        seen.setdefault(type(module), set()).update(p.dtype for p in module.parameters(recurse=False))

    for module in model.modules():
        module.register_forward_pre_hook(note)
    loss = model(**batch(rank)).loss
    loss.backward()
    assert loss.dtype == torch.float32 and {p.grad.dtype for p in model.parameters()} == {torch.float32}
    own = {kind: dtypes for kind, dtypes in seen.items() if dtypes}
    wide = {kind for kind, dtypes in own.items() if dtypes == {torch.float32}}
    assert wide == {kind for kind in own if issubclass(kind, FullPrecision)} and wide
    assert all(dtypes == {torch.bfloat16} for kind, dtypes in own.items() if kind not in wide)


def lora(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    adapted = []
    for spread in (False, True):
        model = build("qwen3")
        torch.manual_seed(2)
        lm.add_lora(model, 3, target_modules=["q_proj", "down_proj"])
        adapted.append(lm.parallelize(model) if spread else model)
    check_training(adapted[1], adapted[0], torch.optim.SGD)
    with pytest.raises(InputError, match="sharded already"):
        lm.add_lora(lm.parallelize(build("qwen3")), 3)


def sums_of_gradients(model: Any, given: Batch) -> list[int]:
    """How many elements of each sum of gradients over the ranks this one has."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    summed: list[int] = []
    scatter = getattr(dist, name)
    setattr(dist, name, lambda output, *a, **o: summed.append(output.numel()) or scatter(output, *a, **o))
    model(**given).loss.backward()
    setattr(dist, name, scatter)
    return summed


def loading(rank: int, folder: Path, mesh: DeviceMesh, plan: lm.ParallelPlan, names: Sequence[str]) -> None:
    world = dist.get_world_size()
    for name in names:
        read = 0
        slices = Checkpoint.read_slice

        def counted(self: Checkpoint, name: str, start: int, count: int, slices: Any = slices) -> Tensor:
            nonlocal read
            read += count
            return slices(self, name, start, count)

        Checkpoint.read_slice = counted  # type: ignore[method-assign]
        model = lm.from_pretrained(folder / name, plan=plan)
        Checkpoint.read_slice = slices  # type: ignore[method-assign]
        total = sum(p.numel() for p in model.parameters())
        shards = plan.degrees(world)["shard"]
        # Less than an equal share and a row of each tensor, which rows do not divide.
        rows = sum(p[:1].numel() for p in model.parameters())
        assert read <= total / shards + rows, (name, read, total)
        assert sum(p.to_local().numel() for p in model.parameters()) <= total / shards + rows
        plain = lm.from_pretrained(folder / name)
        check_equal(model, plain, lambda p: p.detach(), rtol=0, atol=0)
        for buffers in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(*buffers)
        model.save_pretrained(folder / f"out-{world}" / name, max_shard_size=20_000)
        with torch.no_grad():
            torch.testing.assert_close(model(batch(rank)["input_ids"]).logits, plain(batch(rank)["input_ids"]).logits)
    for name in ("qwen3_5_text", "llama-3.2"):  # the second one is tied
        torch.manual_seed(3)
        model = lm.from_config(config_of(name), plan=plan)
        torch.manual_seed(3)
        check_equal(model, lm.from_config(config_of(name)), lambda p: p.detach(), rtol=0, atol=0)


DIVISIBLE: dict[str, dict[str, Any]] = {
    name: {
        **config_of(name),
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        **({"moe_intermediate_size": 18} if "moe" in name else {}),
    }
    for name in ("llama-3", "qwen3_moe", "qwen3_5_text")
}
"""Configs of which two ranks can each have a part of every layer."""


def groups(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Models of one plan share their process groups, forward and backward too: on GPUs each takes memory for good.
    After two calls for each plan there are as many groups as after one, and the models are gone."""
    plans = [
        lm.ParallelPlan(replicate=2),
        lm.ParallelPlan(tensor=2),
        lm.ParallelPlan(context=2, tensor=2),
        lm.ParallelPlan(expert=2),
        lm.ParallelPlan(expert=2, param_dtype="bfloat16", activation_checkpointing="full"),  # the same meshes
    ]
    numbers: list[int] = []
    models: list[weakref.ref[lm.CausalLM]] = []
    for call in range(2 * len(plans)):
        plan = plans[call % len(plans)]
        name = "qwen3_moe" if plan.expert > 1 else "llama-3"
        model = lm.parallelize(lm.from_config(DIVISIBLE[name], dtype=torch.float32), plan)
        models.append(weakref.ref(model))
        model(**batch(0)).loss.backward()
        if call % len(plans) == len(plans) - 1:
            numbers.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(numbers)) == 1, numbers
    del model
    gc.collect()
    assert not any(each() is not None for each in models)


def by_tensor(rank: int, folder: Path, mesh: DeviceMesh, names: Sequence[str]) -> None:
    """All that a plan of tensor parallelism does, with FSDP2 over the ranks that are left. The gradients of families
    are those of test_tensor_parallel."""
    for name in names:
        model = lm.from_pretrained(folder / name, plan=lm.ParallelPlan(tensor=2))
        plain = lm.from_pretrained(folder / name)
        check_equal(model, plain, lambda p: p.detach(), rtol=0, atol=0)
        model.save_pretrained(folder / "tensor" / name)
        ids = batch(0)["input_ids"]
        assert torch.equal(*(each.generate(ids, max_new_tokens=5, eos_token_id=None) for each in (model, plain)))
        if name == "llama-3":
            check_training(model, plain, torch.optim.SGD, tensor=2)
    if "llama-3" not in names:
        return
    medusa = []
    for spread in (False, True):
        torch.manual_seed(1)
        heads = lm.MedusaModel.from_base(lm.from_pretrained(folder / "llama-3"), num_heads=2)
        medusa.append(lm.parallelize(heads, lm.ParallelPlan(tensor=2)) if spread else heads)
    check_training(medusa[1], medusa[0], torch.optim.SGD, tensor=2)
    base = lm.from_pretrained(folder / "llama-3", plan=lm.ParallelPlan(tensor=2))
    with pytest.raises(InputError, match="tensor: the base of this model has been spread by itself"):
        lm.parallelize(lm.MedusaModel.from_base(base, num_heads=2))
    model = lm.from_pretrained(folder / "llama-3")
    model.decoder.blocks[1].mlp.down = torch.nn.Sequential(model.decoder.blocks[1].mlp.down)
    with pytest.raises(ConfigError, match=r"blocks.1.mlp.down \(Sequential\): is in the place of a linear layer"):
        lm.parallelize(model, lm.ParallelPlan(tensor=2, activation_checkpointing="full", compile="blocks"))
    check_untouched(model)


@pytest.mark.parametrize(("world", "names"), [(2, ["qwen3_moe"]), (4, ["llama-3", "qwen3_5_text"])])
def test_tensor_parallelism_by_plan(world: int, names: list[str], tmp_path: Path) -> None:
    """Two ranks without FSDP2: of one family, since test_tensor_parallel has others."""
    for name in names:
        make_checkpoint(tmp_path / name, DIVISIBLE[name])
    in_ranks(world, by_tensor, tmp_path, names)
    for name in names:
        lm.from_pretrained(tmp_path / name).save_pretrained(tmp_path / "one" / name)
        one, several = (tmp_path / where / name / "model.safetensors" for where in ("one", "tensor"))
        assert one.read_bytes() == several.read_bytes()


def test_fsdp2_is_one_process(tmp_path: Path) -> None:
    """Of a recurrent mixer, with buffers and modules that stay float32: a tied model and a mixture are below."""
    in_ranks(2, families, tmp_path, ("qwen3_5_text",), lm.ParallelPlan())


def test_four_shards_and_hsdp_are_one_process(tmp_path: Path) -> None:
    in_ranks(4, families, tmp_path, ("gemma2", "qwen3_moe"), lm.ParallelPlan(), lm.ParallelPlan(replicate=2))


def test_models_of_one_plan_share_process_groups(tmp_path: Path) -> None:
    in_ranks(4, groups, tmp_path)


def test_medusa_and_dtypes(tmp_path: Path) -> None:
    in_ranks(2, jobs, tmp_path)


def test_lora(tmp_path: Path) -> None:
    """On four ranks, of which one has nothing of LoRA's three rows."""
    in_ranks(4, lora, tmp_path)


def test_each_rank_reads_its_part_and_shards_are_written_as_by_one_process(tmp_path: Path) -> None:
    every = (*FAMILIES, "lfm2_moe")
    for name in every:
        make_checkpoint(tmp_path / name, config_of(name))
        lm.from_pretrained(tmp_path / name).save_pretrained(tmp_path / "out-1" / name, max_shard_size=20_000)

    def files(out: Path, names: Sequence[str]) -> dict[Path, bytes]:
        paths = (path for name in names for path in (out / name).rglob("*") if path.is_file())
        return {path.relative_to(out): path.read_bytes() for path in paths}

    for world, plan, names in ((2, lm.ParallelPlan(), every), (4, lm.ParallelPlan(replicate=2), every[:2])):
        in_ranks(world, loading, tmp_path, plan, names)
        assert files(tmp_path / f"out-{world}", names) == files(tmp_path / "out-1", names)
