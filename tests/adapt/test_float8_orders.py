"""What else is done with a model, before and after `lm.float8`: the same numbers in either order, or an error."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from float8_models import FAMILIES, MODELS, SIZES, TWO_LAYERS, agreement, build, family, gradients, in_place_of, tokens
from runs import STAGE_2, losses
from runs import recipe_for as medusa_recipe
from test_mtp_training import recipe_for as mtp_recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM
from two_ranks import in_two_ranks
from zoo import CONFIGS as ZOO

import ligermodels as lm
from ligermodels import ops
from ligermodels.adapt.lora import lora_layers
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.float8 import Float8
from ligermodels.layers.mlp import GatedActivation
from ligermodels.layers.norm import AddRMSNorm
from ligermodels.ops import Float8Tensor
from ligermodels.training import train_heads, train_mtp

MIXTURE = {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 32}
CONFIGS = {**MODELS, "qwen3_moe": {**ZOO["qwen3_moe"], **SIZES, **MIXTURE}}


def with_lora(model: lm.CausalLM, **options: Any) -> lm.CausalLM:
    """LoRA whose updates are not zero."""
    torch.manual_seed(2)
    lm.add_lora(model, r=4, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return model


def stored(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def loaded(state: dict[str, Tensor], **options: Any) -> lm.CausalLM:
    torch.manual_seed(7)
    model = lm.float8(lm.from_config(TWO_LAYERS)).train()
    model(tokens(), labels=tokens()).loss.backward()  # what it has computed before does not matter
    assert not any(model.load_state_dict(state, **options))
    return model


def from_hf_state(state: dict[str, Tensor]) -> lm.CausalLM:
    model = lm.float8(lm.from_config(TWO_LAYERS)).train()
    model.load_hf_state_dict(state)
    return model


def adapted(model: lm.CausalLM, folder: Path) -> lm.CausalLM:
    lm.save_adapter(with_lora(build()), folder, overwrite=True)
    return lm.load_adapter(model, folder, is_trainable=True)


def merged(model: lm.CausalLM) -> lm.CausalLM:
    return lm.merge_lora(model).requires_grad_()


SAME: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "add_lora after": (lambda _: with_lora(lm.float8(build())), lambda _: lm.float8(with_lora(build()))),
    "add_lora to some layers after": (
        lambda _: with_lora(lm.float8(build()), target_modules=["q_proj", "down_proj"]),
        lambda _: lm.float8(with_lora(build(), target_modules=["q_proj", "down_proj"])),
    ),
    "load_adapter after": (lambda p: adapted(lm.float8(build()), p), lambda p: lm.float8(adapted(build(), p))),
    "merge_lora after": (
        lambda _: merged(with_lora(lm.float8(build()))),
        lambda _: lm.float8(merged(with_lora(build()))),
    ),
    "a part, then the rest": (
        lambda _: lm.float8(lm.float8(build(), exclude=["mlp"]), exclude=["mixer"]),
        lambda _: lm.float8(build()),
    ),
    "the first block, then others": (
        lambda _: lm.float8(lm.float8(build(), exclude_last=1), exclude_first=1),
        lambda _: lm.float8(build()),
    ),
    "deepcopy": (lambda _: copy.deepcopy(lm.float8(build())), lambda _: lm.float8(build())),
    "deepcopy of LoRA": (
        lambda _: copy.deepcopy(lm.float8(with_lora(build()))),
        lambda _: lm.float8(with_lora(build())),
    ),
    "pickle": (lambda _: pickle.loads(pickle.dumps(lm.float8(build()))), lambda _: lm.float8(build())),
    "torch.save": (lambda _: stored(lm.float8(build())), lambda _: lm.float8(build())),
    "state_dict": (lambda _: loaded(lm.float8(build()).state_dict()), lambda _: lm.float8(build())),
    "state_dict, assigned": (lambda _: loaded(build().state_dict(), assign=True), lambda _: lm.float8(build())),
    "hf_state_dict": (lambda _: from_hf_state(lm.float8(build()).hf_state_dict()), lambda _: lm.float8(build())),
    "to(bfloat16)": (lambda _: lm.float8(build()).to(torch.bfloat16), lambda _: lm.float8(build().to(torch.bfloat16))),
    "half": (lambda _: lm.float8(build()).half(), lambda _: lm.float8(build().half())),
    "accelerate": (
        lambda _: pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(lm.float8(build())),
        lambda _: lm.float8(build()),
    ),
}


@pytest.mark.parametrize("order", SAME)
def test_the_same_numbers(order: str, tmp_path: Path) -> None:
    model, other = (make(tmp_path / "adapter") for make in SAME[order])
    assert in_place_of(model) == in_place_of(other) != []
    assert {name: p.requires_grad for name, p in model.named_parameters()} == {
        name: p.requires_grad for name, p in other.named_parameters()
    }
    found, wanted = gradients(model), gradients(other)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    if not lora_layers(model):
        model.save_pretrained(tmp_path / "out")
        again = lm.from_pretrained(tmp_path / "out")
        assert not in_place_of(again)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), other.parameters(), strict=True))


def test_errors_name_what_is_wrong() -> None:
    model = lm.float8(build(), exclude=["mlp"])
    for options, name in (({}, "0.mixer.qkv"), ({"exclude": ["mixer.qkv"]}, "0.mixer.o")):
        with pytest.raises(InputError, match=rf"blocks.{name}: is in float8 already; .* by exclude="):
            lm.float8(model, **options)
    assert all(".mixer." in name for name in in_place_of(model))
    with pytest.raises(InputError, match=r"float8_linear: computes bfloat16, float16 or float32, not torch.float64"):
        gradients(lm.float8(build()).double())
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TWO_LAYERS))
    for transformers_model in (hf, lm.nativize(hf)):
        with pytest.raises(InputError, match=r"takes a native CausalLM, got a LlamaForCausalLM; .*from_transformers"):
            lm.float8(transformers_model)
    assert in_place_of(lm.float8(lm.from_transformers(lm.restore(hf))))


def test_a_weight_is_cast_again_where_another_takes_its_place() -> None:
    """Also where it comes to lie at the same address, as can be when state dicts are assigned, or models are moved."""
    model, other = lm.float8(build()).requires_grad_(False), build()
    layer = model.decoder.blocks[0].mixer.o
    assert isinstance(layer.compute, Float8)
    x = torch.randn(3, layer.in_features)
    first, memory = layer(x), layer.weight.data_ptr()
    values = other.decoder.blocks[1].mixer.o.weight.detach()
    layer.weight.data.copy_(values)  # which PyTorch does not count
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)
    assert layer.weight.data_ptr() == memory and not torch.equal(second := layer(x), first)
    layer.weight.data.mul_(2)
    layer.to(torch.float32)
    assert not torch.equal(layer(x), second)


def test_frozen_bodies_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Medusa and of multi-token prediction; of LoRA too. A base that is trained, as in Medusa's stage 2, in each
    forward pass."""
    casts: list[torch.Size] = []
    cast = ops.float8_cast

    def counted(x: Tensor, *args: Any, **options: Any) -> Float8Tensor:
        casts.append(x.shape)
        return cast(x, *args, **options)

    monkeypatch.setattr(ops, "float8_cast", counted)
    for make in (lm.MTPModel.from_base, lm.MedusaModel.from_base, with_lora):
        casts.clear()
        model = make(lm.float8(build())).train()  # type: ignore[operator]
        for _ in range(3):
            model(tokens(), labels=tokens()).loss.backward()
        assert len(casts) == len(in_place_of(model)) > 0
    medusa = lm.MedusaModel.from_base(lm.float8(build()), num_heads=1).train()
    medusa.base.requires_grad_()
    medusa(tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in medusa.base.decoder.blocks.parameters())


@pytest.mark.parametrize("kind", ["mtp", "medusa stage 2"])
def test_runs(kind: str, base: Path, data: Path, tmp_path: Path) -> None:
    """Losses near those without float8, and not the same."""
    found = []
    for float8 in ({}, {"float8": True, "float8_exclude": "mlp"}):
        out = tmp_path / f"{len(found)}"
        if kind == "mtp":
            train_mtp(mtp_recipe(base, data, steps=4, **float8), out)
        else:
            train_heads(medusa_recipe(base, data, steps=4, **STAGE_2, **float8), out)
        found.append([loss for _, loss, _ in losses(out)])
    plain, float8_losses = found
    assert len(plain) == 4 and plain != float8_losses
    assert all(abs(a - b) < 0.02 * abs(a) for a, b in zip(plain, float8_losses, strict=True))


def test_classes_of_a_users_own() -> None:
    """A forward that knows nothing of float8 is not asked for it."""

    class Norm(AddRMSNorm):
        def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x, branch)

    class Activation(GatedActivation):
        def __call__(self, gate_up: Tensor) -> Tensor:  # type: ignore[override]
            return super().__call__(gate_up)

    model = lm.float8(build())
    model.decoder.blocks.requires_grad_(False)
    wanted, seen = gradients(model), []
    block = model.decoder.blocks[0]
    block.mlp_norm.__class__, block.mlp.activation = Norm, Activation("silu")
    for layer in (block.mixer.qkv, block.mlp.gate_up, block.mlp.down):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(type(inputs[0])))
    found = gradients(model)
    assert seen == [Float8Tensor, Tensor, Tensor]
    assert all(agreement(found[key], wanted[key])[0] > 0.98 for key in wanted)


def test_compiled_blocks_under_activation_checkpointing() -> None:
    """In the first step, in which frozen weights are cast within what is compiled, and in the next one."""

    def made() -> lm.CausalLM:
        return lm.float8(with_lora(build({**TWO_LAYERS, "num_hidden_layers": 1})))

    wanted, model = gradients(made()), made()
    model.activation_checkpointing = "selective"
    for block in model.decoder.blocks:
        block.compile(backend="aot_eager")
    for _ in range(2):
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[key], rtol=1e-4, atol=1e-6)


def test_compiled_blocks_with_frozen_layers_between_trained_ones() -> None:
    """As `ParallelPlan(compile="blocks")` compiles them, with breaks of the graph: gradients go through layers without
    a trained weight to earlier ones; the graph casts frozen weights."""
    model = lm.float8(with_lora(build({**TWO_LAYERS, "num_hidden_layers": 1}), target_modules=["q_proj", "v_proj"]))
    wanted = gradients(model)
    for block in model.decoder.blocks:
        block.compile(backend="aot_eager")
    found = gradients(model)
    assert found.keys() == wanted.keys() != set()
    assert all(agreement(found[name], wanted[name])[0] > 0.9999 for name in wanted)


def test_the_first_step_under_activation_checkpointing() -> None:
    """In which frozen weights are cast, in blocks that are computed again."""

    def first(mode: Any) -> dict[str, Tensor]:
        model = lm.float8(build())
        for block in model.decoder.blocks:
            block.mixer.qkv.requires_grad_(False)
        model.activation_checkpointing = mode
        return gradients(model)

    wanted = first("none")
    for mode in ("selective", "full"):
        found = first(mode)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted), mode


def test_inference_mode_before_training() -> None:
    """What it has cast, training can use; and a model that was made in it computes in float8."""
    model, other = lm.float8(with_lora(build())), lm.float8(with_lora(build()))
    with torch.inference_mode():
        model(tokens(), labels=tokens())
        assert torch.isfinite(lm.float8(build()).requires_grad_(False)(tokens(), labels=tokens()).loss)
    found, wanted = gradients(model), gradients(other)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_peft_after_float8() -> None:
    """Its layers around those in float8 are given what they can read, and the frozen products stay float8."""
    peft = pytest.importorskip("peft")
    model = lm.float8(build())
    wanted = model(tokens(), labels=tokens()).loss
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["qkv", "down"], r=4), model)
    seen: list[type] = []
    block = model.decoder.blocks[0]
    for layer in (block.mixer.qkv, block.mlp.gate_up):
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(type(inputs[0])))
    assert in_place_of(model)
    found = gradients(model)
    assert len(found) == 4 * 2 and all(torch.isfinite(gradient).all() for gradient in found.values())
    assert seen == [Tensor, Float8Tensor]
    assert abs(model(tokens(), labels=tokens()).loss - wanted) < 0.01


def in_tensor_parallel(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """Near the numbers of one process: only near zero do scales of parts round otherwise."""
    for name, modes in {
        "deepseek_v3": ("full",),
        "arcee": ("none",),
        "qwen2, with biases": ("selective",),
        "gemma2, with four norms": ("selective", "full"),
        "qwen3_moe": ("none", "selective", "full"),
    }.items():
        plain, model = (lm.float8(family(name) if name in FAMILIES else build(CONFIGS[name])) for _ in range(2))
        model = near_one_process(model, plain, lm.ParallelPlan(tensor=2), modes)
        with torch.no_grad():
            both = [each.eval()(tokens(), labels=tokens()).loss for each in (plain, model)]
        torch.testing.assert_close(*both)
        model.save_pretrained(folder / name[:5])
        saved = lm.from_pretrained(folder / name[:5])
        assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), plain.parameters(), strict=True))
    plain, model = (lm.float8(with_lora(build())) for _ in range(2))
    model = near_one_process(model, plain, lm.ParallelPlan(tensor=2), ("none", "selective"))
    assert model.decoder.blocks[0].mixer.input_form() is not None
    narrow = {**TWO_LAYERS, "intermediate_size": 80}
    for model in (build(narrow), with_lora(build(narrow))):
        with pytest.raises(ConfigError, match=r"mlp.down, of 2 ranks: .*in_features 40 .* multiples of 16"):
            lm.parallelize(lm.float8(model), lm.ParallelPlan(tensor=2))


def near_one_process(model: lm.CausalLM, plain: lm.CausalLM, plan: lm.ParallelPlan, modes: tuple[Any, ...]) -> Any:
    wanted, model = gradients(plain), lm.parallelize(model, plan)
    for mode in modes:
        model.activation_checkpointing = mode
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for key, gradient in found.items():
            cosine, ratio = agreement(gradient.full_tensor(), wanted[key])  # type: ignore[operator]
            assert cosine > 0.995 and abs(ratio - 1) < 0.02, (key, mode, cosine, ratio)
    return model


def by_other_means(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    wanted = gradients(lm.float8(build()))
    ddp = DistributedDataParallel(model := lm.float8(build()))
    ddp(tokens(), labels=tokens()).loss.backward()
    assert all(torch.equal(p.grad, wanted[name]) for name, p in model.named_parameters())
    wanted = gradients(lm.float8(with_lora(build())))
    ddp = DistributedDataParallel(model := lm.float8(with_lora(build())))
    ddp(tokens(), labels=tokens()).loss.backward()
    for name, parameter in model.named_parameters():
        cosine, ratio = agreement(parameter.grad, wanted[name]) if parameter.requires_grad else (1, 1)
        assert (parameter.grad is None) == (name not in wanted) and cosine > 0.9999 and abs(ratio - 1) < 1e-3, name
    plain, sharded = (lm.float8(with_lora(build())) for _ in range(2))
    near_one_process(sharded, plain, lm.ParallelPlan(), ("none", "selective"))
    for plan in (lm.ParallelPlan(expert=2), lm.ParallelPlan(context=2)):
        wanted = gradients(lm.float8(family("mixtral")))
        for key, gradient in gradients(lm.parallelize(lm.float8(family("mixtral")), plan)).items():
            cosine, ratio = agreement(gradient.full_tensor(), wanted[key])  # type: ignore[operator]
            assert cosine > 0.999, (plan, key, cosine, ratio)


@pytest.mark.filterwarnings("ignore::ligermodels.errors.Float8Warning")
@pytest.mark.parametrize("work", [in_tensor_parallel, by_other_means])
def test_on_two_ranks(work: Callable[..., None], tmp_path: Path) -> None:
    in_two_ranks(work, tmp_path)
