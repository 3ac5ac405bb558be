"""The mixture of experts against those of Mixtral and Qwen3-MoE in transformers."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ligermodels.convert.mappings import experts_gate_up, experts_gate_up_in_one, rename, stack
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import ForwardContext, MoE, MoEConfig, RouterOutput, load_balancing_loss

HIDDEN, SIZE = 22, 13
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.kernels])]
FUSED = WeightMap(
    [
        rename("router.weight", "gate.weight"),
        experts_gate_up_in_one("gate_up", "experts.gate_up_proj"),
        rename("down", "experts.down_proj"),
    ]
)


class Case(NamedTuple):
    family: str
    num_experts: int
    top_k: int
    normalize: bool
    tokens: tuple[int, int]


CASES = {
    "mixtral": Case("mixtral", 5, 2, True, (3, 7)),
    "mixtral, one token": Case("mixtral", 8, 2, True, (1, 1)),
    "qwen3": Case("qwen3_moe", 7, 3, True, (2, 9)),
    "qwen3, not normalised": Case("qwen3_moe", 7, 3, False, (2, 9)),
    "all experts": Case("qwen3_moe", 4, 4, False, (2, 5)),
    "one expert": Case("mixtral", 1, 1, True, (2, 5)),
    "most experts without a token": Case("qwen3_moe", 64, 3, True, (1, 5)),
}


def make_oracle(case: Case, hidden: int = HIDDEN, size: int = SIZE) -> nn.Module:
    common = {"hidden_size": hidden, "num_experts_per_tok": case.top_k}
    if case.family == "mixtral":
        config = MixtralConfig(**common, intermediate_size=size, num_local_experts=case.num_experts)
        oracle = MixtralSparseMoeBlock(config)
    else:
        common |= {"num_experts": case.num_experts, "norm_topk_prob": case.normalize}
        oracle = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**common, moe_intermediate_size=size))
    for parameter in oracle.parameters():
        nn.init.normal_(parameter, std=0.5)
    return oracle


def make_ours(case: Case, oracle: nn.Module, hidden: int = HIDDEN, size: int = SIZE) -> MoE:
    layer = MoEConfig(case.num_experts, case.top_k, size, normalize=case.normalize).build(hidden)
    assert isinstance(layer, MoE)
    with torch.no_grad():
        layer.router.weight.copy_(oracle.gate.weight)
        gate, up = oracle.experts.gate_up_proj.chunk(2, dim=1)
        layer.gate_up.copy_(torch.stack([gate, up], dim=2).flatten(1, 2))  # in pairs
        layer.down.copy_(oracle.experts.down_proj)
    return layer


def output_of(layer: nn.Module, x: Tensor) -> Tensor:
    """Without what the router said."""
    return layer(x)[0] if isinstance(layer, MoE) else layer(x)


def outcome(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and all gradients, by transformers' names."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = output_of(layer, x)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    if isinstance(layer, MoE):
        gradients = {name: read() for name, _, _, read in FUSED.export(gradients)}
    return {"y": y.detach(), "x": x.grad, **gradients}


def error(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_parity(name: str, device: str) -> None:
    oracle = make_oracle(CASES[name]).to(device)
    layer = make_ours(CASES[name], oracle).to(device)
    x = torch.randn(*CASES[name].tokens, HIDDEN).to(device)
    ours, theirs = outcome(layer, x), outcome(oracle, x)
    assert ours.keys() == theirs.keys()
    for part, wanted in theirs.items():
        assert error(ours[part], wanted) < 1e-5, part
    if "without" in name:
        assert (theirs["experts.down_proj"].flatten(1).norm(dim=1) == 0).sum() >= 49  # they were indeed without
    for part, again in outcome(layer, x).items():
        assert torch.equal(again, ours[part]), f"{part}: a second run gave other bits"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_no_worse_than_transformers(family: str, device: str) -> None:
    # Multiples of 8, which on a GPU torch's grouped GEMM serves; and tokens enough for the errors to be averages.
    case, sizes = Case(family, 9, 3, True, (4, 50)), (64, 48)
    oracle = make_oracle(case, *sizes)
    # Logits that bfloat16 holds exactly: else its rounding chooses other experts than the truth, now and then.
    router = torch.randn(9, 64).mul(16).round().div(8)
    router[4] = -8  # nobody's choice
    oracle.gate.weight.data.copy_(router)
    layer = make_ours(case, oracle, *sizes).to(device, torch.bfloat16)
    oracle = oracle.to(device, torch.bfloat16)
    x = torch.zeros(*case.tokens, 64).scatter_(2, torch.rand(*case.tokens, 64).topk(3).indices, 1.0)
    x = x.to(device, torch.bfloat16)
    ours, theirs = outcome(layer, x), outcome(oracle, x)
    truth = outcome(copy.deepcopy(oracle).double(), x.double())
    for part, wanted in truth.items():
        assert error(ours[part], wanted) <= 1.05 * error(theirs[part], wanted), part
    assert not ours["experts.down_proj"][4].any() and not ours["experts.gate_up_proj"][4].any()
    for part, again in outcome(layer, x).items():
        assert torch.equal(again, ours[part]), f"{part}: a second run gave other bits"


def test_gradients_in_fp64() -> None:
    layer = MoEConfig(4, 2, 3).build(5).double()
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    names = dict(layer.named_parameters())

    def call(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))[0]

    wide = [parameter.detach().mul(20).requires_grad_() for parameter in names.values()]
    assert torch.autograd.gradcheck(call, (x, *wide))


@pytest.mark.parametrize("trained", ["x", "router.weight", "gate_up", "down"])
def test_only_what_is_trained_gets_a_gradient(trained: str) -> None:
    case = CASES["qwen3"]
    layer = make_ours(case, make_oracle(case))
    x = torch.randn(*case.tokens, HIDDEN)
    leaves = {"x": x, **dict(layer.named_parameters())}
    wanted = {"x": outcome(layer, x)["x"], **{name: p.grad for name, p in layer.named_parameters()}}
    layer.zero_grad()
    for name, leaf in leaves.items():
        leaf.requires_grad_(name == trained)
    y = output_of(layer, x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(leaves[trained].grad, wanted[trained])
    assert all(leaf.grad is None for name, leaf in leaves.items() if name != trained)


def test_compiled() -> None:
    case = CASES["qwen3"]
    layer = make_ours(case, make_oracle(case))
    torch._dynamo.reset()

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y, router_output = layer(x, ForwardContext())
        return y, load_balancing_loss([router_output])

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 8):
        x = torch.randn(2, tokens, HIDDEN)
        for one, two in zip(call(x), compiled(x), strict=True):
            assert torch.equal(one, two)


def test_weights_go_out_expert_by_expert() -> None:
    """The layout of Mixtral's and Qwen3's files before transformers 5, as its oracle splits them."""
    case = CASES["mixtral"]
    oracle = make_oracle(case)
    layer = make_ours(case, oracle)
    names = [[f"experts.{e}.{w}.weight" for e in range(case.num_experts)] for w in ("w1", "w3", "w2")]
    entries = [rename("router.weight", "gate.weight"), experts_gate_up("gate_up", *names[:2])]
    exported = WeightMap([*entries, stack("down", names[2])]).export(dict(layer.named_parameters()))
    found = {name: read() for name, _, _, read in exported}
    x = torch.randn(HIDDEN)
    for e in range(case.num_experts):
        w1, w3, w2 = (found[f"experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2"))
        gate, up = oracle.experts.gate_up_proj[e].chunk(2)
        assert torch.equal(w1, gate) and torch.equal(w3, up) and torch.equal(w2, oracle.experts.down_proj[e])
        # With all tokens at expert e, the mixture is that expert.
        with torch.no_grad():
            layer.router.weight.copy_(100 * torch.eye(case.num_experts)[e][:, None] * x)
        assert error(output_of(layer, x[None])[0], w2 @ (nn.functional.silu(w1 @ x) * (w3 @ x))) < 1e-5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("layers", "num_experts", "top_k"), [(1, 5, 2), (3, 7, 1), (2, 4, 4)])
def test_load_balancing_loss(masked: bool, layers: int, num_experts: int, top_k: int) -> None:
    logits = [torch.randn(3 * 7, num_experts, requires_grad=True) for _ in range(layers)]
    mask = torch.rand(3, 7) < 0.6 if masked else None

    def outcome(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss * -3, logits)]

    ours = outcome(load_balancing_loss([RouterOutput(each, top_k) for each in logits], mask))
    theirs = outcome(load_balancing_loss_func(tuple(logits), num_experts, top_k, mask))
    assert ours[0].shape == ()
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)


def test_load_balancing_loss_at_its_bounds() -> None:
    uniform = torch.eye(4).repeat(5, 1)
    assert load_balancing_loss([RouterOutput(uniform, 1)]).item() == pytest.approx(1.0)
    one = 1e4 * torch.eye(4)[:1].expand(6, 4)
    assert load_balancing_loss([RouterOutput(one.bfloat16(), 1)] * 2).item() == pytest.approx(4.0)
    assert load_balancing_loss([RouterOutput(one, 1)], torch.zeros(2, 3, dtype=torch.bool)).item() == 0.0


def test_router_output() -> None:
    layer, x = MoEConfig(4, 2, 3).build(5), torch.randn(2, 3, 5)
    _, (logits, top_k) = layer(x)
    assert torch.equal(logits, layer.router(x).flatten(0, 1)) and logits.requires_grad and top_k == 2


@pytest.mark.parametrize(
    ("outputs", "mask", "message"),
    [
        ([], None, "router_outputs: empty"),
        ([((6, 4), 2), ((5, 4), 2)], None, r"the same \(tokens, experts\) and top_k.*\(5, 4\)"),
        ([((6, 4), 2), ((6, 3), 2)], None, r"the same \(tokens, experts\) and top_k.*\(6, 3\)"),
        ([((6, 4), 2), ((6, 4), 1)], None, r"the same \(tokens, experts\) and top_k"),
        ([((6, 4), 2)], torch.ones(5), "one element for each of 6 tokens"),
    ],
)
def test_bad_input(outputs: Sequence[tuple[tuple[int, int], int]], mask: Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_balancing_loss([RouterOutput(torch.ones(shape), top_k) for shape, top_k in outputs], mask)


@pytest.mark.parametrize("top_k", [0, 5])
def test_bad_config(top_k: int) -> None:
    with pytest.raises(ConfigError, match=r"top_k: must lie in \[1, 4\]"):
        MoEConfig(4, top_k, 8)
