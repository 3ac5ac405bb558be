"""The mixture of experts against those of transformers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
from zoo_oracles import as_configured

from ligermodels.archs import FAMILIES
from ligermodels.archs.compose import STACKED_EXPERTS
from ligermodels.convert.mappings import experts_gate_up, rename, stack
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import (
    ForwardContext,
    MLPConfig,
    MoE,
    MoEConfig,
    Router,
    RouterConfig,
    RouterOutput,
    load_balancing_loss,
)
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.models.state_dict import StateDict

HIDDEN, SIZE, SHARED = 22, 13, 17
LIMIT = 1.25  # of gpt-oss's activations, which many exceed
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.kernels])]
ORACLES = {
    "mixtral": MixtralSparseMoeBlock,
    "qwen2_moe": Qwen2MoeSparseMoeBlock,
    "qwen3_moe": Qwen3MoeSparseMoeBlock,
    "glm4_moe": Glm4MoeMoE,
    "minimax_m2": MiniMaxM2SparseMoeBlock,
    "gpt_oss": GptOssMLP,
}


class Case(NamedTuple):
    family: str
    num_experts: int
    top_k: int
    normalize: bool
    tokens: tuple[int, int]
    groups: tuple[int, int] = (1, 1)


CASES = {
    "mixtral": Case("mixtral", 5, 2, True, (3, 7)),
    "mixtral, one token": Case("mixtral", 8, 2, True, (1, 1)),
    "qwen2": Case("qwen2_moe", 7, 3, False, (2, 9)),
    "qwen2, normalised": Case("qwen2_moe", 5, 2, True, (2, 9)),
    "qwen3": Case("qwen3_moe", 7, 3, True, (2, 9)),
    "qwen3, not normalised": Case("qwen3_moe", 7, 3, False, (2, 9)),
    "glm4": Case("glm4_moe", 7, 3, True, (2, 9)),
    "glm4, groups": Case("glm4_moe", 12, 3, True, (3, 11), (4, 2)),
    "glm4, one of many groups": Case("glm4_moe", 12, 2, False, (3, 11), (6, 1)),
    "glm4, all groups": Case("glm4_moe", 6, 5, True, (3, 11), (3, 3)),
    "minimax": Case("minimax_m2", 9, 4, True, (2, 9)),
    "gpt_oss": Case("gpt_oss", 7, 3, True, (2, 9)),
    "all experts": Case("qwen3_moe", 4, 4, False, (2, 5)),
    "one expert": Case("mixtral", 1, 1, True, (2, 5)),
    "most experts without a token": Case("qwen3_moe", 64, 3, True, (1, 5)),
}


def make_oracle(case: Case, hidden: int = HIDDEN, size: int = SIZE) -> nn.Module:
    mixtral = case.family in ("mixtral", "minimax_m2", "gpt_oss")
    fields = {"hidden_size": hidden, "num_experts_per_tok": case.top_k, "num_local_experts": case.num_experts}
    fields |= {"intermediate_size": size} if mixtral else {"moe_intermediate_size": size}
    if case.family == "glm4_moe":
        groups = dict(zip(("n_group", "topk_group"), case.groups, strict=True))
        fields |= {**groups, "norm_topk_prob": case.normalize, "routed_scaling_factor": 1.7, "n_shared_experts": 2}
    elif not mixtral:
        fields |= {"num_experts": case.num_experts, "norm_topk_prob": case.normalize}
        fields |= {"shared_expert_intermediate_size": SHARED}
    if case.family == "gpt_oss":
        fields |= {"swiglu_limit": LIMIT}
    config = AutoConfig.for_model(case.family, **fields)
    oracle: nn.Module = as_configured(ORACLES[case.family](config), config)
    for tensor in oracle.state_dict().values():
        tensor.normal_(std=0.5)
    return oracle


def config_of(case: Case, size: int = SIZE) -> MoEConfig:
    router = RouterConfig(case.num_experts, case.top_k, normalize=case.normalize)
    if case.family == "qwen2_moe":
        return MoEConfig(router, size, shared=MLPConfig(SHARED), shared_gate=True)
    if case.family == "gpt_oss":
        router = RouterConfig(*router_sizes(case), bias=True)
        return MoEConfig(router, size, alpha=1.702, limit=LIMIT, up_offset=1.0, bias=True)
    if case.family == "minimax_m2":
        return MoEConfig(RouterConfig(*router_sizes(case), scores="sigmoid", selection_bias=True), size)
    if case.family == "glm4_moe":
        router = RouterConfig(
            *router_sizes(case),
            scores="sigmoid",
            selection_bias=True,
            num_groups=case.groups[0],
            top_k_groups=case.groups[1],
            normalize=case.normalize,
            eps=1e-20,
            scale=1.7,
            float32_logits=True,
        )
        return MoEConfig(router, size, shared=MLPConfig(2 * size), aux_loss=False)
    return MoEConfig(router, size)


def router_sizes(case: Case) -> tuple[int, int]:
    return case.num_experts, case.top_k


def stacked(case: Case, config: MoEConfig, hidden: int = HIDDEN) -> WeightMap:
    """Names in transformers' modules -> ours, by the layout of the family in which experts are one tensor."""
    layouts = FAMILIES[case.family].layouts
    return WeightMap(config.weight_mappings(hidden, "moe", "layer", layouts[min(1, len(layouts) - 1)]["names"]))


def make_ours(case: Case, oracle: nn.Module, hidden: int = HIDDEN, size: int = SIZE) -> MoE:
    config = config_of(case, size)
    layer = config.build(hidden)
    assert isinstance(layer, MoE)
    state = {f"layer.mlp.{name}": tensor for name, tensor in oracle.state_dict().items()}
    native = {f"moe.{name}": tensor for name, tensor in persistent_tensors(layer).items()}
    stacked(case, config, hidden).load(StateDict(state), native)
    return layer


def output_of(layer: nn.Module, x: Tensor) -> Tensor:
    """Without what the router said."""
    found = layer(x)
    return found[0] if isinstance(found, tuple) else found


def stored(layer: MoE, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By transformers' names."""
    config, hidden = layer.config, layer.router.weight.shape[1]
    shared = "shared_expert" if config.shared_gate else "shared_experts"
    stacked_names = FAMILIES["gpt_oss"].layouts[0]["names"] if config.bias else STACKED_EXPERTS
    names = {**stacked_names, "experts.shared": f"mlp.{shared}.{{part}}_proj"}
    mappings = config.weight_mappings(hidden, "moe", "layer", names)
    weights = WeightMap([each for each in mappings if each.target.removeprefix("moe.") in gradients])
    exported = weights.export({f"moe.{name}": gradient for name, gradient in gradients.items()})
    return {each.name.removeprefix("layer.mlp."): each.read() for each in exported}


def outcome(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and all gradients, by transformers' names."""
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = output_of(layer, x)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    if isinstance(layer, MoE):
        gradients = stored(layer, gradients)
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


@pytest.mark.parametrize("family", ORACLES)
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_no_worse_than_transformers(family: str, device: str) -> None:
    # Multiples of 8, which on a GPU torch's grouped GEMM serves; and tokens enough for the errors to be averages.
    case, sizes = Case(family, 9, 3, True, (4, 50)), (64, 48)
    oracle = make_oracle(case, *sizes)
    # Logits that bfloat16 holds exactly: else its rounding chooses other experts than the truth, now and then.
    router = torch.randn(9, 64).mul(16).round().div(8)
    router[4] = -8  # nobody's choice
    if family == "gpt_oss":
        oracle.router.bias.data.zero_()
    getattr(oracle, "router" if family == "gpt_oss" else "gate").weight.data.copy_(router)
    for bias in (buffer for name, buffer in oracle.named_buffers() if "correction_bias" in name):
        bias.copy_(bias.bfloat16())  # which theirs becomes
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


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_in_fp64(biased: bool) -> None:
    router = RouterConfig(4, 2, bias=biased)
    layer = MoEConfig(router, 3, alpha=1.5, limit=0.5 if biased else None, bias=biased).build(5).double()
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


@pytest.mark.parametrize(("name", "backend"), [("glm4, groups", "aot_eager"), ("gpt_oss", "eager")])
def test_compiled(name: str, backend: str) -> None:
    """For gpt-oss the forward pass alone is traced: tests/archs/test_gpt_oss.py compiles a training step of it."""
    case = CASES[name]
    layer = make_ours(case, make_oracle(case))
    torch._dynamo.reset()

    def call(x: Tensor) -> tuple[Tensor, ...]:
        found = layer(x, ForwardContext())
        if not isinstance(found, tuple):
            return (found,)
        y, router_output = found
        return y, load_balancing_loss([router_output])

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=True)
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
    layer, x = MoEConfig(RouterConfig(4, 2), 3).build(5), torch.randn(2, 3, 5)
    y, (logits, top_k, experts, aux_loss) = layer(x)
    routing = layer.router(x.flatten(0, 1))
    assert torch.equal(logits, routing.logits) and logits.requires_grad and top_k == 2 and aux_loss
    assert torch.equal(experts, routing.experts)
    alone = MoEConfig(RouterConfig(4, 2), 3, aux_loss=False).build(5)
    alone.load_state_dict(layer.state_dict())
    assert torch.equal(alone(x)[0], y) and not alone(x)[1].aux_loss  # so that a pass may leave tokens out
    assert alone.token_wise and not layer.token_wise


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


class Waits(TorchDispatchMode):
    """Fails at an op that would wait for a GPU, or whose result has as many elements as the values say."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert torch.Tag.data_dependent_output not in func.tags and torch.Tag.dynamic_output_shape not in func.tags
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["mixtral", "glm4, groups", "minimax"])
def test_routing_waits_for_nothing(name: str) -> None:
    layer = make_ours(CASES[name], make_oracle(CASES[name]))
    with Waits():
        layer.router(torch.randn(6, HIDDEN)).weights.sum().backward()
    with pytest.raises(AssertionError), Waits():
        torch.ones(3).nonzero()


def test_softmax_of_mixtral_to_the_bit() -> None:
    """Its gradient too."""
    router = RouterConfig(6, 2)
    layer = MoEConfig(router, SIZE).build(HIDDEN).router
    x, weight = torch.randn(40, HIDDEN), layer.weight.detach().requires_grad_()
    layer.weight.grad = None
    found = layer(x)
    weights, experts = nn.functional.linear(x, weight).softmax(-1).topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    assert torch.equal(found.weights, weights) and torch.equal(found.experts, experts)
    factors = torch.randn(40, 2)
    for each in (found.weights, weights):
        (each * factors).sum().backward()
    assert torch.equal(layer.weight.grad, weight.grad)


@pytest.mark.parametrize(("num_groups", "top_k_groups", "top_k"), [(4, 2, 3), (3, 1, 4), (2, 1, 6), (6, 6, 5)])
def test_groups_one_token_at_a_time(num_groups: int, top_k_groups: int, top_k: int) -> None:
    config = RouterConfig(
        12, top_k, scores="sigmoid", selection_bias=True, num_groups=num_groups, top_k_groups=top_k_groups, scale=2.5
    )
    router = Router(HIDDEN, config)
    with torch.no_grad():
        router.weight.normal_()
        router.selection_bias.normal_()
    x = torch.randn(30, HIDDEN)
    _, weights, experts = router(x)
    for token, row, chosen in zip(x, weights.tolist(), experts.tolist(), strict=True):
        scores = (router.weight @ token).sigmoid().tolist()
        choice = [score + bias for score, bias in zip(scores, router.selection_bias.tolist(), strict=True)]
        size = 12 // num_groups
        groups = [list(range(first, first + size)) for first in range(0, 12, size)]
        groups.sort(key=lambda group: -sum(sorted(choice[e] for e in group)[-2:]))
        allowed = [e for group in groups[:top_k_groups] for e in group]
        wanted = sorted(allowed, key=lambda e: -choice[e])[:top_k]
        assert chosen == wanted
        total = sum(scores[e] for e in wanted)
        assert row == pytest.approx([2.5 * scores[e] / total for e in wanted], rel=1e-5)


def test_the_selection_bias_is_no_parameter_and_stays_as_it_is() -> None:
    layer = MoEConfig(RouterConfig(5, 2, scores="sigmoid", selection_bias=True), 3).build(4)
    router = layer.router
    assert router.selection_bias.dtype == torch.float32 and not router.selection_bias.any()
    assert not any("bias" in name for name, _ in layer.named_parameters())
    assert "router.selection_bias" in persistent_tensors(layer)
    bias = torch.randn(5)
    router.selection_bias.copy_(bias)
    for cast in (layer.bfloat16, layer.half, lambda: layer.to(torch.float64), lambda: layer.to("cpu", torch.bfloat16)):
        cast()
        assert router.weight.dtype != torch.float32 and torch.equal(router.selection_bias.float(), bias)
        assert router.selection_bias.dtype == torch.promote_types(router.weight.dtype, torch.float32)
    layer.requires_grad_(True)
    layer(torch.randn(7, 4).bfloat16())[0].sum().backward()
    assert not router.selection_bias.requires_grad and router.selection_bias.grad is None
    assert layer.to("meta").router.selection_bias.is_meta
    layer.to_empty(device="cpu")
    layer.router.init_weights()
    assert torch.equal(layer.router.selection_bias, torch.zeros(5))


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_logits(autocast: bool) -> None:
    """Where bfloat16 would make ties of all."""
    router = Router(HIDDEN, RouterConfig(6, 2, scores="sigmoid", float32_logits=True))
    with torch.no_grad():
        router.weight.copy_(1 + 1e-4 * torch.rand(6, HIDDEN))
    x = torch.rand(9, HIDDEN)
    wanted = router(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = router(x)
    assert found.logits.dtype == torch.float32 and torch.equal(found.logits, wanted.logits)
    router.to(torch.bfloat16)
    narrow = router(x.bfloat16())
    assert narrow.logits.dtype == torch.float32
    exact = x.bfloat16().double() @ router.weight.double().t()
    assert error(narrow.logits, exact) < 1e-6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, r"top_k: must be a whole number of at least 1, got 0"),
        ({"top_k": 13}, r"top_k: must lie in \[1, 12\].* got 13"),
        ({"scores": "softplus"}, "scores: must be one of softmax, sigmoid, got 'softplus'"),
        ({"num_groups": 5}, "num_groups: 5 does not divide num_experts 12"),
        ({"num_groups": 0}, "num_groups: must be a whole number of at least 1, got 0"),
        ({"num_groups": 3, "top_k_groups": 4}, r"top_k_groups: must lie in \[1, 3\]"),
        ({"num_groups": 12}, "num_groups: groups need 2 experts or more, but 12 have 1"),
        ({"num_groups": 4, "top_k": 4}, r"top_k: must lie in \[1, 3\]"),
    ],
)
def test_bad_router_config(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**{"num_experts": 12, "top_k": 2, **fields})


def test_bad_config() -> None:
    with pytest.raises(ConfigError, match="shared_gate: there is no shared expert"):
        MoEConfig(RouterConfig(4, 2), 8, shared_gate=True)
