"""Inputs of blocks in host memory: the bits of "full" checkpointing, on a GPU and, without streams, on the CPU."""

import gc
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_activation_checkpointing import gradients, make
from torch import Tensor
from zoo import BASE

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.layers import offload
from ligermodels.layers.offload import HostCopy, host_bytes, saved_in_host_memory
from ligermodels.ops.runtime.dispatch import as_recorded

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device whose tensors move: the CPU too, without streams. Nothing is left in host memory."""
    monkeypatch.setattr(offload, "DEVICES", ("cuda", "meta", "cpu"))
    before = host_bytes()
    yield request.param
    if host_bytes() > before:  # a collection of the whole process takes longer than most of these tests
        gc.collect()
    assert host_bytes() <= before


def ids_on(device: str, length: int = 29, seed: int = 0) -> Tensor:
    return torch.randint(3, 100, (2, length), generator=torch.Generator().manual_seed(seed)).to(device)


def model_on(device: str, name: str = "llama-3", mode: Any = "offload", dtype: Any = torch.float32) -> lm.CausalLM:
    model = make(name).to(device, dtype)
    model.activation_checkpointing = mode
    return model


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) > 0 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-3", "gemma4_text-per-layer-inputs", "qwen2_moe", "kimi_linear"])
@pytest.mark.parametrize("lora", [False, True])
def test_the_bits_are_those_of_full(device: str, name: str, dtype: torch.dtype, lora: bool) -> None:
    model, ids = model_on(device, name, "full", dtype), ids_on(device)
    if lora:
        lm.add_lora(model, 4)
        for parameter in model.parameters():  # B is 0 at first
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator(device).manual_seed(0))
    wanted = gradients(model, ids)
    model.activation_checkpointing = "offload"
    assert equal(gradients(model, ids), wanted)
    loss = model(ids, labels=ids).loss
    inputs = ids.numel() * model.config.hidden_size * dtype.itemsize * len(model.decoder.blocks)
    assert 0.95 * inputs < host_bytes() < 1.07 * inputs  # the last blocks of Gemma 4 have tokens with a label alone
    loss.backward()
    assert host_bytes() == 0  # although the loss is there


def test_nothing_moves_on_the_cpu() -> None:
    model = model_on("cpu")
    loss = model(ids_on("cpu"), labels=ids_on("cpu")).loss
    assert host_bytes() == 0
    loss.backward()


def test_a_retained_graph_is_used_again(device: str) -> None:
    model, ids, found = model_on(device), ids_on(device), []
    loss = model(ids, labels=ids).loss
    for retain in (True, True, False):
        model.zero_grad()
        loss.backward(retain_graph=retain)
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    model.activation_checkpointing = "full"
    wanted = gradients(model, ids)
    assert all(equal(each, wanted) for each in found)


@pytest.mark.parametrize("order", ["the same", "reversed", "together"])
def test_several_forward_passes_before_the_backward_pass(device: str, order: str) -> None:
    """Beside them a pass without a backward pass, which is there until the end, and one of evaluation."""
    model, results = model_on(device), []
    for mode in ("full", "offload"):
        model.zero_grad()
        model.activation_checkpointing = mode
        losses = [model(ids_on(device, 20 + i, i), labels=ids_on(device, 20 + i, i)).loss for i in range(4)]
        with torch.no_grad():
            model(ids_on(device), labels=ids_on(device))
        del losses[1]
        if order == "together":
            torch.autograd.backward(losses[:2])
        else:
            for loss in losses[:2] if order == "the same" else losses[1::-1]:
                loss.backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert equal(*results)


def test_a_part_of_the_backward_pass(device: str) -> None:
    """It starts copies that are not needed; their memory is used again, once they are done."""
    model, ids = model_on(device), ids_on(device)
    wanted = gradients(model, ids)
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        torch.autograd.grad(loss, list(model.decoder.blocks[-1].parameters()))
        del loss
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        assert equal([p.grad for p in model.parameters() if p.grad is not None], wanted)


def test_an_exception_in_a_block(device: str) -> None:
    model, ids = model_on(device), ids_on(device)
    wanted = gradients(model, ids)

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    hook = model.decoder.blocks[-1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(ids, labels=ids)
    hook.remove()
    assert equal(gradients(model, ids), wanted)


@pytest.mark.parametrize("when", ["within", "after"])
def test_inputs_that_are_changed_in_place(device: str, when: str) -> None:
    """Within the block the copy may have had either value, so it is an error; later changes come too late for it."""
    model, ids = model_on(device), ids_on(device)
    wanted = gradients(model, ids)
    block = model.decoder.blocks[-1]

    @torch.no_grad()
    def change(module: Any, inputs: Any, *_: Any) -> None:
        inputs[0].add_(1)

    if when == "within":
        block.mlp.register_forward_hook(lambda *_: change(block, seen))
        seen: list[Tensor] = []
        block.register_forward_pre_hook(lambda _, inputs: seen.insert(0, inputs[0]))
        loss = model(ids, labels=ids).loss
        with pytest.raises(InputError, match=r"activation_checkpointing: the input of a block, .* changed in place"):
            loss.backward()
        del seen[:]
    else:
        taken: list[Tensor] = []
        handle = block.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
        loss = model(ids, labels=ids).loss
        handle.remove()
        change(block, taken)
        model.zero_grad()
        loss.backward()
        assert equal([p.grad for p in model.parameters() if p.grad is not None], wanted)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "a part": lambda x: x[:, 1:-1, 3:],
    "at an offset": lambda x: x[1:],
    "expanded": lambda x: x[:, :1].expand(-1, 7, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hidden_size", [64, 67])
def test_values_and_strides_of_copies(device: str, layout: str, dtype: torch.dtype, hidden_size: int) -> None:
    tensor = LAYOUTS[layout](torch.randint(-100, 100, (3, 11, hidden_size), device=device).to(dtype))
    copies = [HostCopy(tensor + i) for i in range(3)] + [HostCopy(tensor)]
    wanted = tensor.clone()
    for copy in copies:
        copy.finish()
    if layout != "expanded":
        tensor.zero_()
    for _ in range(2):
        for i in (3, 2, 1, 0):
            found = copies[i].get()
            assert torch.equal(found, wanted if i == 3 else wanted + i) and found.stride() == wanted.stride()
            assert found.device == tensor.device and found.dtype == dtype


def test_the_copy_before_is_on_its_way(device: str) -> None:
    copies = [HostCopy(torch.ones(512, device=device)) for _ in range(3)]
    for copy in copies:
        copy.finish()
    copies[2].get()
    assert [copy._returning is not None for copy in copies] == [False, True, False]
    copies[1].get()
    assert [copy._returning is not None for copy in copies] == [True, False, False]


def test_later_passes_use_the_same_host_memory(device: str) -> None:
    model, seen = model_on(device), []
    for _ in range(2):
        loss = model(ids_on(device), labels=ids_on(device)).loss
        seen.append({buffer.data_ptr() for copy in offload._alive for buffer in copy._buffers})
        loss.backward()
    assert seen[0] == seen[1] and seen[0]


def test_which_tensors_move(device: str) -> None:
    large, small = torch.ones(64, 64, device=device, requires_grad=True), torch.ones(3, device=device)
    parameter = torch.nn.Parameter(torch.ones(64, 64, device=device))
    with saved_in_host_memory():
        y = ((large * 2) * (parameter * small.sum())).sum() + (small * parameter.sum()).sum()
        assert host_bytes() == 2 * large.nbytes  # the two factors of the product
    y.backward()
    assert torch.equal(large.grad, torch.full_like(large, 6)) and parameter.grad is not None


@pytest.mark.parametrize("nbytes", [1, 1024, 1025, 4095, 3 * 2**30, 200_001 * 5120 * 2, 2**31, 2**31 + 2])
def test_host_memory_is_rounded_up_by_little(nbytes: int) -> None:
    sizes = offload._sizes(nbytes)
    assert sum(sizes) == nbytes and min(sizes) > 0 and len(sizes) <= 5
    assert nbytes <= sum(map(offload._rounded, sizes)) < nbytes * (1 + 1 / 16)


def test_too_little_host_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_empty = torch.empty

    def empty(*args: Any, **options: Any) -> Tensor:
        if "pin_memory" in options and options.get("dtype") is torch.uint8:
            raise RuntimeError("CUDA error: out of memory")
        return torch_empty(*args, **options)

    model, ids = model_on(device), ids_on(device)
    monkeypatch.setattr(offload, "_free", defaultdict(list))
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(InputError, match=r"activation_checkpointing: the host has no .* bytes of page-locked"):
        model(ids, labels=ids)


def test_whole_models_are_not_compiled() -> None:
    model, ids = model_on("cpu"), ids_on("cpu")
    torch.compiler.reset()
    with pytest.raises(
        InputError, match=r"activation_checkpointing: torch\.compile of a whole model cannot have 'offl"
    ):
        torch.compile(model, backend="eager")(ids, labels=ids)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="activation_checkpointing='offload' needs blocks"):
        torch.compile(model, backend="eager", fullgraph=True)(ids, labels=ids)
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="eager", fullgraph=True)(ids, labels=ids).loss
        torch.testing.assert_close(found, model(ids, labels=ids).loss)


def test_compiled_blocks_move_their_inputs(device: str) -> None:
    model, ids, results = model_on(device), ids_on(device), []
    torch.compiler.reset()
    for block in model.decoder.blocks:
        block.compile(backend="aot_eager")
    for mode in ("full", "offload"):
        model.activation_checkpointing = mode
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        assert (host_bytes() > 0) == (mode == "offload")
        loss.backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert equal(*results)


def test_no_cuda_graph() -> None:
    model, ids = model_on("cpu"), ids_on("cpu")
    with as_recorded(), pytest.raises(InputError, match="activation_checkpointing: a CUDA graph cannot have 'offload'"):
        model(ids, labels=ids)


def test_the_old_name_has_no_word_for_it() -> None:
    model = model_on("cpu")
    assert model.recompute == "offload"


# -- on a GPU alone ----------------------------------------------------------------------------------------------------

LAYERS, TOKENS, HIDDEN = 12, 8192, 256


def close(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether gradients agree up to the order of sums: attention's backward pass adds its blocks in any order."""
    errors = [float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in zip(found, wanted, strict=True)]
    return max(errors) < 0.02


def large_model(mode: Any) -> lm.CausalLM:
    """Inputs of blocks take most of its memory: parameters are frozen but for LoRA."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": LAYERS, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    config = {**BASE, "model_type": "llama", **sizes, **heads}
    torch.manual_seed(0)
    model = lm.add_lora(lm.from_config(config, dtype=torch.bfloat16, device="cuda"), 4).train()
    model.activation_checkpointing = mode
    return model


@pytest.mark.gpu
def test_memory_of_a_step() -> None:
    """All but two inputs of blocks are elsewhere, however far the host is ahead of the GPU; no step but the first
    allocates host memory."""
    ids, peaks, found = torch.randint(3, 100, (1, TOKENS), device="cuda"), {}, {}
    for mode in ("full", "offload"):
        model = large_model(mode)
        gradients(model, ids)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, pinned = torch.cuda.memory_allocated(), torch.cuda.host_memory_stats().get("num_host_alloc")
        for _ in range(3):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()  # the host does not wait for the GPU
        assert torch.cuda.host_memory_stats().get("num_host_alloc") == pinned
        peaks[mode] = torch.cuda.max_memory_allocated() - before
        found[mode] = [p.grad for p in model.parameters() if p.grad is not None]
        del model
    assert close(found["offload"], found["full"])
    inputs = TOKENS * HIDDEN * 2
    assert (LAYERS - 3) * inputs < peaks["full"] - peaks["offload"] < (LAYERS - 1) * inputs


@pytest.mark.gpu
def test_another_stream() -> None:
    """The whole step on a stream of the user's, while the default stream is busy and uses memory."""
    model, ids = large_model("full"), torch.randint(3, 100, (1, TOKENS), device="cuda")
    wanted = gradients(model, ids)
    model.activation_checkpointing = "offload"
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = gradients(model, ids)
    noise = [torch.randn(TOKENS, HIDDEN, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    assert close(found, wanted) and len(noise) == 20


@pytest.mark.gpu
def test_memory_of_a_copy_that_is_not_needed() -> None:
    """It is not used again before the copy has ended."""
    size = 2**26
    first, second = (HostCopy(torch.full((size,), value, device="cuda")) for value in (1.0, 2.0))
    first.finish(), second.finish()
    for _ in range(5):
        assert second.get()[-1] == 2  # starts the copy of the first
        again = HostCopy(torch.full((size,), 3.0, device="cuda"))
        again.finish()
        tensor = HostCopy(torch.full((size,), 4.0, device="cuda"))
        tensor.finish()
        tensor.get()  # starts the copy of `again`
        del again, tensor
        fresh = [torch.full((size,), 5.0, device="cuda") for _ in range(3)]
        torch.cuda.synchronize()
        assert all(bool((each == 5).all()) for each in fresh)
        del fresh
