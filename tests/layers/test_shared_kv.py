"""Gemma 4 beyond the ladder of all families: shared keys and values, per-layer inputs, needed tokens, its files."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig
from zoo import GEMMA4, MULTIMODAL, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.layers import AttentionConfig, BlockConfig, MLPConfig, NormConfig, RopeConfig, SharedKVAttentionConfig

SHARED = GEMMA4["gemma4_text-per-layer-inputs"]
FIRST_SHARED = SHARED["num_hidden_layers"] - SHARED["num_kv_shared_layers"]


def model_of(config: dict[str, Any] = SHARED) -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(config)
    with torch.no_grad():
        for name, each in (*model.named_parameters(), *model.named_buffers()):
            if each.is_floating_point() and "ropes" not in name:
                each.normal_(1.0 if "norm" in name or "scalar" in name else 0.0, 0.3 if each.ndim == 1 else 0.15)
    return model


def tokens(batch: int = 2, length: int = 41) -> Tensor:
    return torch.randint(3, 131, (batch, length), generator=torch.Generator().manual_seed(0))


def tokens_seen(model: lm.CausalLM) -> list[list[int]]:
    """For each block, what its projections and its per-layer input are given, in tokens, filled by forward passes."""
    seen: list[list[int]] = [[] for _ in model.decoder.blocks]
    for found, block in zip(seen, model.decoder.blocks, strict=True):
        for part in (block.mixer, block.mlp, block.after):
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(lambda _, inputs, f=found: f.append(inputs[0][..., 0].numel()))
    return seen


@pytest.mark.parametrize("share", [0.3, 0.0], ids=["many", "few"])
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_shared_keys_and_values_run_on_needed_tokens_alone(packed: bool, share: float) -> None:
    """Loss and every gradient are as without that, the window and bounds of documents included."""
    model, ids = model_of(), tokens(1 if packed else 3)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) > share, -100)
    labels[:, 0], labels[:, 30] = -100, ids[:, 30]
    options: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 17, 41], dtype=torch.int32)} if packed else {}
    if packed:
        labels[:, 17] = -100
    results = []
    for everything in (True, False):
        model.zero_grad()
        seen = tokens_seen(model)
        loss = model(ids, labels=labels, return_logits=everything, **options).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        needed = ids.numel() if everything else int((labels != -100).sum())
        assert {*seen[0]} == {ids.numel()}
        assert all({*each} == {needed} for each in seen[FIRST_SHARED:])
    assert (needed * 8 <= 41) == (share < 0.1)  # both ways of attending
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) < 1e-5


def test_a_prefill_runs_shared_layers_on_the_last_tokens_alone() -> None:
    model, ids = model_of(), tokens(2, 23)
    seen = tokens_seen(model)
    lengths = torch.tensor([23, 14])
    mask = torch.arange(23) < lengths[:, None]
    state = model.new_state(2, 30)
    with torch.no_grad():
        last = model(ids, attention_mask=mask, state=state, token_indices=torch.tensor([22, 23 + 13])).logits[0]
        assert all({*each} == {2} for each in seen[FIRST_SHARED:])
        alone = [model(row[None, :length]).logits[0, -1] for row, length in zip(ids, lengths, strict=True)]
    assert relative_error(last, torch.stack(alone)) < 1e-5


def test_a_decoding_pass_takes_needed_tokens_too() -> None:
    model, ids = model_of(), tokens(2, 23)
    state = model.new_state(2, 30)
    with torch.no_grad():
        model(ids[:, :15], state=state)
        found = model(ids[:, 15:], state=state, token_indices=torch.tensor([3, 7, 8 + 2])).logits[0]
        wanted = model(ids).logits
    assert relative_error(found, torch.stack([wanted[0, 18], wanted[0, 22], wanted[1, 17]])) < 1e-5


class Launches(TorchDispatchMode):
    """Names of the operations that launch a kernel, or, of `decode_attention`, one or two."""

    WITHOUT = ("view", "slice", "select", "split", "transpose", "t", "expand", "squeeze", "alias", "detach", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if not any(each in name.strip("_").split("_") for each in self.WITHOUT) and name != "unsqueeze":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_decoding_step_of_a_layer_launches_no_more_than_it_has_to() -> None:
    """Meta tensors go the way of the kernels. Each norm has the addition that follows or precedes it in its kernel."""
    model = lm.from_config(SHARED, device="meta", dtype=torch.bfloat16).eval()
    state = model.new_state(1, 9)
    model(torch.zeros(1, 3, dtype=torch.long, device="meta"), state=state)
    bounds: list[int] = []
    with Launches() as launches:
        for block in model.decoder.blocks:
            block.register_forward_pre_hook(lambda *_: bounds.append(len(launches.names)))
            block.register_forward_hook(lambda *_: bounds.append(len(launches.names)))
        model(torch.zeros(1, 1, dtype=torch.long, device="meta"), state=state)
    of_layers = [launches.names[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    feed_forward = ["mm", "rms_norm_forward", "rms_norm_forward", "mm", "glu_forward", "mm", "rms_norm_forward"]
    rest = [*feed_forward, "mm", "glu_forward", "mm", "rms_norm_forward", "mul"]
    own = ["rms_norm_forward", "mm", "rope_cached", "decode_attention"]
    shared = ["rms_norm_forward", "mm", "rms_norm_forward", "rope_rotate", "decode_attention"]
    assert of_layers == [own + rest] * FIRST_SHARED + [shared + rest] * (len(of_layers) - FIRST_SHARED)


def test_only_layers_with_keys_and_values_have_slots() -> None:
    model = model_of()
    state = model.decoder.new_state(2, 10)
    assert all(x.keys is y.keys for x, y in ((state.layers[3], state.layers[1]), (state.layers[4], state.layers[2])))
    assert len({layer.keys.data_ptr() for layer in state.layers}) == FIRST_SHARED


def test_files_may_hold_unused_keys_and_values(tmp_path: Path) -> None:
    """Those of E2B and E4B do. They are written back, except by keep="model"; other unknown tensors are an error."""
    oracle = make_checkpoint(tmp_path, SHARED)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    parts = ("k_proj", "v_proj", "k_norm")
    extra = {f"model.layers.{FIRST_SHARED}.self_attn.{part}.weight": torch.ones(3) for part in parts}
    save_file({**stored, **extra}, file)
    model = lm.from_pretrained(tmp_path)
    assert relative_error(model(tokens()).logits, oracle(tokens()).logits) < 1e-5
    model.save_pretrained(tmp_path / "all")
    written = load_file(tmp_path / "all" / "model.safetensors")
    assert written.keys() == {**stored, **extra}.keys()
    assert all(torch.equal(written[each], t) for each, t in extra.items())
    model.save_pretrained(tmp_path / "alone", keep="model")
    assert load_file(tmp_path / "alone" / "model.safetensors").keys() == stored.keys()
    save_file({**stored, "model.layers.0.self_attn.v_norm.weight": torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.v_norm"):
        lm.from_pretrained(tmp_path)


def test_scalars_of_layers_are_stored_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, SHARED, dtype=torch.bfloat16)
    model = lm.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "out")
    ours, theirs = (load_file(at / "model.safetensors") for at in (tmp_path / "out", tmp_path))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == t.dtype and torch.equal(ours[name], t) for name, t in theirs.items())
    assert not model.decoder.blocks[0].layer_scalar.requires_grad


@pytest.mark.parametrize("name", GEMMA4)
def test_config_as_transformers_writes_it(name: str, tmp_path: Path) -> None:
    """With heads of layers in per_layer_config, and none of the fields for full attention."""
    made = AutoConfig.for_model(**{k: v for k, v in copy.deepcopy(GEMMA4[name]).items() if v is not None})
    made.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "per_layer_config" in written and "global_head_dim" not in written
    assert lm.from_config(written, device="meta").config == lm.from_config(GEMMA4[name], device="meta").config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 of 5 layers leaves no layer with keys"),
        ({"num_kv_shared_layers": -1}, "'num_kv_shared_layers' must be a whole number"),
        ({"global_head_dim": 15}, "global_head_dim.*must be even"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 4}, "num_key_value_heads must divide"),
        ({"vocab_size_per_layer_input": 130}, "vocab_size_per_layer_input 130 is below vocab_size"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not implemented"),
        ({"enable_moe_block": True}, "enable_moe_block: field 'num_experts' is missing"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 4},
            "top_k_experts 3",
        ),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config: must have the same head_dim"),
        ({"per_layer_config": {str(i): {"head_dim": 16} for i in (0, 2, 4)}}, "global_head_dim = 24 contradicts"),
        ({"rope_theta": 5.0}, "rope_theta = 5.0 is not implemented"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "factor": 0}}},
            "factor",
        ),
    ],
)
def test_faults_of_a_config_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**SHARED, **changed}, device="meta")
    with pytest.raises(ConfigError, match=message):
        lm.from_config({**MULTIMODAL["gemma4"], "text_config": {**SHARED, **changed}}, device="meta")


def test_embeddings_in_place_of_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=r"inputs_embeds: .* give input_ids"):
        model_of()(inputs_embeds=torch.zeros(1, 3, SHARED["hidden_size"]))


@pytest.mark.parametrize("qk_norm", [None, "projection"])
def test_sharing_by_hand(qk_norm: str | None) -> None:
    """Of a layer that does not hand its keys and values on."""
    attention: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": RopeConfig(8)}
    norm = NormConfig(1e-6)
    if qk_norm:
        with pytest.raises(ConfigError, match="shares_kv: is not implemented"):
            SharedKVAttentionConfig(**attention, shares_kv=True, kv_from=0)
        return
    mixers = (AttentionConfig(**attention), SharedKVAttentionConfig(**attention, kv_from=0))
    blocks = tuple(BlockConfig(mixer, MLPConfig(16), norm) for mixer in mixers)
    model = lm.CausalLM(lm.DecoderConfig(50, 32, blocks, norm))
    with pytest.raises(InputError, match="kv_from: layer 0 shares no keys and values"):
        model(tokens(1, 5) % 50)
