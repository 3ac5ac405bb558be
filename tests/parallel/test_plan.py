"""`ligermodels plan`: memory against peaks measured on a GPU, the arithmetic of costs, and the command."""

import gc
import itertools
import json
import re
import weakref
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typer.testing import CliRunner
from zoo import BASE, CONFIGS, OF_EACH_KIND

import ligermodels as lm
from benchmarks.cases.models import CONFIGS as MODELS
from benchmarks.cases.parallel import Case, planned_gib
from ligermodels.arguments import OptimizerName
from ligermodels.cli import app
from ligermodels.cli.dry_run import _memory
from ligermodels.cli.plan import memory_size
from ligermodels.console import readable_bytes
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.offload import host_bytes
from ligermodels.ops import gated_delta_rule
from ligermodels.ops.linear_attention import delta_channels
from ligermodels.ops.runtime.library import host_code
from ligermodels.parallel import trace
from ligermodels.parallel.advice import RESERVED, _divisors, candidates
from ligermodels.parallel.cost import Hardware, ModelSize
from ligermodels.parallel.expert import mixtures
from ligermodels.parallel.memory import step_memory
from ligermodels.parallel.tensor import check_tensor_parallel, tensor_part
from ligermodels.parallel.trace import FirstRank, _Allocations
from ligermodels.training.optimizer import optimizer_named
from ligermodels.training.parameter_groups import parameter_groups

GIB = 2**30
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def on_meta(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> lm.CausalLM:
    return lm.from_config(config, dtype=dtype, device="meta")


def measured() -> list[Any]:
    """The newest record of each case of ours, all labels in use."""
    records = map(json.loads, (RESULTS / "training-h200.jsonl").read_text().splitlines())
    found = {
        each["case"]: each
        for each in records
        if each["provider"] == "ligermodels" and "peak_gib" in each and not each.get("in_backward") and "model" in each
    }
    return [pytest.param(each, id=name) for name, each in found.items() if not each["ignored"]]


@pytest.mark.parametrize("record", measured())
def test_memory_is_that_measured_on_an_h200(record: dict[str, Any]) -> None:
    """Within 5 % of `torch.cuda.max_memory_allocated`."""
    model = on_meta(MODELS[record["model"]])
    if rank := record.get("lora_rank"):
        lm.add_lora(model, rank)
    # Records of before say nothing of it: the cases with a lot of tokens took it.
    old = "selective" if record["model"] == "llama-3-8b" and record["batch"] > 1 else "none"
    model.activation_checkpointing = record.get("activation_checkpointing") or old
    found = step_memory(model, record["batch"], record["length"]).total
    peak = (record["peak_gib"] - record.get("held_before_gib", 0.0)) * GIB
    assert abs(found / peak - 1) < 0.05, (found / GIB, record["peak_gib"])


def measured_on_ranks() -> list[Any]:
    """The newest record of each case on several GPUs."""
    lines = [line for gpu in ("h100", "h200") for line in (RESULTS / f"parallel-{gpu}.jsonl").read_text().splitlines()]
    found = {(each["case"], each["gpus"]): each for each in map(json.loads, lines) if "planned_gib" in each}
    return [pytest.param(each, id=f"{case} on {gpus}") for (case, gpus), each in found.items() if gpus > 1]


@pytest.mark.parametrize("record", measured_on_ranks())
def test_memory_of_ranks_is_that_measured(record: dict[str, Any]) -> None:
    """Within 4 %: with experts that each rank keeps gathered, or without the gathered blocks, it is not."""
    case = Case(**{each.name: record[each.name] for each in fields(Case) if each.name in record})
    found = planned_gib(case, record["gpus"])
    assert abs(found / record["peak_gib"] - 1) < 0.04, (found, record["peak_gib"])


@pytest.mark.parametrize("name", ["qwen3_5_text", "gpt_oss", "llama-3.2"])
def test_a_plan_that_casts_holds_its_parameters_and_computes_in_its_own_dtype(name: str) -> None:
    """Modules that stay float32 do so in both."""
    config = CONFIGS[name] | {"intermediate_size": 96}
    single, half = (on_meta(config, dtype) for dtype in (torch.float32, torch.bfloat16))
    for degrees in ({"shard": 2}, {"tensor": 2}):  # of the second it gathers copies
        cast, narrow = (step_memory(model, 2, 40, param_dtype="bfloat16", **degrees) for model in (single, half))
        wide = step_memory(single, 2, 40, **degrees)
        assert (cast.weights, cast.optimizer_states) == (wide.weights, wide.optimizer_states)
        assert (cast.gathered, cast.activations) == (narrow.gathered, narrow.activations) and cast.gathered
        assert bool(wide.gathered) == ("shard" in degrees) and cast.activations < wide.activations


def test_sums_of_gradients_take_memory_in_their_dtype() -> None:
    """Of the unit with the most trained parameters: whole in the dtype of the sums, and a part that is cast."""
    model = on_meta({**MODELS["llama-3.2-1b"], "num_hidden_layers": 2})
    largest = sum(p.numel() for p in model.decoder.embed.parameters())
    plain, wide, narrow = (
        step_memory(model, 1, 64, shard=4, reduce_dtype=dtype) for dtype in (None, "float32", "bfloat16")
    )
    held = sum(p.nbytes for p in model.parameters())
    assert plain == narrow and replace(wide, gathered=plain.gathered) == plain
    assert wide.gathered - plain.gathered == largest * (4 - 2) + largest // 4 * 4
    cast = [step_memory(model, 1, 64, shard=4, param_dtype="float32", reduce_dtype=x) for x in (None, "bfloat16")]
    assert cast[0].gathered - cast[1].gathered == largest * (4 - 2)
    assert [ModelSize.of(model, dtype).gradients / held for dtype in (None, "float32")] == [1, 2]
    found = (
        candidates(model, 4, 8 * GIB, 4 * 1024, 64),
        candidates(model, 4, 8 * GIB, 4 * 1024, 64, reduce_dtype="float32"),
    )
    plans = [{(x.degrees, x.fsdp_unit, x.activation_checkpointing, x.micro_batch): x for x in each} for each in found]
    both = [key for key in plans[0] if key in plans[1]]
    assert both and all(plans[1][key].memory.total > plans[0][key].memory.total for key in both)
    assert all(plans[1][key].cost.sent["shard"] >= plans[0][key].cost.sent["shard"] for key in both)
    assert any(plans[1][key].cost.sent["shard"] > plans[0][key].cost.sent["shard"] for key in both)


def test_a_model_that_is_gathered_at_once_is_whole_in_memory_and_so_are_its_gradients() -> None:
    model = on_meta({**MODELS["llama-3.2-1b"], "num_hidden_layers": 2})
    whole = sum(p.nbytes for p in model.parameters())
    found = {
        dtype: step_memory(model, 1, 64, shard=4, fsdp_unit="model", reduce_dtype=dtype) for dtype in (None, "float32")
    }
    assert found[None].gathered == 2 * whole
    assert found["float32"].gathered == whole + 2 * whole + 2 * whole // 4  # sums are larger than parameters
    blocks = step_memory(model, 1, 64, shard=4)
    assert replace(found[None], gathered=blocks.gathered) == blocks
    lm.add_lora(model, 4)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert step_memory(model, 1, 64, shard=4, fsdp_unit="model").gathered == whole + 2 * trained
    mixture = on_meta(CONFIGS["qwen3_moe"])
    own = sum(p.nbytes for p in mixture.parameters() if p.ndim < 3)
    assert step_memory(mixture, 1, 64, shard=2, expert=2, fsdp_unit="model").gathered == 2 * own
    kept = on_meta(CONFIGS["glm4_moe"])  # with routers in float32
    whole = sum(p.nbytes for p in kept.parameters())
    assert whole > 2 * sum(p.numel() for p in kept.parameters())
    found = step_memory(kept, 1, 64, shard=1), step_memory(kept, 1, 64, shard=2, fsdp_unit="model")
    assert (found[0].weights, found[0].optimizer_states, found[1].gathered) == (whole, 2 * whole, 2 * whole)


class Allocated(TorchDispatchMode):
    """Counts the bytes that ops allocate on a device, and the most of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = op(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for result in tree_iter(results):
            if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in self.known | given:
                storage = result.untyped_storage()
                self.known.add(storage._cdata)
                self.now, self.most = self.now + storage.nbytes(), max(self.most, self.now + storage.nbytes())
                weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        return results

    def _release(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def delta_operands(tokens: int, heads: int, width: int, device: str) -> list[torch.Tensor]:
    """q, k, v, g by channel, beta, as slices of the rows of a projection, and the gradient of the outputs."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    rows = torch.ones(1, tokens, 3 * heads * width, **options).split(heads * width, dim=-1)
    q, k, v = (row.unflatten(-1, (heads, width)) for row in rows)
    g, beta = -torch.ones(1, tokens, heads, width, device=device), torch.ones(1, tokens, heads, device=device)
    return [q, k, v, g, beta, torch.ones(1, tokens, heads, width, **options)]


@pytest.mark.kernels
def test_buffers_of_kimi_delta_attention_are_allocated_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernels run: as many bytes at once, in both passes."""
    launch = delta_channels._Launch.launch

    def collecting(*args: Any, **constants: Any) -> None:
        launch(*args, **constants)
        gc.collect()  # Triton's interpreter leaves cycles that hold the kernel's arguments

    monkeypatch.setattr(delta_channels._Launch, "launch", collecting)
    found = []
    for device in ("cpu", "meta"):
        *operands, dout = delta_operands(70, 2, 32, device)
        for op, arguments in (
            (torch.ops.ligermodels.channel_delta_forward.default, (*operands, None, None, True)),
            (torch.ops.ligermodels.channel_delta_backward.default, (dout, None, *operands, None, None, False)),
        ):
            function = host_code(op)
            assert function is not None
            with Allocated() as allocated:
                function(*arguments)
            found.append(allocated.most)
    assert found[:2] == found[2:] and found[1] > 1.5 * found[0] > 70 * 2 * (10 * 32 + 256)


def test_memory_of_kimi_delta_attention_is_that_measured_on_an_h200() -> None:
    records = map(json.loads, (RESULTS / "delta-h200.jsonl").read_text().splitlines())
    case, provider = "rule 8192, by channel", "ligermodels, triton"
    (*_, record) = (each for each in records if (each["case"], each["provider"]) == (case, provider))
    *operands, dout = delta_operands(8192, 32, 128, "meta")
    operands = [x.detach().requires_grad_() for x in operands]
    with _Allocations(torch.nn.Module(), None) as allocations:
        o, _ = gated_delta_rule(*operands, final_state=False)
        torch.autograd.grad(o, operands, dout)
    peak = max(itertools.accumulate(size for _, size in allocations.events))
    assert abs(peak / 2**20 / record["peak_mib"] - 1) < 0.03, (peak / 2**20, record["peak_mib"])


def test_plans_count_buffers_of_kimi_delta_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**CONFIGS["kimi_linear"], "linear_attn_config": {**CONFIGS["kimi_linear"]["linear_attn_config"]}}
    config["linear_attn_config"] |= {"head_dim": 64, "num_heads": 8}
    counted = step_memory(on_meta(config), 1, 2048)
    monkeypatch.setattr(trace, "host_code", lambda op: None)
    without = step_memory(on_meta(config), 1, 2048)
    assert counted.activations == without.activations
    assert counted.total - without.total > 2048 * 8 * (12 * 64 + 8 * 64)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_every_kind_of_layer_can_be_planned(name: str) -> None:
    even = {key: size + size % 2 if key.endswith("intermediate_size") else size for key, size in CONFIGS[name].items()}
    model = on_meta(even)
    model.activation_checkpointing = mode = ("selective", "full")[OF_EACH_KIND.index(name) % 2]
    less = step_memory(model, 2, 40)
    model.activation_checkpointing = "none"
    whole = step_memory(model, 2, 40)
    assert less.activations <= whole.activations and (less.activations < whole.activations or mode == "selective")
    assert whole.weights == sum(p.nbytes for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    try:
        check_tensor_parallel(model.config, 2)
    except ConfigError as error:  # it cannot be divided
        with pytest.raises(ConfigError, match=re.escape(str(error))):
            step_memory(model, 2, 40, tensor=2)
    else:
        half = step_memory(model, 2, 40, tensor=2)
        assert whole.weights / 2 <= half.weights < 0.7 * whole.weights and half.activations < whole.activations
        if mode == "full":  # LoRA: of every second kind
            return
        lm.add_lora(model, 3)
        adapted, whole = step_memory(model, 2, 40, tensor=2), step_memory(model, 2, 40)
        assert half.weights < adapted.weights == half.weights + adapted.optimizer_states // 2
        assert adapted.optimizer_states == whole.optimizer_states and adapted.activations < whole.activations


def test_float8_forms_of_frozen_weights_are_kept_by_one_process_alone() -> None:
    model = on_meta({**MODELS["llama-3.2-1b"], "num_hidden_layers": 4})
    lm.float8(model)
    lm.add_lora(model, 4)
    model.activation_checkpointing = "full"
    frozen = sum(p.numel() for p in model.decoder.blocks.parameters() if p.ndim == 2 and not p.requires_grad)
    one, two = (step_memory(model, 1, 64, shard=n) for n in (1, 2))
    assert 0.9 * frozen < one.activations - two.activations < 1.1 * frozen


def test_a_planned_tensor_parallel_shard_writes_float8_as_the_model_does() -> None:
    model = lm.float8(on_meta({**MODELS["llama-3.2-1b"], "num_hidden_layers": 2}), exclude_first=1)
    model.decoder.blocks.requires_grad_(False)
    shard = tensor_part(model, FirstRank(2))
    of_model, of_shard = ([(b.in_float8, b.mlp.in_float8) for b in m.decoder.blocks] for m in (model, shard))
    assert of_model == of_shard
    assert [b.mixer.input_form() is not None for b in shard.decoder.blocks] == [False, True]


def test_shards_divide_what_lasts_and_gather_what_computes() -> None:
    model = on_meta(MODELS["llama-3.2-1b"])
    whole, sharded = (step_memory(model, 1, 256, shard=n) for n in (1, 8))
    assert sharded.weights == whole.weights // 8
    assert sharded.optimizer_states == whole.optimizer_states // 8
    assert sharded.activations == whole.activations
    divided = step_memory(model, 1, 256, shard=2, context=4)
    assert divided.weights == sharded.weights and divided.optimizer_states == sharded.optimizer_states
    # Of the tokens a quarter, but for the keys and values, which are of all.
    more, less = (step_memory(model, 1, 512, **each).activations for each in ({}, {"shard": 2, "context": 4}))
    of_tokens, kept = more - whole.activations, less - divided.activations
    mixers = [block.mixer.info() for block in model.config.blocks]
    keys_values = 256 * sum(2 * each["kv_heads"] * each["head_dim"] * 2 for each in mixers)
    assert of_tokens / 4 < kept < of_tokens / 4 + 1.5 * keys_values < of_tokens / 2
    assert whole.gathered == 0 < sharded.gathered < whole.weights + whole.optimizer_states
    kept = step_memory(model, 1, 256, shard=8, reshard_after_forward=False)  # all blocks, and the tied embedding
    parts = *model.decoder.blocks, model.decoder.embed
    blocks, embedding = (sum(p.nbytes for part in each for p in part.parameters()) for each in (parts[:-1], parts[-1:]))
    assert kept.gathered == blocks + 2 * embedding and sharded.gathered == 3 * embedding  # and gradients of one
    assert kept.total - sharded.total == kept.gathered - sharded.gathered
    adafactor = step_memory(model, 1, 256, optimizer="adafactor")
    assert adafactor.optimizer_states < whole.optimizer_states / 100
    lm.add_lora(model, 4)
    assert step_memory(model, 1, 256).optimizer_states < whole.optimizer_states / 100


@pytest.mark.parametrize("shard", [1, 4])
def test_updates_in_the_backward_pass_free_the_gradients(shard: int) -> None:
    """A block more then costs its weights, its states and (unless the peak is late) its input, but no gradient."""
    tokens, found = 64, {}
    for layers in (8, 9):
        model = on_meta({**MODELS["llama-3.2-1b"], "num_hidden_layers": layers})
        model.activation_checkpointing = "full"
        for inside in (False, True):
            found[layers, inside] = step_memory(model, 1, tokens, shard=shard, optimizer_in_bwd=inside)
    block = sum(p.nbytes for p in model.decoder.blocks[0].parameters())
    after, inside = (found[9, each].total - found[8, each].total for each in (False, True))
    hidden = tokens * model.config.hidden_size * 2
    assert inside == pytest.approx(3 * block / shard, abs=hidden)
    assert after == pytest.approx(4 * block / shard, abs=hidden)
    assert found[9, True].optimizer_states == found[9, False].optimizer_states


def test_a_plan_with_updates_in_the_backward_pass_has_one_micro_batch() -> None:
    model = on_meta(MODELS["llama-3.2-1b"])
    found = candidates(model, 2, int(24e9), 16384, 2048, optimizer_in_bwd=True)
    sequences = {(each.degrees.replicate * each.degrees.shard) * each.micro_batch for each in found}
    assert sequences == {8} and min(each.memory.total for each in found) < 12e9
    with pytest.raises(ConfigError, match=r"muon has no updates of sharded parameters .*optimizer_in_bwd"):
        candidates(model, 2, int(24e9), 16384, 2048, optimizer="muon", optimizer_in_bwd=True)


@pytest.mark.parametrize("kind", ["llama-3", "qwen3_moe", "lora"])
@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_states_are_those_of_the_optimizer(kind: str, optimizer: OptimizerName) -> None:
    """Bytes of the states after a step of the optimizer that a recipe makes; AdamW's counters are on the host."""
    models = []
    for device in ("meta", "cpu"):
        model = lm.from_config(CONFIGS["llama-3" if kind == "lora" else kind], dtype=torch.bfloat16, device=device)
        models.append(lm.add_lora(model, 4) if kind == "lora" else model)
    made = optimizer_named(
        optimizer, parameter_groups([(models[1].parameters(), 1e-3)], 0.0), model=models[1], betas=(0.9, 0.95)
    )
    for p in models[1].parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    made.step()
    states = [x for state in made.state.values() for key, x in state.items() if key != "step"]
    found = step_memory(models[0], 1, 8, optimizer=optimizer).optimizer_states
    assert found == sum(x.nbytes for x in states) > 0


def test_experts_and_projections_are_divided() -> None:
    model = on_meta(MODELS["qwen3-30b-a3b"] | {"num_hidden_layers": 3})
    whole = step_memory(model, 1, 512, shard=8)
    experts = [step_memory(model, 1, 512, shard=8, expert=n) for n in (2, 4, 8)]
    # As many bytes on each, but fewer are gathered; a rank gets as many rows however many ranks share them.
    assert {each.weights for each in experts} == {whole.weights}
    gathered = [each.gathered for each in (whole, *experts)]
    assert gathered == sorted(gathered, reverse=True)
    rows = 512 * 8 * 2048 * 2
    # Beside the rows themselves only the choices of the tokens of all ranks are kept, for three layers.
    choices = [3 * n * 512 * 8 * (4 + 4) for n in (2, 4, 8)]
    for each, kept in zip(experts, choices, strict=True):
        assert abs(each.activations - whole.activations) < kept + rows / 100
    # A rank keeps its own experts as they are, unless it casts them or sums their gradients over replicas.
    few = on_meta(MODELS["qwen3-30b-a3b"] | {"num_hidden_layers": 3, "vocab_size": 64})
    kept, *copies = (
        step_memory(few, 1, 512, shard=8, expert=8, **each)  # type: ignore[arg-type]
        for each in ({}, {"replicate": 2}, {"param_dtype": "bfloat16"})
    )
    block = list(few.decoder.blocks[0].parameters())
    others, stacked = (sum(p.nbytes for p in block if (p.ndim == 3) == of_experts) for of_experts in (False, True))
    assert kept.gathered == 3 * others
    assert [each.gathered for each in copies] == [3 * (others + stacked // 8)] * 2
    loads = [step_memory(model, 1, 512, shard=8, expert=8, expert_load=load) for load in (1, 1.5, 8)]
    more, most = (each.activations - loads[0].activations for each in loads[1:])
    assert most == pytest.approx(14 * more, rel=1e-3) and more > 3 * rows
    # Beyond one row for each expert nothing is divided: 128 of them over 256 ranks.
    few, many, spread = (
        step_memory(model, 1, 512, shard=n, expert=e).weights for n, e in ((128, 1), (256, 1), (256, 8))
    )
    stacked = sum(p.nbytes for p in model.parameters() if p.ndim == 3)
    assert many > few / 2 + stacked / 128 / 3 and many == spread

    dense = on_meta(MODELS["llama-3.2-1b"])
    one, two, four = (step_memory(dense, 1, 512, tensor=n) for n in (1, 2, 4))
    replicated = sum(p.nbytes for p in dense.parameters() if p.ndim == 1)
    assert two.weights == (one.weights + replicated) / 2
    # Hidden states are divided too.
    assert one.activations - two.activations == pytest.approx(2 * (two.activations - four.activations), rel=1e-2)
    assert four.total < two.total < one.total
    with pytest.raises(ConfigError, match="num_kv_heads"):
        step_memory(dense, 1, 512, tensor=16)
    with pytest.raises(ConfigError, match="num_experts: 128 cannot"):
        step_memory(model, 1, 512, shard=3, expert=3)
    with pytest.raises(ConfigError, match=r"expert: 8 does not divide the 4 ranks"):
        step_memory(model, 1, 512, shard=4, expert=8)
    with pytest.raises(ConfigError, match="expert: the memory of a plan with both expert and tensor is not estimated"):
        step_memory(model, 1, 512, shard=2, tensor=2, expert=2)
    with pytest.raises(InputError, match="expert_load: must be from 1, balanced, to expert, 8, got 9"):
        step_memory(model, 1, 512, shard=8, expert=8, expert_load=9)
    assert not any(module._expert_mesh for _, module in mixtures(model))
    assert all(p.is_meta and p.grad is None for p in model.parameters())


def test_the_plans_that_fit() -> None:
    model = on_meta(MODELS["llama-3.2-1b"])
    found = candidates(model, 4, int(24e9), 4 * 8 * 2048, 2048)
    assert all(each.memory.total < 24e9 for each in found)
    assert {each.degrees.replicate * each.degrees.shard for each in found} == {4}
    assert [each.cost.seconds for each in found] == sorted(each.cost.seconds for each in found)
    # A step in one pass gathers the parameters once for each direction; without checkpointing it takes two passes, or
    # four where the gradients of passes before leave less room.
    assert (found[0].activation_checkpointing, found[0].micro_batch) == ("selective", 8)
    assert {each.micro_batch for each in found if each.activation_checkpointing == "none"} == {2, 4}
    assert model.activation_checkpointing == "none"
    long = 32 * 2048  # fewer sequences than GPUs
    divided = candidates(model, 4, int(80e9), 2 * long, long)
    assert {each.degrees.replicate * each.degrees.shard for each in divided} == {2}
    assert {(each.degrees.context, each.degrees.tensor) for each in divided} == {(2, 1), (1, 2)}
    mixture = on_meta(MODELS["qwen3-30b-a3b"] | {"num_hidden_layers": 2})
    spread = candidates(mixture, 8, int(40e9), 8 * 4096, 2048)
    assert {each.degrees.expert for each in spread} == {1, 2, 4, 8}
    assert all(each.degrees.shard % each.degrees.expert == 0 for each in spread)
    for each in (spread[0], spread[-1]):  # one step is followed for several plans
        mixture.activation_checkpointing = each.activation_checkpointing
        load = 1.25 if each.degrees.expert > 1 else 1.0
        sizes = {**each.degrees._asdict(), "passes": each.passes}
        needed = step_memory(mixture, each.micro_batch, 2048, **sizes, expert_load=load)
        assert each.memory.total == pytest.approx(needed.total, rel=1e-3)  # row numbers of other ranks' tokens
    for heads, divides in ((16, True), (3, False)):  # of Gated DeltaNet: each rank takes whole ones
        sizes = {"num_hidden_layers": 4, "linear_num_key_heads": heads, "linear_num_value_heads": 2 * heads}
        recurrent = on_meta(MODELS["qwen3.5-9b"] | sizes)
        with nullcontext() if divides else pytest.raises(InputError, match="whole sequences"):
            found = candidates(recurrent, 4, int(80e9), 2 * 2048, 2048, hardware=Hardware(gpus_per_host=1))
            assert {each.degrees.context for each in found} == {2}
    with pytest.raises(ConfigError, match="adafactor does not work on sharded"):
        candidates(model, 4, int(80e9), 4 * 8 * 2048, 2048, optimizer="adafactor")
    alone = candidates(model, 1, int(17e9), 8192, 8192)
    assert {each.activation_checkpointing for each in alone} == {"full", "selective"}
    with pytest.raises(ConfigError, match=r"no plan fits: one sequence of 2048 tokens.*more GPUs.*LoRA; states in 8"):
        candidates(model, 1, int(4e9), 2048, 2048)
    with pytest.raises(InputError, match=r"tokens: 10240 must be a multiple of seq_len x gpus"):
        candidates(model, 4, int(4e9), 5 * 2048, 2048)
    with pytest.raises(InputError, match=r"optimizer: must be one of adamw, adafactor, muon, .*, got 'sgd'"):
        step_memory(model, 1, 8, optimizer="sgd")
    with pytest.raises(InputError, match="meta device"):
        step_memory(lm.from_config({**BASE, "model_type": "llama"}), 1, 8)


@pytest.mark.parametrize("degrees", [{}, {"shard": 2, "context": 2}, {"tensor": 2}])
def test_inputs_of_blocks_in_host_memory(degrees: dict[str, int]) -> None:
    """All at the end of the forward pass. At the peak, when the backward pass starts, it has two of them back."""
    layers, tokens = 8, 16384
    model = on_meta({**MODELS["llama-3.2-1b"], "num_hidden_layers": layers})
    model.decoder.embed.requires_grad_(False)
    lm.add_lora(model, 4)
    found = {}
    for mode in ("full", "offload"):
        model.activation_checkpointing = mode
        found[mode] = step_memory(model, 2, tokens, **degrees)
    inputs = 2 * tokens * model.config.hidden_size * 2 // (degrees.get("context", 1) * degrees.get("tensor", 1))
    full, less = found["full"], found["offload"]
    assert (full.host, less.host) == (0, layers * inputs) and host_bytes() == 0
    assert full.activations - less.activations == layers * inputs
    assert full.total - less.total == pytest.approx((layers - 2) * inputs, rel=0.01)
    assert replace(less, activations=0, backward=0, host=0) == replace(full, activations=0, backward=0)
    assert less.total == sum(vars(less).values()) - less.host
    text = f" and {readable_bytes(less.host)} of host memory"  # of `train --dry-run`
    assert _memory(less).endswith(text) and "host" not in _memory(full) + _memory(less).removesuffix(text)


def test_host_memory_is_used_where_nothing_else_fits(tmp_path: Path) -> None:
    config = {**MODELS["llama-3.2-1b"], "num_hidden_layers": 8}
    model, found = on_meta(config), {}
    lm.add_lora(model, 4)
    for mode in ("full", "offload"):
        model.activation_checkpointing = mode
        found[mode] = step_memory(model, 1, 65536).total
    between = int(sum(found.values()) / 2 / (1 - RESERVED))
    (plan,) = candidates(model, 1, between, 65536, 65536)
    assert (plan.activation_checkpointing, plan.memory.total) == ("offload", found["offload"])
    plans = candidates(model, 1, int(found["full"] / 0.9), 65536, 65536)
    assert "offload" not in {each.activation_checkpointing for each in plans} and plans
    both = candidates(model, 2, between, 2 * 65536, 65536)  # what fits if sequences or products are divided comes first
    assert {each.activation_checkpointing for each in both} <= {"none", "selective", "full"} and both
    with pytest.raises(ConfigError, match=r"with the inputs of blocks in host memory, takes .*shorter sequences"):
        candidates(model, 1, int(found["offload"] / 0.95), 65536, 65536)
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["plan", str(tmp_path), "--gpus", "1", "--tokens", "65536", "--seq-len", "65536", "--lora-rank", "4"]
    result = CliRunner().invoke(app, [*command, "--memory", str(between)])
    assert result.exit_code == 0 and "host memory" in result.output and "2 GiB" in result.output, result.output
    assert "--activation-checkpointing offload" in result.output
    (row,) = json.loads(CliRunner().invoke(app, [*command, "--memory", str(between), "--json"]).stdout)
    assert row["host_bytes"] == plan.memory.host == 8 * 65536 * 2048 * 2


def test_the_command(tmp_path: Path) -> None:
    small = json.dumps(MODELS["llama-3.2-1b"] | {"num_hidden_layers": 2})
    (tmp_path / "config.json").write_text(small)
    command = ["plan", str(tmp_path), "--gpus", "2", "--memory", "5GB", "--tokens", "16384"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert f"ligermodels train {tmp_path} --gpus 2 " in result.output
    assert "--shard 2" in result.output
    alone = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpus", "1", "--memory", "80GB", *command[6:]])
    assert alone.exit_code == 0, alone.output
    # Short steps are recorded in a CUDA graph, so that the CPU keeps up.
    large = CliRunner().invoke(app, [*command[:5], "80GB", "--tokens", "131072"])
    assert large.exit_code == 0, large.output
    short = CliRunner().invoke(app, [*command[:5], "80GB", "--tokens", "2048", "--seq-len", "1024"])
    for text, shown in {
        " --fsdp-unit model": [False, False, False],
        "--no-reshard-after-forward gathers": [True, True, False],
    }.items():
        assert [text in each.output for each in (short, large, alone)] == shown, text
    eight = CliRunner().invoke(app, [*command, "--optimizer", "adamw8bit", "--optimizer-in-bwd"])
    assert eight.exit_code == 0 and " --optimizer adamw8bit --optimizer-in-bwd" in eight.output, eight.output
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    wide = CliRunner().invoke(app, [*command[:5], "8GB", *command[6:], "--reduce-dtype", "float32"])
    assert wide.exit_code == 0 and " --reduce-dtype float32" in wide.output, wide.output
    refused = CliRunner().invoke(app, [*command[:2], "--gpus", "1", *command[4:], "--reduce-dtype", "float32"])
    assert refused.exit_code == 2 and "--reduce-dtype: is for several GPUs" in refused.output
    assert rows[0]["memory_bytes"] < 5e9
    assert rows[0]["tokens_per_s"] == pytest.approx(16384 / rows[0]["step_s"])
    assert [rows[0][name] for name in ("context", "tensor", "expert")] == [1, 1, 1]
    mixture = {**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**mixture, "hidden_size": 4096, "intermediate_size": 32768}))
    result = CliRunner().invoke(
        app, [*command[:2], "--gpus", "4", "--memory", "80GB", "--tokens", "512", "--seq-len", "128"]
    )
    assert result.exit_code == 0, result.output
    assert "the CPU, which launches the kernels, is the limit" in result.output  # 128 tokens on each GPU
    # Steps with expert parallelism are not recorded: gathering the blocks at once is less work for the CPU.
    assert " --expert 4" in result.output and " --fsdp-unit model" in result.output
    assert "with all tokens at the experts of one GPU that takes" in result.output
    (tmp_path / "config.json").write_text(small)
    refused = CliRunner().invoke(app, [*command[:5], "1GB", *command[6:]])
    assert refused.exit_code == 1
    assert "no plan fits" in refused.output
    # a config alone, as `train` takes it; bytes for what is no gigabyte
    refused = CliRunner().invoke(app, ["plan", str(tmp_path / "config.json"), *command[2:5], "2000000", *command[6:]])
    assert "no plan fits" in refused.output and "1,880,000 bytes are usable" in refused.output
    uneven = CliRunner().invoke(app, [*command[:2], "--gpus", "12", *command[4:]])
    assert uneven.exit_code == 2 and "--gpus: must be whole hosts of 8" in uneven.output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 10**13}, "gpus: must be at most 131,072"),
        ({"batch_tokens": 10**23}, "tokens: must be at most 2,147,483,647"),
        ({"seq_len": 2.5}, "seq_len: must be a whole number"),
        ({"memory": 0}, "memory: must be a whole number of at least 1"),
    ],
)
def test_sizes_that_are_none_are_refused_at_once(changes: dict[str, Any], words: str) -> None:
    arguments = {"gpus": 2, "memory": int(80e9), "batch_tokens": 8192, "seq_len": 2048, **changes}
    with pytest.raises(InputError, match=words):
        candidates(lm.from_config({**BASE, "model_type": "llama"}, device="meta"), **arguments)


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 2**31 - 1, 2**31 - 2**11])
def test_divisors(number: int) -> None:
    found = list(_divisors(number))
    assert found == sorted(set(found)) and all(number % each == 0 for each in found)
    small = {each for each in range(1, min(number, 1000) + 1) if number % each == 0}
    assert small | {number // each for each in small} <= set(found)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80e9), ("79.5 GiB", 79.5 * GIB), ("141g", 141e9), ("80000000000", 8e10), ("1.5T", 1.5e12)],
)
def test_sizes_of_memory(text: str, size: float) -> None:
    assert memory_size(text) == int(size)


@pytest.mark.parametrize("text", ["", "GB", "80 apples", "0GB", "-3GB", "nan"])
def test_other_sizes_of_memory(text: str) -> None:

    with pytest.raises(typer.BadParameter, match="must be a size such as 80GB"):
        memory_size(text)
    with pytest.raises(typer.BadParameter, match="'80' is 80 bytes; give a unit, as in 80GB"):
        memory_size("80")
