"""Models whose linear layers compute in float8: gradients beside those of float32, training, what stays as it is."""

import copy
import json
import math
import pickle
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from float8_models import MODELS, TWO_LAYERS, agreement, build, gradients, in_place_of, losses_of_training, tokens
from runs import losses
from runs import recipe_for as medusa_recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from two_ranks import in_two_ranks
from typer.testing import CliRunner
from zoo import CONFIGS

import ligermodels as lm
from ligermodels import ops
from ligermodels.adapt.float8_agreement import float8_agreement
from ligermodels.cli import app
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers.activation import GatedActivation
from ligermodels.layers.float8 import float8_slots
from ligermodels.ops import Float8Tensor
from ligermodels.ops.float8 import cast, lora, mm, tail
from ligermodels.training import train_heads


@pytest.mark.parametrize("gradient_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_beside_float32(name: str, gradient_dtype: torch.dtype) -> None:
    model = build(MODELS[name])
    wanted, names = gradients(model), set(model.state_dict())
    lm.float8(model, lm.Float8Recipe(gradient_dtype=gradient_dtype))
    assert len(in_place_of(model)) == 4 * len(model.decoder.blocks) and set(model.state_dict()) == names
    found = gradients(model)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        cosine, ratio = agreement(gradient, wanted[key])
        assert 0.93 < cosine < 1 - 1e-6, (key, cosine)  # not the same: it is computed in float8
        assert 0.9 < ratio < 1.1, (key, ratio)


def test_autocast() -> None:
    """float32 parameters, products of float8 whose results are bfloat16."""
    model = lm.float8(build({**TWO_LAYERS, "model_type": "qwen2"}))
    wanted = gradients(model)
    seen: list[torch.dtype] = []
    model.decoder.blocks[1].mlp.gate_up.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model)
    assert seen == [torch.bfloat16]
    for key, gradient in found.items():
        cosine, ratio = agreement(gradient, wanted[key])
        assert gradient.dtype == torch.float32 and cosine > 0.98 and 0.95 < ratio < 1.05, (key, cosine, ratio)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_changes_nothing(name: str, mode: Any) -> None:
    """Also where products that narrow are computed again, such as those before a norm."""
    config = MODELS[name] if "norms" in name else {**MODELS[name], "head_dim": 32}
    model = lm.float8(build(config))
    wanted = gradients(model)
    model.activation_checkpointing = mode
    for _ in range(2):
        found = gradients(model)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def counts_by_mode(model: lm.CausalLM, calls: Counter[Any]) -> dict[str, dict[Any, int]]:
    """What `calls` counts in a step, by mode of activation checkpointing."""
    found = {}
    for mode in ("none", "selective", "full"):
        model.activation_checkpointing = mode  # type: ignore[assignment]
        calls.clear()
        gradients(model)
        found[mode] = dict(calls)
    return found


TRAINED = ["mlp.down", "blocks.0.mlp.down", "gate_up", "qkv", "mixer.o", "blocks.1", "weight", "lora", "lora_|norm"]


@pytest.mark.parametrize("trained", TRAINED)
def test_activation_checkpointing_beside_frozen_layers(trained: str) -> None:
    """With some parameters trained: by name, and with "weight" all but the embedding and the norm after it."""
    model = lm.float8(build())
    if "lora" in trained:
        lm.add_lora(model, r=4)
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, std=0.01) if "lora_B" in name else None
    for name, parameter in model.named_parameters():
        left_out = trained == "weight" and ("embed" in name or "blocks.0.mixer_norm" in name)
        parameter.requires_grad_(any(part in name for part in trained.split("|")) and not left_out)
    wanted = gradients(model)
    assert wanted
    for mode in ("selective", "full"):
        model.activation_checkpointing = mode
        found = gradients(model)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted), mode


def test_a_second_backward_pass_under_activation_checkpointing() -> None:
    model = lm.float8(build())
    for mode, allowed in (("full", True), ("selective", False)):
        model.activation_checkpointing = mode
        loss = model(tokens(), labels=tokens()).loss
        loss.backward(retain_graph=True)
        with nullcontext() if allowed else pytest.raises(RuntimeError, match="backward an extra time"):
            loss.backward()


def test_products_of_lora_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By "selective" all that are as wide as their input; the last of a block is computed again."""
    calls: Counter[str] = Counter()
    plain = lora.low_rank_sum
    monkeypatch.setattr(lora, "low_rank_sum", lambda *args, **options: calls.update("n") or plain(*args, **options))
    found = counts_by_mode(lm.float8(lm.add_lora(build(), r=4)), calls)
    assert found == {"none": {"n": 15}, "selective": {"n": 15 + 2}, "full": {"n": 15 + 8}}


def test_what_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No product with "selective", where all but the last of a block widen, and no maximum; with "full" all but that
    one, and the maxima of inputs and weights."""
    calls: Counter[str] = Counter()

    def count(name: str, module: Any, function: str) -> None:
        plain = getattr(module, function)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            return plain(*args)

        monkeypatch.setattr(module, function, counted)

    count("products", mm, "float8_mm_reference")
    count("maxima", cast, "_amax_reference")
    model = lm.float8(build())
    blocks = len(model.decoder.blocks)
    maxima = (4 + 4 + 4) * blocks  # of weights, inputs and gradients
    once = {"products": 12 * blocks, "maxima": maxima}
    full = {"products": 15 * blocks, "maxima": maxima + (4 + 4) * blocks}
    assert counts_by_mode(model, calls) == {"none": once, "selective": once, "full": full}


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_on_the_gpu(name: str, lora: bool) -> None:
    """Gradients beside those in bfloat16; equal bits in every run, and under activation checkpointing. 38 tokens, no
    multiple of 16."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}

    def make() -> lm.CausalLM:
        model = build(MODELS[name], **options)
        return lm.add_lora(model, r=8) if lora else model

    def of(model: lm.CausalLM) -> dict[str, Tensor]:
        model.zero_grad()
        model(tokens().cuda(), labels=tokens().cuda()).loss.backward()
        return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    wanted, model = of(make()), lm.float8(make())
    first = of(model)
    assert first.keys() == wanted.keys()
    for key, gradient in first.items():
        if wanted[key].any():  # of LoRA's A nothing at first
            cosine, ratio = agreement(gradient, wanted[key])
            assert cosine > 0.93 and 0.85 < ratio < 1.15, (key, cosine, ratio)
    for mode in ("none", "selective", "full"):
        model.activation_checkpointing = mode
        found = of(model)
        assert all(torch.equal(found[key], first[key]) for key in first), mode


@pytest.mark.parametrize("frozen", [False, True])
def test_norms_and_activations_write_float8_for_frozen_weights(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters qkv, gate_up and down has been cast by what computed it; so has the gradient that leaves gate_up."""
    model = lm.float8(build())
    model.decoder.blocks.requires_grad_(not frozen)
    seen: dict[str, bool] = {}

    def see(name: str) -> Any:
        return lambda module, inputs: seen.__setitem__(name, isinstance(inputs[0], Float8Tensor))

    for name in in_place_of(model):
        model.get_submodule(name).register_forward_pre_hook(see(name))
    arrived: list[Tensor] = []
    gradients_of_gate_up(arrived, monkeypatch)
    gradients(model)
    assert len(seen) == 4 * len(model.decoder.blocks)
    assert all(cast == (frozen and not name.endswith(".o")) for name, cast in seen.items())
    # For trained weights the linear layer computes the activation.
    assert [isinstance(each, Float8Tensor) for each in arrived] == [True] * len(model.decoder.blocks) * frozen


def gradients_of_gate_up(arrived: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `arrived` gets the gradients that activations give their inputs, the results of gate_up."""
    plain = GatedActivation.__call__

    def seen(self: GatedActivation, gate_up: Tensor, **options: Any) -> Tensor:
        gate_up.register_hook(arrived.append)
        return plain(self, gate_up, **options)

    monkeypatch.setattr(GatedActivation, "__call__", seen)


@pytest.mark.parametrize("kind", ["lora", "lora, with dropout", "medusa"])
def test_what_meets_frozen_weights_is_float8_by_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast by what computes it, with a scale for each row; not where LoRA's dropout needs the numbers themselves. Its
    updates are part of the layers' products, which there is a tail for."""
    passes: list[Any] = []
    monkeypatch.setattr(tail, "add_product", lambda *args, unless: passes.append(unless))
    model: Any = lm.float8(build())
    if kind == "medusa":
        model = lm.MedusaModel.from_base(model, num_heads=1).train()
    else:
        lm.add_lora(model, r=4, lora_dropout=0.5 if "dropout" in kind else 0.0)
    seen: dict[str, Any] = {}
    gradients: list[Tensor] = []
    block = (model.base if kind == "medusa" else model).decoder.blocks[1]
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.__setitem__(name, inputs[0]))
    if kind == "lora":
        gradients_of_gate_up(gradients, monkeypatch)
    model(tokens(), labels=tokens()).loss.backward()
    by_row = {name for name, x in seen.items() if isinstance(x, Float8Tensor) and x.scale.shape == (38,)}
    assert by_row == (set() if "dropout" in kind else {"mixer.qkv", "mlp.gate_up", "mlp.down"})
    assert kind != "lora" or (isinstance(gradients[1], Float8Tensor) and gradients[1].scale.shape == (38,))
    assert all(x.tail == (128 if kind == "lora" else 0) for x in (*gradients, *(seen[name] for name in by_row)))
    assert all(unless is not None and unless.item() == 1 for unless in passes)
    assert len(passes) == {"lora": 8 + 7, "lora, with dropout": 8, "medusa": 0}[kind]


def test_evaluation_and_generation_are_those_of_the_weights() -> None:
    model = build()
    wanted = model.eval()(tokens(), labels=tokens()).loss.detach()
    generated = model.generate(tokens(), max_new_tokens=4)
    lm.float8(model)
    with torch.no_grad():
        assert torch.equal(model(tokens(), labels=tokens()).loss, wanted)
        assert torch.equal(model.generate(tokens(), max_new_tokens=4), generated)
        assert not torch.equal(model.train()(tokens(), labels=tokens()).loss, wanted)
    assert not torch.equal(model.eval()(tokens(), labels=tokens()).loss, wanted)  # gradients are recorded


def test_compiled() -> None:
    """With a break of the graph at each layer: gradients that are float8 meet code that was compiled for plain ones."""
    model = lm.float8(build({**TWO_LAYERS, "num_hidden_layers": 1}))
    model(tokens(), labels=tokens()).loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend="aot_eager")(tokens(), labels=tokens()).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=1e-4, atol=1e-6)


def test_checkpoints_and_copies(tmp_path: Path) -> None:
    model = lm.float8(build())
    plain = build()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model.save_pretrained(tmp_path / "out")
    assert not in_place_of(lm.from_pretrained(tmp_path / "out"))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert in_place_of(again) and torch.equal(
            again(tokens(), labels=tokens()).loss, model(tokens(), labels=tokens()).loss
        )
    model.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_stays_near_that_in_other_dtypes(dtype: torch.dtype) -> None:
    """The same steps on the same data: the loss falls as far, and on the way."""
    plain, found = map(losses_of_training, (build(dtype=dtype), lm.float8(build(dtype=dtype))))
    assert plain[-1] < 0.2 * plain[0] and plain != found
    assert all(abs(a - b) < 0.03 for a, b in zip(plain, found, strict=True))


def test_training_of_lora_stays_near_that_without_float8() -> None:
    """Its matrices multiply inputs and gradients that are rounded to float8."""
    plain, found = (losses_of_training(lm.add_lora(make(), r=8)) for make in (build, lambda: lm.float8(build())))
    assert plain[-1] < 0.85 * plain[0] and plain != found
    assert all(abs(a - b) < 0.03 for a, b in zip(plain, found, strict=True))


def test_exclusion() -> None:
    blocks, deep = 3, {**TWO_LAYERS, "num_hidden_layers": 3}
    whole = "decoder.blocks.{}.{}"
    found = in_place_of(lm.float8(build(deep), exclude_first=1, exclude_last=1, exclude=["mlp.down"]))
    assert found == [whole.format(i, n) for i in range(1, blocks - 1) for n in ("mixer.qkv", "mixer.o", "mlp.gate_up")]
    model = lm.float8(build(deep), exclude=["*.1.mixer", "mixer.o", "mlp.gate_up"])
    assert in_place_of(model) == [
        whole.format(i, n) for i in range(blocks) for n in ("mixer.qkv", "mlp.down") if (i, n) != (1, "mixer.qkv")
    ]
    assert not any(layer.input_form() for b in model.decoder.blocks for layer in (b.mixer, b.mlp))  # of trained weights
    model.decoder.blocks.requires_grad_(False)
    inputs = [[layer.input_form() is not None for layer in (b.mixer, b.mlp)] for b in model.decoder.blocks]
    assert inputs == [[i != 1, False] for i in range(blocks)]
    assert all(torch.isfinite(gradient).all() for gradient in gradients(model.requires_grad_()).values())


def test_frozen_weights_are_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medusa's backbone; a weight that is changed is cast again."""
    casts: list[torch.Size] = []
    cast = ops.float8_cast

    def counted(x: Tensor, *args: Any, **options: Any) -> Float8Tensor:
        if not isinstance(x, Float8Tensor):
            casts.append(x.shape)
        return cast(x, *args, **options)

    monkeypatch.setattr(ops, "float8_cast", counted)
    medusa = lm.MedusaModel.from_base(lm.float8(build()), num_heads=2).train()
    losses = [medusa(tokens(), labels=tokens()).loss for _ in range(3)]
    assert len(casts) == len(in_place_of(medusa.base)) and torch.equal(losses[0], losses[2])
    losses[2].backward()
    assert all(p.grad is None for p in medusa.base.decoder.parameters())
    with torch.no_grad():
        medusa.base.decoder.blocks[0].mixer.qkv.weight.mul_(2)
    assert not torch.equal(medusa(tokens(), labels=tokens()).loss, losses[0])
    assert len(casts) == len(in_place_of(medusa.base)) + 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_lora(dropout: float) -> None:
    def make() -> lm.CausalLM:
        model = lm.add_lora(build({**TWO_LAYERS, "model_type": "qwen2"}), r=4, lora_dropout=dropout)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.005)  # times 8: an update as large as the weights
        return model

    def with_seed(model: lm.CausalLM) -> dict[str, Tensor]:
        torch.manual_seed(3)
        return gradients(model)

    wanted, model = with_seed(make()), lm.float8(make())
    for mode in ("none", "selective", "full"):
        model.activation_checkpointing = mode
        found = with_seed(model)
        assert found.keys() == wanted.keys() and all("lora" in key for key in found)
        for key, gradient in found.items():
            cosine, ratio = agreement(gradient, wanted[key])
            assert 0.93 < cosine < 1 - 1e-6 and 0.9 < ratio < 1.1, (key, cosine, ratio)
    wanted, found = with_seed(make().requires_grad_()), with_seed(model.requires_grad_())  # part after part
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        cosine, _ = agreement(gradient, wanted[key])
        assert cosine > 0.93, (key, cosine)
    assert in_place_of(lm.merge_lora(model))
    assert float8_agreement(make(), tokens()).worst.error < 0.1


def test_runs(tmp_path: Path, base: Path, data: Path) -> None:
    """`train --float8`, of a checkpoint, of a config; and Medusa heads on a frozen model."""
    settings = ("--set=steps=6", "--set=seq_len=128", "--set=batch_tokens=256", "--set=max_bad_lines=1", "--lr=5e-3")
    flags = ("--float8", "--float8-exclude", "mlp", "--float8-gradients", "e4m3")
    shutil.copytree(base, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    found: dict[str, list[tuple[int, float, float]]] = {}
    for name, (model, more) in {
        "plain": (base, ()),
        "float8": (base, flags),
        "random": (tmp_path / "config", flags),
    }.items():
        arguments = ("train", model, "--data", data, "--out", tmp_path / name, *settings, *more)
        result = CliRunner().invoke(app, list(map(str, arguments)))
        assert result.exit_code == 0, result.output
        found[name] = losses(tmp_path / name)
        assert not in_place_of(lm.from_pretrained(tmp_path / name))
    for plain, float8 in zip(found["plain"], found["float8"], strict=True):
        assert plain[1] != float8[1] and abs(plain[1] - float8[1]) < 0.02 * plain[1]
    assert all(math.isfinite(loss) for _, loss, _ in found["random"])
    recipe = medusa_recipe(base, data, float8=True, float8_exclude="mlp")
    assert train_heads(recipe, tmp_path / "heads").evaluation is not None
    with pytest.raises(ConfigError, match="float8_exclude: is for float8, which is false"):
        medusa_recipe(base, data, float8_exclude="mlp")
    with pytest.raises(ConfigError, match="float8: is for smaller dtypes"):
        medusa_recipe(base, data, float8=True, dtype="float64")


def test_verify(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path / "model")

    def verify(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["verify", str(tmp_path / "model"), "--float8", *arguments])

    result = verify("--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    names = [name for name, _ in build().named_parameters()]
    assert list(report["gradients"]) == names and report["tokens"] == 64
    assert report["loss"] != report["float8_loss"] and abs(report["loss"] - report["float8_loss"]) < 0.02
    for each in report["gradients"].values():
        assert 0.9 < each["cosine"] < 1 - 1e-6 and 0.9 < each["norm_ratio"] < 1.1
    assert verify("--tolerance", "0.2").exit_code == 0
    far = verify("--tolerance", "1e-4")
    assert far.exit_code == 1 and "is above --tolerance 1.0e-04" in far.stderr
    assert "decoder.blocks.1.mlp.down.weight" in verify().stdout
    for arguments in (["--reference", str(tmp_path)], ["--tokens", "1"], ["--float8-exclude", "none"]):
        assert verify(*arguments).exit_code != 0


def train_sharded(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    plain, model = lm.float8(build()), lm.float8(build())
    for block in model.decoder.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    wanted, found = gradients(plain), gradients(model)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), wanted[name], rtol=1e-5, atol=1e-7)
    with pytest.raises(InputError, match="sharded already"):
        lm.float8(model)


def test_fsdp2(tmp_path: Path) -> None:
    in_two_ranks(train_sharded, tmp_path)


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"decoder.blocks.0.mixer.qkv: in_features 60 .* exclude the layer"):
        lm.float8(lm.from_config(CONFIGS["llama-3"]))
    model = build()
    for options, message in (
        ({"exclude": ["mlp.up"]}, "'mlp.up' matches no layer"),
        ({"exclude": "mlp.down"}, "must be a sequence"),
        ({"exclude": ["mlp.down", 3]}, "must be a sequence"),
        ({"exclude": None}, "must be a sequence"),
        ({"exclude_first": 9}, "exclude_first: must be"),
        ({"exclude_last": 2, "exclude_first": 2}, "no layer that could"),
        ({"recipe": "e5m2"}, "recipe: must be a Float8Recipe"),
    ):
        with pytest.raises(InputError, match=message):
            lm.float8(model, **options)
    assert not in_place_of(model)
    with pytest.raises(InputError, match=r"blocks.0.mixer.qkv: is in float8 already"):
        lm.float8(lm.float8(model))
    with pytest.raises(InputError, match="takes a native CausalLM, got a MedusaModel"):
        lm.float8(lm.MedusaModel.from_base(build(), num_heads=1))
    with pytest.raises(InputError, match="model: no parameter requires a gradient"):
        float8_agreement(build().requires_grad_(False), tokens())
    with pytest.raises(InputError, match=r"is torch\.float64"):
        lm.float8(build(dtype=torch.float64))


def test_every_linear_layer_of_known_blocks_has_a_rule() -> None:
    """Names in `float8_linears` are those of layers; what a block of Llama has besides is no linear layer."""
    for name in ("llama-3", "gemma2", "arcee"):
        for block in lm.from_config(CONFIGS[name]).decoder.blocks:
            there = {part for part, module in block.named_modules() if isinstance(module, nn.Linear)}
            assert {slot for slot, _ in float8_slots(block)} == there
