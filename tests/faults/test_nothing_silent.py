"""What a user does with a model has the effect that PyTorch's and transformers' users expect, or is a named error."""

import copy
import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from zoo import BASE, GEMMA, PHI_LONGROPE, SANDWICH, make_checkpoint

import ligermodels as lm
from ligermodels.archs import FAMILIES, Family, family_of, register
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.generation import DecodingState
from ligermodels.layers import BlockConfig, Layer, LayerConfig, TreeTokens
from ligermodels.layers.activation import GatedActivation
from ligermodels.layers.norm import AddRMSNorm
from ligermodels.speculative.benchmark import benchmark_decoding
from ligermodels.speculative.tree import chain
from ligermodels.training import FusedAdamW

LLAMA = {**BASE, "model_type": "llama"}
PHI_LONGROPE_CONFIG = {**BASE, **PHI_LONGROPE, "hidden_size": 60, "original_max_position_embeddings": 32}
GEMMA2 = {**SANDWICH, "model_type": "gemma2"}


def draw(batch: int = 3, length: int = 17) -> Tensor:
    return torch.randint(3, 131, (batch, length))


# -- a config that was changed -----------------------------------------------------------------------------------------


def odd_windows(config: lm.DecoderConfig) -> lm.DecoderConfig:
    def block(i: int, each: BlockConfig) -> BlockConfig:
        return replace(each, mixer=replace(each.mixer, window=5)) if i % 2 else each  # type: ignore[call-arg]

    return replace(config, blocks=tuple(block(i, each) for i, each in enumerate(config.blocks)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (odd_windows, r"blocks\[1\]\.mixer\.window is 5, .* None"),
        (lambda c: replace(c, head=replace(c.head, softcap=2.0)), r"head\.softcap is 2\.0"),
        (lambda c: replace(c, embed_scale=3.0), "embed_scale is 3.0"),
        (lambda c: replace(c, norm=replace(c.norm, eps=1e-3)), r"norm\.eps is 0\.001"),
    ],
)
def test_a_changed_config_is_not_written_as_the_old_one(change: Any, field: str, tmp_path: Path) -> None:
    found = lm.from_config(LLAMA)
    model = lm.CausalLM(change(found.config), found.export_spec)
    heads = lm.MedusaModel.from_base(model, num_heads=1)
    for write in (model.save_pretrained, lambda folder: heads.export(folder, profile="full-hf")):
        with pytest.raises(ConfigError, match=field):
            write(tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: setattr(m.head, "config", replace(m.head.config, softcap=1.0)), r"head\.config\.softcap is 1\.0"),
        (lambda m: setattr(m.decoder.embed, "scale", 3.0), r"decoder\.embed\.scale is 3\.0"),
        (
            lambda m: setattr(m.decoder.blocks[1].mlp, "activation", GatedActivation("gelu")),
            r"blocks\.1\.mlp\.activation is .*'gelu'",
        ),
        (lambda m: setattr(m.decoder.blocks[0], "residual_scale", 0.5), r"blocks\.0\.residual_scale is 0\.5"),
        (lambda m: setattr(m.decoder.blocks[0].mlp, "activation", nn.Identity()), r"mlp\.activation is Identity"),
        (
            lambda m: setattr(m.decoder.blocks[0].mlp, "down", nn.Linear(97, 60, bias=False)),
            r"mlp\.down is torch\.nn\.\S*\.Linear, .* composes to ligermodels\.\S*\.Linear",
        ),
    ],
)
def test_changed_layers_are_not_written_as_the_config(change: Any, field: str, tmp_path: Path) -> None:
    model = lm.from_config(LLAMA)
    change(model)
    with pytest.raises(ConfigError, match=field):
        model.save_pretrained(tmp_path / "out")


def test_a_config_that_says_so_is_written(tmp_path: Path) -> None:
    model = lm.from_config(GEMMA2)
    config = replace(model.config, head=replace(model.config.head, softcap=2.0))
    changed = lm.CausalLM(config, model.export_spec)
    changed.hf_config["final_logit_softcapping"] = 2.0
    changed.save_pretrained(tmp_path / "out")
    ids = draw()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(theirs(ids).logits, changed(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_backend_of_attention_is_no_change(tmp_path: Path) -> None:
    lm.from_config(LLAMA, attention="reference").save_pretrained(tmp_path / "out")


# -- modules of a user's own -------------------------------------------------------------------------------------------


class Own(Layer):
    """A parameter, an integer buffer, a float one that checkpoints hold, and one that they do not."""

    token_wise = True

    def __init__(self, size: int, fills: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(size))
        self.register_buffer("places", torch.arange(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("table", torch.ones(size), persistent=False)
        if fills:
            self.reset_parameters = self._fill
        self.helper = object()

    def _fill(self) -> None:
        with torch.no_grad():
            self.scale.fill_(0.5)
            self.places.copy_(torch.arange(len(self.places)))
            self.mean.fill_(0.25)
            self.table.fill_(2.0)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return (x[..., self.places] - self.mean) * self.scale * self.table


class OwnConfig(LayerConfig):
    def __init__(self, fills: bool = True) -> None:
        self.fills = fills

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnConfig) and other.fills == self.fills

    def __hash__(self) -> int:
        return hash(self.fills)

    def build(self, hidden_size: int) -> nn.Module:
        return Own(hidden_size, self.fills)


@pytest.fixture
def own() -> Any:
    def family(fills: bool) -> Family:
        def decoder_config(config: Any) -> lm.DecoderConfig:
            found = family_of(LLAMA).decoder_config({**config, "model_type": "llama"})
            return replace(found, blocks=tuple(replace(block, mlp=OwnConfig(fills)) for block in found.blocks))

        return Family("own" if fills else "empty", decoder_config)

    before = dict(FAMILIES)
    register(family(True))
    register(family(False))
    yield {**LLAMA, "model_type": "own"}
    FAMILIES.clear()
    FAMILIES.update(before)


def test_own_modules_fill_themselves_and_their_buffers_live(own: dict[str, Any], tmp_path: Path) -> None:
    model = lm.from_config(own, dtype=torch.bfloat16)
    layer = model.decoder.blocks[1].mlp
    assert layer.scale.eq(0.5).all() and layer.scale.dtype == torch.bfloat16
    assert layer.places.equal(torch.arange(60)) and layer.mean.eq(0.25).all() and layer.table.eq(2.0).all()
    layer.places.copy_(torch.arange(60).flip(0))
    layer.mean.fill_(0.75)
    model.save_pretrained(tmp_path / "out")
    again = lm.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).decoder.blocks[1].mlp
    assert again.places.equal(layer.places) and again.mean.eq(0.75).all() and again.table.eq(2.0).all()


def test_an_own_module_that_cannot_be_filled_is_named(own: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"blocks\.0\.mlp \(Own\) owns scale, places, mean, table .*init_weights"):
        lm.from_config({**own, "model_type": "empty"})


def test_a_linear_layer_with_a_reset_of_its_own_keeps_it() -> None:
    class Zero(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.zeros_(self.weight)

    model = lm.from_config(LLAMA)
    model.decoder.blocks[0].mlp.down = Zero(97, 60, bias=False)
    model.reset_parameters()
    assert not model.decoder.blocks[0].mlp.down.weight.any() and model.decoder.blocks[1].mlp.down.weight.any()


def test_objects_that_a_module_holds_are_no_change(own: dict[str, Any], tmp_path: Path) -> None:
    """A module may hold anything; two of a kind need not be equal."""
    model = lm.from_config(own)
    for block in model.decoder.blocks:
        block.mlp.held = object()
    model.save_pretrained(tmp_path / "out")


def test_a_modules_place_can_be_taken() -> None:
    """As libraries of adapters do: the modules put in the place of linear layers are called, with their hooks."""
    model, ids = lm.from_config(LLAMA), draw()
    before = model(ids).logits
    seen = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            taken = nn.Sequential(module, nn.Identity())
            taken.register_forward_hook(lambda *_, name=name: seen.append(name))
            setattr(model.get_submodule(parent), child, taken)
    model.activation_checkpointing = "selective"
    assert torch.equal(model(ids).logits, before)
    assert len(seen) == 4 * len(model.decoder.blocks) + 1


class TwiceRMSNorm(nn.Module):
    """A norm of a user's own: hidden states in, hidden states out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


@pytest.mark.parametrize("config", [LLAMA, GEMMA2])
def test_a_norm_may_be_any_module(config: dict[str, Any]) -> None:
    """In a batch of two, whose tensors two names could be unpacked from; before and after sublayers, and at the end."""
    model, ids = lm.from_config(config, dtype=torch.float64), draw(2)

    def block(x: Tensor, each: nn.Module, context: Any) -> Tensor:
        for part in ("mixer", "mlp"):
            before, after = getattr(each, f"{part}_norm"), getattr(each, f"{part}_post_norm")
            y = getattr(each, part)(before(x), context)
            x = x + (y if after is None else after(y))
        return x

    norms = [name for name, _ in model.named_modules() if name.endswith("_norm")]
    assert len(norms) == len(model.decoder.blocks) * (4 if config is GEMMA2 else 2)
    for kind in ("identity", "own", "wrapped"):
        changed = copy.deepcopy(model)
        for i, name in enumerate(norms):
            norm, (parent, _, child) = model.get_submodule(name), name.rpartition(".")
            taken = nn.Identity() if kind == "identity" else TwiceRMSNorm(norm.weight)
            if i % 4 < 3:
                setattr(changed.get_submodule(parent), child, nn.Sequential(norm) if kind == "wrapped" else taken)
        found = changed(ids).logits
        if kind == "wrapped":
            torch.testing.assert_close(found, model(ids).logits)
            continue
        seen: list[Any] = []
        handle = changed.decoder.blocks[0].register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given))
        changed(ids)
        handle.remove()
        x, context = seen[0][:2]
        plain = copy.deepcopy(changed)
        for each in plain.decoder.blocks:
            x = block(x, _unfused(each), context)
        torch.testing.assert_close(found, changed.head(changed.decoder.norm(x)))


def _unfused(block: nn.Module) -> nn.Module:
    """Its fused norms as such that give the norm alone."""
    for norm in block.children():
        if type(norm) is AddRMSNorm:
            norm.forward = lambda x, norm=norm: AddRMSNorm.forward(norm, x)[0]
    return block


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, PHI_LONGROPE_CONFIG, {**LLAMA, "model_type": "own"}])
def test_a_model_on_the_meta_device_may_be_assigned_its_state(config: dict[str, Any], own: dict[str, Any]) -> None:
    """No state has rotary frequencies, or a layer's own buffers that are not persistent."""
    model, ids = lm.from_config(config), draw()
    if config["model_type"] == "own":
        for block in model.decoder.blocks:
            nn.init.normal_(block.mlp.scale)
    with torch.device("meta"):
        empty = lm.CausalLM(model.config)
    empty.load_state_dict(model.state_dict(), assign=True)
    assert not any(tensor.is_meta for tensor in (*empty.parameters(), *empty.buffers()))
    assert torch.equal(empty(ids).logits, model(ids).logits)
    options = {"eos_token_id": [], "do_sample": False}
    assert torch.equal(empty.generate(ids, 3, **options), model.generate(ids, 3, **options))


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_everything_after_input_ids_is_keyword_only() -> None:
    for forward in (lm.CausalLM.forward, lm.MedusaModel.forward):
        kinds = [each.kind for each in list(inspect.signature(forward).parameters.values())[2:]]
        assert set(kinds) <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    with pytest.raises(TypeError):
        lm.from_config(LLAMA)(draw(), draw())


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, {**GEMMA, "model_type": "gemma"}])
def test_attention_mask_as_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """Padding on the left, on the right, and none; logits and losses where there are tokens, gradients everywhere."""
    make_checkpoint(tmp_path, config)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
    ours = lm.from_pretrained(tmp_path, dtype=torch.float64)
    ids, mask = draw(), torch.ones(3, 17, dtype=torch.long)
    mask[0, :5], mask[1, 11:] = 0, 0
    rows = [row[None, m == 1] for row, m in zip(ids, mask, strict=True)]
    wanted = [theirs(row, labels=row) for row in rows]
    counts = [row.shape[1] - 1 for row in rows]
    loss = sum(each.loss.double() * count for each, count in zip(wanted, counts, strict=True)) / sum(counts)
    labels = ids.masked_fill(mask == 0, -100)
    padded = ids.masked_fill(mask == 0, 130_000)  # which the vocabulary does not have
    found = ours(padded, attention_mask=mask)
    for logits, m, each in zip(found.logits, mask, wanted, strict=True):
        torch.testing.assert_close(logits[m == 1], each.logits[0], rtol=1e-3, atol=1e-5)
        assert not logits[m == 0].any()
    out = ours(padded, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.loss, loss, rtol=1e-5, atol=0)
    each = ours(padded, attention_mask=mask, labels=labels, reduction="none").loss
    torch.testing.assert_close(each.sum() / sum(counts), out.loss)
    assert each.shape == ids.shape and not each[mask == 0].any()
    out.loss.backward()
    loss.backward()
    named = dict(theirs.named_parameters())
    torch.testing.assert_close(ours.decoder.norm.weight.grad, named["model.norm.weight"].grad, rtol=1e-3, atol=1e-6)
    for wrong, message in ((mask * 2, "only 1"), (mask[:, 1:], "inputs' shape"), (mask * 0, "no 1")):
        with pytest.raises(InputError, match=message):
            ours(ids, attention_mask=wrong)
    with pytest.raises(InputError, match="no position_ids"):
        ours(ids, attention_mask=mask, position_ids=torch.arange(17).expand(3, 17))


def test_medusa_takes_an_attention_mask() -> None:
    model = lm.MedusaModel.from_base(lm.from_config(LLAMA, dtype=torch.float64), num_heads=2)
    for parameter in model.heads.parameters():
        nn.init.normal_(parameter, std=0.1)
    ids, mask = draw(2), torch.ones(2, 17, dtype=torch.long)
    mask[0, :6] = 0
    labels = ids.masked_fill(mask == 0, -100)
    out = model(ids, labels=labels, attention_mask=mask, reduction="sum")
    alone = [
        model(row[None, m == 1], labels=row[None, m == 1], reduction="sum") for row, m in zip(ids, mask, strict=True)
    ]
    torch.testing.assert_close(out.head_losses, sum(each.head_losses for each in alone))
    assert out.ranks.shape == (2, 2, 17) and out.ranks[:, 0, :6].eq(-1).all()
    torch.testing.assert_close(out.ranks[:, 0, 6:], alone[0].ranks[:, 0])
    logits = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[:, 0, 6:], model(ids[:1, 6:]).logits[:, 0])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_repeats_dropout(mode: Any) -> None:
    model, ids = lm.from_config(LLAMA), draw()
    for block in model.decoder.blocks:
        block.mlp.down = nn.Sequential(block.mlp.down, nn.Dropout(0.3))
    found = []
    for each in ("none", mode):
        model.activation_checkpointing = each
        model.zero_grad()
        torch.manual_seed(3)
        model(ids, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_counts_are_those_of_a_padded_batch() -> None:
    model, ids = lm.from_config(LLAMA), draw()
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 9:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    mean = model(ids, labels=labels, attention_mask=mask).loss
    count = model.num_targets(labels, attention_mask=mask)
    torch.testing.assert_close(model(ids, labels=labels, attention_mask=mask, num_items_in_batch=count).loss, mean)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_no_items_in_a_batch(kind: Any) -> None:
    """Without any target the loss is 0, as are its gradients; with one, no items are an error, and so are fewer."""
    base, ids = lm.from_config(LLAMA), draw()
    heads = lm.MedusaModel.from_base(base, num_heads=2)
    for model in (base.requires_grad_(), heads, lm.JointMedusa(heads)):
        loss = model(ids, labels=ids.new_full(ids.shape, -100), num_items_in_batch=kind(0)).loss
        loss.backward()
        assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())
        for wrong in (0, -3):
            with pytest.raises(InputError, match=r"num_items_in_batch: must be (a number )?(above|of at least) 0"):
                model(ids, labels=ids, num_items_in_batch=kind(wrong))
    with pytest.raises(InputError, match=r"num_items_in_batch: must be one number, got a tensor of shape \(2,\)"):
        base(ids, labels=ids, num_items_in_batch=torch.tensor([5, 5]))


def test_arguments_without_an_effect_are_errors() -> None:
    model, ids = lm.from_config(LLAMA), draw()
    heads = lm.MedusaModel.from_base(lm.from_config(LLAMA), num_heads=1)
    for wrong in (torch.ones(3, 15), torch.ones(4, 17)):
        with pytest.raises(InputError, match="attention_mask: must have the inputs' shape"):
            heads(ids, labels=ids, attention_mask=wrong)
    for options, message in (
        ({"label_smoothing": 0.1}, "label_smoothing: is an option of a loss"),
        ({"num_items_in_batch": 3}, "num_items_in_batch: is an option of a loss"),
        ({"past_key_values": 3}, "past_key_values: no such argument"),
    ):
        for each in (model, heads):
            with pytest.raises(InputError, match=message):
                each(ids, **options)
    tree = TreeTokens(torch.ones(17, 17, dtype=torch.bool), torch.zeros(17).long(), torch.arange(17))
    for options, message in (
        ({"labels": ids, "token_indices": torch.tensor([3])}, "token_indices: with labels"),
        ({"tree": tree}, "tree: is for decoding"),
        ({"labels": ids.int()}, "labels: must be int64"),
        ({"labels": ids.tolist()}, "labels: must have the inputs' shape"),
        ({"attention_mask": ids.tolist()}, "attention_mask: must have the inputs' shape"),
    ):
        with pytest.raises(InputError, match=message):
            model(ids, **options)
    for embeds in (torch.zeros(2, 0, model.config.hidden_size), torch.zeros(2, 3, model.config.hidden_size).long()):
        with pytest.raises(InputError, match="inputs_embeds: must be floating"):
            model(inputs_embeds=embeds)
    with pytest.raises(InputError, match="input_ids: must be a tensor"):
        model(ids.tolist())
    with pytest.raises(InputError, match="no gradient; call it under"):
        model(ids, state=model.new_state(3, 20))
    with torch.no_grad():
        for options, message in (
            ({"cu_seqlens": torch.tensor([0, 17], dtype=torch.int32)}, "cu_seqlens: a decoding state takes one"),
            ({"past_key_values": 3}, "past_key_values: no such argument"),
            ({"z_loss": 0.1}, "z_loss: is an option of a loss"),
            ({"attention_mask": torch.zeros(3, 17)}, "a row has no token"),
        ):
            with pytest.raises(InputError, match=message):
                model(ids, state=model.new_state(3, 20), **options)
        with pytest.raises(InputError, match="for 2 sequences, the inputs have 3"):
            model(ids, state=model.new_state(2, 20))


def test_frequencies_that_follow_the_length_are_not_hidden_by_padding() -> None:
    model = lm.from_config({**PHI_LONGROPE_CONFIG, "rope_scaling": None})
    mask = torch.ones(3, 17)
    mask[0, :4] = 0
    model(draw(), attention_mask=mask)
    with pytest.raises(InputError, match="attention_mask: rotary frequencies of this model depend on the length"):
        lm.from_config(PHI_LONGROPE_CONFIG)(draw(), attention_mask=mask)


def test_ties_survive_assigned_states() -> None:
    model = lm.from_config({**GEMMA, "model_type": "gemma"})
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.head.weight is model.decoder.embed.weight
    for name in ("decoder.embed.weight", "head.weight"):  # either name of the tied weight gives both
        given = torch.randn_like(state[name])
        model.load_state_dict({name: given}, strict=False, assign=True)
        assert model.head.weight is model.decoder.embed.weight and torch.equal(model.head.weight, given)
    wrapper = nn.ModuleDict({"value_head": nn.Linear(2, 2), "model": model})  # whose own weights are missing
    wrapper.load_state_dict({"model.head.weight": state["head.weight"]}, strict=False, assign=True)
    assert torch.equal(model.decoder.embed.weight, state["head.weight"])
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    kept = model.head.weight.detach().clone()
    assert model.to("cpu", torch.float64).head.weight.equal(kept.double())


def test_options_of_adamw_that_are_not_implemented() -> None:
    parameter = nn.Parameter(torch.ones(3))
    for name in ("amsgrad", "maximize"):
        with pytest.raises(InputError, match=name):
            FusedAdamW([{"params": [parameter], name: True}])
        theirs = torch.optim.AdamW([parameter], **{name: True})
        with pytest.raises(InputError, match=name):
            FusedAdamW([parameter]).load_state_dict(theirs.state_dict())


# -- what a checkpoint says of generation ------------------------------------------------------------------------------


def generation(folder: Path, **options: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path, {**LLAMA, "initializer_range": 0.3})
    return tmp_path


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_as_transformers(folder: Path, penalty: float) -> None:
    generation(folder, repetition_penalty=penalty, eos_token_id=[], pad_token_id=0)
    ids = draw(2, 7)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    wanted = theirs.generate(ids, max_new_tokens=20, do_sample=False)
    found = lm.from_pretrained(folder).generate(ids, max_new_tokens=20)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, lm.from_pretrained(folder).generate(ids, max_new_tokens=20, repetition_penalty=1.0))


def test_a_checkpoint_that_samples_is_sampled_from(folder: Path) -> None:
    ids, count = draw(64, 3)[:1].repeat(64, 1), 6
    model = lm.from_pretrained(folder)
    greedy = model.generate(ids, max_new_tokens=count, eos_token_id=[])
    assert len(greedy.unique(dim=0)) == 1
    generation(folder, do_sample=True, temperature=1.5, top_k=4, max_new_tokens=count, pad_token_id=0)
    model = lm.from_pretrained(folder)
    sampled = model.generate(ids, eos_token_id=[])
    assert sampled.shape == greedy.shape and len(sampled.unique(dim=0)) > 8
    top = model(ids[:1]).logits[0, -1].topk(4).indices
    assert torch.isin(sampled[:, 3], top).all() and len(sampled[:, 3].unique()) > 1
    assert torch.equal(model.generate(ids, do_sample=False, eos_token_id=[]), greedy)
    # Tree decoding does not sample.
    medusa = lm.MedusaModel.from_base(model, num_heads=2)
    assert torch.equal(medusa.generate(ids[:2], max_new_tokens=count, eos_token_id=[]), greedy[:2])


def test_measures_of_decoding_are_greedy_whatever_the_checkpoint_says(folder: Path) -> None:
    generation(folder, do_sample=True, temperature=2.0, repetition_penalty=1.7, eos_token_id=2, pad_token_id=0)
    medusa = lm.MedusaModel.from_base(lm.from_pretrained(folder), num_heads=2)
    prompts = draw(3, 6).tolist()
    found = benchmark_decoding(medusa, prompts, tree=chain(2), max_new_tokens=12)
    assert found.same == len(prompts)
    for options in ({}, {"do_sample": True}):
        with pytest.raises(InputError, match=r"repetition_penalty: .* sets 1\.7"):
            medusa.generate(prompts, **options)


def test_a_mixer_without_a_state_does_not_decode(own: dict[str, Any]) -> None:
    model = lm.from_config(own)
    block = replace(model.config.blocks[0], mixer=OwnConfig())
    with pytest.raises(ConfigError, match=r"OwnConfig has no decoding state: define new_state"):
        DecodingState([block.mixer], 1, 5, hidden_size=60, dtype=torch.float32, device=torch.device("cpu"))


def test_options_that_are_not_implemented_are_named(folder: Path) -> None:
    generation(folder, no_repeat_ngram_size=3)
    model = lm.from_pretrained(folder)
    with pytest.raises(ConfigError, match="no_repeat_ngram_size"):
        model.generate(draw(1, 3))


# -- the pad token -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [{**LLAMA, "pad_token_id": 7}, {**GEMMA, "model_type": "gemma"}, {**LLAMA, "pad_token_id": -1}]
)
def test_the_pad_tokens_row_gets_no_gradient_from_the_inputs(config: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, config)
    pad = config["pad_token_id"] % 131
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").double()
    ours = lm.from_pretrained(tmp_path, dtype=torch.float64)
    ids = draw()
    ids[:, 4] = pad
    theirs(ids, labels=ids).loss.backward()
    ours(ids, labels=ids).loss.backward()
    found, wanted = ours.decoder.embed.weight.grad, theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)
    assert found[pad].any() == bool(config["tie_word_embeddings"])


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_module_without_weights_for_it_is_missing(own: dict[str, Any], tmp_path: Path) -> None:
    lm.from_config({**LLAMA}).save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: .*mlp\.scale"):
        lm.from_pretrained(tmp_path / "out")
