"""Routing replay: the experts of each token, returned by a pass and given to another."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.layers import DenseMoEConfig, ForwardContext, Layer, MoE, MoEConfig, Router, RouterConfig
from ligermodels.layers.config import LayerConfig

FAMILIES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe-normalised",
    "kimi_linear",
    "bailing_hybrid",
    "qwen3_next",
    "qwen3_5_moe_text",
    "gpt_oss",
    "glm4_moe",
    "glm4_moe_lite",
    "minimax_m2",
    "mellum",
    "deepseek_v2",
    "deepseek_v3",
    "mistral4-groups",
    "gemma4_text-experts",
    *("exaone_moe", "solar_open", "hy_v3", "afmoe", "hunyuan_v1_moe", "ernie4_5_moe", "lfm2_moe"),
    *("granitemoehybrid", "cohere2_moe", "laguna", "nemotron_h"),
    *("mimo_v2_flash", "llama4_text-two-experts-and-no-norms", "sarvam_mla", "sarvam_moe", "lara_mini"),
]
"""Every family with experts, a test checks; of the configurations those whose routers differ."""


def build(name: str, **fields: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config({**CONFIGS[name], **fields}, dtype=torch.float32)
    for router in (module for module in model.modules() if isinstance(module, Router)):
        nn.init.normal_(router.weight)
        if router.selection_bias is not None:
            nn.init.normal_(router.selection_bias)
    return model


def ids_of(model: lm.CausalLM, *shape: int) -> Tensor:
    return torch.randint(model.config.vocab_size, shape or (2, 11), generator=torch.Generator().manual_seed(1))


def random_routing(model: lm.CausalLM, ids: Tensor) -> Tensor:
    """Experts that the routers would not choose, in any order."""
    routers = model.decoder.expert_routers
    router = next(iter(routers.values()))
    scores = torch.rand(*ids.shape, len(routers), router.num_experts, generator=torch.Generator().manual_seed(2))
    return scores.topk(router.top_k).indices.to(torch.int16)


def outcome(model: lm.CausalLM, ids: Tensor, **options: Any) -> tuple[Any, list[Tensor | None]]:
    model.zero_grad()
    out = model.log_probs(ids, ids, **options)
    (out.log_probs * torch.linspace(-1, 1, ids.shape[1])).sum().backward()
    return out, [p.grad for p in model.parameters()]


def test_every_family_with_experts_is_here() -> None:
    configs = {name: config for name, config in CONFIGS.items() if any("experts" in field for field in config)}
    models = {name: lm.from_config(config, device="meta") for name, config in configs.items()}
    routed = {configs[name]["model_type"] for name, model in models.items() if model.decoder.expert_routers}
    assert routed == {configs[name]["model_type"] for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_own_routing_given_back_changes_no_bit(name: str) -> None:
    model = build(name)
    ids = ids_of(model)
    own, wanted = outcome(model, ids, return_routing=True)
    routers = model.decoder.expert_routers
    top_k = next(iter(routers.values())).top_k
    assert own.routing.dtype == torch.int16 and own.routing.shape == (2, 11, len(routers), top_k)
    replayed, found = outcome(model, ids, routing=own.routing, return_routing=True)
    assert torch.equal(replayed.log_probs, own.log_probs) and torch.equal(replayed.routing, own.routing)
    for one, two in zip(found, wanted, strict=True):
        assert (one is None and two is None) or torch.equal(one, two)
    # Other experts give other results, with a gradient to the routers; in another order the same.
    given = random_routing(model, ids)
    forced, gradients = outcome(model, ids, routing=given, return_routing=True)
    assert torch.equal(forced.routing, given) and not torch.allclose(forced.log_probs, own.log_probs)
    by_name = dict(zip([name for name, _ in model.named_parameters()], gradients, strict=True))
    assert all(by_name[name].any() for name in by_name if name.endswith("router.weight"))
    turned = model.log_probs(ids, ids, routing=given.flip(-1).long())
    torch.testing.assert_close(turned.log_probs, forced.log_probs, rtol=1e-4, atol=1e-5)
    # Tokens with -1 are routed by the router; so are all if no token has experts.
    unknown = model.log_probs(ids, ids, routing=torch.full_like(given, -1))
    assert torch.equal(unknown.log_probs, own.log_probs)
    given[0], given[1, 6:] = own.routing[0], -1
    mixed = model.log_probs(ids, ids, routing=given, return_routing=True)
    torch.testing.assert_close(mixed.log_probs[0], own.log_probs[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(mixed.routing[1, :6], given[1, :6]) and (mixed.routing[1, 6:] >= 0).all()


def weights_by_hand(layer: MoE, name: str, logits: Tensor, experts: Tensor) -> Tensor:
    """The weights (N, k) of given experts, as each family's paper or model card has them."""
    chosen = logits.gather(1, experts)
    over_chosen = ("mixtral", "qwen3_moe-normalised", "qwen3_next", "qwen3_5_moe_text", "gpt_oss", "mellum")
    if name in (*over_chosen, "hunyuan_v1_moe", "granitemoehybrid", "lara_mini"):
        return chosen.softmax(-1)
    if name in ("qwen2_moe", "qwen3_moe"):
        return logits.softmax(-1).gather(1, experts)
    if name == "gemma4_text-experts":
        return chosen.softmax(-1) * layer.router.expert_scales[experts]
    if layer.config.weight_inputs:
        return chosen.sigmoid()
    of_all = name in ("mistral4-groups", "ernie4_5_moe", "deepseek_v2")
    scores = logits.softmax(-1).gather(1, experts) if of_all else chosen.sigmoid()
    if CONFIGS[name].get("norm_topk_prob", True):
        scores = scores / (scores.sum(-1, keepdim=True) + (1e-6 if name == "lfm2_moe" else 0.0))
    scales = ("routed_scaling_factor", "router_scaling_factor", "route_scale", "moe_routed_scaling_factor")
    return scores * next((CONFIGS[name][scale] for scale in scales if scale in CONFIGS[name]), 1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_given_experts(name: str) -> None:
    """Against a loop over tokens and experts in float64: of the input, the router and the experts."""
    model = build(name).double()
    number, router = next(iter(model.decoder.expert_routers.items()))
    mlp = model.decoder.blocks[number].mlp
    beside = isinstance(model.config.blocks[number].mlp, DenseMoEConfig)
    layer: MoE = mlp.experts if beside else mlp
    x = torch.randn(7, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    experts = torch.rand(7, router.num_experts).topk(router.top_k).indices
    y, output = layer(x[None], ForwardContext(experts=experts[None].to(torch.int32)))
    dy = torch.randn_like(y)
    parameters = (layer.router.weight, layer.router.expert_scales, layer.gate_up, layer.down)
    trained = [x, *(parameter for parameter in parameters if parameter is not None)]
    found = torch.autograd.grad((y * dy).sum(), trained)
    assert torch.equal(output.experts, experts)

    inputs = x if layer.router.norm is None else layer.router.norm(x)
    logits = F.linear(inputs * layer.router.config.input_scale, layer.router.weight, layer.router.bias)
    weights = weights_by_hand(layer, name, logits, experts)
    rows = []
    for token in range(7):
        total = torch.zeros_like(x[token])
        for weight, e in zip(weights[token], experts[token].tolist(), strict=True):
            given, weight = (weight * x[token], 1.0) if layer.config.weight_inputs else (x[token], weight)
            inner = layer.gate_up[e] @ given + (0 if layer.gate_up_bias is None else layer.gate_up_bias[e])
            outer = layer.down[e] @ layer.activation(inner[None])[0]
            total = total + weight * (outer if layer.down_bias is None else outer + layer.down_bias[e])
        rows.append(total)
    expected = torch.stack(rows)
    if layer.shared is not None:
        shared = layer.shared(x)
        expected = expected + (shared if layer.shared_gate is None else layer.shared_gate(x).sigmoid() * shared)
    expected = expected * layer.config.output_scale
    wanted = torch.autograd.grad((expected * dy[0]).sum(), trained)
    torch.testing.assert_close(y[0], expected, rtol=1e-9, atol=1e-11)
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gemma4_text-experts", "qwen3_next"])
def test_packed_documents_and_padding(name: str) -> None:
    """One routing by document, in rows of their own, in padded rows and in one packed row."""
    model = build(name)
    long, short = ids_of(model, 1, 9), ids_of(model, 1, 5)
    routings = [random_routing(model, ids) for ids in (long, short)]
    alone = [
        model.log_probs(ids, ids, routing=routing, return_routing=True)
        for ids, routing in zip((long, short), routings, strict=True)
    ]
    wanted = torch.cat([out.log_probs[0] for out in alone])

    bounds = torch.tensor([0, 9, 14], dtype=torch.int32)
    row, given = torch.cat([long, short], 1), torch.cat(routings, 1)
    packed = model.log_probs(row, row, cu_seqlens=bounds, routing=given, return_routing=True)
    torch.testing.assert_close(packed.log_probs[0], wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(packed.routing, given)

    # Padding on either side may have any experts, and is -1 in the result.
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    ids = torch.cat([long, F.pad(short, (4, 0))])
    padded_routing = torch.cat([routings[0], F.pad(routings[1], (0, 0, 0, 0, 4, 0), value=99)])
    labels = ids.masked_fill(mask == 0, -100)
    padded = model.log_probs(ids, labels, attention_mask=mask, routing=padded_routing, return_routing=True)
    torch.testing.assert_close(padded.log_probs[mask == 1], wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(padded.routing[mask == 1], given[0]) and (padded.routing[mask == 0] == -1).all()
    # Where few tokens have labels, and blocks are then given only these.
    few = model(ids, labels=labels.index_fill(1, torch.arange(6), -100), attention_mask=mask, routing=padded_routing)
    kept = padded.log_probs[:, 5:8] * (mask[:, 5:8] == 1)
    torch.testing.assert_close(few.loss, -kept.sum() / 6, rtol=1e-4, atol=1e-5)


def of_all_layers(model: lm.CausalLM, routing: Tensor) -> Tensor:
    """As servers return it for a model that also has layers without experts: zeros for these."""
    full = torch.zeros(*routing.shape[:2], len(model.decoder.blocks), routing.shape[3], dtype=torch.int32)
    full[:, :, list(model.decoder.expert_routers)] = routing.int()
    return full


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_the_form_of_servers(name: str) -> None:
    """vLLM and SGLang: (tokens - 1, all layers, experts per token) of a prompt and its continuation, without the last
    new token, which they never compute."""
    model = build(name)
    out = model.generate([5, 6, 7], max_new_tokens=6, do_sample=False, return_routing=True)
    of_server = of_all_layers(model, out.routing)[0, :-1]
    assert of_server.shape[:2] == (8, len(model.decoder.blocks))
    routing = F.pad(of_server, (0, 0, 0, 0, 0, 1), value=-1)[None]
    ids = out.sequences
    wanted = model.log_probs(ids, ids, routing=out.routing).log_probs
    assert torch.equal(model.log_probs(ids, ids, routing=routing).log_probs, wanted)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_next", "gemma4_text-experts", "deepseek_v3"])
def test_generate(name: str) -> None:
    """Prompts of two lengths, and one ends early: the experts of each token are those of a pass over all tokens."""
    model = build(name).eval()
    first = model.generate([[1, 2, 3, 4], [5, 6]], 5, pad_token_id=0, do_sample=False)
    eos = int(first[0, 5])
    options: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": eos, "do_sample": False}
    out = model.generate([[1, 2, 3, 4], [5, 6]], 5, return_routing=True, **options)
    assert torch.equal(out.sequences, model.generate([[1, 2, 3, 4], [5, 6]], 5, **options))
    for row, start, prompt in ((0, 0, 4), (1, 2, 2)):
        tokens = out.sequences[row, start:].tolist()
        end = tokens.index(eos, prompt) + 1 if eos in tokens[prompt:] else len(tokens)
        ids = torch.tensor([tokens[:end]])
        own = model.log_probs(ids, ids, return_routing=True)
        routing = out.routing[row, start : start + end]
        assert torch.equal(routing[:-1], own.routing[0, :-1]) and (routing[-1] == -1).all()
        assert (out.routing[row, :start] == -1).all() and (out.routing[row, start + end :] == -1).all()
        assert torch.equal(model.log_probs(ids, ids, routing=routing[None]).log_probs, own.log_probs)
    # Given experts: their own change nothing; others decide each token; -1 and missing ones are the routers' choice.
    prompts = [[1, 2, 3, 4], [5, 6]]
    replayed = model.generate(prompts, 5, routing=out.routing, return_routing=True, **options)
    assert torch.equal(replayed.sequences, out.sequences) and torch.equal(replayed.routing, out.routing)
    assert torch.equal(model.generate(prompts, 5, routing=torch.full_like(out.routing, -1), **options), out.sequences)
    given = random_routing(model, torch.ones(2, 9, dtype=torch.long))
    for length in (9, 4):  # of all tokens, or of the prompts alone
        options = {"pad_token_id": 0, "do_sample": False}
        found = model.generate(prompts, 5, routing=given[:, :length].int(), return_routing=True, **options)
        for row, start in ((0, 0), (1, 2)):
            ids = found.sequences[row : row + 1, start:]
            logits = model(
                ids, routing=F.pad(given[row : row + 1, start:length], (0, 0, 0, 0, 0, 9 - length), value=-1)
            )
            assert logits.logits[0, 3 - start : -1].argmax(-1).tolist() == ids[0, 4 - start :].tolist()
            known = slice(start, min(length, 8))
            assert torch.equal(found.routing[row, known], given[row, known].to(found.routing.dtype))
    for wrong in (given[:1], given[:, :3], F.pad(given, (0, 0, 0, 0, 0, 1)), given[0]):
        with pytest.raises(InputError, match=r"routing: must be .*, here 2 prompts of 4 to 9 tokens"):
            model.generate(prompts, 5, routing=wrong, **options)
    # Given experts also in a pass with a decoding state.
    ids = ids_of(model, 2, 6)
    given = random_routing(model, ids)
    wanted = model(ids, routing=given).logits
    with torch.no_grad():
        state = model.new_state(2, 6)
        model(ids[:, :4], state=state, routing=given[:, :4])
        step = model(ids[:, 4:5], state=state, routing=given[:, 4:5], return_routing=True)
    torch.testing.assert_close(step.logits[:, 0], wanted[:, 4], rtol=1e-4, atol=1e-5)
    assert torch.equal(step.routing, given[:, 4:5])


def checkpointed(mode: str) -> Callable[[lm.CausalLM], object]:
    return lambda model: setattr(model, "activation_checkpointing", mode)


def compile_blocks(model: lm.CausalLM) -> None:
    torch._dynamo.reset()
    model.decoder.blocks[-1].compile(backend="aot_eager", fullgraph=True)


def with_lora(model: lm.CausalLM) -> None:
    lm.add_lora(model, 2)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.ones_(parameter)


@pytest.mark.parametrize(
    ("name", "change"),
    [("qwen3_moe", checkpointed("full")), ("qwen3_moe", checkpointed("selective")), ("deepseek_v3", compile_blocks)],
)
def test_same_results(name: str, change: Callable[[lm.CausalLM], object]) -> None:
    """Activation checkpointing computes the routers twice; and a compiled block with experts."""
    model = build(name)
    ids = ids_of(model)
    given = random_routing(model, ids)
    out, wanted = outcome(model, ids, routing=given)
    change(model)
    again, found = outcome(model, ids, routing=given, return_routing=True)
    torch.testing.assert_close(again.log_probs, out.log_probs, rtol=1e-5, atol=1e-6)
    assert torch.equal(again.routing, given)
    for one, two in zip(found, wanted, strict=True):
        assert (one is None and two is None) or torch.allclose(one, two, rtol=1e-4, atol=1e-5)


def test_lora_and_the_load_balancing_loss() -> None:
    """The loss of a replay counts the given experts: Fedus et al. 2021 by hand."""
    model = build("mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    with_lora(model)
    ids = ids_of(model, 1, 8)
    own = model(ids, labels=ids, return_routing=True)
    assert torch.equal(model(ids, labels=ids, routing=own.routing).loss, own.loss)
    given = own.routing.clone()
    given[..., 0], given[..., 1] = 0, 1
    out = model(ids, labels=ids, routing=given)
    assert out.tokens_per_expert.tolist() == [[8, 8, 0, 0, 0]] * 2
    logits: list[Tensor] = []
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.register_forward_hook(lambda module, inputs, result: logits.append(result.logits))
    model(ids, labels=ids, routing=given)
    probabilities = torch.cat(logits).softmax(-1).mean(0)
    torch.testing.assert_close(out.aux_loss, 5 * (probabilities[0] + probabilities[1]))


def test_tokens_per_expert() -> None:
    """Counted by hand from the routing; padding does not count."""
    model = build("deepseek_v3")
    ids, mask = ids_of(model), torch.ones(2, 11, dtype=torch.long)
    mask[0, 7:] = mask[1, :3] = 0
    out = model(ids, labels=ids.masked_fill(mask == 0, -100), attention_mask=mask, return_routing=True)
    routing = out.routing[mask == 1]
    wanted = [[int((routing[:, layer] == e).sum()) for e in range(8)] for layer in range(routing.shape[1])]
    assert out.tokens_per_expert.tolist() == wanted and int(out.tokens_per_expert.sum()) == 15 * routing[0].numel()
    assert model(ids).tokens_per_expert is None and model(ids, labels=ids).routing is None


def test_bad_input() -> None:
    model, dense = build("qwen3_moe"), lm.from_config(CONFIGS["qwen3"])
    ids = ids_of(model, 1, 4)
    routing = random_routing(model, ids)
    assert routing.shape == (1, 4, 1, 2)
    beyond, half = (torch.tensor(experts).view(1, 4, 1, 2) for experts in ([0, 1, 1, 2, 3, 6, 1, 2], [-1, 1] * 4))
    for message, given in {
        "must be torch.int8 or .* got torch.float32": routing.float(),
        r"\(1, 4, 1, 2\) for 1 layers with experts \(or all 4 layers\); got \(1, 3, 1, 2\).*with -1": routing[:, :3],
        r"got \(1, 4, 2, 2\)": routing.expand(1, 4, 2, 2),
        r"got \(1, 4, 1, 3\)": routing[..., [0, 1, 0]],
        r"lie in \[0, 6\), or be -1 .*routing\[0, 2, 0, 1\] is 6": beyond,
        r"lie in \[0, 6\), or be -1 for all.*routing\[0, 0, 0, 0\] is -1": half,
        r"must differ; servers .* zeros, fill these with -1.*\[0, 0, 0\] is 0": torch.zeros_like(routing),
        "must be a tensor, got list": routing.tolist(),
    }.items():
        with pytest.raises(InputError, match=message):
            model(ids, routing=given)
    for call in (lambda: dense(ids, routing=routing), lambda: dense(ids, return_routing=True)):
        with pytest.raises(InputError, match="routing: is for mixtures of experts, and this model has no native layer"):
            call()
    heads = lm.MedusaModel.from_base(model, num_heads=1)
    for call, message in {
        lambda: heads(ids, labels=ids, routing=routing): "routing: no such argument",
        lambda: model.generate(ids, 2, return_routing=True, draft=heads): "return_routing: tree decoding does not",
        lambda: model.generate(ids, 2, return_routing=1): "return_routing must be True or False",
        lambda: list(model.stream(ids, 2, return_routing=True)): "return_routing: stream yields",
        lambda: dense.generate(ids, 2, return_routing=True): "return_routing: is for mixtures of experts",
    }.items():
        with pytest.raises(InputError, match=message):
            call()


def test_a_wrapped_model_refuses() -> None:
    """It computes with transformers' routers."""
    from ligermodels.integrations import wrap

    model = build("mixtral")
    model.load_hf_state_dict(model.hf_state_dict())
    ids = ids_of(model)
    wanted = model(ids, labels=ids).loss
    wrap(model)
    torch.testing.assert_close(model(ids, labels=ids).loss, wanted)
    with pytest.raises(InputError, match="no native layer with experts"):
        model(ids, return_routing=True)


def test_a_layer_that_returns_no_experts() -> None:
    model = build("mixtral")

    class Dense(nn.Module):
        def forward(self, x: Tensor, context: Any = None) -> tuple[Tensor, None]:
            return x, None

    model.decoder.blocks[1].mlp = Dense()
    ids = ids_of(model)
    with pytest.raises(InputError, match="2 layers have experts by the model's config, and 1 returned"):
        model(ids, return_routing=True)


class WithoutContext(Layer):
    """Around a mixture; the experts that a caller gives do not reach it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: Any = None) -> Any:
        return self.inner(x)


class WithContext(WithoutContext):
    reads_experts = True

    def forward(self, x: Tensor, context: Any = None) -> Any:
        return self.inner(x, context)


def test_given_experts_reach_a_layer_or_are_refused() -> None:
    model = build("qwen3_moe")
    ids = ids_of(model)
    given, number = random_routing(model, ids), next(iter(model.decoder.expert_routers))
    wanted = model(ids, routing=given).logits
    block = model.decoder.blocks[number]
    mixture = block.mlp
    block.mlp = WithContext(mixture)
    assert torch.equal(model(ids, routing=given).logits, wanted)
    block.mlp = WithoutContext(mixture)
    with pytest.raises(InputError, match=rf"routing: blocks\[{number}\].mlp \(WithoutContext\) would ignore"):
        model(ids, routing=given)
    assert model(ids, labels=ids, return_routing=True).routing.shape == given.shape  # its own choice


class HidesItsRouter(Layer):
    """A mixture that uses given experts, and returns hidden states alone."""

    token_wise = reads_experts = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        hidden: Tensor = self.inner(x, context)[0]
        return hidden


@dataclass(frozen=True)
class HidesItsRouterConfig(LayerConfig):
    inner: MoEConfig

    @property
    def expert_router(self) -> RouterConfig:
        return self.inner.expert_router

    def build(self, hidden_size: int) -> nn.Module:
        return HidesItsRouter(self.inner.build(hidden_size))


def test_a_layer_without_extra_output_takes_given_experts() -> None:
    usual = build("mixtral")
    blocks = (replace(block, mlp=HidesItsRouterConfig(block.mlp)) for block in usual.config.blocks)
    model = lm.CausalLM(replace(usual.config, blocks=tuple(blocks)))
    model.load_state_dict({name.replace(".mlp.", ".mlp.inner."): x for name, x in usual.state_dict().items()})
    ids = ids_of(model)
    given = random_routing(model, ids)
    assert torch.equal(model(ids, routing=given).logits, usual(ids, routing=given).logits)
    with pytest.raises(InputError, match="return_routing: 2 layers have experts by the model's config, and 0 returned"):
        model(ids, return_routing=True)
