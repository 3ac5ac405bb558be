"""Sequence parallelism between tensor-parallel projections: what it sends, what it keeps, and awkward sizes."""

import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_context_parallel import check_pass, some_inputs
from test_tensor_parallel import (
    CONFIGS,
    EVEN,
    build,
    check_generation,
    check_gradients,
    draw,
    of_labels,
    of_logits,
    with_lora,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from two_ranks import in_ranks, in_two_ranks

import ligermodels as lm
from ligermodels.layers import sequence_parallel
from ligermodels.layers.attention import Attention
from ligermodels.models import decoder
from ligermodels.ops.linear.parallel_linear import all_gather_linear, linear_reduce_scatter
from ligermodels.ops.runtime import collectives
from ligermodels.parallel.memory import step_memory
from ligermodels.parallel.tensor import tensor_parallel

CONFIGS["four"] = {**EVEN, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
CONFIGS["four-experts"] = {
    **CONFIGS["qwen3_moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
}


class Sums(TorchDispatchMode):
    """Counts all-reduces."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # until it comes to local tensors
        self.found.update(["all_reduce"] if "all_reduce" in op.__name__ else [])
        return op(*args, **(kwargs or {}))


@contextmanager
def counted() -> Any:
    """How often each kind of exchange begins within it."""
    found: Counter[str] = Counter()
    before = {name: getattr(collectives, name) for name in ("_gather", "_scatter")}
    for name, function in before.items():
        setattr(collectives, name, lambda *a, n=name, f=function, **o: found.update([n]) or f(*a, **o))
    try:
        with Sums(found):
            yield found
    finally:
        for name, function in before.items():
            setattr(collectives, name, function)


class Kept(TorchDispatchMode):
    """The storages that ops made within it, and the most bytes that were there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference also keeps the address from new ones

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        results = op(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if type(x) is Tensor}
        for storage in (x.untyped_storage() for x in tree_iter(results) if type(x) is Tensor):
            if storage._cdata not in given:
                self._found.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        if self.bytes() > self.peak:
            time.sleep(0.001)  # the threads of gloo hold what they sent a little longer
            self.peak = max(self.peak, self.bytes())
        return results

    def bytes(self) -> int:
        """Of those that are still there."""
        self._found = {key: each for key, each in self._found.items() if not each[0].expired()}
        return sum(size for _, size in self._found.values())


def kept_and_peak(model: nn.Module) -> tuple[int, int]:
    """Bytes at the end of a forward pass, and at the peak of a step."""
    ids = draw(0)[0]
    with Kept() as mode:
        loss = model(ids, labels=ids).loss
        time.sleep(0.1)
        found = mode.bytes()
        loss.backward()
    return found, mode.peak


def exchanges_and_memory(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    # Of each block: a gather before, and a sum after, each of its two layers; once more the other way in the backward
    # pass, which also gathers the input of each projection by columns. One gather at the end of the blocks, and one
    # of the gradient at their start. What is summed whole are embeddings, the gradient of the head's input, and norms.
    # Logits are gathered.
    model = build("llama")
    tensor_parallel(model, mesh)
    blocks = len(model.decoder.blocks)
    with counted() as forward:
        loss = of_logits(model, 0)
    with counted() as backward:
        loss.backward()
    assert forward == {"_gather": 2 * blocks + 1 + 1, "_scatter": 2 * blocks, "all_reduce": 1}, forward
    assert backward == {"_gather": 4 * blocks + 1, "_scatter": 2 * blocks, "all_reduce": 1 + 2 * blocks}, backward
    model.decoder.embed.weight.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    for block in model.decoder.blocks:
        block.requires_grad_(False)
    loss = of_logits(model, 0)
    with counted() as backward:  # of the norm at the end alone
        loss.backward()
    assert not backward["_gather"] and not backward["_scatter"], backward

    # A pass of fewer tokens than ranks, and passes that decode, sum them whole, and gather only logits.
    with counted() as decoded, torch.no_grad():
        model(torch.tensor([[5]]))
        model.generate(draw(0)[0], max_new_tokens=2, eos_token_id=None)
    assert decoded["_gather"] == 3 and not decoded["_scatter"] and decoded["all_reduce"] > 6 * blocks, decoded

    # What each block keeps: four states of all tokens, two of them the inputs of projections, or the parts of these.
    # With LoRA the inputs of all projections are whole, and in parts is what lies between blocks and norms.
    states = draw(0)[0].numel() * model.config.hidden_size * 8
    for lora, mode, less in ((0, "none", 4 / 2), (0, "selective", 1 / 2), (3, "none", 0), (3, "full", 0)):
        (parts, peak), (planned, peak_planned) = of_a_block(mode, lora, mesh), of_a_block(mode, lora)
        assert abs(planned / parts - 1) < 0.02, (lora, mode, planned, parts)
        # What plain linear layers gather, and sum, within an op is not seen here.
        unseen = 0 if lora else 2 * states
        assert abs((peak_planned - unseen) / peak - 1) < 0.05, (lora, mode, peak_planned, unseen, peak)
        assert mode != "full" or parts == states / 2, (parts, states)
        if not lora:
            whole, _ = of_a_block(mode, lora, mesh, lambda *_: None)
            assert whole - parts >= less * states, (mode, parts, whole, states)


def of_a_block(
    mode: Any, lora: int, mesh: DeviceMesh | None = None, parts_of: Any = sequence_parallel.parts_of
) -> tuple[float, int]:
    """The bytes that a block keeps, and those at the peak of four; without a mesh those that a plan expects."""
    kept = []
    for layers in (2, 4):
        torch.manual_seed(0)
        config = {**CONFIGS["llama"], "num_hidden_layers": layers}
        model = lm.from_config(config, dtype=torch.float64, device="cpu" if mesh else "meta")
        model.activation_checkpointing = mode
        if lora:
            lm.add_lora(model, lora)
        if mesh is None:
            found = step_memory(model, *draw(0)[0].shape, tensor=2)
            kept.append(found.activations)
            peak = found.activations + found.backward
            continue
        tensor_parallel(model, mesh)
        decoder.parts_of = parts_of
        size, peak = kept_and_peak(model)
        kept.append(size)
        decoder.parts_of = sequence_parallel.parts_of
    return (kept[1] - kept[0]) / 2, peak


def test_what_is_sent_and_kept(tmp_path: Path) -> None:
    in_two_ranks(exchanges_and_memory, tmp_path)


def awkward(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Numbers of tokens that four ranks do not divide, documents and padding."""

    def of(inputs: dict[str, Tensor], model: nn.Module, seed: int) -> Tensor:
        found = model(**inputs, return_logits=True)
        return found.loss + found.logits.sin().sum() / 100

    generator = torch.Generator().manual_seed(2)
    for name in ("four", "four-experts"):
        plain, model = build(name), build(name)
        tensor_parallel(model, mesh)
        for shape in ((1, 5), (3, 7), (1, 3)) if name == "four" else ((2, 2),):
            ids = torch.randint(3, 131, shape, generator=generator)
            check_gradients(model, plain, partial(of, {"input_ids": ids, "labels": ids}))
        model.activation_checkpointing = plain.activation_checkpointing = "selective" if name == "four" else "full"
        check_gradients(model, plain, of_labels)
        ids = torch.randint(3, 131, (2, 9), generator=generator)
        mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
        check_gradients(model, plain, partial(of, {"input_ids": ids, "labels": ids, "attention_mask": mask}))
        if name == "four-experts":  # documents and given embeddings come to all layers alike
            check_generation(model, plain)
            continue
        ids = torch.randint(3, 131, (1, 11), generator=generator)
        bounds = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
        check_gradients(model, plain, partial(of, {"input_ids": ids, "labels": ids, "cu_seqlens": bounds}))
        embeds = [torch.randn(2, 7, 60, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(1)]
        labels = torch.randint(3, 131, (2, 7), generator=generator)
        gradients = [
            torch.autograd.grad(each(inputs_embeds=embeds[0], labels=labels).loss, embeds)[0] for each in (plain, model)
        ]
        torch.testing.assert_close(*gradients)
        check_generation(model, plain)
    plain, model = build("four"), build("four")
    for each in (plain, model):
        each.decoder.blocks[1].mixer.__class__ = OfNeighbours
    tensor_parallel(model, mesh)
    check_gradients(model, plain, of_labels)
    with counted() as found:
        of_logits(model, 0)
    assert found["_gather"] == 1 and found["all_reduce"] == 1 + 2 * len(model.decoder.blocks), found


class OfNeighbours(Attention):
    """A mixer that does more with tokens than project them, and does not say that it can be given a part."""

    sequence_parallel = False

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(x + x.roll(1, 1), *args, **options)


def test_awkward_sizes(tmp_path: Path) -> None:
    in_ranks(4, awkward, tmp_path)


def beside_others(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Latents, of which parts are gathered before heads are made of them: with LoRA, and with context parallelism."""
    plain, model = with_lora("deepseek_v3"), with_lora("deepseek_v3")
    tensor_parallel(model, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["tensor"])
    check_gradients(model, plain, of_labels)
    both = []
    for spread in (False, True):
        torch.manual_seed(0)
        model = lm.from_config(CONFIGS["deepseek_v3"])
        both.append(lm.parallelize(model, lm.ParallelPlan(context=2, tensor=2)) if spread else model)
    for inputs in some_inputs(0, 3):
        check_pass(both[1], both[0], inputs)


def test_latent_attention_with_lora_and_context(tmp_path: Path) -> None:
    in_ranks(4, beside_others, tmp_path)


def test_blocks_are_compiled_whole(tmp_path: Path) -> None:
    in_two_ranks(compiled, tmp_path)


def compiled(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    # A window. Without the softcap, whose attention in torch's own ops takes most of the time that is traced.
    CONFIGS["one layer"] = {**CONFIGS["gemma2"], "num_hidden_layers": 1, "attn_logit_softcapping": None}
    CONFIGS["one layer"]["layer_types"] = ["sliding_attention"]
    plain, model = build("one layer"), build("one layer")
    tensor_parallel(model, mesh)
    for block in model.decoder.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    check_gradients(model, plain, of_logits)


def test_ops_and_their_schemas() -> None:
    """On one rank, with padding: five rows of six."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, (x, dy, weight, bias) = dist.group.WORLD.group_name, map(torch.randn, ((6, 4), (5, 3), (3, 4), (3,)))
        found = all_gather_linear(x, weight, bias, rows=5, ranks=1, group=group)
        torch.testing.assert_close(found, F.linear(x[:5], weight, bias))
        torch.testing.assert_close(linear_reduce_scatter(x[:5], weight, ranks=1, group=group), F.linear(x[:5], weight))
        for name, arguments in {
            "all_gather_linear_forward": (x, weight, bias, 5, 1, group),
            "all_gather_linear_backward": (dy, x, weight, 6, 1, group, True, True),
            "linear_reduce_scatter_forward": (x, weight, 1, group),
            "all_gather_rows": (x, 1, group),
            "reduce_scatter_rows": (x, 1, group),
            "all_reduce_sum": (x, group),
        }.items():
            op = getattr(torch.ops.ligermodels, name).default
            torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
    finally:
        dist.destroy_process_group()
