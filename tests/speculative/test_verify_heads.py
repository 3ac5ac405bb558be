"""`ligermodels verify HEADS MODEL`: each kind of mistake in the files of heads is named first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from named_exports import export_named
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import ligermodels as lm
from ligermodels import ops
from ligermodels.cli import app
from ligermodels.speculative import verify_blocks
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.eagle3_head import TwoStreamAttention
from ligermodels.speculative.markov_head import ConfidenceHead, MarkovHead
from ligermodels.speculative.verify import verify_heads

MODEL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA4 = {**MODEL, "model_type": "gemma4_text", "num_hidden_layers": 2, "global_head_dim": 8,
          "layer_types": ["full_attention"] * 2, "final_logit_softcapping": 1.5, "hidden_size_per_layer_input": 0,
          "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
FEW = DraftVocabulary(torch.arange(1, 61, 3), 61)
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}  # fmt: skip


def base(**changes: Any) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config({**MODEL, **changes}, dtype="float32")


@torch.no_grad()
def stirred(model: Any) -> Any:
    for parameter in model.head_parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def eagle(folder: Path, profile: str = "speculators", **options: Any) -> Path:
    export_named(stirred(lm.Eagle3Model.from_base(base(), 3, **options)), folder, profile, "x")
    return folder


@pytest.mark.parametrize(("profile", "options"), [
    ("speculators", {"layer": "qwen3", "norm_before_residual": True, "norm_before_fc": True}),
    ("specforge", {"vocabulary": FEW, "fc_norm": True, "norm_output": True, "lm_head": "shared"}),
    ("deepspec", {"layer": "qwen3", "boundaries": (1, 2, 4, 6, 8)}),
])  # fmt: skip
def test_right_heads_of_eagle3_pass(profile: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = verify_heads(eagle(tmp_path, profile, **options), MODEL)
    assert report.passed and report.kind == "EAGLE-3" and all(check.passed for check in report.checks)
    names = ["config.json", "layer ids", "norms", "vocabulary tables", "shapes", "values", "logits"]
    assert [check.name for check in report.checks] == names


BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dflash": (lm.DFlashModel, {}),
    "bare": (lm.DSparkModel, {"markov_rank": 0, "confidence": False}),
    "vanilla": (lm.DSparkModel, {"markov_rank": 5}),
    "gated": (lm.DSparkModel, {"markov_rank": 5, "markov_head_type": "gated", "confidence_with_markov": False}),
    "rnn": (lm.DSparkModel, {"markov_rank": 5, "markov_head_type": "rnn"}),
}


def blocks(folder: Path, kind: str, profile: str, **options: Any) -> Path:
    model_class, own = BLOCKS[kind]
    number = {} if "layers" in options else {"num_layers": 2}
    options = {"boundaries": (0, 3, 8), **number, **own, **options}
    export_named(stirred(model_class.from_base(base(), 4, **options)), folder, profile, "x")
    return folder


@pytest.mark.parametrize(("kind", "profile", "options"), [
    ("dflash", "speculators", {"vocabulary": FEW}), ("dflash", "z-lab", {}), ("bare", "deepspec", {}),
    ("vanilla", "speculators", {"vocabulary": FEW}), ("gated", "deepspec", {}), ("rnn", "speculators", {}),
    ("vanilla", "deepspec", {"layers": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}}),
    ("bare", "deepspec", {"layers": GEMMA4}),
    ("rnn", "deepspec", {"layers": {**MODEL, "model_type": "qwen3", "num_hidden_layers": 1, "attention_bias": True,
                                    "rope_scaling": LLAMA_3}}),
])  # fmt: skip
def test_right_block_heads_pass(kind: str, profile: str, options: dict[str, Any], tmp_path: Path) -> None:
    report = verify_heads(blocks(tmp_path, kind, profile, **options), MODEL)
    assert report.passed and report.kind == BLOCKS[kind][0].kind, report.first_mismatch
    found = {check.name: check.found for check in report.checks}
    assert list(found) == ["config.json", "layer ids", "norms", "vocabulary tables", "Markov and confidence heads",
                           "shapes", "values", "logits"]  # fmt: skip
    field = {"speculators": "aux_hidden_state_layer_ids", "deepspec": "target_layer_ids"}.get(profile, "dflash_config.")
    assert found["layer ids"].startswith(f"boundaries [0, 3, 8], layer ids [-1, 2, 7] ({field}")
    named = [name for name in ("Markov", "confidence") if name in found["logits"]]
    assert named == {"dflash": [], "bare": []}.get(kind, ["Markov", "confidence"])


def test_a_new_block_head_passes(tmp_path: Path) -> None:
    """Also with a tensor of the model that speculators stores, which is no tensor of the head."""
    lm.DSparkModel.from_base(base(), 3, num_layers=1, markov_rank=4).export(tmp_path, base_model="x")
    tensors = load_file(tmp_path / "model.safetensors") | {"verifier_norm.weight": torch.zeros(24)}
    save_file(tensors, tmp_path / "model.safetensors")
    report = verify_heads(tmp_path, MODEL)
    assert report.passed, report.first_mismatch


def test_right_medusa_and_mtp_heads_pass(tmp_path: Path) -> None:
    stirred(lm.MedusaModel.from_base(base(), 3, 2)).save_pretrained(tmp_path / "medusa")
    stirred(lm.MedusaModel.from_base(base(), 2, 1, "shared")).export(tmp_path / "tgi", "tgi-v2", base_model="x")
    stirred(lm.MTPModel.from_base(base(), num_layers=2)).save_head(tmp_path / "mtp")
    stirred(lm.MTPModel.from_base(base(model_type="gemma2"))).save_pretrained(tmp_path / "whole")
    for name, kind, config in (
        ("medusa", "Medusa", MODEL), ("tgi", "Medusa", MODEL), ("mtp", "MTP", MODEL),
        ("whole", "MTP", {**MODEL, "model_type": "gemma2"}),
    ):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):  # whatever torch's default is
            torch.set_default_dtype(dtype)
            try:
                report = verify_heads(tmp_path / name, config)
            finally:
                torch.set_default_dtype(torch.float32)
            assert report.passed and report.kind == kind, report.checks


def eagle_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]  # boundaries in place of layer ids


def ids_in_place_of_offsets(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = FEW.tokens.clone()


def one_plus(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["norm.weight"] = torch.full((24,), 0.01)


def renamed(old: str, new: str | None) -> Callable[..., None]:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(old)
        if new is not None:
            tensors[new] = tensor

    return change


def changed(**fields: Any) -> Callable[..., None]:
    return lambda config, tensors: config.update(fields)


def tensor(name: str, value: Tensor) -> Callable[..., None]:
    return lambda config, tensors: tensors.update({name: value})


@pytest.mark.parametrize(("change", "check", "message"), [
    (changed(vocab_size=60), "config.json", "vocab_size: is 60, and of the model 61"),
    (changed(num_target_layers=9), "config.json", "num_target_layers: is 9, and of the model 8"),
    (eagle_ids, "layer ids", "eagle_aux_hidden_state_layer_ids is [2, 4, 5] but eagle_config.eagle_aux_hidden_state_"
                             "layer_ids is [3, 5, 6]"),
    (changed(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), "layer ids", "boundary [9], where the model has 8 layers"),
    (changed(eagle_aux_hidden_state_layer_ids=[2, 4], eagle_config={}), "layer ids",
     "fc.weight: reads 72 channels, where 2 layers have 48"),
    (changed(fc_norm=True), "norms", "fc_norm: is set, and the files have no fc_norm.0.weight"),
    (renamed("norm.weight", "input_norm.weight"), "norms", "norm_before_fc: is not set, but the files have input_norm"),
    (ids_in_place_of_offsets, "vocabulary tables", "d2t: begins with [1, 4, 7, 10], ids of tokens; it must be offsets"),
    (tensor("t2d", torch.zeros(61, dtype=torch.bool)), "vocabulary tables", "t2d: marks other tokens than d2t"),
    (renamed("d2t", None), "vocabulary tables", "d2t: is missing, where draft_vocab_size is 20 of 61 tokens"),
    (renamed("norm.weight", None), "shapes", "norm.weight"),
    (tensor("midlayer.mlp.up_proj.weight", torch.ones(41, 24)), "shapes", "mlp.up_proj.weight [41, 24] instead of"),
    (one_plus, "values", "norm.weight: its mean is 0.010; this head multiplies by the weight, not by 1 + weight"),
    (tensor("fc.weight", torch.full((24, 72), torch.nan)), "values", "fc.weight: has values that are infinite or not"),
], ids=lambda value: value if isinstance(value, str) else "changed")  # fmt: skip
def test_a_mistake_is_the_first_mismatch(change: Any, check: str, message: str, tmp_path: Path) -> None:
    first_mismatch(eagle(tmp_path, "specforge", vocabulary=FEW, boundaries=(2, 4, 5)), change, check, message)


def first_mismatch(folder: Path, change: Any, check: str, message: str) -> None:
    """The change of the files of a head is the first mismatch, of this check; the checks after it are left out."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    report = verify_heads(folder, MODEL)
    mismatch = report.first_mismatch
    assert mismatch is not None and not report.passed and mismatch.name == check and message in mismatch.found, mismatch
    after = [each.passed for each in report.checks][report.checks.index(mismatch) + 1 :]
    assert after == [None] * len(after)


@pytest.mark.parametrize(("fields", "message"), [
    ({"num_heads": 2}, "num_heads: config.json says 2 instead of 3"),
    ({"num_hidden_layers": 1}, "num_hidden_layers: config.json says 1 instead of 2"),
    ({"vocab_size": 60}, "vocab_size: config.json says 60 instead of 61"),
    ({"medusa_fc_bias": None}, "medusa_fc_bias: is False in config.json, and the ResBlocks have biases"),
], ids=lambda value: value if isinstance(value, str) else "changed")  # fmt: skip
def test_a_mistake_in_medusa_heads_for_vllm_is_the_first_mismatch(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stirred(lm.MedusaModel.from_base(base(), 3, 2)).save_pretrained(tmp_path)
    first_mismatch(tmp_path, changed(**fields), "heads", message)


def nested(name: str, **fields: Any) -> Callable[..., None]:
    return lambda config, tensors: config[name].update(fields)


def proposing(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 5


MARKOV = "Markov and confidence heads"
W1, W2, CONFIDENCE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"


@pytest.mark.parametrize(("kind", "profile", "change", "check", "message"), [
    ("vanilla", "deepspec", changed(vocab_size=62), "config.json", "vocab_size: is 62, and of the model 61"),
    ("vanilla", "deepspec", changed(num_target_layers=9), "config.json", "num_target_layers: is 9, and of the model 8"),
    ("vanilla", "speculators", nested("transformer_layer_config", model_type="gemma3_text"), "config.json",
     "model_type must be one of qwen3, gemma4_text"),
    ("vanilla", "speculators", changed(sample_from_anchor=False), "config.json", "sample_from_anchor: False is not im"),
    ("dflash", "speculators", changed(sample_from_anchor=True), "config.json", "sample_from_anchor: True is not impl"),
    ("vanilla", "speculators", nested("speculators_config", algorithm="dflash"), "config.json",
     "speculators_config.algorithm: is 'dflash', and the head is of 'dspark'"),
    ("vanilla", "speculators", changed(speculators_config=[]), "config.json", "speculators_config"),
    ("vanilla", "speculators", proposing, "config.json",
     "speculative_tokens: is 5, but a block of 4 slots proposes 4"),
    ("dflash", "z-lab", nested("dflash_config", block_size=7), "config.json",
     "block_size: is 4, but dflash_config.block_size is 7"),
    ("dflash", "z-lab", changed(mask_token_id=3), "config.json",
     "mask_token_id: is 3, but dflash_config.mask_token_id is 60"),
    ("dflash", "z-lab", changed(target_layer_ids=[0, 3, 7]), "layer ids",
     "dflash_config.target_layer_ids is [0, 3, 8] but target_layer_ids is [1, 4, 8]"),
    ("dflash", "z-lab", nested("dflash_config", target_layer_ids=[-1, 2, 8]), "layer ids", "boundary [9], where"),
    ("vanilla", "deepspec", changed(aux_hidden_state_layer_ids=[-1, 2, 7]), "config.json",
     "boundaries: must be different layers in ascending order, got (-1, 2, 7)"),
    ("vanilla", "deepspec", changed(aux_hidden_state_layer_ids=[0, 2, 7]), "layer ids",
     "aux_hidden_state_layer_ids is [0, 2, 7] but target_layer_ids is [0, 3, 8]"),
    ("vanilla", "speculators", changed(aux_hidden_state_layer_ids=[0, 3]), "layer ids",
     "fc.weight: reads 72 channels, where 2 layers have 48"),
    ("dflash", "z-lab", renamed("hidden_norm.weight", "input_norm.weight"), "norms", "hidden_norm.weight: is missing"),
    ("vanilla", "deepspec", renamed("layers.1.self_attn.k_norm.weight", None), "norms", "layers.1.self_attn.k_norm"),
    ("vanilla", "deepspec", tensor("layers.0.pre_feedforward_layernorm.weight", torch.ones(24)), "norms",
     "layers.0.pre_feedforward_layernorm.weight: is no norm of a head with 2 layers"),
    ("vanilla", "speculators", changed(draft_vocab_size=20), "vocabulary tables", "d2t: is missing, where draft_vocab"),
    ("vanilla", "reduced", ids_in_place_of_offsets, "vocabulary tables", "d2t: begins with [1, 4, 7, 10], ids of"),
    ("vanilla", "reduced", renamed("lm_head.weight", None), "vocabulary tables", "lm_head.weight: is missing"),
    ("vanilla", "deepspec", renamed(W1, None), MARKOV, f"{W1}: is missing, where config.json has markov_rank 5"),
    ("vanilla", "deepspec", tensor(W2, torch.ones(61, 4)), MARKOV, f"{W2}: [61, 4], not [61, 5]"),
    ("vanilla", "deepspec", changed(markov_rank=0, enable_confidence_head=False), MARKOV,
     f"{CONFIDENCE[:-6]}bias: is in the files, where config.json has markov_rank 0"),
    ("vanilla", "deepspec", changed(confidence_head_with_markov=False), MARKOV, f"{CONFIDENCE}: [1, 29], not [1, 24]"),
    ("vanilla", "deepspec", changed(markov_head_type="rnn"), MARKOV, "markov_head.joint_proj.weight: is missing"),
    ("gated", "deepspec", changed(markov_head_type="vanilla"), MARKOV, "gate_proj.bias: is in the files, where"),
    ("dflash", "z-lab", tensor(W1, torch.ones(61, 5)), MARKOV, f"{W1}: is in the files"),
    ("dflash", "z-lab", tensor("layers.2.mlp.up_proj.weight", torch.ones(40, 24)), "shapes", "layers.2.mlp.up_proj"),
    ("vanilla", "speculators", tensor("lm_head.weight", torch.ones(60, 24)), "shapes", "lm_head.weight: [60, 24], not"),
    ("rnn", "deepspec", tensor("norm.weight", torch.full((24,), 0.01)), "values", "norm.weight: its mean is 0.010"),
    ("rnn", "deepspec", tensor("fc.weight", torch.full((24, 72), torch.inf)), "values", "fc.weight: has values that"),
], ids=lambda value: value if isinstance(value, str) else "changed")  # fmt: skip
def test_a_mistake_in_a_block_head_is_the_first_mismatch(
    kind: str, profile: str, change: Any, check: str, message: str, tmp_path: Path
) -> None:
    options = {"vocabulary": FEW} if profile == "reduced" else {}
    blocks(tmp_path, kind, "speculators" if options else profile, **options)
    first_mismatch(tmp_path, change, check, message)


def test_a_missing_sample_from_anchor_is_said(tmp_path: Path) -> None:
    folder = blocks(tmp_path, "vanilla", "speculators")
    config = json.loads((folder / "config.json").read_text())
    del config["sample_from_anchor"]
    (folder / "config.json").write_text(json.dumps(config))
    report = verify_heads(folder, MODEL)
    assert report.passed and report.checks[0].found.endswith("sample_from_anchor is not in config.json, and vLLM then "
                                                             "takes it for false")  # fmt: skip


def causal(*args: Any, **options: Any) -> Tensor:
    return ops.block_context_attention(*args, **{**options, "causal": True})


def one_later(*args: Any, **options: Any) -> Tensor:
    """A context up to the anchor, inclusive."""
    return ops.block_context_attention(*args[:5], args[5] + 1, **options)


def of_other_tokens(self: Any, embeds: Tensor, hidden: Tensor) -> Tensor:
    return forward(self, embeds.roll(1, dims=1), hidden)


def features_reversed(self: Any, hidden: Tensor, embeds: Any) -> Tensor:
    return confidence(self, hidden.flip(-1), embeds)


forward, confidence = MarkovHead.forward, ConfidenceHead.forward


@pytest.mark.parametrize(("target", "name", "replacement", "place"), [
    (verify_blocks, "block_context_attention", causal, "hidden states"),
    (verify_blocks, "block_context_attention", one_later, "hidden states"),
    (MarkovHead, "forward", of_other_tokens, "logits with the Markov head"),
    (ConfidenceHead, "forward", features_reversed, "confidence"),
])  # fmt: skip
def test_another_computation_of_a_block_head_is_a_mismatch_of_the_logits(
    target: Any, name: str, replacement: Any, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = blocks(tmp_path, "rnn", "deepspec")
    monkeypatch.setattr(target, name, replacement)
    mismatch = verify_heads(folder, MODEL).first_mismatch
    assert mismatch is not None and mismatch.name == "logits", mismatch
    assert mismatch.found.startswith(f"{place}: relative error")


def test_another_computation_is_a_mismatch_of_the_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas are independent of the head's code: here it takes features and embeddings in the other order."""
    folder, forward = eagle(tmp_path), TwoStreamAttention.forward
    assert verify_heads(folder, MODEL).passed

    def swapped(self: Any, x: Tensor, *args: Any) -> Tensor:
        return forward(self, torch.cat([x[..., 24:], x[..., :24]], dim=-1), *args)

    monkeypatch.setattr(TwoStreamAttention, "forward", swapped)
    mismatch = verify_heads(folder, MODEL).first_mismatch
    assert mismatch is not None and mismatch.name == "logits" and mismatch.found.startswith("step 0: relative error")


def test_scaled_rope_in_the_layer(tmp_path: Path) -> None:
    layer = {**MODEL, "num_hidden_layers": 1, "rope_scaling": LLAMA_3, "rope_theta": 5e5}
    assert verify_heads(eagle(tmp_path, layer=layer), MODEL).passed


def test_the_command(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", eagle(tmp_path / "heads")
    base().save_pretrained(model)
    result = CliRunner().invoke(app, ["verify", str(folder), str(model)])
    assert result.exit_code == 0 and f"Match: the EAGLE-3 heads in {folder} fit {model}." in result.output
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "fc_norm": True}))
    result = CliRunner().invoke(app, ["verify", str(folder), str(model)])
    assert result.exit_code == 1 and "First mismatch: norms: fc_norm: is set, and" in result.output
    found = json.loads(CliRunner().invoke(app, ["verify", str(folder), str(model), "--json"]).stdout)
    assert not found["passed"] and found["first_mismatch"] == "norms" and found["checks"][-1]["passed"] is None
    for option in (["--float8"], ["--tokens", "9"], ["--dtype", "float32"], ["--quantize-head", "int4"]):
        assert CliRunner().invoke(app, ["verify", str(folder), str(model), *option]).exit_code == 2
