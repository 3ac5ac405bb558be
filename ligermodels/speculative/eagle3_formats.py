"""File formats of EAGLE-3 heads: speculators' for vLLM, SpecForge's for SGLang and vLLM, and DeepSpec's.

They hold the same tensors; a head of SpecForge calls the layer `midlayer`. config.json names the layers whose states
the head reads: speculators by boundaries, SpecForge's `eagle_config` and DeepSpec's `target_layer_ids` by ids of layers
(`models.capture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ligermodels.arguments import EAGLE_FLAGS, MOST_HEADS, check_count, check_number
from ligermodels.convert.json_values import as_object, is_int, is_list_of, object_field
from ligermodels.convert.mappings import rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, ConfigWarning, InputError, short, warn_caller
from ligermodels.layers import LayerConfig
from ligermodels.models.capture import boundaries_of, default_boundaries, layer_ids_of
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import EAGLE_TYPE, draft_type
from ligermodels.speculative.draft_files import (
    AUX_STATES,
    LAYER_FIELDS,
    LM_HEAD,
    Profile,
    Target,
    agreed_boundaries,
    other_tensors,
    read_ids,
    stored_base,
    stored_layers,
    stored_tokens,
    warn_unread,
)
from ligermodels.speculative.eagle3_head import Eagle3Config

BOUNDARIES = "eagle_aux_hidden_state_layer_ids"
LAYER_IDS, STEPS_FIELD, DECAY_FIELD = "target_layer_ids", "ttt_length", "step_loss_decay"
"""Fields of DeepSpec: ids of layers, steps of training, and the decay of their weights."""
NESTED = "eagle_config"
_READ = {
    *EAGLE_FLAGS, BOUNDARIES, LAYER_IDS, STEPS_FIELD, DECAY_FIELD, NESTED, "layer_types", "target_model_name_or_path",
    "draft_num_hidden_layers",
}  # fmt: skip
"""Fields of config.json that are read."""
_NESTED_READ = {BOUNDARIES, AUX_STATES}
_NESTED_SAME = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Fields of `eagle_config` that are read, and fields of NVIDIA's heads there -> the value that all heads here have."""


def _speculators(config: Eagle3Config, target: Target, num_steps: int, decay: float) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": dict(config.layer),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in EAGLE_FLAGS},
        "embed_requires_grad": False,
        BOUNDARIES: list(config.boundaries),
        "speculators_config": target.speculators_config("eagle3", num_steps),
    }


def _specforge(config: Eagle3Config, target: Target, num_steps: int, decay: float) -> dict[str, Any]:
    """With the boundaries that vLLM reads beside SGLang's ids of layers; InputError if SGLang has no such head."""
    wrong = {
        "layer: kind 'qwen3'": config.layer["model_type"] != "llama",
        **{flag: getattr(config, flag) for flag in ("norm_before_residual", "norm_before_fc")},
        **{bias: bool(config.layer.get(bias)) for bias in ("attention_bias", "mlp_bias")},
    }
    _require_none("specforge", "SGLang", wrong)
    return {
        **config.layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **{flag: getattr(config, flag) for flag in EAGLE_FLAGS},
        BOUNDARIES: list(config.boundaries),
        NESTED: {BOUNDARIES: list(layer_ids_of(config.boundaries)), AUX_STATES: True},
        "tie_word_embeddings": False,
    }


def _deepspec(config: Eagle3Config, target: Target, num_steps: int, decay: float) -> dict[str, Any]:
    """Heads of Qwen3's kind, with all tokens and the states of five layers; InputError for another head."""
    wrong = {
        f"layer: kind {config.layer['model_type']!r}": config.layer["model_type"] != "qwen3",
        f"{len(config.boundaries)} boundaries, but five": len(config.boundaries) != 5,
        "boundary 0": 0 in config.boundaries,
        f"draft_vocab_size {config.draft_vocab_size}": config.draft_vocab_size != config.decoder.vocab_size,
        **{flag: getattr(config, flag) for flag in EAGLE_FLAGS},
    }
    _require_none("deepspec", "DeepSpec", wrong)
    return {
        **config.layer,
        "architectures": ["Qwen3Eagle3Model"],
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"],
        "target_model_name_or_path": target.required_name,
        LAYER_IDS: list(layer_ids_of(config.boundaries)),
        STEPS_FIELD: num_steps,
        DECAY_FIELD: decay,
        "draft_num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def _require_none(profile: str, program: str, wrong: Mapping[str, bool]) -> None:
    """InputError for the first property of a head, name -> whether it has it, that a program does not implement."""
    for name, has in wrong.items():
        if has:
            raise InputError(f"profile {profile!r}: {program} does not implement {name}; export profile='speculators'")


PROFILES = {
    EAGLE_TYPE: {
        "speculators": Profile(_speculators, names_base=True),
        "specforge": Profile(_specforge, embedding=False, prefix="midlayer"),
        "deepspec": Profile(_deepspec, names_base=True),
    }
}
"""Type of the head -> its file formats by name."""

_AUX_NORMS = {f"aux_norm_{name}.weight": f"fc_norm.{i}.weight" for i, name in enumerate(("low", "mid", "high"))}


def tensor_name(stored: str) -> str:
    """The name in speculators' form of a tensor in another form."""
    name = f"layers.0.{stored.removeprefix('midlayer.')}" if stored.startswith("midlayer.") else stored
    return _AUX_NORMS.get(name, name)


def weight_map(config: Eagle3Config, prefix: str = "layers.0", *, lm_head: bool = True) -> WeightMap:
    """The head's tensors: native names `head.*` of `Eagle3Head` and `lm_head.weight`, and their names in files.

    Args:
        config: the head's config.
        prefix: prefix of the layer's tensors in files.
        lm_head: whether there is an lm_head; else one in a file is ignored.
    """
    size, block = config.decoder.hidden_size, config.decoder.blocks[0]
    entries = [rename("head.reader.fc.weight", "fc.weight")]
    if config.norm_before_fc:
        entries.append(rename("head.reader.norm.weight", "input_norm.weight"))
    if config.fc_norm:
        names = (f"norms.{i}.weight" for i in range(len(config.boundaries)))
        entries += [rename(f"head.reader.{name}", f"fc_{name.replace('norms', 'norm')}") for name in names]
    norms = {
        "embedding_norm": "input_layernorm", "hidden_norm": "hidden_norm", "mlp_norm": "post_attention_layernorm",
    }  # fmt: skip
    entries += [rename(f"head.{ours}.weight", f"{prefix}.{theirs}.weight") for ours, theirs in norms.items()]
    entries += config.mixer.weight_mappings(size, "head.mixer", prefix, {})
    entries += cast(LayerConfig, block.mlp).weight_mappings(size, "head.mlp", prefix, {})
    entries.append(rename("head.norm.weight", "norm.weight"))
    if lm_head:
        entries.append(rename("lm_head.weight", "lm_head.weight"))
    return WeightMap(entries, ignored=other_tensors(() if lm_head else (LM_HEAD,)))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_config(stored: Mapping[str, Any], target: DecoderConfig) -> Eagle3Config:
    """The config of a head from config.json, in any of the forms, for a model with the config `target`; ConfigError if
    it is no config of an EAGLE-3 head, or a field has a bad value."""
    stored_steps(stored), stored_decay(stored)  # checked here, where errors name the folder
    flat = _is_flat(stored)
    warn_unread(stored, _READ)
    nested = as_object(stored.get(NESTED))
    same = {name for name, value in nested.items() if value == _NESTED_SAME.get(name)}
    warn_unread(nested, _NESTED_READ | same, f"{NESTED}.")
    whole = dict(stored if flat else object_field(stored, "transformer_layer_config"))
    layer = {name: value for name, value in whole.items() if name in LAYER_FIELDS or not flat}
    layer.pop("architectures", None)  # of the head
    layer |= _types(whole)
    flags = {flag: stored[flag] for flag in EAGLE_FLAGS if stored.get(flag) is not None}
    if not flat and "norm_before_residual" not in stored:
        warn_caller(
            "config.json: norm_before_residual is missing; vLLM takes it for true, and so does this model",
            ConfigWarning,
        )
        flags["norm_before_residual"] = True
    return Eagle3Config(
        layer={"model_type": "llama"} | layer,
        boundaries=agreed_boundaries(stored_boundaries(stored)) or default_boundaries(len(target.blocks)),
        target_hidden_size=stored.get("target_hidden_size") or target.hidden_size,
        draft_vocab_size=stored.get("draft_vocab_size") or layer.get("vocab_size") or 0,
        **flags,
    )


def _is_flat(stored: Mapping[str, Any]) -> bool:
    """Whether the layer's fields are beside the head's; ConfigError if this is no config of an EAGLE-3 head here."""
    kind = stored.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise ConfigError(f"speculators_model_type: must be 'eagle3', got {short(kind)}")
    if kind is None and draft_type(stored) != EAGLE_TYPE:
        raise ConfigError("architectures: names no EAGLE-3 head, such as 'LlamaForCausalLMEagle3'")
    if as_object(stored.get(NESTED)).get(AUX_STATES) is False:
        raise ConfigError(f"{NESTED}.{AUX_STATES}: false, a head of the last layer's states, is not implemented")
    return kind is None


def _types(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`layer_types` of a head's config, if they are not all full attention. Flat configs may have the whole model's."""
    types = stored.get("layer_types")
    is_full = types is None or is_list_of(types, lambda name: name == "full_attention")
    return {} if is_full else {"layer_types": types}


def stored_boundaries(stored: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The boundaries that each field of config.json names, by the field; in the order in which vLLM reads them."""
    nested = as_object(stored.get(NESTED))
    fields = (
        (BOUNDARIES, stored.get(BOUNDARIES), tuple),
        (LAYER_IDS, stored.get(LAYER_IDS), boundaries_of),
        (f"{NESTED}.{BOUNDARIES}", nested.get(BOUNDARIES), boundaries_of),
    )
    return {name: convert(_ids(name, given)) for name, given, convert in fields if given is not None}


def _ids(name: str, given: Any) -> tuple[int, ...]:
    return tuple(sorted(set(read_ids(name, given))))  # as vLLM reads them


def stored_steps(stored: Mapping[str, Any]) -> int | None:
    """The number of tokens that a server proposes by default; None where config.json does not name it. InputError if
    it is too large."""
    tokens, steps = stored_tokens(stored), stored.get(STEPS_FIELD)
    name, count = (STEPS_FIELD, steps) if tokens is None else ("speculative_tokens", tokens)
    return check_count(name, count, most=MOST_HEADS) if is_int(count) and count > 0 else None


def stored_decay(stored: Mapping[str, Any]) -> float | None:
    """The decay of the steps' weights; None where config.json does not name it. InputError for a bad value."""
    decay = stored.get(DECAY_FIELD)
    return None if decay is None else float(check_number(DECAY_FIELD, decay))


def facts_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says about a head: its model, the kind of its layer, and sizes."""
    whole = stored_layers(stored)
    return {
        "base_model": stored_base(stored) or stored.get("target_model_name_or_path"),
        "layer": whole.get("model_type"),
        "boundaries": agreed_boundaries(stored_boundaries(stored)),
        "draft_vocab_size": stored.get("draft_vocab_size", whole.get("vocab_size")),
        "num_steps": stored_steps(stored),
        **{name: whole.get(name) for name in ("hidden_size", "vocab_size")},
    }
