"""Random models of transformers, the oracles, and how ours are compared with them."""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import transformers
import zoo_classes  # noqa: F401 - registers classes of its own
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Module = TypeVar("Module", bound=torch.nn.Module)


def auto_class(config: PreTrainedConfig) -> type:
    """The class of transformers that makes the model of `config`."""
    multimodal = hasattr(config, "text_config") or hasattr(config, "thinker_config")
    return AutoModelForMultimodalLM if multimodal else AutoModelForCausalLM


def thinker(oracle: PreTrainedModel) -> PreTrainedModel:
    """Of a model that speaks the one that reads and writes text; any other model itself."""
    return plain(oracle.thinker) if hasattr(oracle, "thinker") else oracle


BUFFERS = ("correction_bias", "expert_bias", "layer_scalar")
"""Ends of the names of buffers that checkpoints hold."""
NULLS = ("sliding_window", "q_lora_rank", "mamba_conv_bias", "moe_renormalize")
"""Fields whose null does not mean their default."""


def skip_without_oracle(config: dict[str, Any]) -> None:
    """Skip the test if the installed transformers has no such model, or computes it wrongly."""
    if config["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have {config['model_type']}")
    if config.get("mamba_n_groups", 1) > 1 and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} normalises all groups of Mamba2 as one")
    if "sliding_window_size" in config and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} reads sliding_window_size as sliding_window")


def make_checkpoint(folder: Path, config: dict[str, Any], *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Save a random checkpoint whose config.json is `config` to the letter; returns the oracle, attention eager."""
    skip_without_oracle(config)
    # transformers writes into what it is given.
    fields = {k: v for k, v in copy.deepcopy(config).items() if v is not None or k in NULLS}
    if "rotary_dim" in fields:  # which transformers before 5.18 or so does not read
        fields["partial_rotary_factor"] = fields["rotary_dim"] / fields["head_dim"]
    oracle_config = AutoConfig.for_model(**fields)
    torch.manual_seed(sum(map(ord, json.dumps(config))) % 1000)
    if config["model_type"] == "llama4" and not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        # transformers 5.24 reads it of the output of the language model, with or without images.
        MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]
    make = auto_class(oracle_config).from_config
    oracle = plain(make(oracle_config, attn_implementation="eager", dtype=torch.float32))
    randomize(oracle)
    oracle.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] == "qwen2_5_omni":
        torch.save({}, folder / "spk_dict.pt")  # the voices, without which transformers does not open it
    return oracle


@torch.no_grad()
def randomize(oracle: PreTrainedModel) -> None:
    """Fill all that a checkpoint holds, biases and norms too: at initial values a mistake in them would not show."""
    from_zero = "gemma" in oracle.config.model_type and "gemma4" not in oracle.config.model_type
    for name, parameter in oracle.named_parameters():
        mean = 1.0 if "norm" in name and not from_zero else 0.0
        mean = -2.0 if "A_log" in name else mean  # states that remember
        parameter.normal_(mean, 0.3 if parameter.ndim == 1 else 0.15)
    for name, buffer in oracle.named_buffers():
        if name.endswith(BUFFERS):
            buffer.normal_(1.0 if name.endswith("layer_scalar") else 0.0, 0.3)


def plain(oracle: PreTrainedModel) -> PreTrainedModel:
    """An oracle in eval mode whose experts, if any, are computed one by one: its default asks for round sizes."""
    if {"num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk"} & {
        *oracle.config.get_text_config().to_dict()
    }:
        oracle.set_experts_implementation("eager")
    return as_configured(oracle, oracle.config).eval()


def as_configured(oracle: Module, config: PreTrainedConfig) -> Module:
    """An oracle of gpt-oss's experts with the numbers of its config, for which older transformers have constants."""
    for module in oracle.modules():
        for name in ("limit", "alpha"):
            if hasattr(config, f"swiglu_{name}") and hasattr(module, name):
                setattr(module, name, getattr(config, f"swiglu_{name}"))
    return oracle


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """max |found - wanted| / max |wanted|."""
    assert found.shape == wanted.shape
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max())


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """The gradients of a native model's parameters, in the layout of its checkpoint."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    weight_map = model.export_spec.weight_map
    mappings = [each for each in weight_map.mappings if each.target in found]  # those of buffers are left out
    return {each.name: each.read() for each in replace(weight_map, mappings=mappings).export(found)}


def renamed(name: str) -> str:
    """The name that transformers has for a tensor of a published checkpoint; only those of Hy3, Granite 4,
    Nemotron-H, OLMo Hybrid and Lara differ from the oracle's."""
    parts = {".mlp.router.gate.": ".mlp.gate.", ".mlp.shared_mlp.": ".mlp.shared_experts."}
    parts |= {"transformer.h.": "model.layers.", "transformer.wte.": "model.embed_tokens."}
    parts |= {"transformer.ln_f.": "model.norm.", ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm."}
    parts |= {
        f".mlp.c_{part}.": f".mlp.{own}_proj." for part, own in (("fc_0", "gate"), ("fc_1", "up"), ("proj", "down"))
    }
    parts |= {".attn.attention.out_proj.": ".self_attn.o_proj.", ".attn.attention.": ".self_attn."}
    parts |= {f".attention.{part}_layernorm.": f".self_attn.{part[0]}_norm." for part in ("query", "key")}
    parts[".block_sparse_moe.input_linear.weight"] = ".block_sparse_moe.experts.gate_up_proj"
    parts[".block_sparse_moe.output_linear.weight"] = ".block_sparse_moe.experts.down_proj"
    parts[".block_sparse_moe.router.layer."] = ".block_sparse_moe.router."
    parts["backbone."] = "model."
    parts.update({f".self_attn.{own}": f".self_attn.forget_gate.{own}" for own in ("f_a", "f_b", "A_log", "dt_bias")})
    parts["model.word_embeddings."], parts[".attention.dense."] = "model.embed_tokens.", ".self_attn.o_proj."
    parts[".mlp.gate.expert_bias"] = ".mlp.gate.e_score_correction_bias"
    gates = ("f_proj", "A_log", "dt_bias")
    parts.update({f".attention.{own}": f".self_attn.forget_gate.{own}" for own in gates})
    parts[".attention."] = ".self_attn."
    parts[".self_attn.gate_proj."] = ".self_attn.g_proj."
    parts[".mlp.experts.e_score_correction_bias"] = ".mlp.gate.e_score_correction_bias"
    parts[".mlp.shared_expert."] = ".mlp.shared_experts."
    parts[".linear_attn.out_norm."] = ".linear_attn.norm."
    parts[".attention_layer_norm."] = ".input_layernorm."
    parts[".feedforward_layer_norm."] = ".post_attention_layernorm."
    parts[".attention_sink_bias"] = ".sinks"
    parts[".mlp.expert_bias"] = ".mlp.e_score_correction_bias"
    for published, own in parts.items():
        name = name.replace(published, own)
    return name


def kept_tensors(oracle: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Its parameters, and the buffers that checkpoints hold."""
    buffers = {name: b for name, b in oracle.named_buffers() if name.endswith(BUFFERS)}
    return {**dict(oracle.named_parameters()), **buffers}


def stored_as(
    oracle: PreTrainedModel | Mapping[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors in the layout of files, in that of the oracle, or of its tensors: it keeps all experts of a layer as one
    tensor."""
    own = oracle if isinstance(oracle, Mapping) else kept_tensors(oracle)
    per_expert = (".experts.", "block_sparse_moe")
    tensors = {name if name in own else renamed(name): t for name, t in tensors.items()}
    elsewhere = (*per_expert, "_conv1d.", ".linear_attn.in_proj.")
    found = {name: t for name, t in tensors.items() if name in own or not any(part in name for part in elsewhere)}
    for name, parameter in own.items():
        if name in found:
            continue
        layer, _, part = name.partition(".mlp.")
        at = name.rpartition(".")[0]
        if (fused := re.sub(r"\.[qkv]_proj\.", ".query_key_value.", name)) in found:
            parts = [fused.replace("query_key_value", f"{part}_proj") for part in "qkv"]
            found |= zip(parts, found.pop(fused).split([len(own[part]) for part in parts]), strict=True)
            continue
        if f"{layer.removesuffix('.conv1d.weight')}.q_conv1d.weight" in tensors:
            thirds = [tensors[name.replace(".conv1d.", f".{third}_conv1d.")] for third in "qkv"]
            found[name] = torch.cat(thirds)
            continue
        fused = f"{at.rpartition('.')[0]}.in_proj.weight"
        if fused in tensors:
            parts = [f"{at.rpartition('.')[0]}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
            found |= zip(parts, tensors[fused].split([own[part].shape[0] for part in parts]), strict=True)
            continue
        if not at.endswith(".experts"):
            elsewhere = f"{layer}.block_sparse_moe.{part}"
            found |= {name: tensors[elsewhere]} if elsewhere in tensors else {}
            continue
        if f"{layer}.block_sparse_moe.gate.weight" in tensors:
            at = f"{layer}.block_sparse_moe.experts"
        numbered = f"{at}.0.w1.weight" in tensors
        gate, up, down = ("w1", "w3", "w2") if numbered else ("gate_proj", "up_proj", "down_proj")
        each = range(parameter.shape[0])
        if name.endswith("experts.gate_up_proj"):
            pairs = [torch.cat([tensors[f"{at}.{e}.{x}.weight"] for x in (gate, up)]) for e in each]
            found[name] = torch.stack(pairs)
        else:  # experts without a gate have "up_proj" too
            own_name = down if name.endswith("experts.down_proj") else name.rpartition(".")[2]
            found[name] = torch.stack([tensors[f"{at}.{e}.{own_name}.weight"] for e in each])
    return found
