"""File formats of DFlash and DSpark heads: speculators', which vLLM reads, z-lab's (DFlash) and DeepSpec's (DSpark).

All hold the same tensors. config.json names the layers whose states the head reads: speculators by boundaries, the
others by ids of layers (`models.capture`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from ligermodels.arguments import check_count
from ligermodels.convert.json_values import is_int, is_list_of, is_number, object_field
from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, ConfigWarning, short, warn_caller
from ligermodels.layers import AttentionConfig
from ligermodels.models.capture import boundaries_of, layer_ids_of
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.extra_heads import DFLASH_TYPE, DSPARK_TYPE, draft_type
from ligermodels.speculative.block_head import GEMMA4, BlockAttention, BlockDraftConfig
from ligermodels.speculative.draft_files import (
    AUX_STATES,
    GEMMA4_FIELDS,
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

SLIDING = "sliding_attention"
BOUNDARIES, LAYER_IDS, NESTED = "aux_hidden_state_layer_ids", "target_layer_ids", "dflash_config"
MARKOV = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
SOFTCAP, EMBED_SCALE = "final_logit_softcapping", "input_embedding_scale"
"""Fields of z-lab: the softcap of the draft's logits, and the factor of the model's embeddings as they are stored."""
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Fields of DFlash2's convolutions and candidate selector."""
_KNOWN = {
    "mask_token_id", LAYER_IDS, "block_size", SOFTCAP, EMBED_SCALE, "causal", "use_swa", "swa_window_size", AUX_STATES,
}  # fmt: skip
"""Fields of `dflash_config` that are read."""
_PLAIN = {"projector_type": "dflash", "shift_label": False, AUX_STATES: True, "output_multiplier": 1.0}
"""Fields that change the computation -> the value that all heads here have."""
_READ = {
    *_KNOWN, *_PLAIN, *MARKOV, *DFLASH2, BOUNDARIES, NESTED, "layer_types", "max_window_layers", "sample_from_anchor",
    "is_causal", "sliding_window_non_causal", "num_anchors", "loss_decay_gamma", "attention_backend",
}  # fmt: skip
"""Fields of config.json that are read, or are options of the training."""
_GEMMA4_READ = {*GEMMA4_FIELDS, "vocab_size_per_layer_input"}
"""Further such fields of heads of Gemma 4's kind. The last is the size of a table that no head has:
`hidden_size_per_layer_input` must be 0."""


def _speculators(config: BlockDraftConfig, target: Target, num_anchors: int) -> dict[str, Any]:
    kind = DSPARK_TYPE if config.sample_from_anchor else DFLASH_TYPE
    further = {name: getattr(config, name) for name in MARKOV} if kind == DSPARK_TYPE else {}
    layers = {**config.layers, **({} if config.causal is None else {"is_causal": config.causal})}
    if any(config.windows):
        further["sliding_window_non_causal"] = config.causal is False
        if config.causal is None and None in config.windows:
            warn_caller(
                "sliding_window_non_causal: is false for the layers with a sliding window, and vLLM 0.32 then takes "
                "the other layers for causal too; for vLLM export "
                f"profile={'deepspec' if kind == DSPARK_TYPE else 'z-lab'!r}, or make the head with causal=False",
                ConfigWarning,
            )
    return {
        "architectures": ["DSparkDraftModel" if kind == DSPARK_TYPE else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        BOUNDARIES: list(config.boundaries),
        **_softcap(config),
        **further,
        "speculators_config": target.speculators_config(kind, config.num_drafts),
    }


def _softcap(config: BlockDraftConfig) -> dict[str, Any]:
    """The field of a softcap that is not among the fields of the layers."""
    return {} if config.final_logit_softcapping is None else {SOFTCAP: config.final_logit_softcapping}


def _flat(config: BlockDraftConfig, target: Target) -> dict[str, Any]:
    return {
        **config.layers,
        **_softcap(config),
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in config.windows],
        "tie_word_embeddings": False,
    }


def _z_lab(config: BlockDraftConfig, target: Target, num_anchors: int) -> dict[str, Any]:
    nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, LAYER_IDS: list(layer_ids_of(config.boundaries))}
    if config.causal is not None:
        nested["causal"] = config.causal
    if target.embed_scale is not None:
        nested[EMBED_SCALE] = target.embed_scale
    return {**_flat(config, target), "architectures": ["DFlashDraftModel"], NESTED: nested}


def _deepspec(config: BlockDraftConfig, target: Target, num_anchors: int) -> dict[str, Any]:
    return {
        **_flat(config, target),
        "architectures": [f"{'Gemma4' if config.layers['model_type'] in GEMMA4 else 'Qwen3'}DSparkModel"],
        "mask_token_id": config.mask_token_id,
        LAYER_IDS: list(layer_ids_of(config.boundaries)),
        "num_anchors": num_anchors,
        **({} if config.causal is None else {"is_causal": config.causal}),
        **{name: getattr(config, name) for name in MARKOV},
    }


_SPECULATORS = Profile(_speculators, names_base=True)
PROFILES = {
    DFLASH_TYPE: {"speculators": _SPECULATORS, "z-lab": Profile(_z_lab, embedding=False, lm_head=False, reduced=False)},
    DSPARK_TYPE: {"speculators": _SPECULATORS, "deepspec": Profile(_deepspec, reduced=False)},
}
"""Type of the head -> its file formats by name."""


def tensor_name(stored: str) -> str:
    """The name in speculators' form of a tensor in transformers' form."""
    return stored.replace("encoder.fc.", "fc.").replace("encoder.output_norm_enc.", "hidden_norm.")


def weight_map(config: BlockDraftConfig, prefix: str = "", *, lm_head: bool) -> WeightMap:
    """The head's tensors: native names `head.*` of `BlockHead` and `lm_head.weight`, and their names in files.

    Args:
        config: the head's config.
        prefix: not used: all formats have the same names.
        lm_head: whether there is an lm_head; else one in a file is ignored.
    """
    size, entries = config.decoder.hidden_size, list[WeightMapping]()
    entries += [rename(f"head.{name}.weight", f"{name}.weight") for name in ("fc", "hidden_norm", "norm")]
    for i, block in enumerate(config.decoder.blocks):
        native, layer = f"head.layers.{i}", f"layers.{i}"
        mixer = f"{native}.mixer"
        whole = block.weight_mappings(size, native, layer, {})
        entries += [mapping for mapping in whole if not mapping.target.startswith(f"{mixer}.")]
        entries += BlockAttention.weight_mappings(cast(AttentionConfig, block.mixer), mixer, f"{layer}.self_attn")
    entries += _markov(config)
    if lm_head:
        entries.append(rename(LM_HEAD, LM_HEAD))
    return WeightMap(entries, ignored=other_tensors(() if lm_head else (LM_HEAD,)))


def _markov(config: BlockDraftConfig) -> list[WeightMapping]:
    found = list[WeightMapping]()
    if config.markov_rank:
        found += [rename(f"head.markov.w{i}.weight", f"markov_head.markov_w{i}.weight") for i in (1, 2)]
        if part := {"gated": "gate", "rnn": "joint"}.get(config.markov_head_type):
            names = (f"head.markov.{part}", f"markov_head.{part}_proj")
            found += [rename(*(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias")]
    if config.enable_confidence_head:
        names = "head.confidence.proj", "confidence_head.proj"
        found += [rename(*(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias")]
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def read_config(stored: Mapping[str, Any], target: DecoderConfig) -> BlockDraftConfig:
    """The config of a head from config.json, in any of the forms, for a model with the config `target`; ConfigError if
    it is of another head, has a bad value, or a field that is not implemented."""
    kind = draft_type(stored)
    if kind not in PROFILES:
        raise ConfigError("architectures: names no DFlash or DSpark head")
    nested = object_field(stored, NESTED)
    fields = {**stored, **nested}
    _refuse_others(stored, nested, fields)
    _check_embed_scale(fields.get(EMBED_SCALE), target)
    warn_unread(stored, _READ | _GEMMA4_READ if stored.get("model_type") in GEMMA4 else _READ)
    layers, softcap = _layers(stored), fields.get(SOFTCAP) or None
    if kind == DSPARK_TYPE and misses_anchor(stored):
        warn_caller(
            "config.json: sample_from_anchor is missing; this model takes it for true, but vLLM for false: write true "
            "into the file",
            ConfigWarning,
        )
    boundaries = agreed_boundaries(stored_boundaries(stored))
    missing = [name for name in ("mask_token_id", "block_size") if fields.get(name) is None]
    if missing or boundaries is None:
        raise ConfigError(f"{(missing or [BOUNDARIES])[0]}: config.json of the head does not have it")
    return BlockDraftConfig(
        layers=layers,
        boundaries=boundaries,
        target_hidden_size=stored.get("target_hidden_size") or target.hidden_size,
        draft_vocab_size=stored.get("draft_vocab_size") or layers.get("vocab_size") or 0,
        block_size=fields["block_size"],
        mask_token_id=fields["mask_token_id"],
        sample_from_anchor=kind == DSPARK_TYPE,
        causal=_causal(stored, nested, layers),
        final_logit_softcapping=None if softcap == layers.get(SOFTCAP) else softcap,
        **(_markov_fields(fields) if kind == DSPARK_TYPE else {}),
    )


def _layers(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config of the head's layers: nested in speculators' form, flat in the others."""
    if "speculators_model_type" in stored:
        layers = dict(object_field(stored, "transformer_layer_config"))
    else:
        further = GEMMA4_FIELDS if stored.get("model_type") in GEMMA4 else ()
        names = (*LAYER_FIELDS, "layer_types", "max_window_layers", *further)
        layers = {name: stored[name] for name in names if name in stored}
    layers.pop("architectures", None)
    layers.pop("is_causal", None)
    types = layers.get("layer_types")
    if types is not None and not is_list_of(types, lambda name: isinstance(name, str)):
        raise ConfigError(f"layer_types: must be a list of names, got {short(types)}")
    if layers.get("model_type") in GEMMA4:
        return _gemma4_layers(layers)
    nested = object_field(stored, NESTED)
    types = types or _types_by_number(layers)
    if nested.get("use_swa") and SLIDING not in types:
        types = [SLIDING] * len(types)
    if SLIDING in types:
        window = nested.get("swa_window_size") or layers.get("sliding_window")
        layers |= {"layer_types": types, "sliding_window": window, "use_sliding_window": True}
    elif set(types) == {"full_attention"}:
        layers.pop("layer_types", None)  # the default
    return layers


def _types_by_number(layers: Mapping[str, Any]) -> list[str]:
    """The types of layers whose config has none, as Qwen3's config has them."""
    count, first = layers.get("num_hidden_layers"), math.inf
    if layers.get("use_sliding_window"):
        first = check_count("max_window_layers", layers.get("max_window_layers", 28), least=0)
    return [SLIDING if i >= first else "full_attention" for i in range(count if is_int(count) else 0)]


def _gemma4_layers(layers: dict[str, Any]) -> dict[str, Any]:
    """Layers of Gemma 4's kind. DeepSpec copies the fields of the model: as many shared layers as there are layers, or
    more, share nothing there."""
    shared, count = layers.get("num_kv_shared_layers"), layers.get("num_hidden_layers")
    if is_int(shared) and is_int(count) and shared >= count:
        layers["num_kv_shared_layers"] = 0
    return layers


def _causal(stored: Mapping[str, Any], nested: Mapping[str, Any], layers: Mapping[str, Any]) -> bool | None:
    """`BlockDraftConfig.causal`, as servers read it."""
    windows = SLIDING in (layers.get("layer_types") or ())
    if "speculators_model_type" in stored:
        causal = object_field(stored, "transformer_layer_config").get("is_causal")
        bidirectional = stored.get("sliding_window_non_causal")
        if causal is not None or not windows:
            return causal
        if bidirectional is None:
            warn_caller(
                "config.json: sliding_window_non_causal is missing; vLLM takes it for true, and so does this model",
                ConfigWarning,
            )
        return None if bidirectional is False else False
    for value in (stored.get("is_causal"), nested.get("causal")):
        if value is not None:
            return cast(bool, value)  # `BlockDraftConfig` checks it
    return False if nested.get("use_swa") and SLIDING not in (stored.get("layer_types") or ()) else None


def _markov_fields(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a DSpark head's Markov head and confidence head."""
    fields = {name: stored[name] for name in MARKOV if stored.get(name) is not None}
    return fields if fields.get("markov_rank") else {**fields, "confidence_head_with_markov": False}


def misses_anchor(stored: Mapping[str, Any]) -> bool:
    """Whether config.json of a DSpark head, in speculators' form, has no `sample_from_anchor`."""
    return "speculators_model_type" in stored and "sample_from_anchor" not in stored


def _refuse_others(stored: Mapping[str, Any], nested: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """ConfigError for a field that changes the computation and is not implemented."""
    kind, names = draft_type(stored), str(stored.get("architectures"))
    other = next((name for name in DFLASH2 if fields.get(name) is not None), None)
    if other is not None or "DFlash2" in names:
        value = names if other is None else short(fields[other])
        raise ConfigError(f"{other or 'architectures'}: {value} is not implemented, a layer of DFlash2")
    anchor = fields.get("sample_from_anchor")
    if anchor is not None and anchor is not (kind == DSPARK_TYPE):
        raise ConfigError(f"sample_from_anchor: {anchor} is not implemented for {kind} heads")
    for name, value in nested.items():
        markov = MARKOV if kind == DSPARK_TYPE else ()  # SpecForge has these fields there
        if name not in _KNOWN | {"sample_from_anchor", *markov} and (value is True or value not in (None, False, 1.0)):
            raise ConfigError(f"{NESTED}.{name}: {short(value)} is not implemented")
    for name, plain in _PLAIN.items():
        if fields.get(name) not in (None, plain):
            raise ConfigError(f"{name}: {short(fields[name])} is not implemented")


def _check_embed_scale(scale: Any, target: DecoderConfig) -> None:
    """ConfigError for another factor of the embeddings than the model's own; bfloat16 may have rounded it."""
    own = 1.0 if target.embed_scale is None else target.embed_scale
    if scale is not None and not (is_number(scale) and math.isclose(scale, own, rel_tol=2**-8)):
        raise ConfigError(f"{EMBED_SCALE}: {short(scale)} is not implemented for a model with embeddings times {own:g}")


def stored_boundaries(stored: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The boundaries that each field of config.json names, by the field; the field with precedence first."""
    nested = object_field(stored, NESTED)
    fields = (
        (BOUNDARIES, stored.get(BOUNDARIES), tuple),
        (f"{NESTED}.{LAYER_IDS}", nested.get(LAYER_IDS), boundaries_of),
        (LAYER_IDS, stored.get(LAYER_IDS), boundaries_of),
    )
    return {name: convert(read_ids(name, ids)) for name, ids, convert in fields if ids is not None}


def facts_of(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says about a head: its model, its layers, and sizes."""
    whole, fields = stored_layers(stored), {**stored, **object_field(stored, NESTED)}
    return {
        "base_model": stored_base(stored),
        "layers": whole.get("num_hidden_layers"),
        "boundaries": agreed_boundaries(stored_boundaries(stored)),
        "block_size": fields.get("block_size"),
        "mask_token_id": fields.get("mask_token_id"),
        "markov_rank": stored.get("markov_rank"),
        "draft_vocab_size": stored.get("draft_vocab_size"),
        "num_tokens": stored_tokens(stored),
        **{name: whole.get(name) for name in ("hidden_size", "vocab_size")},
    }
