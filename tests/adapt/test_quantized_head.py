"""The quantised language-model head: tied and not, in decoding, losses, loading, saving, draft heads, and refusals."""

import copy
import json
import math
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_oracle import add_head
from runs import make_base
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner
from zoo import BASE, CONFIGS, MULTIMODAL, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app
from ligermodels.data.batches import Batch
from ligermodels.errors import CheckpointError, ConfigWarning, InputError
from ligermodels.evaluation import evaluate_kl
from ligermodels.integrations import wrap
from ligermodels.layers import LMHead
from ligermodels.layers.quantized import QuantizedCompute, weight_codes
from ligermodels.models.causal_lm import CausalLM

KINDS = ("float8", "int4", "nf4")
LLAMA: dict[str, Any] = {**BASE, "model_type": "llama", "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4}
TIED = {**LLAMA, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, tied": TIED,
    "gemma2, tied, with a softcap": CONFIGS["gemma2"],
    "granite, with a scale": {**LLAMA, "model_type": "granite", "logits_scaling": 3.0},
    "with a bias": LLAMA,
}


def build(name: str = "llama", kind: Any = None, head: Any = None, **options: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(MODELS[name], **options).eval()
    if name == "with a bias":
        weights = model.state_dict()
        model = CausalLM(replace(model.config, head=replace(model.config.head, bias=True))).eval()
        model.load_state_dict({**weights, "head.bias": torch.randn(model.config.vocab_size)})
    return model if kind is None else lm.quantize(model, kind, head=head)


def tokens(batch: int = 2, length: int = 19) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(1))


def same(found: lm.CausalLM, wanted: lm.CausalLM) -> None:
    state = wanted.state_dict()
    assert found.state_dict().keys() == state.keys()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == state[name].dtype and torch.equal(tensor.float(), state[name].float()), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_decoding_and_losses(name: str, kind: Any) -> None:
    """Those of the model whose head has the rounded weight, with all else as it was."""
    plain = build(name)
    model = lm.quantize(copy.deepcopy(plain), "float8", exclude=["*"], head=kind)
    embedding = plain.decoder.embed.weight
    assert torch.equal(model.decoder.embed.weight, embedding) and not model.config.head.tied
    rounded = lm.dequantize(copy.deepcopy(model))
    assert type(rounded.head) is LMHead and rounded.head.weight is not rounded.decoder.embed.weight
    far = float(((rounded.head.weight - plain.head.weight).norm() / plain.head.weight.norm()).detach())
    assert 1e-3 < far < {"float8": 0.04, "int4": 0.15, "nf4": 0.15}[kind]
    ids = tokens()
    results = []
    for each in (model, rounded):
        with torch.no_grad():
            logits, scored = each(ids).logits, each.log_probs(ids, ids)
        inputs = torch.randn(2, 19, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        loss = each(inputs_embeds=inputs.requires_grad_(), labels=ids, z_loss=1e-3).loss
        found = each.generate([[5, 9, 11], [77]], max_new_tokens=6, eos_token_id=None, pad_token_id=0)
        results.append((logits, scored.log_probs, loss.detach(), torch.autograd.grad(loss, inputs)[0], found))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
    assert repr(model.head).startswith("LMHead(") and kind in repr(model.head)
    report = evaluate_kl(model, plain, [Batch({"input_ids": ids, "labels": ids})])
    assert 0 < report.kl < {"float8": 2e-3, "int4": 2e-2, "nf4": 2e-2}[kind]
    for each in (model, rounded):
        assert not any(p.requires_grad for p in each.parameters())


def test_losses_keep_no_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Medusa heads that share the lm_head: what each dequantises is gone before the backward pass, which dequantises
    again what it needs."""
    model = build("llama", "int4", "int4")
    plain = lm.dequantize(copy.deepcopy(model))
    medusa, apart = (lm.MedusaModel.from_base(each, 3, lm_head="shared") for each in (model, plain))
    made, compute = [], QuantizedCompute.dense

    def rounded(self: QuantizedCompute, dtype: torch.dtype) -> Tensor:
        weight = compute(self, dtype)
        made.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(QuantizedCompute, "dense", rounded)
    ids = tokens()
    losses = [each(ids, labels=ids).loss for each in (medusa, apart)]
    assert len(made) == 3 and all(each() is None for each in made)
    for each in losses:
        each.backward()
    for ours, other in zip(medusa.head_parameters(), apart.head_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad)
    made.clear()
    gradients = []
    for base in (model, plain):  # log-probabilities, whose backward pass multiplies by the weight again
        inputs = torch.ones(2, 19, model.config.hidden_size, requires_grad=True)
        found = base.log_probs(inputs_embeds=inputs, labels=ids).log_probs
        assert all(each() is None for each in made)
        gradients.append(torch.autograd.grad(found.sum(), inputs)[0])
    torch.testing.assert_close(*gradients)
    assert len(made) == 2 and all(each() is None for each in made)


@pytest.mark.parametrize("head", KINDS)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gemma2, tied, with a softcap"])
def test_loading_and_saving(name: str, head: Any, tmp_path: Path) -> None:
    """The bits of quantising the loaded model; and dequantised, both tensors in a checkpoint that says so."""
    make_checkpoint(tmp_path / "in", MODELS[name], dtype=torch.bfloat16)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": "int4", "quantize_head": head}
    steps = list[tuple[int, int]]()
    model = lm.from_pretrained(tmp_path / "in", progress=lambda *done: steps.append(done), **options)
    same(model, lm.quantize(lm.from_pretrained(tmp_path / "in", dtype=torch.bfloat16), "int4", head=head))
    assert steps[-1][0] == steps[-1][1]
    meta = lm.from_pretrained(tmp_path / "in", device="meta", **options)
    assert {n: (t.dtype, t.shape) for n, t in meta.state_dict().items()} == {
        n: (t.dtype, t.shape) for n, t in model.state_dict().items()
    }
    other = lm.from_pretrained(tmp_path / "in", prepare=lambda m: lm.quantize(m, "int4", head=head), dtype="bfloat16")
    same(other, model)
    lm.dequantize(model).save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    again = lm.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"], model.head.weight)
    hf = wrap(model)
    torch.testing.assert_close(hf(input_ids=tokens()).logits, again(tokens()).logits)
    assert hf.lm_head.weight is not hf.get_input_embeddings().weight


@pytest.mark.parametrize(("name", "prefix"), [("mistral3", "language_model."), ("qwen3_omni_moe", "thinker.")])
def test_a_tied_checkpoint_of_more_than_text(name: str, prefix: str, tmp_path: Path) -> None:
    """It goes out whole: each of its configs, one in another, then says that the head is not the embedding."""
    config = copy.deepcopy(MULTIMODAL[name])
    make_checkpoint(tmp_path / "in", config)
    holder = config.get("thinker_config", config)
    holder["tie_word_embeddings"] = holder["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    before = load_file(tmp_path / "in" / "model.safetensors")
    del before[f"{prefix}lm_head.weight"]
    save_file(before, tmp_path / "in" / "model.safetensors")
    exclude = ["mlp.experts"] if name == "qwen3_omni_moe" else []
    model = lm.from_pretrained(tmp_path / "in", quantize="float8", quantize_head="float8", quantize_exclude=exclude)
    lm.dequantize(model).save_pretrained(tmp_path / "out", keep="all")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    written = written.get("thinker_config", written)
    assert written["tie_word_embeddings"] is written["text_config"]["tie_word_embeddings"] is False
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == {*before, f"{prefix}lm_head.weight"}
    again = lm.from_pretrained(tmp_path / "out")
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama, tied", "with a bias"])
def test_casts_moves_and_copies_keep_the_weight(name: str, kind: Any) -> None:
    model = build(name, "float8", kind)
    codes, scales = model.head.compute.codes.clone(), model.head.compute.scales.clone()

    def check(other: lm.CausalLM) -> None:
        for found, wanted in ((other.head.compute.codes, codes), (other.head.compute.scales, scales)):
            assert found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float())

    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        check(model.to(dtype))
        assert model(tokens()).logits.dtype == dtype
        assert model(tokens(), labels=tokens()).loss.isfinite()
    check(copy.deepcopy(model).half())
    empty = build("llama, tied", "float8", kind, device="meta") if name == "llama, tied" else copy.deepcopy(model)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    check(empty)
    assert torch.equal(empty(tokens()).logits, model(tokens()).logits)
    empty.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    check(empty)
    with pytest.raises(RuntimeError, match=r"Missing key.*head.compute.codes"):
        model.load_state_dict(build("llama").state_dict())
    with pytest.raises(InputError, match=r"x must be floating, of shape .* 64"):
        model.head(torch.ones(3, 63))
    model.reset_parameters()
    rounded = lm.dequantize(model)
    assert not torch.equal(rounded.head.weight, rounded.decoder.embed.weight)
    assert 0.5 < rounded.head.weight.std() / rounded.decoder.embed.weight.std() < 2


@pytest.mark.parametrize(("name", "kind"), [*(("llama", kind) for kind in KINDS), ("llama, tied", KINDS[0])])
def test_draft_heads(name: str, kind: Any, tmp_path: Path) -> None:
    """Trees give the tokens of plain decoding; heads come from files that repeat the lm_head; own ones are trained."""
    plain = build(name)
    shared = lm.MedusaModel.from_base(plain, 2, lm_head="shared")
    own = lm.MedusaModel.from_base(copy.deepcopy(plain), 2)
    for i, each in enumerate((shared, own)):
        torch.manual_seed(i)
        for parameter in each.heads.parameters():
            parameter.data.add_(0.01 * torch.randn_like(parameter))
    files = {"shared": shared, "repeated": shared, "own": own}
    for stored, each in files.items():
        each.export(tmp_path / stored, "vllm-shared" if stored == "shared" else "vllm")
    model = build(name, "int4", kind)
    prompts: Any = {"input_ids": [[5, 9, 11], [77, 3]], "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(**prompts)
    for stored, each in files.items():
        found = lm.MedusaModel.from_pretrained(model, tmp_path / stored)
        assert found.lm_head == ("own" if stored == "own" else "shared")
        for name_, parameter in found.heads.named_parameters():
            assert torch.equal(parameter, dict(each.heads.named_parameters())[name_])
        assert torch.equal(found.generate(**prompts), wanted)
    other = lm.quantize(lm.from_config({**LLAMA, "initializer_range": 0.1}), "int4", head=kind)
    with pytest.raises(CheckpointError, match=r"no .* that is the base model's lm_head"):
        lm.MedusaModel.from_pretrained(other, tmp_path / "shared")
    fresh = lm.MedusaModel.from_base(model, 2)
    assert torch.equal(fresh.heads[1].lm_head.weight, lm.dequantize(copy.deepcopy(model)).head.weight)
    for heads in (fresh, lm.MedusaModel.from_base(model, 2, lm_head="shared"), lm.MTPModel.from_base(model)):
        assert torch.equal(heads.generate(**prompts), wanted)
        heads.train()
        heads(tokens(), labels=tokens()).loss.backward()
        trained = {n for n, p in heads.named_parameters() if p.grad is not None}
        assert trained and not any(n.startswith("base.") for n in trained)
    with pytest.raises(InputError, match="which neither checkpoints nor"):
        lm.MedusaModel.from_base(model, 2, lm_head="shared").export(tmp_path / "no", "vllm")
    assert not (tmp_path / "no").exists()


def test_copies_of_the_head(tmp_path: Path) -> None:
    """A layer of multi-token prediction has a copy of the head, which is compared as it is rounded."""
    oracle = make_checkpoint(tmp_path, {**CONFIGS["deepseek_v3"], "num_nextn_predict_layers": 1})
    add_head(tmp_path, oracle, like_deepseek=True, num_layers=1)
    options: dict[str, Any] = {"quantize": "int4", "quantize_exclude": ["mlp.experts"], "quantize_head": "float8"}
    model = lm.from_pretrained(tmp_path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.MTPModel.from_pretrained(model, tmp_path)
    with torch.no_grad():
        model.head.compute.scales.mul_(2)
    with pytest.warns(ConfigWarning, match=r"shared_head.head.weight is not the model's own tensor"):
        lm.MTPModel.from_pretrained(model, tmp_path)


@pytest.mark.parametrize("exclude", [[], ["*"]], ids=["with the blocks", "alone"])
def test_refusals(exclude: list[str], tmp_path: Path) -> None:
    model = lm.quantize(build("llama, tied"), "int4", exclude=exclude, head="float8")
    where = "head" if exclude else "decoder.blocks.0.mixer.qkv"
    for what, call in (
        ("which neither checkpoints nor", lambda: model.save_pretrained(tmp_path / "out")),
        ("which neither checkpoints nor", lambda: model.hf_state_dict()),
        ("which neither checkpoints nor", lambda: wrap(model)),
        ("quantize: the model is quantised already", lambda: lm.quantize(model, "int4", head="int4")),
        (f"float8: {where} has a weight quantised", lambda: lm.float8(model)),
        (f"JointMedusa: {where} has a weight", lambda: lm.JointMedusa(lm.MedusaModel.from_base(model, 1))),
    ):
        with pytest.raises(InputError, match=what):
            call()
    assert not (tmp_path / "out").exists()
    assert weight_codes(model.head) is not None


def test_heads_that_cannot_be_quantised(tmp_path: Path) -> None:
    """The model stays as it was, blocks and config too."""

    class Other(LMHead):
        pass

    def check(model: lm.CausalLM, message: str, head: Any = "int4") -> None:
        config, names = model.config, list(model.state_dict())
        with pytest.raises(InputError, match=message):
            lm.quantize(model, "int4", head=head)
        assert model.config is config and list(model.state_dict()) == names
        assert all(p.requires_grad for p in model.parameters())

    for head in ("INT4", 4, [], torch.int8, True, "none"):
        check(build(), "head: must be one of float8, int4", head)
    model = build("llama, tied")
    model.head = Other(64, 131, model.config.head)
    check(model, "head: is a Other, which has no quantised form")
    model = build("llama, tied")
    nn.init.constant_(model.head.weight, math.nan)
    check(model, "head: has weights that are not finite in float32")
    for config in (LLAMA, TIED):
        make_checkpoint(tmp_path, config)
        model = lm.from_pretrained(tmp_path, mapped=False)
        nn.init.constant_(model.head.weight, math.inf)
        model.save_pretrained(tmp_path, overwrite=True)
        with pytest.raises(CheckpointError, match=r"(head|embed)\.weight: .* not finite"):
            lm.from_pretrained(tmp_path, quantize="int4", quantize_head="int4")
    with pytest.raises(InputError, match="quantize_head: got 'int4' without `quantize`"):
        lm.from_pretrained(tmp_path, quantize_head="int4")
    with pytest.raises(InputError, match="quantize_head: must be one of float8, int4, nf4, mxfp4, got 'fp4'"):
        lm.from_pretrained(tmp_path, quantize="int4", quantize_head="fp4")  # type: ignore[arg-type]


def test_commands(tmp_path: Path) -> None:
    """`verify`, `generate`, `chat` and `medusa eval` take the option, and no other one without --quantize."""
    base, text = tmp_path / "base", tmp_path / "text.txt"
    make_base(base)
    text.write_text("one text, and another text of some more words than one. " * 8)

    def invoke(*arguments: object, status: int = 0, **more: Any) -> str:
        result = CliRunner().invoke(app, list(map(str, arguments)), **more)
        assert result.exit_code == status, result.output
        return result.stdout if status == 0 else result.output

    quantized = ("--quantize", "int4", "--quantize-head", "float8")
    reports = [
        json.loads(invoke("verify", base, "--json", "--text", text, "--tokens", 50, *options))
        for options in (quantized[:2], quantized)
    ]
    model = lm.from_pretrained(base, quantize="int4", quantize_head="float8")
    assert reports[1]["quantized_weights_bytes"] == sum(each.nbytes for each in model.state_dict().values())
    assert reports[0]["quantized_perplexity"] != reports[1]["quantized_perplexity"]
    medusa = lm.MedusaModel.from_base(lm.from_pretrained(base), 2)
    medusa.export(tmp_path / "heads", "vllm")
    generate = ("generate", base, "--prompt", "one text, and", "--max-new-tokens", 12, "--json")
    found = [
        json.loads(invoke(*generate, *quantized, *more))["completions"][0]["completion"]
        for more in ((), ("--medusa", tmp_path / "heads"))
    ]
    assert found[0] == found[1]
    invoke("chat", base, *quantized, "--max-new-tokens", 3, input="hi\n")
    invoke(*("medusa", "eval", base, tmp_path / "heads", "--data", text, "--prompts", 0), "--seq-len", 16, *quantized)
    for arguments in (generate, ("verify", base), ("chat", base)):
        assert "--quantize-head" in invoke(*arguments, "--quantize-head", "int4", status=2)
        invoke(*arguments, "--quantize", "int4", "--quantize-head", "int3", status=2)
