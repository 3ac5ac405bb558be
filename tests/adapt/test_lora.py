"""Native LoRA: which layers, what they compute, training, generation, sharding, merging, errors. PEFT's own results are
in tests/integrations/test_lora_peft.py."""

import copy
import json
import math
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.utils._python_dispatch import TorchDispatchMode
from two_ranks import in_two_ranks
from typer.testing import CliRunner
from zoo import BASE, CONFIGS, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.adapt import patterns
from ligermodels.adapt.adapter import rewrite_adapter
from ligermodels.adapt.lora import lora_disabled, lora_layers
from ligermodels.cli import app
from ligermodels.convert.mappings import TensorView, grouped_qkv
from ligermodels.errors import AdapterWarning, CheckpointError, ConfigError, InputError
from ligermodels.layers import Linear
from ligermodels.layers.lora import LoRA, LoRAPart
from ligermodels.ops.runtime.dispatch import set_backend
from ligermodels.training import FusedAdamW

LLAMA = {**BASE, "model_type": "llama", "num_hidden_layers": 3}
ENDLESS = r"((.)|.)*(.*)*!"
"""A regular expression that takes time exponential in the text."""
QWEN = {**BASE, "model_type": "qwen2"}  # with biases
SAVED = ["embed_tokens"]
"""Modules that are trained whole."""


def draw(model: lm.CausalLM) -> lm.CausalLM:
    """B is zero at first; then nothing that is wrong with A or B would show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


def build(config: dict[str, Any] = LLAMA, **options: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    return draw(lm.add_lora(lm.from_config(config), **{"r": 3, **options}))


def tokens(batch: int = 2, length: int = 19) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: lm.CausalLM, *size: int) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens(*size), labels=tokens(*size)).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- the layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [["q_proj", "k_proj", "v_proj"], ["v_proj"], ["k_proj", "q_proj"]], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_layer_against_its_formula(chosen: list[str], bias: bool) -> None:
    """In float64, with a rank and a scaling for each part, and their gradients."""
    hidden, kv, group, width = 10, 2, 3, 4
    views = {view.source: view for view in grouped_qkv("qkv", "q_proj", "k_proj", "v_proj", kv, group, width).views}
    layer = Linear(hidden, kv * (group + 2) * width, bias=bias, dtype=torch.float64)
    settings = {"q_proj": (2, 3.0), "k_proj": (3, 5.0), "v_proj": (1, 0.5)}
    parts = [LoRAPart(f"layer.{name}", (views[name],), *settings[name], use_rslora=name == "k_proj") for name in chosen]
    x = torch.randn(2, 5, hidden, dtype=torch.float64, requires_grad=True)
    before = layer(x)
    layer.update = LoRA(layer, parts)
    torch.testing.assert_close(layer(x), before, rtol=1e-13, atol=1e-13)
    for parameter in layer.parameters():
        parameter.data.normal_()

    a = dict(zip(chosen, layer.update.lora_A.split([part.r for part in parts]), strict=True))
    updated = layer.weight.clone()
    for part, name in zip(parts, chosen, strict=True):
        scaling = part.lora_alpha / (math.sqrt(part.r) if name == "k_proj" else part.r)
        update = scaling * layer.update.get_parameter(f"lora_B_{name}") @ a[name]
        heads = updated.unflatten(0, (kv, group + 2, width))
        place = {"q_proj": slice(group), "k_proj": slice(group, group + 1), "v_proj": slice(group + 1, None)}[name]
        heads[:, place] += update.view(kv, -1, width, hidden)
    wanted, found = nn.functional.linear(x, updated, layer.bias), layer(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    along = torch.randn_like(found)
    inputs = [x, *layer.parameters()]
    for one, other in zip(*(torch.autograd.grad(y, inputs, along) for y in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    layer.merge_update()
    assert layer.update is None
    torch.testing.assert_close(layer(x), wanted, rtol=1e-12, atol=1e-12)


def test_dropout() -> None:
    """On the input of A alone, and in training alone; its mean is the layer without."""
    model = build(lora_dropout=0.4, target_modules=["o_proj"])
    layer = model.eval().get_submodule("decoder.blocks.0.mixer.o")
    x = torch.ones(4000, 84)
    with torch.no_grad():
        plain = layer(x)
        layer.train()
        dropped = layer(x)
        assert torch.equal(layer.eval()(x), plain) and not torch.equal(dropped, plain)
        a, b = layer.update.lora_A, layer.update.lora_B_o_proj
        base = nn.functional.linear(x, layer.weight, layer.bias)
        update = (dropped - base).double()
        spread = (32 / 3) ** 2 * 0.4 / 0.6 * ((b @ a) ** 2).sum(1).double()
        assert torch.allclose(update.var(0), spread, rtol=0.2)
        assert ((update.mean(0) - (plain - base)[0]).abs() < 5 * (spread / 4000).sqrt()).all()


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = lm.from_config(LLAMA, dtype=torch.bfloat16)
    before = model(tokens()).logits
    assert lm.add_lora(model, 8, dtype="float32", target_modules=["q_proj", "gate_proj"]) is model
    assert torch.equal(model(tokens()).logits, before)
    layer = model.get_submodule("decoder.blocks.1.mixer.qkv").update
    assert layer.lora_A.dtype == torch.float32 and layer.lora_A.abs().max() <= 60**-0.5
    assert float(layer.lora_A.detach().std()) == pytest.approx(180**-0.5, rel=0.1) and not layer.lora_B_q_proj.any()
    draw(model)
    model.reset_parameters()
    assert not layer.lora_B_q_proj.any()


# -- which layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (["q_proj", "v_proj"], {f"model.layers.{i}.self_attn.{x}_proj" for i in range(3) for x in "qv"}),
        (["layers.1.mlp.down_proj"], {"model.layers.1.mlp.down_proj"}),
        (r".*\.[02]\.mlp\.up_proj", {"model.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj"}),
        (r"(?:\w+\.)+1\.(?:\w+\.)*up_pro.?", {"model.layers.1.mlp.up_proj"}),
    ],
)
def test_target_modules(wanted: Any, found: set[str]) -> None:
    model = build(target_modules=wanted)
    assert {part.name for layer in lora_layers(model).values() for part in layer.parts} == found
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(gradients(model)) and all("lora_" in name for name in trained)
    assert len(trained) == len(found) + len(lora_layers(model))


@pytest.mark.filterwarnings("ignore::ligermodels.errors.AdapterWarning")
@pytest.mark.parametrize(
    "name", ["llama-2", "phi3", "mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss"]
)
def test_all_linear(name: str) -> None:
    model = build(CONFIGS[name])
    leaves = {part.name.rpartition(".")[2] for layer in lora_layers(model).values() for part in layer.parts}
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    packed = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    gated = attention | {"shared_expert_gate"}
    assert leaves == {"llama-2": attention | mlp, "phi3": packed, "qwen2_moe": gated}.get(name, attention)


# -- training and generation -------------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ligermodels.lora_linear_forward.default:
            self.rows.append(tuple(args[2].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config["model_type"])
def test_activation_checkpointing(config: dict[str, Any]) -> None:
    """The same gradients; "selective" computes what is narrower than its operand again, "full" all."""
    model = build(config)
    wanted = gradients(model)
    shapes = [tuple(model.get_submodule(name).weight.shape) for name in lora_layers(model)]
    for mode in ("selective", "full"):
        model.activation_checkpointing = mode
        with Count() as count:
            found = gradients(model)
        again = [shape for shape in shapes if mode == "full" or shape[0] < shape[1]]
        assert Counter(shapes + again) == Counter(count.rows)
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name])


@pytest.mark.kernels
def test_gradients_by_the_kernels() -> None:
    """They are asked for the gradients of activations alone: weights, norms and head are frozen."""
    model = build({**CONFIGS["gemma2"], "num_hidden_layers": 2})
    found = gradients(model, 1, 7)
    with set_backend("reference"):
        wanted = gradients(model, 1, 7)
    assert found.keys() == wanted.keys()
    errors = {name: relative_error(found[name], wanted[name]) for name in found}
    assert max(errors.values()) < 1e-4, errors


def test_training_lowers_the_loss_and_leaves_the_base_alone() -> None:
    model = build(r=4, lora_dropout=0.05).train()
    with torch.no_grad():
        model.head.weight.mul_(10)  # at its initial size no hidden state has a low loss
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(15):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


def test_a_compiled_model_and_steps_in_the_backward_pass() -> None:
    config = {**QWEN, "num_hidden_layers": 1}
    model, plain = build(config), build(config)
    compiled = torch.compile(model, backend="aot_eager")
    for each, module in ((model, compiled), (plain, plain)):
        optimizer = FusedAdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        optimizer.step_in_backward()
        for _ in range(2):
            module(tokens(), labels=tokens()).loss.backward()
    torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits)


@pytest.mark.parametrize("config", [QWEN, CONFIGS["qwen3_moe"]], ids=["dense", "experts"])
def test_a_functional_call(config: dict[str, Any]) -> None:
    """Takes tensors in place of parameters, those of LoRA too."""
    experts = [] if config is QWEN else ["experts"]
    model, changed = (build(config, target_modules=["all-linear", *experts]) for _ in range(2))
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    given = {name: 1.1 * parameter.detach() for name, parameter in model.named_parameters()}
    found = torch.func.functional_call(model, given, (tokens(),))
    assert torch.equal(found.logits, changed(tokens()).logits)


def test_autocast_and_a_copy() -> None:
    model = build()
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(tokens()).logits, model(tokens()).logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(tokens()).logits
    assert relative_error(found, model(tokens()).logits) < 3e-2


def test_generation_is_that_of_the_merged_model() -> None:
    model = build(r=8, lora_alpha=64).eval()
    found = model.generate(tokens(2, 7), max_new_tokens=12)
    plain = build(r=8, lora_alpha=64).eval()
    with torch.no_grad():
        for layer in lora_layers(plain).values():
            layer.lora_A.zero_()
    assert not torch.equal(plain.generate(tokens(2, 7), max_new_tokens=12), found)
    assert torch.equal(lm.merge_lora(model).generate(tokens(2, 7), max_new_tokens=12), found)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_round_trip_is_exact(tmp_path: Path) -> None:
    options = {"lora_dropout": 0.1, "lora_alpha": 5.5, "use_rslora": True, "dtype": torch.bfloat16}
    model = build(target_modules=["k_proj", "o_proj", "up_proj"], **options)
    lm.save_adapter(model, tmp_path / "adapter")
    again = lm.from_config(LLAMA)
    again.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if "lora_" not in name})
    lm.load_adapter(again, tmp_path / "adapter", is_trainable=True, dtype="bfloat16")
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert settings(again) == settings(model)


def test_numbers_of_numpy_are_saved_as_others(tmp_path: Path) -> None:
    ids, rank, alpha, dropout = np.array([5, 1]), np.int64(3), np.float32(0.5), np.float64(0.25)
    model = build(r=rank, lora_alpha=alpha, lora_dropout=dropout, trainable_token_indices=list(ids))
    lm.save_adapter(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert [config[name] for name in ("r", "lora_alpha", "lora_dropout")] == [3, 0.5, 0.25]
    assert config["trainable_token_indices"] == [5, 1]


def settings(model: lm.CausalLM) -> list[Any]:
    parts = [(layer.dropout, part) for layer in lora_layers(model).values() for part in layer.parts]
    return [(dropout, part.name, part.r, part.lora_alpha, part.use_rslora) for dropout, part in parts]


def test_what_is_merged_goes_out_as_a_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", LLAMA)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    model = draw(lm.add_lora(lm.from_pretrained(tmp_path / "model"), 3))
    logits = model(tokens()).logits
    for write in (
        lambda: model.save_pretrained(tmp_path / "out"),
        lambda: model.push_to_hub("some/model"),
        model.hf_state_dict,
        lambda: model.load_hf_state_dict({}),
    ):
        with pytest.raises(InputError, match=r"save_adapter.*merge_lora"):
            write()
    assert lm.merge_lora(model) is model and not lora_layers(model)
    model.save_pretrained(tmp_path / "out")
    assert relative_error(lm.from_pretrained(tmp_path / "out")(tokens()).logits, logits) < 1e-5
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before  # they were mapped


def test_a_merged_weight_is_rounded_once() -> None:
    """In bfloat16 every weight is the nearest to the sum in float64, but for ties that float32 cannot tell apart."""
    torch.manual_seed(0)
    layer = Linear(96, 80, bias=False, dtype=torch.bfloat16)
    layer.update = LoRA(layer, [LoRAPart("o_proj", (TensorView("o_proj", lambda native: native),), 8, 16.0)])
    for parameter in layer.update.parameters():
        nn.init.normal_(parameter, std=0.05)
    a, b = (parameter.detach().double() for parameter in layer.update.lora_parameters().values())
    wanted = (layer.weight.detach().double() + 2 * (b @ a)).bfloat16()
    layer.merge_update()
    assert (layer.weight == wanted).double().mean() > 0.999


@pytest.mark.parametrize("kind", [None, "int4"])
def test_an_update_that_is_not_finite_is_merged_into_no_layer(kind: Any) -> None:
    model = build() if kind is None else lm.quantize(build(), kind)
    updates = lora_layers(model)
    *_, (name, last) = updates.items()
    with torch.no_grad():
        next(iter(last.lora_parameters().values()))[0, 0] = math.nan
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=rf"merge_lora: {name}.update.lora_A has values that are not finite"):
        lm.merge_lora(model)
    assert lora_layers(model) == updates
    assert all(torch.equal(tensor.nan_to_num(), before[key].nan_to_num()) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("by", [prune.identity, lambda layer, name: parametrizations.weight_norm(layer, name)])
def test_weights_that_are_computed_from_others_do_not_change_silently(by: Any) -> None:
    model, name = build(), "decoder.blocks.2.mlp.down"
    by(model.get_submodule(name), "weight")
    with pytest.raises(InputError, match=f"{name}.weight: is no parameter, but computed from others"):
        lm.merge_lora(model)
    with pytest.raises(InputError, match=f"{name}.weight: is no parameter, but computed from others"):
        lm.quantize(model, "int4")
    assert len(lora_layers(model)) == 12 and model.decoder.blocks[0].mlp.down.weight is not None
    gradients(model)


def test_an_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    """Its layers have the same names and shapes."""
    for name in ("llama-3", "mistral-nemo"):
        make_checkpoint(tmp_path / name, CONFIGS[name])
    adapter = tmp_path / "adapter"
    lm.save_adapter(lm.add_lora(lm.from_pretrained(tmp_path / "llama-3"), 2), adapter)
    message = r"base_model_name_or_path: .*llama-3' has model_type 'llama', but this model has 'mistral'"
    with pytest.raises(ConfigError, match=message):
        lm.load_adapter(lm.from_pretrained(tmp_path / "mistral-nemo"), adapter)
    result = CliRunner().invoke(app, ["lora", "merge", *(str(tmp_path / x) for x in ("mistral-nemo", "adapter", "o"))])
    assert result.exit_code == 1 and "has model_type 'llama'" in result.output and not (tmp_path / "o").exists()
    shutil.rmtree(tmp_path / "llama-3")  # then there is nothing to compare with
    lm.load_adapter(lm.from_pretrained(tmp_path / "mistral-nemo"), adapter)


def test_an_adapter_of_other_weights_is_a_warning(tmp_path: Path) -> None:
    """Where both are there to compare; merging into a relative of the base may be what is wanted."""
    for seed, name in enumerate(("own", "other")):
        torch.manual_seed(seed)
        lm.from_config(CONFIGS["llama-3"]).save_pretrained(tmp_path / name)
    adapter = tmp_path / "adapter"
    lm.save_adapter(lm.add_lora(lm.from_pretrained(tmp_path / "own"), 2), adapter)
    message = rf"the adapter is for '.*/own', whose .* has other values than in {tmp_path}/other"
    with pytest.warns(AdapterWarning, match=message):
        lm.load_adapter(lm.from_pretrained(tmp_path / "other"), adapter)
    command = ["lora", "merge", *(str(tmp_path / name) for name in ("other", "adapter", "merged"))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0 and "has other values than in" in result.stderr
    # The same weights in another folder or dtype, and a base that is not there.
    shutil.copytree(tmp_path / "own", tmp_path / "copy")
    lm.from_pretrained(tmp_path / "own", dtype="bfloat16").save_pretrained(tmp_path / "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("own", "copy", "bfloat16"):
            lm.load_adapter(lm.from_pretrained(tmp_path / name), adapter)
        shutil.rmtree(tmp_path / "own")
        lm.load_adapter(lm.from_pretrained(tmp_path / "other"), adapter)


def test_an_adapter_beside_a_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, LLAMA)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = lm.add_lora(lm.from_pretrained(tmp_path), 2)
    with pytest.raises(CheckpointError, match="not empty"):
        lm.save_adapter(model, tmp_path)
    for _ in range(2):
        lm.save_adapter(model, tmp_path, overwrite=True)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(after["adapter_config.json"])["base_model_name_or_path"] == str(tmp_path)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "r: must be a whole number"),
        ({"r": 2.5}, "r: must be a whole number"),
        ({"lora_alpha": 0}, "lora_alpha: must be a number above 0"),
        ({"lora_dropout": 1.0}, "lora_dropout: must lie in"),
        ({"dtype": "int8"}, "dtype: 'int8'"),
        ({"target_modules": None}, "target_modules: must be names"),
        ({"target_modules": []}, "target_modules: is empty"),
        (
            {"target_modules": ["q_proj", "c_attn"]},
            "'c_attn' names no linear layer; known: q_proj, k_proj, v_proj, o_proj",
        ),
        ({"target_modules": ["lm_head"]}, "'lm_head' is not a linear layer that native LoRA adapts.*known"),
        ({"target_modules": ["embed_tokens"]}, "'embed_tokens' is not a linear layer that native LoRA adapts"),
        ({"target_modules": "q_proj"}, r"'q_proj' is a regular expression .* give \['q_proj'\]"),
        ({"target_modules": "(q_proj"}, "is no regular expression"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    model = lm.from_config(LLAMA)
    with pytest.raises(InputError, match=message):
        lm.add_lora(model, **options)
    assert all(p.requires_grad for p in model.parameters()) and not lora_layers(model)


def test_hooks_on_a_layer_are_not_lost() -> None:
    """Hooks and a forward of its own stay when LoRA is added, merged, or the weight quantised."""
    model, seen = lm.from_config(LLAMA), []
    layer = model.get_submodule("decoder.blocks.1.mixer.o")
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    other = model.get_submodule("decoder.blocks.1.mlp.down")
    forward = other.forward
    other.forward = lambda x, **options: (seen.append("forward"), forward(x, **options))[1]
    changes = (lm.add_lora, draw, lambda model: lm.quantize(model, "int4"), lm.merge_lora, lm.dequantize)
    for change in changes:
        change(model)
        seen.clear()
        model(tokens())
        assert seen == ["hook", "forward"] and model.get_submodule("decoder.blocks.1.mixer.o") is layer


@pytest.mark.parametrize("wanted", ["all-linear", ["o_proj", "down_proj"], r".*(o|down)_proj"], ids=str)
def test_layers_of_another_class_are_left_out_with_a_warning(wanted: Any) -> None:
    model = lm.from_config(LLAMA)
    old = model.decoder.blocks[1].mlp.down
    model.decoder.blocks[1].mlp.down = nn.Linear(old.in_features, old.out_features, bias=False)
    name = "model.layers.1.mlp.down_proj, a torch.nn.modules.linear.Linear"
    with pytest.warns(AdapterWarning, match=f"LoRA: 1 layers, such as {re.escape(name)}, are not adapted"):
        lm.add_lora(model, 2, target_modules=wanted)
    assert len(lora_layers(model)) == (11 if wanted == "all-linear" else 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.add_lora(lm.merge_lora(model), 2, target_modules=["o_proj"])


def test_routers_are_refused_by_name() -> None:
    for config, names in ((CONFIGS["mixtral"], ["w4", "gate"]), (CONFIGS["qwen3_moe"], ["gate", "shared_experts"])):
        for name in names:
            with pytest.raises(InputError, match=f"{name}' .*known: q_proj, k_proj, v_proj, o_proj"):
                lm.add_lora(lm.from_config(config), target_modules=[name])


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    model = lm.from_config(LLAMA)
    for call in (lm.merge_lora, lambda model: lm.save_adapter(model, tmp_path / "out")):
        with pytest.raises(InputError, match="has no LoRA"):
            call(model)
    with pytest.raises(InputError, match="takes a native CausalLM, got a MedusaModel"):
        lm.add_lora(lm.MedusaModel.from_base(model, num_heads=1))
    with pytest.raises(ConfigError, match="composed by hand"):
        lm.add_lora(lm.CausalLM(model.config))
    lm.save_adapter(lm.add_lora(model), tmp_path / "out")
    for call in (lm.add_lora, lambda model: lm.load_adapter(model, tmp_path / "out")):
        with pytest.raises(InputError, match="has LoRA already"):
            call(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "LOHA"}, "'peft_type' must be 'LORA'.*'LOHA'"),
        ({"use_dora": True}, "'use_dora'"),
        ({"some_later_field": {"a": 1}}, "'some_later_field' is not implemented"),
        ({"r": -1}, "'r' must be"),
        ({"lora_dropout": 1.0}, "'lora_dropout' must be a number in"),
        ({"lora_dropout": "0.1"}, "'lora_dropout' must be a number in"),
        ({"lora_dropout": []}, "'lora_dropout' must be a number in"),
        ({"trainable_token_indices": [3, 1 << 63]}, "'trainable_token_indices' must be a list"),
        ({"rank_pattern": {"q_proj": "a"}}, "'rank_pattern' must be"),
        ({"alpha_pattern": {"(q": 3}}, "'alpha_pattern' must have regular expressions"),
        ({"rank_pattern": {"q" * 9 + "{" + 20 * "9" + "}": 3}}, "'rank_pattern' must have regular expressions"),
        ({"rank_pattern": {ENDLESS: 3}}, "'rank_pattern'.*takes more than 1 seconds"),
        ({"r": 5}, r"lora_A.weight \[3, 60\] instead of \[5, 60\]"),
    ],
    ids=str,
)
def test_bad_configs(fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 1)
    lm.save_adapter(build(), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    model = lm.from_config(LLAMA)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        lm.load_adapter(model, tmp_path)
    assert all(p.requires_grad for p in model.parameters()) and not lora_layers(model)


def test_an_expression_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 1)
    with pytest.raises(InputError, match=r"target_modules: .* takes more than 1 seconds as a regular expression"):
        build(target_modules=ENDLESS)


def test_bad_files(tmp_path: Path) -> None:
    lm.save_adapter(build(), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    good = load_file(path)
    first = next(iter(good))
    for tensors, message in (
        (
            {name: t for name, t in good.items() if name != first},
            rf"{path}: the adapter does not fit the model:\n.* missing from the checkpoint: {first}",
        ),
        (
            {**good, first.replace("layers.0", "layers.9"): good[first].clone()},
            "1 layers that are no linear .*layers.9",
        ),
        ({**good, "base_model.model.lm_head.weight": good[first].clone()}, "lm_head.weight"),
    ):
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=message):
            lm.load_adapter(lm.from_config(LLAMA), tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no adapter_model.safetensors; pickles"):
        lm.load_adapter(lm.from_config(LLAMA), tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        lm.load_adapter(lm.from_config(LLAMA), tmp_path / "nowhere")


# -- modules that are trained whole (files: test_saved_modules_peft.py) ------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("embed_tokens", "must be a list of names"),
        ([3], "must be a list of names"),
        (["wte"], "'wte' matches no module; there are .*embed_tokens.*norm"),
        (["up_proj"], "gate_proj, up_proj are one fused weight; name all of them, or use LoRA for .*gate_proj"),
        (["gate_proj", "up_proj"], "has LoRA; leave it out of target_modules"),
        (["o_proj"], "o_proj has LoRA"),
        (["mlp"], "has LoRA"),
    ],
    ids=str,
)
def test_modules_that_cannot_be_trained_whole(names: Any, message: str) -> None:
    model = lm.from_config(LLAMA)
    with pytest.raises(InputError, match=f"modules_to_save: .*{message}"):
        lm.add_lora(model, modules_to_save=names)
    assert all(p.requires_grad for p in model.parameters()) and not lora_layers(model)


def test_a_whole_module_has_no_base() -> None:
    """All of a block's MLP may be one; without LoRA the model is not its base, so that it is no reference."""
    model = build(target_modules=["q_proj"], modules_to_save=["layers.1.mlp.gate_proj", "layers.1.mlp.up_proj"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}
    assert trained == {"decoder.blocks.1.mlp.gate_up.weight"}
    with pytest.raises(InputError, match=r"values of .*layers.1.mlp.gate_proj.* are not kept"), lora_disabled(model):
        pass
    whole = build(target_modules=["q_proj"], modules_to_save=["layers.1.mlp"])
    assert trained | {"decoder.blocks.1.mlp.down.weight"} == {
        name for name, p in whole.named_parameters() if p.requires_grad and "lora_" not in name
    }
    merged = lm.merge_lora(model)
    assert not merged.modules_to_save and not any(p.requires_grad for p in merged.parameters())


def test_whole_modules_and_quantised_layers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["o_proj", "embed_tokens"]}
    model = build(**options)
    with pytest.raises(InputError, match=r"exclude: decoder.blocks.0.mixer.o.weight.* are trained whole"):
        lm.quantize(model, "int4")
    lm.quantize(model, "int4", exclude=["*mixer.o"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name}
    assert trained == {"decoder.embed.weight", *(f"decoder.blocks.{i}.mixer.o.weight" for i in range(3))}
    lm.save_adapter(model, tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(
        stored["base_model.model.model.layers.1.self_attn.o_proj.weight"], model.decoder.blocks[1].mixer.o.weight
    )
    base = lm.quantize(lm.from_config(LLAMA), "int4")
    with pytest.raises(InputError, match=r"modules_to_save: .*o_proj are quantised; load the model unquantised"):
        lm.load_adapter(base, tmp_path)
    assert not lora_layers(base)
    with pytest.raises(InputError, match=r"modules_to_save: .*o_proj.* are quantised"):
        lm.add_lora(base, **options)


def test_an_adapter_with_whole_modules_is_written_again(tmp_path: Path) -> None:
    """Each tensor in its dtype, or all in the one that is given; the embedding and the head stay tied."""
    tied = {**LLAMA, "tie_word_embeddings": True}
    model = lm.add_lora(lm.from_config(tied), 2, dtype="bfloat16", modules_to_save=SAVED)
    lm.save_adapter(model, tmp_path / "first")
    rewrite_adapter(lm.from_config(tied), tmp_path / "first", tmp_path / "again")
    first, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "again"))
    assert {x.dtype for x in first.values()} == {torch.bfloat16, torch.float32}
    assert first.keys() == again.keys() and all(torch.equal(first[n], again[n]) for n in first)
    assert all(first[n].dtype == again[n].dtype for n in first)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("first", "again")]
    assert configs[0] == configs[1] and configs[0]["ensure_weight_tying"]
    no_lora = {name: tensor for name, tensor in first.items() if ".lora_" not in name}
    save_file(no_lora, tmp_path / "again" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="has no tensors A and B of LoRA"):
        rewrite_adapter(lm.from_config(tied), tmp_path / "again", tmp_path / "no")
    rewrite_adapter(lm.from_config(tied), tmp_path / "first", tmp_path / "half", dtype="float16")
    assert {x.dtype for x in load_file(tmp_path / "half" / "adapter_model.safetensors").values()} == {torch.float16}


@pytest.mark.parametrize("name", ["layers.2.mlp.down_proj.lora_B", "layers.0.self_attn.v_proj.lora_A", "embed_tokens"])
def test_values_beyond_the_range_of_float16_are_named(name: str, tmp_path: Path) -> None:
    """They would become infinite; in a larger dtype they are read."""
    lm.save_adapter(build(modules_to_save=SAVED), tmp_path)
    file, name = tmp_path / "adapter_model.safetensors", f"base_model.model.model.{name}.weight"
    tensors = load_file(file)
    tensors[name][-1, 0] = 1e5
    save_file(tensors, file)
    half = lm.from_config(LLAMA, dtype=torch.float16)
    for load in (lm.load_adapter, lambda *args: rewrite_adapter(*args, tmp_path / "half", dtype="float16")):
        with pytest.raises(CheckpointError, match=f"{re.escape(name)}: .* infinite in torch.float16"):
            load(half, tmp_path)
    assert not lora_layers(half) and not (tmp_path / "half").exists()
    assert all(p.requires_grad for p in half.parameters())
    for dtype in (torch.float32, torch.bfloat16):
        model = lm.load_adapter(lm.from_config(LLAMA, dtype=dtype), tmp_path)
        assert max(p.max() for p in model.parameters()) == torch.tensor(1e5, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model.layers.0.mlp.up_proj.weight": (84, 36)}, "up_proj"),
        ({"model.embed_tokens.weight": (133, 36)}, r"embed_tokens.weight \[133, 36\] instead of"),
        ({"model.wte.weight": (131, 36)}, "no whole parameter of this model .*such as base_model.model.model.wte"),
    ],
    ids=["a part", "grown", "unknown"],
)
def test_whole_tensors_that_do_not_fit(change: dict[str, tuple[int, ...]], error: str, tmp_path: Path) -> None:
    lm.save_adapter(build(modules_to_save=SAVED), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path) | {f"base_model.model.{name}": torch.zeros(shape) for name, shape in change.items()}
    save_file(tensors, path, {"format": "pt"})
    model = lm.from_config(LLAMA)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CheckpointError, match=error):
        lm.load_adapter(model, tmp_path)
    assert not lora_layers(model) and all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# -- several ranks -----------------------------------------------------------------------------------------------------


def train_sharded(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    plain, model = build(modules_to_save=SAVED), build(modules_to_save=SAVED)
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for each in (plain, model):
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            each(tokens(), labels=tokens()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor) and one.requires_grad == ("lora_" in name or name == "decoder.embed.weight")
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-6)
    found = model.eval().generate(tokens(2, 5), max_new_tokens=4)
    assert torch.equal(found, plain.eval().generate(tokens(2, 5), max_new_tokens=4))
    for call in (lm.merge_lora, lm.dequantize, lambda model: lm.load_adapter(model, folder)):
        with pytest.raises(InputError, match=r"sharded|already"):
            call(model)
    lm.save_adapter(model, folder / "sharded")
    if rank == 0:
        lm.save_adapter(plain, folder / "plain")
        one, other = (load_file(folder / name / "adapter_model.safetensors") for name in ("sharded", "plain"))
        assert one.keys() == other.keys() and "base_model.model.model.embed_tokens.weight" in one
        for name in one:
            torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-6)


def test_fsdp2(tmp_path: Path) -> None:
    in_two_ranks(train_sharded, tmp_path)
