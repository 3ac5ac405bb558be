"""Rope of every type against transformers' own: frequencies, attention factor, tables, config reading and export."""

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ligermodels.archs.fields import Fields
from ligermodels.archs.rope import read_rope
from ligermodels.convert.config_json import for_export
from ligermodels.errors import ConfigError
from ligermodels.layers import (
    DynamicScaling,
    LongRopeScaling,
    RopeConfig,
    RotaryEmbedding,
    YarnScaling,
    inverse_frequencies,
)

CONTEXT, ORIGINAL, HEAD_DIM = 192, 48, 20
LENGTHS = [1, ORIGINAL, ORIGINAL + 1, CONTEXT, CONTEXT + 1, 1000]
SHORT = [1.0, 1.0, 1.25, 1.5, 1.5, 2.0, 2.5, 3.0, 3.5, 4.75]
LONG = [1.0, 1.1, 1.7, 2.9, 4.5, 7.0, 11.0, 18.0, 30.5, 62.0]
BASE: dict[str, Any] = {
    "hidden_size": 60,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
    # Phi-3 has special tokens outside of small vocabularies otherwise.
    "pad_token_id": 0,
}


def old(theta: float = 10_000.0, **scaling: Any) -> dict[str, Any]:
    """The v4 schema."""
    return {"rope_theta": theta, "rope_scaling": scaling}


def new(**scaling: Any) -> dict[str, Any]:
    """The v5 schema."""
    return {"rope_parameters": {"rope_theta": 123_456.7, **scaling}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LLAMAS: dict[str, dict[str, Any]] = {
    "no fields": {},
    "default": new(rope_type="default", factor=3.0),
    "default v4": {"rope_theta": 500_000, "rope_scaling": None},
    "linear": old(type="linear", factor=2.5),
    "linear, whole number": new(rope_type="linear", factor=3),
    "dynamic": old(type="dynamic", factor=2.3),
    "dynamic, original context of no account": new(
        rope_type="dynamic", factor=2.0, original_max_position_embeddings=ORIGINAL
    ),
    "proportional": new(rope_type="proportional", partial_rotary_factor=0.3, factor=2.0),
    "proportional, whole": new(rope_type="proportional"),
    "llama3": old(500_000.0, **LLAMA3, original_max_position_embeddings=ORIGINAL),
    "llama3, original context at the top": new(**LLAMA3, original_max_position_embeddings=7)
    | {"original_max_position_embeddings": 31},
    "llama3, no original context": new(**LLAMA3),
    "yarn": old(**YARN),
    "yarn, no original context": new(rope_type="yarn", factor=0.5),
    "yarn, original context at the top": new(**YARN) | {"original_max_position_embeddings": 31},
    "yarn, all set": new(**YARN, beta_fast=4, beta_slow=1.5, truncate=False, mscale=0.7, mscale_all_dim=1.3),
    "yarn, one mscale": new(**YARN, mscale=0.7, mscale_all_dim=0.0),
    "yarn, factor given": new(**YARN, attention_factor=0.83, mscale=0.7, mscale_all_dim=1.3),
    "yarn, one channel ramp": new(**YARN, beta_fast=1.0, beta_slow=1.0, truncate=False),
    "longrope, ratio": old(type="longrope", short_factor=SHORT, long_factor=LONG)
    | {"original_max_position_embeddings": ORIGINAL},
    "longrope, inside": new(**LONGROPE, original_max_position_embeddings=ORIGINAL),
    "longrope, factor": new(**LONGROPE, original_max_position_embeddings=ORIGINAL, factor=6.0),
    "longrope, attention factor": new(**LONGROPE, original_max_position_embeddings=ORIGINAL, attention_factor=1.2),
    "longrope, no original context": new(**LONGROPE),
    "both schemas": new(rope_type="linear", factor=9.0) | old(700.0, rope_type="dynamic", factor=2.0),
}
PHIS: dict[str, dict[str, Any]] = {
    "partial": {"partial_rotary_factor": 0.7},
    "partial, inside": new(rope_type="default", partial_rotary_factor=0.4),
    "partial, odd": new(rope_type="default", partial_rotary_factor=0.48),
    "partial, longrope": old(type="longrope", short_factor=SHORT[:7], long_factor=LONG[:7])
    | {"partial_rotary_factor": 0.7, "original_max_position_embeddings": ORIGINAL},
    "partial, longrope, v5": new(
        rope_type="longrope", short_factor=SHORT[:7], long_factor=LONG[:7], partial_rotary_factor=0.7
    )
    | {"original_max_position_embeddings": ORIGINAL},
}
GEMMAS: dict[str, dict[str, Any]] = {
    "no fields": {},
    "thetas v4": {"rope_theta": 50_000.0, "rope_local_base_freq": 777.0, "rope_scaling": None},
    "scaling v4": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "nested": {
        "rope_parameters": {
            "full_attention": {"rope_theta": 2e5, **YARN},
            "sliding_attention": {"rope_type": "default", "rope_theta": 321.0},
        }
    },
    "nested, thetas at the top": {
        "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}, "sliding_attention": None},
        "rope_theta": 2e5,
        "rope_local_base_freq": 321.0,
    },
    "nested, local scaled": {
        "rope_parameters": {
            "full_attention": {"rope_theta": 2e5, "rope_type": "default"},
            "sliding_attention": {**LONGROPE, "original_max_position_embeddings": ORIGINAL},
        }
    },
    "both schemas": {
        "rope_parameters": {"full_attention": {"rope_theta": 2e5, **YARN}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 3e5,
    },
}
GEMMA_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}

CASES = [
    *(pytest.param("llama", fields, None, id=f"llama: {name}") for name, fields in LLAMAS.items()),
    *(pytest.param("phi3", fields, None, id=f"phi3: {name}") for name, fields in PHIS.items()),
    *(
        pytest.param("gemma3", fields, layer_type, id=f"gemma3: {name}: {layer_type}")
        for name, fields in GEMMAS.items()
        for layer_type in GEMMA_THETAS
    ),
]


def config_of(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    more = {"gemma3": {"head_dim": HEAD_DIM, "layer_types": list(GEMMA_THETAS)}}.get(family, {})
    return {**BASE, **more, **fields}


def ours(family: str, config: dict[str, Any], layer_type: str | None) -> RopeConfig:
    theta = GEMMA_THETAS[layer_type] if layer_type else 10_000.0
    if family == "phi3":
        config = {"original_max_position_embeddings": 4096, **config}
    return Fields(config).rope(HEAD_DIM, CONTEXT, theta, layer_type, partial=family == "phi3")


def theirs(family: str, config: dict[str, Any], layer_type: str | None, positions: Tensor, dtype: torch.dtype) -> Any:
    """cos, sin and frequencies of a model that has seen nothing before."""
    classes = {
        "llama": (LlamaConfig, LlamaRotaryEmbedding),
        "phi3": (Phi3Config, Phi3RotaryEmbedding),
        "gemma3": (Gemma3TextConfig, Gemma3RotaryEmbedding),
    }
    config_class, rotary = classes[family]
    embedding = rotary(config_class(**deepcopy(config)))
    more = (layer_type,) if layer_type else ()
    cos, sin = embedding(torch.zeros((), dtype=dtype), positions, *more)
    return cos, sin, getattr(embedding, f"{layer_type}_inv_freq" if layer_type else "inv_freq")


def positions_to(length: int) -> Tensor:
    """(2, 9) whose highest position in each row is length - 1, and not the last."""
    positions = torch.randint(length, (2, 9), generator=torch.Generator().manual_seed(length))
    positions[:, 3] = length - 1
    return positions


def assert_same(family: str, rope: RopeConfig, config: dict[str, Any], layer_type: str | None, length: int) -> None:
    positions = positions_to(length)
    for dtype in (torch.float32, torch.bfloat16):
        cos, sin, frequencies = theirs(family, config, layer_type, positions, dtype)
        found_cos, found_sin = RotaryEmbedding(rope)(positions, dtype)
        assert found_cos.dtype == found_sin.dtype == dtype
        # Theirs repeats the angles for the second half of the head.
        assert torch.equal(torch.cat([found_cos] * 2, -1), cos) and torch.equal(torch.cat([found_sin] * 2, -1), sin)
        assert torch.equal(inverse_frequencies(rope, length=length), frequencies)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("family", "fields", "layer_type"), CASES)
def test_frequencies_and_tables_are_those_of_transformers(
    family: str, fields: dict[str, Any], layer_type: str | None, length: int
) -> None:
    config = config_of(family, fields)
    assert_same(family, ours(family, config, layer_type), config, layer_type, length)


# transformers reads these wrongly or not at all; each stands beside a spelling that it reads as meant.
SPELLINGS = [
    ("phi3", old(type="su", short_factor=SHORT, long_factor=LONG), old(**LONGROPE), None),
    ("llama", {"rope_theta": None, "rope_scaling": {}, "rope_parameters": None}, {}, None),
    ("llama", new(**YARN, finetuned=True, beta_fast=None), new(**YARN), None),
    (
        "gemma3",
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "full_attention",
    ),
]


@pytest.mark.parametrize(("family", "fields", "same_as", "layer_type"), SPELLINGS)
def test_other_spellings(family: str, fields: dict, same_as: dict, layer_type: str | None) -> None:
    assert ours(family, config_of(family, fields), layer_type) == ours(family, config_of(family, same_as), layer_type)


FOLLOWING = [
    RopeConfig(HEAD_DIM, scaling=DynamicScaling(2.0, ORIGINAL)),
    RopeConfig(HEAD_DIM, scaling=LongRopeScaling(tuple(SHORT), tuple(LONG), ORIGINAL), attention_factor=1.1),
]


@pytest.mark.parametrize("rope", FOLLOWING)
def test_length_is_followed_on_the_device_without_memory(rope: RopeConfig) -> None:
    embedding = RotaryEmbedding(rope)
    compiled = torch.compile(embedding, backend="eager", fullgraph=True)
    short, long = (inverse_frequencies(rope, length=length) for length in (ORIGINAL, ORIGINAL + 1))
    assert not torch.isclose(short[1:], long[1:]).any()
    for length in (ORIGINAL + 1, ORIGINAL):
        wanted = RotaryEmbedding(rope)(positions_to(length), torch.float32)
        for found in (embedding, compiled):
            assert all(map(torch.equal, found(positions_to(length), torch.float32), wanted))
    # On the meta device there are no values to look at.
    cos, _ = embedding.to("meta")(positions_to(9).to("meta"), torch.bfloat16)
    assert cos.shape == (2, 9, HEAD_DIM // 2)


@pytest.mark.parametrize("rope", [*FOLLOWING, RopeConfig(HEAD_DIM, scaling=YarnScaling(4.0, ORIGINAL))])
def test_frequencies_stay_fp32_and_come_back_from_meta(rope: RopeConfig) -> None:
    wanted = RotaryEmbedding(rope).inv_freq
    with torch.device("meta"):
        embedding = RotaryEmbedding(rope)
    assert torch.equal(embedding.to_empty(device="cpu").to(torch.bfloat16).inv_freq, wanted)
    assert wanted.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (new(rope_type="spiral"), r"rope_parameters: rope_type = 'spiral' is not implemented.*'longrope'"),
        (
            new(rope_type="proportional", partial_rotary_factor=1.5),
            r"partial_rotary_factor must be at most 1, got 1\.5",
        ),
        (new(rope_type=["yarn"]), r"rope_type = \['yarn'\] is not implemented"),
        (new(rope_type="linear"), "'factor' is missing"),
        (old(type="dynamic", factor=-2.0), "'factor' must be above 0, got -2.0"),
        (new(rope_type="linear", factor=10**400), "'factor' must be a finite number"),
        (new(rope_type="yarn"), "'factor' is missing"),
        (new(**{**YARN, "original_max_position_embeddings": 4.5}), "'original_max_.*' must be a .* from 0 on"),
        (new(**{**YARN, "original_max_position_embeddings": 0}), "'original_max_.*' must be a whole number above 0"),
        (new(**YARN, truncate="no"), "'truncate' must be true or false"),
        (new(**YARN, beta_fast=1, beta_slow=2), "beta_fast must not be below beta_slow"),
        (new(**YARN, attention_factor=0), "'attention_factor' must be above 0"),
        (new(**YARN, mscale=-1.0), "mscale .*must not be below 0"),
        (new(**{**LLAMA3, "high_freq_factor": 1.0}), "high_freq_factor must be above low_freq_factor"),
        (new(**{**LONGROPE, "long_factor": LONG[1:]}), "'long_factor' must be a list of 10 numbers, got one of 9"),
        (new(**{**LONGROPE, "short_factor": 2.0}), "'short_factor' must be a list of 10 numbers, got one: 2.0"),
        (new(**{**LONGROPE, "short_factor": [*SHORT[1:], "1"]}), r"'short_factor\[9\]' must be a finite number"),
        (new(**{**LONGROPE, "short_factor": None}), "'short_factor' is missing"),
        (new(**LONGROPE, original_max_position_embeddings=1), "original_max_position_embeddings must be above 1"),
        (new(**YARN, mrope_section=[4, 3, 3]), r"rope_parameters: mrope_section = \[4, 3, 3\] is not implemented"),
        (new(**YARN, alpha=2), "rope_parameters: alpha = 2 is not implemented"),
        (new(rope_theta=1), "rope_theta must be above 1"),
        (new(rope_theta=float("nan")), "'rope_theta' must be a finite number"),
        (new(rope_type="linear", factor=1e-45), "not finite and above 0"),
        (new(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5 is not implemented for this model_type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not implemented for this model_type"),
        ({"rope_parameters": [1]}, r"rope_parameters: must be an object, got \[1\]"),
        (GEMMAS["nested"], "one rope for all layers is implemented, got one for each of .*'full_attention'"),
        ({"rope_parameters": {"full_attention": None}}, "got one for each of .*'full_attention'"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours("llama", config_of("llama", fields), None)


@pytest.mark.parametrize("channels", range(1, 11))
@pytest.mark.parametrize("truncate", [False, True])
def test_yarn_over_few_channels(channels: int, truncate: bool) -> None:
    """The frequencies of transformers, whose ramp fits an even number of channels alone."""
    fields = {**YARN, "rope_theta": 1e4, "partial_rotary_factor": channels / HEAD_DIM, "truncate": truncate}
    if channels % 2:
        with pytest.raises(
            ConfigError, match=f"YaRN needs an even number of rotated channels, got {channels} by head_"
        ):
            read_rope(Fields(fields), HEAD_DIM, CONTEXT, True)
        return
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(**BASE, rope_parameters=dict(fields)), "cpu")
    rope = read_rope(Fields(fields), HEAD_DIM, CONTEXT, True)
    assert rope.attention_factor == pytest.approx(factor)
    torch.testing.assert_close(inverse_frequencies(rope), wanted)


@pytest.mark.parametrize(
    ("family", "layer_type", "fields", "message"),
    [
        ("phi3", None, {"partial_rotary_factor": 0.0}, "'partial_rotary_factor' must be above 0"),
        ("phi3", None, {"partial_rotary_factor": 0.02}, "gives 0 channels to rotate"),
        ("phi3", None, {"partial_rotary_factor": 1.1}, "gives 22 channels to rotate"),
        (
            "phi3",
            None,
            old(type="dynamic", factor=2.0) | {"partial_rotary_factor": 0.1},
            "dynamic rope needs more than 2 rotated channels, got 2",
        ),
        ("gemma3", "full_attention", old(**YARN, alpha=2), r"rope_parameters\.full_attention: alpha = 2 is not impl"),
        ("gemma3", "sliding_attention", new(), "must hold an object for each layer type, such as 'sliding_attention'"),
        (
            "gemma3",
            "sliding_attention",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": 3}},
            "rope_parameters.sliding_attention: must be an object, got 3",
        ),
    ],
)
def test_bad_settings_of_a_part_are_named(family: str, layer_type: str | None, fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ours(family, config_of(family, fields), layer_type)


V4 = {"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"}
BEYOND_V4 = "nested, local scaled"


@pytest.mark.parametrize(("family", "fields", "layer_type"), CASES)
def test_export_reads_the_same_in_either_schema(
    family: str, fields: dict[str, Any], layer_type: str | None, request: pytest.FixtureRequest
) -> None:
    config = config_of(family, fields)
    before, rope = deepcopy(config), ours(family, config, layer_type)
    thetas = GEMMA_THETAS if layer_type else 10_000.0
    exported = json.loads(json.dumps(for_export(config, torch.bfloat16, thetas)))
    assert config == before and exported["dtype"] == exported["torch_dtype"] == "bfloat16"
    assert for_export(exported, torch.bfloat16) == exported

    v5 = {name: value for name, value in exported.items() if name not in V4}
    v4 = {name: value for name, value in exported.items() if name != "rope_parameters"}
    assert ours(family, exported, layer_type) == ours(family, v5, layer_type) == rope
    if BEYOND_V4 not in request.node.name:
        assert ours(family, v4, layer_type) == rope
    for length in LENGTHS:
        assert_same(family, rope, exported, layer_type, length)
        assert_same(family, rope, v5, layer_type, length)


def test_export_keeps_what_was_there() -> None:
    fields = {"x": [1], **old(type="su", short_factor=SHORT, long_factor=LONG), "original_max_position_embeddings": 48}
    exported = for_export(fields, torch.float32)
    # The three fields, under these names, are what Phi-3 takes in transformers 4.
    assert exported["rope_scaling"] == {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    assert exported["rope_parameters"].pop("original_max_position_embeddings") == 48
    assert exported["rope_parameters"] == {**LONGROPE, "rope_theta": 10_000.0}
    assert exported["x"] == [1] and exported["original_max_position_embeddings"] == 48
    # What the config leaves to its class, which may have a default of its own, stays left to it.
    unsaid = {**new(**LLAMA3), "max_position_embeddings": 99}
    assert for_export(unsaid, torch.float32)["rope_parameters"] == unsaid["rope_parameters"]


number = st.floats(0.05, 100.0)
whole = st.integers(2, 5000)
RANDOM = {
    "linear": {"factor": number},
    "dynamic": {"factor": number},
    "llama3": {
        "factor": number,
        "low_freq_factor": st.floats(0.1, 4.0),
        "high_freq_factor": st.floats(4.1, 50.0),
        "original_max_position_embeddings": whole,
    },
    "yarn": {
        "factor": number,
        "original_max_position_embeddings": whole,
        "beta_fast": st.floats(4.0, 100.0),
        "beta_slow": st.floats(0.1, 4.0),
        "truncate": st.booleans(),
        "mscale": st.floats(0.0, 2.0),
        "mscale_all_dim": st.floats(0.0, 2.0),
    },
}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_settings_give_frequencies_as_transformers_does(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(RANDOM)))
    scaling = {name: data.draw(values, name) for name, values in RANDOM[kind].items()}
    theta, dim = data.draw(st.floats(2.0, 1e8), "theta"), 2 * data.draw(st.integers(2, 64), "dim / 2")
    context, length = data.draw(whole, "context"), data.draw(whole, "length")
    config = {
        "hidden_size": 4 * dim,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": kind, "rope_theta": theta, **scaling},
    }
    rope = Fields(config).rope(dim, context)
    # A model asks for the frequencies of a length only when it is past the context.
    past = torch.tensor(length) if length > context else None
    wanted, factor = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**deepcopy(config)), seq_len=past)
    found = inverse_frequencies(rope, length=length)
    assert rope.attention_factor == factor
    assert torch.equal(found, wanted)
    assert (found > 0).all() and found.isfinite().all()
    if kind in ("linear", "dynamic"):
        assert (found.diff() < 0).all()
    else:
        plain = inverse_frequencies(RopeConfig(dim, theta))
        low, high = sorted((1.0, 1 / scaling["factor"]))
        assert ((found >= plain * low * 0.999999) & (found <= plain * high * 1.000001)).all()


KINDS = ["default", "linear", "proportional", "dynamic", "llama3", "yarn", "longrope"]
value = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**5), st.floats(), st.just(10**320), st.text(max_size=3),
    st.lists(st.floats(0, 4) | st.none(), min_size=3, max_size=4), st.dictionaries(st.text(max_size=2), st.none()),
)  # fmt: skip
garbage = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(KINDS) | value},
    optional={
        name: value | number
        for name in sorted({name for each in RANDOM.values() for name in each} | {"attention_factor", "rope_theta"})
    }
    | {name: value | st.just([1.0, 2.0, 3.0]) for name in ("short_factor", "long_factor")},
)


@settings(max_examples=200, deadline=None)
@given(garbage, st.fixed_dictionaries({}, optional=dict.fromkeys(["partial_rotary_factor", "rope_theta"], value)))
def test_garbage_is_refused_or_gives_usable_frequencies(inside: dict[str, Any], top: dict[str, Any]) -> None:
    try:
        rope = Fields({**top, "rope_parameters": inside}).rope(6, 128, partial=True)
    except ConfigError:
        return
    for length in (None, 128, 129):
        frequencies = inverse_frequencies(rope, length=length)
        lowest = frequencies.min() if inside["rope_type"] != "proportional" else 1  # which has zeros
        assert frequencies.isfinite().all() and lowest > 0
    assert hash(rope) is not None and 0 < rope.attention_factor < float("inf")
