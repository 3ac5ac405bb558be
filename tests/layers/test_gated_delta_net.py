"""Gated DeltaNet in models (long texts: Kimi Delta Attention too): what stays in fp32, bad configs."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from two_ranks import in_two_ranks
from zoo import BASE, CONFIGS, HYBRIDS, KIMI, OF_EACH_KIND, gradients_of, make_checkpoint, relative_error, stored_as

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.layers import FullPrecision

TOLERANCE = 1e-5
QWEN = CONFIGS["qwen3_5_text"]
KEPT = ("A_log", "dt_bias", "linear_attn.norm.weight")
Pair = tuple[Path, PreTrainedModel, lm.CausalLM]


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


LONG = {*OF_EACH_KIND, "olmo_hybrid-rope-and-other-sizes", "qwen3_5_text-other-sizes", "qwen3_next"}
"""Layers of all sizes; other configs name the same layers, or have other feed-forward layers between them."""


@pytest.fixture(scope="module", params=sorted((HYBRIDS | KIMI) & LONG))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    config = {**CONFIGS[request.param], "max_position_embeddings": 512}
    oracle = make_checkpoint(folder, config)
    return folder, oracle, lm.from_pretrained(folder)


def test_texts_longer_than_a_chunk(pair: Pair) -> None:
    _, oracle, model = pair
    ids = tokens(2, 150)
    labels = ids.masked_fill(ids < 30, -100)
    oracle.zero_grad()
    model.zero_grad()
    wanted, output = oracle(ids, labels=labels), model(ids, labels=labels, return_logits=True)
    wanted.loss.backward()
    output.loss.backward()
    assert relative_error(output.logits, wanted.logits) < TOLERANCE
    assert relative_error(output.loss, wanted.loss) < TOLERANCE
    ours = stored_as(oracle, gradients_of(model))
    theirs = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    errors = {name: relative_error(ours[name], theirs[name]) for name in theirs}
    assert max(errors.values()) < 3 * TOLERANCE, errors


def test_packed_texts_longer_than_a_chunk(pair: Pair) -> None:
    """Documents end within chunks and at their ends; gradients do not cross either."""
    model, lengths = pair[2], [64, 3, 70, 1, 54, 130]
    ids = tokens(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    results = []
    for logits in (
        model(ids, cu_seqlens=bounds).logits,
        torch.cat([model(ids[:, start:end]).logits for start, end in pairwise(bounds.tolist())], dim=1),
    ):
        model.zero_grad()
        logits.logsumexp(-1).square().mean().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    errors = [relative_error(found, wanted) for found, wanted in zip(*results, strict=True) if wanted is not None]
    assert max(errors) < TOLERANCE


def test_greedy_tokens_of_long_padded_prompts(pair: Pair) -> None:
    _, oracle, model = pair
    ids = tokens(3, 90)
    mask = torch.ones_like(ids)
    mask[1, :20] = mask[2, :88] = 0
    ids[mask == 0] = 0
    wanted = oracle.generate(
        ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    options = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), wanted)
    medusa = lm.MedusaModel.from_base(model, num_heads=3)
    assert torch.equal(medusa.generate(ids, attention_mask=mask, **options), wanted)


# -- what stays in fp32 ------------------------------------------------------------------------------------------------


def full(model: torch.nn.Module) -> dict[str, Tensor]:
    kept = {name for name, module in model.named_modules() if isinstance(module, FullPrecision)}
    return {name: p.detach().clone() for name, p in model.named_parameters() if name.rpartition(".")[0] in kept}


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_decays_stay_in_full_precision_and_go_out_as_they_came(kept: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "exact", QWEN)
    exact = load_file(tmp_path / "exact" / "model.safetensors")
    stored = {key: t.to(kept if key.endswith(KEPT) else torch.bfloat16) for key, t in exact.items()}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**QWEN, "dtype": "bfloat16"}))

    model = lm.from_pretrained(folder)
    before = full(model)
    assert model.dtype == torch.bfloat16 and len(before) == 9
    model = model.to(torch.bfloat16).float().bfloat16()
    for each in (before, full(model)):
        assert all(t.dtype == torch.float32 for t in each.values())
        assert all(torch.equal(each[name], t) for name, t in before.items())
    key = "model.layers.1.linear_attn.A_log"
    assert torch.equal(before["decoder.blocks.1.mixer.decay.log_rate"], stored[key].float())
    for keep in ("model", "all"):
        model.save_pretrained(tmp_path / f"out-{keep}", keep=keep)
        after = load_file(tmp_path / f"out-{keep}" / "model.safetensors")
        assert after.keys() == stored.keys()
        assert all(after[key].dtype == t.dtype and torch.equal(after[key], t) for key, t in stored.items())
    state = model.hf_state_dict()
    assert all(state[key].dtype == t.dtype for key, t in stored.items())
    wide = lm.from_pretrained(folder, dtype=torch.float32)
    assert all(t.dtype == torch.float32 for t in wide.hf_state_dict().values())

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    native = lm.from_transformers(hf)
    assert all(t.dtype == torch.float32 for t in full(native).values())
    assert all(t.dtype == torch.bfloat16 for t in native.hf_state_dict().values())
    assert all(t.dtype == torch.float64 for t in full(native.double()).values())
    assert {t.dtype for t in full(lm.from_config(QWEN, dtype=torch.bfloat16)).values()} == {torch.float32}


def sharded(rank: int, folder: Path, mesh: Any) -> None:
    def make() -> lm.CausalLM:
        torch.manual_seed(0)
        return lm.from_config(QWEN, dtype=torch.bfloat16)

    plain, model = make(), make()
    for block in model.decoder.blocks:
        if kept := [module for module in block.modules() if isinstance(module, FullPrecision)]:
            fully_shard(kept, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = tokens(2, 13)
    for each in (plain, model):
        loss = each(ids, labels=ids).loss
        loss.backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert found[name].dtype == parameter.dtype
        torch.testing.assert_close(found[name], parameter.grad, rtol=0.02, atol=1e-4)
    model.save_pretrained(folder / "out")
    if rank == 0:
        plain.save_pretrained(folder / "plain")
        ours, theirs = (load_file(folder / each / "model.safetensors") for each in ("out", "plain"))
        assert all(torch.equal(ours[key], t) and ours[key].dtype == t.dtype for key, t in theirs.items())


def test_fsdp_with_a_group_of_full_precision(tmp_path: Path) -> None:
    in_two_ranks(sharded, tmp_path)


# -- checkpoints and configs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["model", "model.language_model"])
def test_text_checkpoints_with_a_drafting_head(prefix: str, tmp_path: Path) -> None:
    """`mtp.*` is no part of the model; it is written back, except by keep="model". Names may be multimodal ones."""
    oracle = make_checkpoint(tmp_path / "model", QWEN)
    file = tmp_path / "model" / "model.safetensors"
    tensors = {key.replace("model", prefix, 1): t for key, t in load_file(file).items()}
    tensors |= {"mtp.fc.weight": torch.randn(60, 120), "mtp.norm.weight": torch.randn(60)}
    save_file(tensors, file, metadata={"format": "pt"})
    model = lm.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        assert relative_error(model(tokens(2, 41)).logits, oracle(tokens(2, 41)).logits) < TOLERANCE
    model.save_pretrained(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == tensors.keys() and all(torch.equal(after[key], t) for key, t in tensors.items())
    model.save_pretrained(tmp_path / "alone", keep="model")
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert alone.keys() == {key for key in tensors if not key.startswith("mtp.")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": 4}, "linear_num_key_heads 4 does not divide linear_num_value_heads 6"),
        ({"linear_key_head_dim": 0}, "field 'linear_key_head_dim' must be a whole number above 0"),
        ({"linear_conv_kernel_dim": "4"}, "field 'linear_conv_kernel_dim' must be a whole number"),
        ({"attn_output_gate": False}, "attn_output_gate = False is not implemented"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not implemented"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented"),
        ({"layer_types": ["sliding_attention"] * 4}, "field 'layer_types' must be a list of num_hidden_layers = 4"),
        ({"full_attention_interval": 0}, "field 'full_attention_interval' must be"),
        ({"num_experts": 5}, "num_experts = 5 is not implemented for model_type 'qwen3_5_text'"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**QWEN, **change})
