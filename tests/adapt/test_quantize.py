"""Models with quantised weights: loaded and in place, decoding, gradients through them, refusals, the commands."""

import copy
import json
import math
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import by_turns
from runs import make_base
from torch import Tensor, nn
from typer.testing import CliRunner
from zoo import BASE, CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.adapt import quantized_loading
from ligermodels.cli import app
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import CheckpointError, InputError
from ligermodels.evaluation import KLToReference, perplexity
from ligermodels.integrations import wrap
from ligermodels.layers.quantized import QuantizedCompute, quantized_weights

KINDS = ("float8", "int4", "nf4")
SIZES = {"hidden_size": 64, "intermediate_size": 150, "head_dim": 16, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {**BASE, **SIZES, "model_type": "llama", "num_hidden_layers": 3}
EXPERTS = "gpt_oss, experts with biases"
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (LLAMA, []),
    "qwen2, with biases": ({**LLAMA, "model_type": "qwen2"}, []),
    "gemma2, tied": (CONFIGS["gemma2"], []),
    "deepseek_v3, latent attention, dense and experts": (CONFIGS["deepseek_v3"], []),
    EXPERTS: ({**CONFIGS["gpt_oss"], "hidden_size": 140, "intermediate_size": 33}, []),
    "lfm2, short convolutions": (CONFIGS["lfm2-biases"], []),
    "qwen3_next, Gated DeltaNet and experts": (CONFIGS["qwen3_next"], ["mlp.experts"]),
}

of_each_model_and_kind = pytest.mark.parametrize(
    ("name", "kind"), sorted({*product(["llama", EXPERTS], KINDS), *by_turns(list(MODELS), KINDS)})
)
"""Linear layers have their weights in one class, and experts in another: llama and one mixture have every form of
weights, other models one each."""


def build(name: str = "llama", kind: Any = None, **options: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    config, exclude = MODELS[name]
    model = lm.from_config(config, **options).eval()
    with torch.no_grad():
        for name_of, parameter in model.named_parameters():
            if name_of.endswith("bias"):  # zero at first
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model if kind is None else lm.quantize(model, kind, exclude=exclude)


def tokens(batch: int = 2, length: int = 19) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(1))


def quantised(model: nn.Module) -> dict[str, QuantizedCompute]:
    return quantized_weights(model)


@of_each_model_and_kind
def test_decoding(name: str, kind: Any) -> None:
    """Greedy, sampled, in padded batches: as the model of the rounded weights does, which is near the original."""
    plain, model = build(name), build(name, kind)
    names = {f"{n}.weight" for n, m in plain.named_modules() if isinstance(m, nn.Linear) and m.out_features > 1}
    experts = {n for n, p in plain.named_parameters() if p.ndim == 3 and n.endswith(("gate_up", "down"))}
    names |= set() if MODELS[name][1] else experts
    assert quantised(model).keys() == {n for n in names if n.startswith("decoder.blocks.")}
    assert f"{kind}" in repr(model)
    rounded = lm.dequantize(copy.deepcopy(model))
    assert not quantised(rounded)
    with torch.no_grad():
        wanted, found, before = (each(tokens()).logits for each in (rounded, model, plain))
    torch.testing.assert_close(found, wanted)
    distance = float((found - before).norm() / found.norm())
    assert 1e-5 < distance < {"float8": 0.1, "int4": 0.5, "nf4": 0.5}[kind]
    prompts, options = [[5, 9, 11], [77], list(range(30, 50))], {"max_new_tokens": 6, "eos_token_id": None}
    for sampled in (False, True):
        results = []
        for each in (model, rounded):
            more = {"do_sample": True, "generator": torch.Generator().manual_seed(3)} if sampled else {}
            results.append(each.generate(prompts, pad_token_id=0, **options, **more))
        assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_heads(kind: Any) -> None:
    """Trees of Medusa and MTP heads give the tokens of plain decoding; heads are trained on the frozen base."""
    model = build(kind=kind)
    medusa = lm.MedusaModel.from_base(model, 3)
    prompts: Any = {"input_ids": [[5, 9, 11], [77, 3]], "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    for heads in (medusa, lm.MTPModel.from_base(model)):
        assert torch.equal(heads.generate(**prompts), model.generate(**prompts))
    medusa.train()
    medusa(tokens(), labels=tokens()).loss.backward()
    assert {n for n, p in medusa.named_parameters() if p.grad is not None} == {
        n for n, p in medusa.named_parameters() if not n.startswith("base.")
    }
    with pytest.raises(InputError, match=r"JointMedusa: decoder.blocks.0.mixer.qkv has a weight quantised to"):
        lm.JointMedusa(medusa)


@of_each_model_and_kind
def test_gradients_of_inputs(name: str, kind: Any) -> None:
    """Those of the model of the rounded weights; and no parameter of the model is trained."""
    model = build(name, kind)
    rounded = lm.dequantize(copy.deepcopy(model))
    gradients = []
    for each in (model, rounded):
        embeds = torch.randn(2, 7, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
        loss = each(inputs_embeds=embeds.requires_grad_(), input_ids=None, labels=tokens(2, 7)).loss
        gradients.append(torch.autograd.grad(loss, embeds)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().sum() > 0
    assert not any(p.requires_grad for p in (*model.parameters(), *rounded.parameters()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "stored"), [*((name, torch.bfloat16) for name in MODELS), ("llama", torch.float32)], ids=str
)
def test_loading(name: str, stored: torch.dtype, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of quantising the loaded model; layer by layer; and what is not quantised is in its own dtype."""
    config, exclude = MODELS[name]
    make_checkpoint(tmp_path, config, dtype=stored)
    wanted = lm.quantize(lm.from_pretrained(tmp_path, dtype=torch.bfloat16), kind, exclude=exclude).state_dict()
    monkeypatch.setattr(quantized_loading, "CHUNK_BYTES", 1)
    alive, most, steps = 0, 0, list[tuple[int, int]]()
    original = quantized_loading._Part.empty

    def watched(part: Any, layer: QuantizedCompute, device: Any = None) -> Tensor:
        nonlocal alive, most
        found = original(part, layer, device)
        if found.is_meta:
            return found
        alive += (size := found.nbytes)
        most = max(most, alive)

        def freed() -> None:
            nonlocal alive
            alive -= size

        weakref.finalize(found, freed)
        return found

    monkeypatch.setattr(quantized_loading._Part, "empty", watched)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "progress": lambda *done: steps.append(done)}
    if exclude:
        with pytest.raises(InputError, match=r"quantize_exclude: got \['mlp.experts'\] without `quantize`"):
            lm.from_pretrained(tmp_path, quantize_exclude=exclude)
    options |= {"quantize": kind, "quantize_exclude": exclude}
    model = lm.from_pretrained(tmp_path, **options)
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert tensor.dtype == found[key].dtype, key
        assert torch.equal(*(t.view(torch.uint8) if t.ndim > 1 else t for t in (tensor, found[key]))), key
    layers = quantised(model).values()
    assert most == max(2 * each.in_features * each.out_features for each in layers) and alive == 0
    total = {total for _, total in steps}
    assert steps == sorted(steps) and len(total) == 1 and steps[-1][0] == total.pop()
    meta = lm.from_pretrained(tmp_path, device="meta", **{k: v for k, v in options.items() if k != "progress"})
    assert {n: t.dtype for n, t in meta.state_dict().items()} == {n: t.dtype for n, t in found.items()}


def test_what_is_read_is_checked(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, LLAMA)
    model = lm.from_pretrained(tmp_path, mapped=False)
    with torch.no_grad():
        model.decoder.blocks[1].mlp.down.weight[3, 7] = math.nan
    model.save_pretrained(tmp_path, overwrite=True)
    with pytest.raises(CheckpointError, match=r"decoder.blocks.1.mlp.down.weight: .* not finite"):
        lm.from_pretrained(tmp_path, quantize="int4")
    model.double()
    for value in (math.nan, math.inf, 1e300):  # the last one is no float32
        with torch.no_grad():
            model.decoder.blocks[1].mlp.down.weight[3, 7] = value
        with pytest.raises(InputError, match=r"decoder.blocks.1.mlp.down: has weights that are not finite in float32"):
            lm.quantize(model, "int4")
        assert not quantised(model) and all(p.requires_grad for p in model.parameters())
    with pytest.raises(InputError, match="quantize: must be one of float8, int4, nf4, mxfp4, got 'int3'"):
        lm.from_pretrained(tmp_path, quantize="int3")  # type: ignore[arg-type]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError):
        lm.from_pretrained(tmp_path, quantize="int4")


@pytest.mark.parametrize("kind", KINDS)
def test_casts_moves_and_copies_keep_the_weights(kind: Any) -> None:
    model = build("qwen2, with biases", kind)
    before = {n: t.clone() for n, t in model.state_dict().items() if n.endswith(("codes", "scales"))}
    assert len(before) == 2 * len(quantised(model))

    def check(other: nn.Module) -> None:
        state = other.state_dict()
        assert all(state[n].dtype == t.dtype and torch.equal(state[n].float(), t.float()) for n, t in before.items())

    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float32):
        model.to(dtype)
        check(model)
        with pytest.raises(InputError, match=r"x must be floating, of shape .* 64"):
            model.decoder.blocks[0].mixer.o(torch.ones(3, 65, dtype=dtype))
        assert model(tokens()).logits.dtype == dtype == model.decoder.blocks[0].mixer.qkv.bias.dtype
    check(copy.deepcopy(model).half().to("cpu", torch.bfloat16))
    shared = copy.deepcopy(model).share_memory()
    assert all(tensor.is_shared() for tensor in shared.state_dict().values())
    check(shared)
    codes = [weight.codes.data_ptr() for weight in quantised(shared).values()]
    shared.double()
    assert codes == [weight.codes.data_ptr() for weight in quantised(shared).values()]  # a cast makes no copy
    check(shared)
    empty = build("qwen2, with biases", kind, device="meta").to_empty(device="cpu")
    empty.load_state_dict(model.state_dict())
    check(empty)
    assert torch.equal(empty(tokens()).logits, model(tokens()).logits)
    plain = build("qwen2, with biases")
    with pytest.raises(RuntimeError, match=r"Missing key.*codes"):
        model.load_state_dict(plain.state_dict())
    model.reset_parameters()
    weight = lm.dequantize(model).decoder.blocks[0].mlp.down.weight
    assert 0.5 < weight.std() / plain.decoder.blocks[0].mlp.down.weight.std() < 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_quantised_model_refuses(kind: Any, tmp_path: Path) -> None:
    model = build(kind=kind)
    for call in (
        lambda: model.save_pretrained(tmp_path / "out"),
        lambda: model.hf_state_dict(),
        lambda: model.load_hf_state_dict({}),
        lambda: lm.MedusaModel.from_base(model, 2).export(tmp_path / "out", "full-hf"),
    ):
        with pytest.raises(InputError, match=r"which neither checkpoints nor .* have: do this before it is quantised"):
            call()
    assert not (tmp_path / "out").exists()
    for what, each in (
        ("quantize: the model is quantised already", lambda: lm.quantize(model, kind)),
        ("float8: decoder.blocks.0.mixer.qkv has a weight quantised", lambda: lm.float8(model)),
        ("quantize: .* got a MedusaModel", lambda: lm.quantize(lm.MedusaModel.from_base(model, 2), kind)),
        ("dequantize: .* got a MedusaModel", lambda: lm.dequantize(lm.MedusaModel.from_base(model, 2))),
    ):
        with pytest.raises(InputError, match=what):
            each()
    lm.dequantize(model).save_pretrained(tmp_path / "out")
    assert torch.equal(lm.from_pretrained(tmp_path / "out")(tokens()).logits, model(tokens()).logits)
    with pytest.raises(InputError, match="dequantize: the model has no quantised weights"):
        lm.dequantize(model)


def test_models_of_transformers() -> None:
    """Neither can a quantised model compute in one, nor a model that does be quantised."""
    with pytest.raises(InputError, match=r"neither checkpoints nor models of transformers have: do this before"):
        wrap(build(kind="int4"))
    wrapped = build()
    wrap(wrapped)
    with pytest.raises(InputError, match="computes by the modules of the transformers model"):
        lm.quantize(wrapped, "int4")


def test_exclusion_and_what_is_not_quantised() -> None:
    model = lm.quantize(build(), "int4", exclude=["mlp.down", "decoder.blocks.1.mixer"])
    assert quantised(model).keys() == {
        f"decoder.blocks.{i}.{name}.weight"
        for i in range(3)
        for name in ("mixer.qkv", "mixer.o", "mlp.gate_up")
        if (i, name[:5]) != (1, "mixer")
    }
    for exclude, message in (
        (["mlp.up"], "exclude: 'mlp.up' matches no layer in the blocks"),
        ("mlp", r"exclude: must be a sequence of patterns, got 'mlp'; give \['mlp'\]"),
        (["*"], "exclude: leaves no linear layer to quantise"),
    ):
        with pytest.raises(InputError, match=message):
            lm.quantize(build(), "int4", exclude=exclude)
    with pytest.raises(InputError, match="the model is in float8 training; load"):
        lm.quantize(lm.float8(lm.from_config({**LLAMA, "intermediate_size": 96})), "float8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make_base(folder)
    return folder


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_verify(base: Path, tmp_path: Path) -> None:
    """KL and perplexities are those of the distributions, computed here from logits."""
    text = tmp_path / "text.txt"
    text.write_text("one text, and another text of some more words than one. " * 8)
    reports = {}
    for kind in KINDS:
        result = invoke("verify", base, "--quantize", kind, "--json", "--text", text, "--tokens", 50)
        assert result.exit_code == 0, result.output
        reports[kind] = report = json.loads(result.stdout)
        ids = torch.tensor([Tokenizer(base).encode(text.read_text())[:50]])
        models = lm.from_pretrained(base), lm.from_pretrained(base, quantize=kind)
        with torch.no_grad():
            p, q = (model(ids).logits[0, :-1].double().log_softmax(-1) for model in models)
        losses = (-float(each.gather(1, ids[0, 1:, None]).mean()) for each in (p, q))
        wanted = [float((p.exp() * (p - q)).sum(1).mean()), *(math.exp(loss) for loss in losses)]
        found = [report[name] for name in ("kl", "perplexity", "quantized_perplexity")]
        assert found == pytest.approx(wanted, rel=1e-3, abs=1e-7)
        sizes = [sum(each.nbytes for each in model.state_dict().values()) for model in models]
        assert report["tokens"] == 49
        assert [report["weights_bytes"], report["quantized_weights_bytes"]] == sizes and sizes[1] < sizes[0]
    assert 0 < reports["float8"]["kl"] < reports["int4"]["kl"]
    middle = (reports["float8"]["kl"] * reports["int4"]["kl"]) ** 0.5
    for kind, code in (("float8", 0), ("int4", 1)):
        result = invoke("verify", base, "--quantize", kind, "--text", text, "--tokens", 50, "--tolerance", middle)
        assert result.exit_code == code and "KL divergence" in result.stdout and "49 predicted tokens" in result.stdout
    assert (perplexity(1e4), KLToReference(0.0, 1e4, 1.0).perplexity_change) == (math.inf, math.inf)
    for arguments in (
        ["--quantize", "int4", "--reference", base],
        ["--quantize", "int4", "--float8"],
        ["--quantize", "int4", "--float8-exclude", "mlp"],
        ["--quantize", "int4", "--tokens", 1],
        ["--quantize-exclude", "mlp"],
        ["--quantize", "int4", "--quantize-exclude", "none"],
        ["--quantize", "int3"],
    ):
        result = invoke("verify", base, *arguments)
        assert result.exit_code != 0 and "KL" not in result.stdout


def test_commands_that_decode(base: Path, tmp_path: Path) -> None:
    """`generate` and `chat` decode with rounded weights, heads and an adapter too; `medusa eval` scores them."""
    prompt = "one text, and another"
    options = ("--prompt", prompt, "--max-new-tokens", 12, "--json")
    model = lm.from_pretrained(base, quantize="int4")
    ids = Tokenizer(base).encode(prompt)
    wanted = Tokenizer(base).continuation(ids, model.generate([ids], max_new_tokens=12)[0, len(ids) :].tolist())

    def completion(*arguments: object) -> str:
        result = invoke("generate", base, *options, *arguments)
        assert result.exit_code == 0, result.output
        return str(json.loads(result.stdout)["completions"][0]["completion"])

    assert completion("--quantize", "int4") == wanted
    lm.MedusaModel.from_base(lm.from_pretrained(base), 2).export(tmp_path / "heads", "vllm")
    assert completion("--quantize", "int4", "--medusa", tmp_path / "heads") == wanted
    adapted = lm.add_lora(lm.from_pretrained(base), 4)
    torch.manual_seed(0)
    for name, p in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    lm.save_adapter(adapted, tmp_path / "adapter")
    merged = lm.quantize(lm.merge_lora(adapted.eval()), "int4")
    wanted = Tokenizer(base).continuation(ids, merged.generate([ids], max_new_tokens=12)[0, len(ids) :].tolist())
    assert completion("--quantize", "int4", "--adapter", tmp_path / "adapter") == wanted
    chat = CliRunner().invoke(app, ["chat", str(base), "--quantize", "float8", "--max-new-tokens", "3"], input="hi\n")
    assert chat.exit_code == 0, chat.output
    text = tmp_path / "text.txt"
    text.write_text("one text and another text. " * 40)
    scores = {}
    for name, more in {"plain": [], "int4": ["--quantize", "int4"]}.items():
        result = invoke(
            *("medusa", "eval", base, tmp_path / "heads", "--data", text, "--prompts", 0, "--json"),
            "--seq-len",
            32,
            *more,
        )
        assert result.exit_code == 0, result.output
        scores[name] = json.loads(result.stdout)["losses"]
    assert scores["plain"] != scores["int4"] and scores["plain"] == pytest.approx(scores["int4"], rel=0.2)
    assert invoke("generate", base, *options, "--quantize-exclude", "mlp").exit_code == 2
