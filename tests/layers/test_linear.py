"""The composed linear layer: its parts work with one another and with a user's own, and are named in one place."""

import copy
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairwise import by_turns
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_two_ranks
from zoo import BASE, CONFIGS

import ligermodels as lm
from ligermodels import ops
from ligermodels.layers import Compute, Linear, Update
from ligermodels.layers.activation import GatedActivation
from ligermodels.layers.linear import FUSED
from ligermodels.layers.linear_parts import UNSHARDED, Shard
from ligermodels.ops.runtime import dispatch

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
LLAMA = {**BASE, **SIZES, "num_key_value_heads": 2, "model_type": "llama"}


class Ternary(Compute):
    """A precision of a user's own: weights of one magnitude for each output, trained straight through."""

    def forward(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, shard: Shard = UNSHARDED, *, activation: Any = None
    ) -> Tensor:
        rounded = weight.sign() * 0.1 + (weight - weight.detach())
        y = F.linear(x, rounded, bias)
        return y if activation is None else GatedActivation(*activation)(y)


class Scale(Update):
    """An update of a user's own: a trained diagonal before, and a trained number for each output (IA3's kind)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inputs = nn.Parameter(torch.full((linear.in_features,), 0.1))
        self.outputs = nn.Parameter(torch.full((linear.out_features,), 0.5))

    def forward(self, x: Tensor, shard: Shard = UNSHARDED) -> Tensor:
        total = (x * shard.inputs(self.inputs)).sum(-1, keepdim=True)
        return total * shard.outputs(self.outputs)


def with_parts(compute: bool = True, update: bool = True) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(LLAMA)
    for block in model.decoder.blocks:
        for linear in (block.mixer.qkv, block.mixer.o, block.mlp.gate_up, block.mlp.down):
            if compute:
                linear.store(Ternary())
            if update:
                linear.update = Scale(linear)
    return model


def tokens(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens(), labels=tokens()).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        torch.testing.assert_close(whole, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_own_parts_train_save_and_decode() -> None:
    model = with_parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = with_parts()
    again.load_state_dict(torch.load(file))
    ids = tokens(2, 5)
    generated = model.eval().generate(ids, max_new_tokens=5, eos_token_id=None)
    assert torch.equal(again.eval().generate(ids, max_new_tokens=5, eos_token_id=None), generated)
    logits = model(generated[:, :-1]).logits[:, 4:]
    assert torch.equal(logits.argmax(-1), generated[:, 5:])  # decoding computes with the same parts
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def own_parts_on_two_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for plan in (lm.ParallelPlan(shard=2), lm.ParallelPlan(shard=1, tensor=2)):
        plain, model = with_parts(), lm.parallelize(with_parts(), plan)
        close(gradients(model), gradients(plain))
        generated = model.eval().generate(tokens(2, 5), max_new_tokens=4, eos_token_id=None)
        assert torch.equal(generated, plain.eval().generate(tokens(2, 5), max_new_tokens=4, eos_token_id=None))


def test_own_parts_on_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(own_parts_on_two_ranks, tmp_path)


def drawn(model: lm.CausalLM) -> lm.CausalLM:
    """B is zero at first; then nothing that is wrong with A or B would show."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


def qlora(kind: str, **options: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.quantize(lm.from_config(LLAMA, **options), kind)  # type: ignore[arg-type]
    return drawn(lm.add_lora(model, r=4))


@pytest.mark.parametrize("kind", ["int4", "float8", "nf4"])
def test_qlora(kind: str, tmp_path: Path) -> None:
    """LoRA on quantised weights is LoRA on the rounded ones: gradients, decoding, adapters, merging."""
    model = qlora(kind)
    rounded = lm.dequantize(copy.deepcopy(model))
    close(gradients(model), gradients(rounded))
    assert all("lora" in name for name in gradients(model))
    ids = tokens(2, 5)
    generated = model.eval().generate(ids, max_new_tokens=5, eos_token_id=None)
    assert torch.equal(generated, rounded.eval().generate(ids, max_new_tokens=5, eos_token_id=None))
    lm.save_adapter(model, tmp_path / "adapter")
    torch.manual_seed(0)
    again = lm.load_adapter(lm.quantize(lm.from_config(LLAMA), kind), tmp_path / "adapter")  # type: ignore[arg-type]
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)
    logits = model(ids).logits
    dense = lm.merge_lora(copy.deepcopy(model), dequantize=True)
    torch.testing.assert_close(dense(ids).logits, logits, rtol=1e-4, atol=1e-4)
    dense.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(lm.from_pretrained(tmp_path / "merged")(ids).logits, logits, rtol=1e-4, atol=1e-4)
    merged = lm.merge_lora(model)
    assert merged.decoder.blocks[0].mlp.down.compute.kind == kind and merged.decoder.blocks[0].mlp.down.update is None
    assert torch.equal(merged(ids).logits, lm.quantize(dense, kind)(ids).logits)  # type: ignore[arg-type]


def qlora_on_two_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for kind in ("int4", "float8", "nf4"):
        for plan in (lm.ParallelPlan(shard=2), lm.ParallelPlan(shard=1, tensor=2)):
            plain, model = qlora(kind), lm.parallelize(qlora(kind), plan)
            close(gradients(model), gradients(plain))
            generated = model.eval().generate(tokens(2, 5), max_new_tokens=4, eos_token_id=None)
            assert torch.equal(generated, plain.eval().generate(tokens(2, 5), max_new_tokens=4, eos_token_id=None))
            codes = model.decoder.blocks[0].mlp.down.compute.codes
            assert 2 * codes.to_local().numel() == codes.numel()  # sharded, as LoRA's base in bfloat16 is


def test_qlora_on_two_ranks(tmp_path: Path) -> None:
    in_two_ranks(qlora_on_two_ranks, tmp_path)


def loaded_on_two_ranks(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    for plan in (lm.ParallelPlan(shard=2), lm.ParallelPlan(shard=1, tensor=2)):
        plain = lm.from_pretrained(folder / "model", quantize="int4")
        model = lm.from_pretrained(folder / "model", quantize="int4", device="cpu", plan=plan)
        assert torch.equal(model(tokens()).logits.argmax(-1), plain(tokens()).logits.argmax(-1))
        torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits, rtol=1e-4, atol=1e-5)


def test_quantised_weights_are_loaded_into_shards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    lm.from_config(LLAMA).save_pretrained(tmp_path / "model")
    in_two_ranks(loaded_on_two_ranks, tmp_path)


@pytest.mark.parametrize("change", [lambda linear: linear.store(Ternary()), lambda linear: None], ids=["own", "plain"])
def test_hooks_see_the_result_of_the_call(change: Callable[[Linear], None]) -> None:
    linear, seen = Linear(8, 12), []
    change(linear)
    linear.register_forward_hook(lambda *given: seen.append(given[2]))
    x = torch.randn(3, 8)
    activation = GatedActivation("silu")
    y = linear(x, activation=activation)
    assert torch.equal(seen[0], y) and torch.equal(activation(linear(x)), y)
    assert torch.equal(nn.Linear.forward(linear, x), F.linear(x, linear.weight, linear.bias))


def test_kinds_of_linear_layers_are_named_in_one_file() -> None:
    """A pair of parts has an op of its own in `layers/linear.py` alone, and no class is swapped for another."""
    assert {(compute.__name__, update.__name__) for compute, update in FUSED} == {
        ("NoneType", "LoRA"),
        ("Float8", "LoRA"),
    }
    package = Path(lm.__file__).parent
    texts = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    asked = re.compile(r"isinstance\([^()]*,\s*\(?(?:Float8|LoRA|QuantizedCompute)\b|type\([^()]*compute[^()]*\)")
    # The table of pairs; and the two functions that look for layers with one part, to change or to count them.
    allowed = {"layers/linear.py", "layers/quantized.py", "adapt/lora.py"}
    assert {name for name, text in texts.items() if asked.search(text)} <= allowed
    swapped = re.compile(r"__class__ = |MethodType\(.*forward|\.forward = ")
    assert not [name for name, text in texts.items() if swapped.search(text) and "integrations" not in name]


@pytest.mark.parametrize(
    ("family", "kind"),
    [*by_turns(["llama-3", "qwen3", "gemma2", "granite"], [None, "float8", "int4", "nf4"]), ("qwen3", None)],
)
def test_steps_of_decoding_activate_in_the_kernel(device: str, fused: list[bool], family: str, kind: Any) -> None:
    """Which kernel a layer calls, and with what; tests/ops has its numbers."""
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    model = lm.from_config({**CONFIGS[family], **one_layer}, dtype=torch.float16, device=device).eval()
    if kind:
        lm.quantize(model, kind)
    ids = torch.randint(model.config.vocab_size, (2, 5), device=device)
    state = model.new_state(2, 8)
    with torch.no_grad():
        with ops.set_backend("reference"):
            model(ids[:, :-1], state=state)
        assert not fused
        model(ids[:, -1:], state=state)
    assert fused.count(True) == len(model.decoder.blocks)
    linears = sum(isinstance(module, Linear) for module in model.modules())
    assert len(fused) == linears  # every linear layer, the head too


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each launch of the kernel for few rows, whether an activation is part of it. The kernel does not run."""
    module, launched = sys.modules["ligermodels.ops.linear.linear"], list[bool]()

    def few_rows(*given: Any) -> None:
        launched.append(given[5] is not None)
        given[4].zero_()

    monkeypatch.setattr(module, "few_rows", few_rows)
    return launched


@pytest.fixture(
    params=[
        pytest.param("cpu", id="interpreter", marks=pytest.mark.kernels),
        pytest.param("cuda", marks=(pytest.mark.gpu, pytest.mark.kernels)),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernels run."""
    if request.param == "cpu" and not dispatch.INTERPRETED:
        pytest.skip("Triton compiles here: the kernels run on the GPU")
    return str(request.param)
