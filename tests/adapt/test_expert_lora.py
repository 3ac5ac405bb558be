"""LoRA of experts: formula and gradients in float64, targets, files in three formats, merging, training. PEFT's own
results are in tests/integrations/test_expert_lora_peft.py."""

import copy
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_lora import draw, gradients, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import CONFIGS, EACH_FAMILY, OF_EACH_KIND, WITHOUT_GATES, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels import ops
from ligermodels.adapt.adapter import rewrite_adapter
from ligermodels.adapt.lora import lora_layers
from ligermodels.adapt.targets import mixtures
from ligermodels.convert.mappings import interleaved_gate_up, interleaved_gate_up_in_one, rename
from ligermodels.errors import AdapterWarning, BackendError, CheckpointError, ConfigError, InputError
from ligermodels.layers import Linear, MoEConfig, RouterConfig
from ligermodels.layers.expert_lora import ExpertLoRA, ExpertPart
from ligermodels.layers.moe import MoE
from ligermodels.models.families import family_of

HALVES = ["gate_proj", "up_proj", "down_proj"]
MIXTURES = sorted(
    name for name, config in CONFIGS.items() if "MoEConfig(" in repr(family_of(config).decoder_config(config).blocks)
)
OF_EACH_FORM = [name for name in MIXTURES if name in {*EACH_FAMILY, *OF_EACH_KIND}]
"""Names in files go by families, tensors by the kinds of layers."""
FORMATS = ("target_parameters", "per_expert", "shared_outer")
WITHOUT_LAYERS = ("gpt_oss", "gemma4", "granitemoehybrid", "llama4", "lara_mini")
"""Families without checkpoints with a tensor for each expert."""


def build(
    name: str = "qwen3_moe", targets: Any = ("experts",), fields: dict[str, Any] | None = None, **options: Any
) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config({**CONFIGS[name], **(fields or {})})
    return draw(lm.add_lora(model, **{"r": 3, "lora_alpha": 7, "target_modules": list(targets), **options}))


# -- the layer ---------------------------------------------------------------------------------------------------------


def parts_of(kind: str, size: int) -> list[ExpertPart]:
    """Parts with a rank and a scaling of their own."""
    gate, up = interleaved_gate_up("", "gate_proj", "up_proj").views
    down = ExpertPart("experts.down_proj", rename("", "down_proj").views, 3, 5.0, projection="down")
    if kind == "halves":
        settings = ((gate, 2, 3.0, False), (up, 4, 6.0, True))
        return [*(ExpertPart(f"experts.{v.source}", (v,), r, a, s) for v, r, a, s in settings), down]
    views = (interleaved_gate_up_in_one if kind == "gate, then up" else rename)("", "gate_up_proj").views
    return [ExpertPart("experts.gate_up_proj", views, 5, 2.0), *([] if kind == "pairs" else [down])]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["halves", "gate, then up", "pairs"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_against_their_formula(kind: str, shared: bool, tokens: int) -> None:
    """In float64, with experts without tokens; outputs, and the gradients of x, A and B; the base has none."""
    hidden, size, experts = 10, 6, 5
    layer = MoE(hidden, MoEConfig(RouterConfig(experts, 2), size, bias=True, aux_loss=False)).double()
    for parameter in layer.parameters():
        parameter.data.normal_().requires_grad_(False)
    with torch.no_grad():
        layer.router.weight[3] = 0  # never among the two best
        layer.router.weight[:2] *= 4
    parts = parts_of(kind, size)
    layer.update = update = ExpertLoRA(*layer.sizes, parts, dtype=torch.float64, shared_outer=shared)
    for parameter in update.parameters():
        parameter.data.normal_()
    x = torch.randn(tokens, hidden, dtype=torch.float64, requires_grad=True)
    found, _ = layer(x)
    along = torch.randn_like(found)
    inputs = [x, *update.parameters()]
    got = torch.autograd.grad(found, inputs, along)

    def delta(projection: str, expert: int, weight: Tensor) -> Tensor:
        if projection not in update.projections:
            return weight
        rows, start = [], 0
        a = update.get_parameter(f"lora_A_{projection}")
        for part in update.parts_of(projection):
            b = update.get_parameter(f"lora_B_{part.leaf}")
            one, two = (each[expert if len(each) > 1 else 0] for each in (a[:, start : start + part.r], b))
            start += part.r
            scaling = part.lora_alpha / (math.sqrt(part.r) if part.use_rslora else part.r)
            rows.append((part.leaf, scaling * two @ one))
        own = dict(rows)
        if projection == "down":
            return weight + own["down_proj"]
        if "gate_up_proj" in own:
            pairs = own["gate_up_proj"]
            pairs = pairs if kind == "pairs" else pairs.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
            return weight + pairs
        return weight + torch.stack([own["gate_proj"], own["up_proj"]], 1).flatten(0, 1)

    routing = layer.router(x)
    wanted = torch.zeros_like(found)
    for token in range(tokens):
        for weight, expert in zip(routing.weights[token], routing.experts[token].tolist(), strict=True):
            gate_up = delta("gate_up", expert, layer.gate_up[expert]) @ x[token] + layer.gate_up_bias[expert]
            rows = torch.nn.functional.silu(gate_up[::2]) * gate_up[1::2]
            y = delta("down", expert, layer.down[expert]) @ rows + layer.down_bias[expert]
            wanted = wanted.index_add(0, torch.tensor([token]), (weight * y)[None])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    for one, other in zip(got, torch.autograd.grad(wanted, inputs, along), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    layer.merge_update()
    assert layer.update is None
    torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-11, atol=1e-11)


def test_a_merged_weight_is_rounded_once() -> None:
    torch.manual_seed(0)
    layer = MoE(24, MoEConfig(RouterConfig(3, 1), 20, aux_loss=False)).bfloat16()
    layer.update = ExpertLoRA(*layer.sizes, parts_of("gate, then up", 20), dtype=torch.bfloat16)
    for parameter in layer.update.parameters():
        parameter.data.normal_(0, 0.05)
    a, b = (layer.update.get_parameter(f"lora_{name}").detach().double() for name in ("A_down", "B_down_proj"))
    wanted = (layer.down.detach().double() + 5 / 3 * (b @ a)).bfloat16()
    layer.merge_update()
    assert (layer.down == wanted).double().mean() > 0.999


def test_dropout() -> None:
    """In training alone, with a mask for each row; its mean is the layer without."""
    layer = MoE(8, MoEConfig(RouterConfig(2, 1), 4, aux_loss=False))
    layer.update = ExpertLoRA(*layer.sizes, parts_of("gate, then up", 4), dropout=0.4)
    for parameter in layer.update.parameters():
        parameter.data.normal_()
    rows, ends = torch.ones(6000, 8), torch.tensor([6000, 6000], dtype=torch.int32)
    with torch.no_grad():
        plain = layer.eval().update("gate_up", rows, ends)
        dropped = layer.train().update("gate_up", rows, ends)
    assert torch.equal(layer.eval().update("gate_up", rows, ends), plain) and not torch.equal(dropped[0], dropped[1])
    assert ((dropped.mean(0) - plain[0]).abs() < 5 * dropped.std(0) / 6000**0.5).all()


# -- which experts -----------------------------------------------------------------------------------------------------


def adapted(model: lm.CausalLM) -> Counter[str]:
    return Counter(part.name.rpartition(".")[2] for update in lora_layers(model).values() for part in update.parts)


ALL_HALVES = dict.fromkeys(HALVES, 2)


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("mixtral", {"target_modules": ["w1", "w3", "w2"]}, ALL_HALVES),
        ("mixtral", {"target_modules": [*HALVES, "q_proj"]}, {**ALL_HALVES, "q_proj": 2}),
        ("mixtral", {"target_modules": r".*\.1\..*experts\.\d+\.w[13]"}, {"gate_proj": 1, "up_proj": 1}),
        ("mixtral", {"target_modules": ["layers.0.mlp.experts"]}, {"gate_up_proj": 1, "down_proj": 1}),
        ("mixtral", {"target_modules": ["k_proj"], "target_parameters": ["down_proj"]}, {"k_proj": 2, "down_proj": 2}),
        ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}, {"gate_up_proj": 2}),
        ("gpt_oss", {"target_modules": r".*experts\..*proj"}, {"gate_up_proj": 2, "down_proj": 2}),
        ("gpt_oss", {"target_modules": ["up_proj"]}, {"up_proj": 2}),
    ],
)  # fmt: skip
def test_targets(name: str, options: dict[str, Any], found: dict[str, int]) -> None:
    model = lm.add_lora(lm.from_config(CONFIGS[name]), r=2, **options)
    assert adapted(model) == found
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(gradients(model)) and all("lora_" in name for name in trained)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["experts.0.gate_proj"]}, r"names 1 of 6 experts of a layer.*give \['gate_proj'\]"),
        ({"target_modules": ["gate_proj", "experts"]}, r"gate_up_proj and .*gate_proj are the same weights"),
        ({"target_modules": ["gate"]}, r"'gate' is not a linear layer.*known: q_proj.*experts"),
        (
            {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
            r"known: experts.gate_up_proj, experts.down",
        ),
        ({"target_parameters": "experts.down_proj"}, "target_parameters: must be a list of names"),
        ({"target_modules": []}, "target_modules: is empty"),
    ],
)
def test_bad_targets(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lm.add_lora(lm.from_config(CONFIGS["qwen3_moe"]), **options)


def test_targets_as_iterators() -> None:
    """An iterator has the names that a list has, although it can be read only once."""
    names = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"], "modules_to_save": ["lm_head"]}
    model, other = (lm.from_config(CONFIGS["qwen3_moe"]) for _ in range(2))
    lm.add_lora(model, r=2, **{option: iter(wanted) for option, wanted in names.items()})
    lm.add_lora(other, r=2, **names)
    assert adapted(model) == adapted(other)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in other.parameters()]
    assert model.modules_to_save


def test_no_expert_is_missed_silently() -> None:
    """ "all-linear" warns of experts, and names of experts warn of dense layers with these names."""
    with pytest.warns(AdapterWarning, match=r"experts of 1 of 4 layers are not trained.*\['all-linear', 'experts'\]"):
        lm.add_lora(lm.from_config(CONFIGS["qwen3_moe"]))
    model = build(targets=["all-linear", "experts"])
    assert adapted(model) == {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], 4),
        "gate_up_proj": 1,
        "down_proj": 1,
    }
    with pytest.warns(AdapterWarning, match=r"9 dense layers .*model.layers.0.mlp.gate_proj, are not adapted"):
        build(targets=HALVES)
    with pytest.warns(AdapterWarning, match=r"such as model.layers.0.mlp.shared_expert.up_proj"):
        build("qwen2_moe", targets=["up_proj"])


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, HALVES if index % 2 else ("experts", "o_proj")) for index, name in enumerate(OF_EACH_FORM)],
    ids=OF_EACH_FORM,
)
@pytest.mark.filterwarnings("ignore::ligermodels.errors.AdapterWarning")
def test_round_trips(name: str, targets: Any, tmp_path: Path) -> None:
    """Through every format: the same function and the same file again; in its own format the same parameters, so equal
    logits to the bit. In another one A may have other rows, for which a CPU may sum in another order."""
    if name.startswith("lfm2"):
        targets = tuple(target.replace("o_proj", "out_proj") for target in targets)
    if name in WITHOUT_GATES:
        targets = tuple(target for target in targets if target != "gate_proj")
    model = build(name, targets)
    state = {key: tensor for key, tensor in model.state_dict().items() if "lora_" not in key}
    logits = model(tokens()).logits
    for form in FORMATS:
        if form == "per_expert" and name.startswith(WITHOUT_LAYERS):
            with pytest.raises(InputError, match="no names for the layers of single experts"):
                lm.save_adapter(model, tmp_path / form, expert_format=form)
            continue
        if form == "shared_outer" and name in WITHOUT_GATES:
            with pytest.raises(InputError, match="'shared_outer' has no names for experts without a gate"):
                lm.save_adapter(model, tmp_path / form, expert_format=form)
            continue
        lm.save_adapter(model, tmp_path / form, expert_format=form)
        again = lm.from_config(CONFIGS[name])
        again.load_state_dict(state)
        lm.load_adapter(again, tmp_path / form, is_trainable=True)
        found = again(tokens()).logits
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-6)
        if (form == "target_parameters") == ("experts" in targets):
            loaded = again.state_dict()
            assert torch.equal(found, logits)
            assert all(torch.equal(tensor, loaded[key]) for key, tensor in model.state_dict().items())
        lm.save_adapter(again, tmp_path / "again", expert_format=form, overwrite=True)
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "again" / file).read_bytes() == (tmp_path / form / file).read_bytes()


def test_the_names_and_shapes_of_the_formats(tmp_path: Path) -> None:
    """As PEFT 0.21, vLLM and SGLang have them; written by hand, for 5 experts, H 60 and I 17 of Qwen 3."""
    model = build("qwen3_moe-normalised", HALVES)
    a, b = (lora_layers(model)["decoder.blocks.1.mlp"].get_parameter(f"lora_{n}") for n in ("A_gate_up", "B_up_proj"))
    stem, size = "base_model.model.model.layers.1.mlp.experts.", b.shape[1]
    files = {}
    for form in FORMATS:
        lm.save_adapter(model, tmp_path / form, expert_format=form)
        files[form] = load_file(tmp_path / form / "adapter_model.safetensors")
    stacked, layers, outer = files.values()
    assert {key: tuple(t.shape) for key, t in stacked.items() if key.startswith(stem)} == {
        f"{stem}base_layer.lora_A.weight": (5 * 6, 60),
        f"{stem}base_layer.lora_B.weight": (2 * size, 6 * 5),
        f"{stem}lora_A.weight": (5 * 3, size),
        f"{stem}lora_B.weight": (60, 3 * 5),
    }
    joined = stacked[f"{stem}base_layer.lora_B.weight"].view(2, size, 6, 5)
    assert torch.equal(joined[1, :, 3:, 4], b[4]) and not joined[1, :, :3].any() and not joined[0, :, 3:].any()
    assert torch.equal(stacked[f"{stem}base_layer.lora_A.weight"].view(5, 6, 60), a)
    assert torch.equal(layers[f"{stem}4.up_proj.lora_A.weight"], a[4, 3:])
    assert torch.equal(layers[f"{stem}4.up_proj.lora_B.weight"], b[4]) and len(layers) == 2 * 5 * 6
    assert torch.equal(outer[f"{stem}w3.lora_A.weight"], a[:, 3:]) and torch.equal(outer[f"{stem}w3.lora_B.weight"], b)
    configs = [json.loads((tmp_path / form / "adapter_config.json").read_text()) for form in FORMATS]
    assert configs[0]["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert configs[0]["target_modules"] == [] and configs[1]["target_modules"] == HALVES
    assert (configs[1]["r"], configs[1]["lora_alpha"], configs[1]["rank_pattern"]) == (3, 7, {})
    assert configs[2]["target_modules"] == ["w1", "w3", "w2"]


@pytest.mark.parametrize("form", FORMATS)
def test_shared_outer_matrices(form: str, tmp_path: Path) -> None:
    """One A of gate and up, and one B of down, for all experts; in other formats every expert has a copy."""
    model = build("qwen3_moe", HALVES, experts_shared_outer_loras=True)
    update = lora_layers(model)["decoder.blocks.1.mlp"]
    assert update.lora_A_gate_up.shape[0] == update.lora_B_down_proj.shape[0] == 1 < len(update.lora_A_down)
    lm.save_adapter(model, tmp_path / "adapter", expert_format=form)
    again = lm.from_config(CONFIGS["qwen3_moe"])
    again.load_state_dict({key: tensor for key, tensor in model.state_dict().items() if "lora_" not in key})
    lm.load_adapter(again, tmp_path / "adapter")
    assert relative_error(again(tokens()).logits, model(tokens()).logits) < 1e-6
    assert lora_layers(again)["decoder.blocks.1.mlp"].shared_outer == (form == "shared_outer")
    merged = lm.merge_lora(copy.deepcopy(model))
    assert relative_error(merged(tokens()).logits, model(tokens()).logits) < 1e-5


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    model = build("qwen3_moe", HALVES)
    lm.save_adapter(model, tmp_path / "good", expert_format="per_expert")
    tensors = load_file(tmp_path / "good" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "good" / "adapter_config.json").read_text())

    def refused(error: type[Exception], message: str, own: dict[str, Tensor] = tensors, **fields: Any) -> None:
        folder = tmp_path / "bad"
        folder.mkdir(exist_ok=True)
        save_file(own, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(error, match=message):
            lm.load_adapter(lm.from_config(CONFIGS["qwen3_moe"]), folder)

    fewer = {name: tensor for name, tensor in tensors.items() if "1.mlp.experts.2.up_proj" not in name}
    refused(
        CheckpointError, r"adapts 5 of 6 experts of model.layers.1.mlp.experts.*experts.2.up_proj is missing", fewer
    )
    refused(ConfigError, r"'rank_pattern' has values \[2, 3\] for the experts", rank_pattern={"experts.0.up_proj": 2})
    router = {**tensors, "base_model.model.model.layers.1.mlp.gate.lora_A.weight": torch.zeros(3, 60)}
    refused(CheckpointError, r"no linear layers .* such as model.layers.1.mlp.gate", router)
    with pytest.raises(InputError, match=r"expert_format: must be one of.*got 'peft'"):
        lm.save_adapter(model, tmp_path / "no", expert_format="peft")
    # Formats are converted without weights of the base model.
    blank = lm.from_config(CONFIGS["qwen3_moe"], device="meta")
    rewrite_adapter(blank, tmp_path / "good", tmp_path / "stacked", expert_format="target_parameters")
    rewrite_adapter(blank, tmp_path / "good", tmp_path / "same")
    assert load_file(tmp_path / "same" / "adapter_model.safetensors").keys() == tensors.keys()
    assert any("base_layer" in name for name in load_file(tmp_path / "stacked" / "adapter_model.safetensors"))


def test_dropout_in_files(tmp_path: Path) -> None:
    model = build(lora_dropout=0.1)
    with pytest.warns(AdapterWarning, match=r"lora_dropout is written as 0 instead of 0.1"):
        lm.save_adapter(model, tmp_path / "adapter")


# -- merging and training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "gemma4_text-experts"])
def test_merged_checkpoints(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", CONFIGS[name])
    model = draw(lm.add_lora(lm.from_pretrained(tmp_path / "model"), 3, target_modules=["experts", "q_proj"]))
    logits = model(tokens()).logits
    with pytest.raises(InputError, match=r"save_adapter.*merge_lora"):
        model.save_pretrained(tmp_path / "out")
    lm.merge_lora(model).save_pretrained(tmp_path / "out")
    assert not lora_layers(model) and relative_error(model(tokens()).logits, logits) < 1e-5
    assert relative_error(lm.from_pretrained(tmp_path / "out")(tokens()).logits, logits) < 1e-5
    ids = tokens(1, 5)
    assert torch.equal(
        model.eval().generate(ids, max_new_tokens=5),
        lm.from_pretrained(tmp_path / "out").generate(ids, max_new_tokens=5),
    )


@pytest.mark.parametrize("kind", ["int4", "nf4", "float8"])
@pytest.mark.parametrize("name", ["qwen3_moe-normalised", "gpt_oss"])
def test_qlora(name: str, kind: Any, tmp_path: Path) -> None:
    """LoRA on experts in 4 or 8 bits trains as on their rounded weights, and is merged into either."""
    make_checkpoint(tmp_path / "model", CONFIGS[name])
    model = lm.from_pretrained(tmp_path / "model", quantize=kind)
    torch.manual_seed(0)
    draw(lm.add_lora(model, 3, target_modules=["all-linear", "experts"]))
    mixture = mixtures(model)["decoder.blocks.1.mlp"]
    assert mixture.gate_up is None and kind in repr(mixture.compute)
    rounded = lm.dequantize(copy.deepcopy(model))
    assert mixtures(rounded)["decoder.blocks.1.mlp"].compute is None
    found, wanted = gradients(model), gradients(rounded)
    assert found.keys() == wanted.keys() and all("lora_" in key for key in found)
    for key in found:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-4, atol=1e-6)
    logits = model(tokens()).logits
    lm.save_adapter(model, tmp_path / "adapter")
    again = lm.load_adapter(lm.from_pretrained(tmp_path / "model", quantize=kind), tmp_path / "adapter")
    assert torch.equal(again(tokens()).logits, logits)
    merged = lm.merge_lora(again, dequantize=True)
    assert relative_error(merged(tokens()).logits, logits) < 1e-5
    merged.save_pretrained(tmp_path / "out")
    lm.merge_lora(model)  # rounded anew
    assert mixture.update is None and mixture.compute is not None
    codes = mixture.compute.codes["down"]
    assert codes.is_of(mixtures(merged)["decoder.blocks.1.mlp"].down, torch.float32)


class Outer(TorchDispatchMode):
    """Counts products that only a gradient of weights needs, by their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.ligermodels.grouped_outer.default:
            self.shapes.append(tuple(result.shape[1:]))
        return result


def test_activation_checkpointing_and_frozen_weights() -> None:
    """The same gradients in all modes; none of the frozen experts' weights is computed."""
    model = build("qwen3_moe", HALVES)
    with Outer() as outer:
        wanted = gradients(model)
    sizes = {tuple(shape[1:]) for module in mixtures(model).values() for shape in module.sizes}
    assert len(outer.shapes) == 4 and sizes.isdisjoint(outer.shapes)
    for mode in ("selective", "full"):
        model.activation_checkpointing = mode
        found = gradients(model)
        assert found.keys() == wanted.keys()
        for key in wanted:
            torch.testing.assert_close(found[key], wanted[key])


def test_compiled_and_under_autocast() -> None:
    one_mixture = {"num_hidden_layers": 1, "mlp_only_layers": [], "decoder_sparse_step": 1}
    model, plain = build(fields=one_mixture), build(fields=one_mixture)
    compiled = torch.compile(model, backend="aot_eager")
    for each, module in ((model, compiled), (plain, plain)):
        module(tokens(), labels=tokens()).loss.backward()
        torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
    torch.testing.assert_close(model(tokens()).logits, plain(tokens()).logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(model(tokens()).logits, plain(tokens()).logits) < 5e-2


def test_a_named_backend_that_cannot_compute_lora_is_an_error() -> None:
    model, ids = build(), torch.randint(60, (1, 5))
    with (
        ops.set_experts_backend("few_tokens"),
        pytest.raises(BackendError, match=r"experts with LoRA.* grouped_mm alone"),
    ):
        model(ids)
    with ops.set_experts_backend("grouped_mm"):
        assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["lara_mini", "llama4_text", "gemma4_text-experts"])
def test_dense_layers_with_the_name_of_a_parameter_of_experts_are_adapted(name: str) -> None:
    """ "down_proj" of a dense or shared layer, beside experts whose "down_proj" is one parameter for all of them."""
    with pytest.warns(AdapterWarning, match="experts of"):
        model = lm.add_lora(lm.from_config(CONFIGS[name]), r=2)
    adapted = set(lora_layers(model))
    dense = {layer for layer, each in model.named_modules() if layer.endswith(".down") and isinstance(each, Linear)}
    assert dense and dense <= adapted
