"""Text models within multimodal checkpoints: `wrapper` makes the family of such a checkpoint from that of its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ligermodels.archs.fields import Fields
from ligermodels.convert.config_json import TEXT, THINKER, short
from ligermodels.errors import ConfigError
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.families import Family
from ligermodels.models.untie import TIED

SHARED = (
    "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "is_causal", "per_layer_config",
    "quantization_config", "quantization", "compression_config", "transformers_weights",
)  # fmt: skip
"""Fields of a multimodal config that are those of its text model too."""
BESIDE_TEXT = (
    "text_config", "vision_config", "audio_config", "tie_word_embeddings", "initializer_range", "mm_tokens_per_image",
    "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index", "video_token_id", "audio_token_id",
    "vision_start_token_id", "vision_end_token_id", "vision_token_id", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "boi_token_id", "eoi_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image", "video_token_index", "audio_token_index",
    "audio_start_token_id", "audio_end_token_id", "user_token_id", "position_id_per_seconds", "seconds_per_chunk",
    "ignore_index",
)  # fmt: skip
"""Its other fields: they say how images, videos and sounds become embeddings."""
BESIDE_THINKER = (
    THINKER, "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output", "enable_talker",
    "initializer_range", "tie_word_embeddings", "im_start_token_id", "im_end_token_id", "tts_bos_token_id",
    "tts_eos_token_id", "tts_pad_token_id", "system_token_id", "user_token_id", "assistant_token_id",
)  # fmt: skip
"""Fields beside the multimodal config in that of a model that speaks."""
MULTIMODAL_ROPE = ("mrope_section", "mrope_interleaved", "interleaved")
"""Settings by which channels of a rope follow the time, height or width of an image. For text the three are equal, so
every such rope is the plain one."""


@dataclass(frozen=True)
class TextModel:
    """The text model in a multimodal checkpoint: alone, it is a checkpoint of `family` and of `architecture`, the name
    of transformers' class. `defaults` are fields whose defaults differ from the family's, `lacking` those of its fields
    that transformers does not read here."""

    family: Family
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    lacking: Sequence[str] = ()


def layouts(
    *places: tuple[str, str], ignored: Sequence[str], names: Sequence[Mapping[str, str]] = ({},)
) -> list[dict[str, Any]]:
    """A layout for each (prefix, head) of the text model's tensors and each way of naming its layers' parts."""
    each = [(*place, parts) for parts in names for place in places]
    return [{"prefix": prefix, "head": head, "names": parts, "ignored": tuple(ignored)} for prefix, head, parts in each]


BESIDE_VISION_TOWER = layouts(
    ("model.language_model", "lm_head.weight"),
    ("language_model.model", "language_model.lm_head.weight"),
    ignored=(r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\."),
)
"""As transformers 5 has the state of models with a vision tower of transformers' LLaVA kind, and as its checkpoints
are."""


def wrapper(
    model_type: str,
    text_models: Mapping[str, TextModel],
    layouts: Sequence[Mapping[str, Any]],
    *,
    tied: bool = False,
    flat: bool = False,
    absent: Mapping[str, Any] | None = None,
) -> Family:
    """The family of multimodal checkpoints, of which the text model alone is loaded.

    Args:
        model_type: that of the whole.
        text_models: `text_config.model_type` -> text model; the first is that of a config that names none.
        layouts: as of `Family`.
        tied: whether the head is the embedding where config.json does not say.
        flat: whether the text model's fields may stand beside `vision_config`, without a `text_config`.
        absent: the `text_config` of a config that has neither.
    """

    def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
        found = config.get(TEXT)
        if found is None and flat:
            beside = {*BESIDE_TEXT, "model_type", "architectures"}
            found = {name: value for name, value in config.items() if name not in beside}
        found = (absent or {}) if found is None else found
        if not isinstance(found, Mapping):
            raise ConfigError(f"config.json: field 'text_config' must be an object, got {short(found)}")
        shared = {name: config[name] for name in SHARED if config.get(name) is not None}
        text = plain_rope({**shared, **found})
        kind = text.get("model_type") or next(iter(text_models))
        if not isinstance(kind, str) or kind not in text_models:
            known = ", ".join(map(repr, text_models))
            raise ConfigError(
                f"config.json: text_config.model_type = {short(kind)} is not implemented for model_type "
                f"{model_type!r}; implemented: {known}"
            )
        model = text_models[kind]
        if given := [name for name in model.lacking if text.get(name) is not None]:
            raise ConfigError(
                f"config.json: {given[0]} = {short(text[given[0]])} is not read for model_type {model_type!r}"
            )
        if TIED not in config and text.get(TIED, tied) != tied:
            # Releases of transformers differ in which of the two they ask.
            raise ConfigError(
                f"config.json: text_config.{TIED} = {short(text[TIED])}: set {TIED} beside text_config too"
            )
        own = {"model_type": model.family.model_type, "architectures": [model.architecture]}
        newer = model.family.attribute_map
        defaults = {name: value for name, value in model.defaults.items() if newer.get(name) not in text}
        return {**defaults, **text, **own, TIED: config.get(TIED, tied)}

    def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
        text = text_of(config)
        # Some releases of transformers wrote the text model's fields in both places.
        whole = Fields({name: value for name, value in config.items() if name not in text or text[name] != value})
        whole.ignore(*SHARED, *BESIDE_TEXT)
        whole.check_unread()
        family = next(each.family for each in text_models.values() if each.family.model_type == text["model_type"])
        if flat and config.get(TEXT) is None:
            return family.decoder_config(text)
        with _within(TEXT):
            return family.decoder_config(text)

    first = next(iter(text_models.values()))
    theta = first.defaults.get("rope_theta", first.family.default_theta)
    return Family(model_type, decoder_config, layouts, theta, text=text_of, attribute_map=first.family.attribute_map)


def around(thinker: Family, model_type: str, layouts: Sequence[Mapping[str, Any]]) -> Family:
    """The family of checkpoints of models that speak, stored in these `layouts`: their `thinker_config` is a config of
    `thinker`, a family made by `wrapper`."""

    def thinker_of(config: Mapping[str, Any]) -> dict[str, Any]:
        found = config.get(THINKER)
        if not isinstance(found, Mapping):
            raise ConfigError(f"config.json: field {THINKER!r} must be an object, got {short(found)}")
        own = thinker.model_type
        if (kind := found.get("model_type") or own) != own:
            raise ConfigError(
                f"config.json: {THINKER}.model_type = {short(kind)} is not implemented for model_type {model_type!r}; "
                f"implemented: {own!r}"
            )
        shared = {name: config[name] for name in SHARED if config.get(name) is not None}
        return {**shared, **found, "model_type": own}

    def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
        whole = Fields(config)
        whole.ignore(*SHARED, *BESIDE_THINKER)
        whole.check_unread()
        found = thinker_of(config)
        with _within(THINKER):
            return thinker.decoder_config(found)

    text = thinker.text or dict
    return replace(
        thinker,
        model_type=model_type,
        decoder_config=decoder_config,
        layouts=layouts,
        text=lambda config: text(thinker_of(config)),
    )


@contextmanager
def _within(field: str) -> Iterator[None]:
    """Have an error of the config in `field` say where that is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json: ", f"config.json: {field}: ", 1)) from None


def plain_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without the settings of MULTIMODAL_ROPE, and with the plain rope in place of Qwen2-VL's "mrope"."""
    found = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name)
        if isinstance(settings, Mapping):
            plain = {key: value for key, value in settings.items() if key not in MULTIMODAL_ROPE}
            for key in ("type", "rope_type"):
                plain |= {key: "default"} if plain.get(key) == "mrope" else {}
            found[name] = plain
    return found
