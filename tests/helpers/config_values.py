"""Fields of configs, and values that they may hold, for tests that draw configs."""

from functools import cache
from typing import Any

from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ligermodels.archs import FAMILIES
from ligermodels.archs.unread import HARMLESS

Config = dict[str, Any]

UNLISTED: Config = {
    "hidden_activation": "gelu",
    "is_causal": True,
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 1.0,
    "per_layer_config": None,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "rope_theta": 1e4,
    "sliding_window_pattern": 6,
    "torch_dtype": "float32",
}
"""Fields that config files have or had, and that not every class lists, with what they might hold."""


def fields_of(model_type: str) -> Config:
    """Every field of this type's config class, and its default."""
    config = AutoConfig.for_model(model_type)
    fields = {**UNLISTED, **dict.fromkeys(config.attribute_map), **config.to_dict()}
    other = {"model_type", "text_config", "vision_config", "thinker_config"}
    return {name: fields[name] for name in sorted(fields) if name not in other}


FIELDS = {model_type: fields_of(model_type) for model_type in FAMILIES if model_type in CONFIG_MAPPING}
OF_ALL = PreTrainedConfig().to_dict().keys() & HARMLESS
"""Fields of transformers' common class, which code common to all types handles, and which change no computation."""
EVERY_FIELD = {name: default for fields in FIELDS.values() for name, default in fields.items()}

SIZES = [2, 3, 4, 5, 6, 0, 8, 12, 42, 130, -1]
FLOATS = [0.3, 0.0, 1.0, 0.25, 0.5, 2.5, 7.25, 1e-3, 1e4, 1e6, -0.7]
WORDS = [*sorted(ACT2FN), "auto", "eager", "bfloat16", "x", ""]
LAYER_TYPES = ["full_attention", "sliding_attention", "chunked_attention", "linear_attention", "attention", "conv"]
ROPE_TYPES = [*sorted(ROPE_INIT_FUNCTIONS), "default", "su", "mrope"]
ROPE: Config = {
    "rope_theta": 700.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0, 1.3, 1.5, 1.9, 2.5],
    "long_factor": [1.5, 3, 4.5, 7.5, 9.0],
}
"""Enough for every type of rope, of heads with 10 channels where it has lists."""
SETTINGS = [*ROPE, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"]
SETTINGS += ["partial_rotary_factor", "finetuned", "unheard_of"]

sizes, floats, words = st.sampled_from(SIZES), st.sampled_from(FLOATS), st.sampled_from(WORDS)
scalars = st.none() | st.booleans() | sizes | floats | words
numbers = sizes | floats | st.booleans()
LIKE = {int: sizes | floats, float: floats | sizes, str: words}


@st.composite
def ropes(draw: st.DrawFn, values: st.SearchStrategy[Any] = scalars) -> Config:
    """Settings of a rope, a few changed to `values`, left out or added."""
    changed = draw(st.dictionaries(st.sampled_from(SETTINGS), values, max_size=3))
    lost = draw(st.sets(st.sampled_from(SETTINGS), max_size=2))
    types = draw(st.dictionaries(st.sampled_from(["rope_type", "type"]), st.sampled_from(ROPE_TYPES), max_size=2))
    return {**{name: value for name, value in {**ROPE, **changed}.items() if name not in lost}, **types}


@cache
def values_by_layers(layers: int) -> tuple[st.SearchStrategy[Any], dict[str, st.SearchStrategy[Any]]]:
    """What any field may hold, and some fields by their names."""
    kinds = st.lists(st.sampled_from(LAYER_TYPES[:2]), min_size=layers, max_size=layers)
    kinds |= st.lists(st.sampled_from(["conv", "full_attention"]), min_size=layers, max_size=layers)
    kinds |= st.lists(st.sampled_from(LAYER_TYPES), max_size=layers)
    flags = st.lists(st.integers(0, 1), min_size=layers, max_size=layers)
    ropes_by_type = st.dictionaries(st.sampled_from(LAYER_TYPES[:3]), ropes() | st.none(), max_size=3)
    anything = scalars | flags | st.lists(st.integers(-1, layers), max_size=3) | kinds | ropes() | ropes_by_type
    return anything, {"rope_parameters": ropes() | ropes_by_type, "rope_scaling": ropes(), "layer_types": kinds}


def values_of(name: str, default: Any, layers: int) -> st.SearchStrategy[Any]:
    """What a field may hold, mostly of its default's kind."""
    anything, own = values_by_layers(layers)
    if isinstance(default, bool):
        likely = st.sampled_from([not default, default])
    else:
        likely = own.get(name, LIKE.get(type(default), numbers))
    return st.integers(0, 3).flatmap(lambda die: anything if die == 3 else likely)


TOWERS = {"audio_config", "vision_config", "talker_config", "code2wav_config", "token2wav_config"}
"""With another config they are mostly of their published sizes: gigabytes, and no part of the text model."""
