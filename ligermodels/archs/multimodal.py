"""Families of multimodal checkpoints. Only the text model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields
from ligermodels.convert.config_json import TEXT, THINKER
from ligermodels.convert.json_values import is_object
from ligermodels.errors import ConfigError, short
from ligermodels.models.untie import TIED

ENDS = ("bos_token_id", "eos_token_id")
"""Fields of a multimodal config that transformers generates by, whatever its `text_config` has."""
SHARED = (
    *ENDS, "dtype", "torch_dtype", "is_causal", "per_layer_config", "quantization_config", "quantization",
    "compression_config", "transformers_weights",
)  # fmt: skip
"""Fields of a multimodal config that also apply to its text model. `pad_token_id` does not: the token of its
`text_config` is that whose embedding gets no gradient."""
BESIDE_TEXT = (
    "text_config", "vision_config", "audio_config", "tie_word_embeddings", "initializer_range", "mm_tokens_per_image",
    "image_token_index", "image_token_id", "boi_token_index", "eoi_token_index", "video_token_id", "audio_token_id",
    "vision_start_token_id", "vision_end_token_id", "vision_token_id", "projector_hidden_act", "vision_feature_layer",
    "multimodal_projector_bias", "spatial_merge_size", "boi_token_id", "eoi_token_id", "boa_token_id",
    "eoa_token_id", "eoa_token_index", "vision_soft_tokens_per_image", "video_token_index", "audio_token_index",
    "audio_start_token_id", "audio_end_token_id", "user_token_id", "position_id_per_seconds", "seconds_per_chunk",
    "ignore_index", "out_hidden_size", "projector_hidden_size",
)  # fmt: skip
"""Other fields of a multimodal config, about images, video and sound."""
BESIDE_THINKER = (
    THINKER, "talker_config", "token2wav_config", "code2wav_config", "enable_audio_output", "enable_talker",
    "initializer_range", "tie_word_embeddings", "im_start_token_id", "im_end_token_id", "tts_bos_token_id",
    "tts_eos_token_id", "tts_pad_token_id", "system_token_id", "user_token_id", "assistant_token_id",
)  # fmt: skip
"""Fields beside the multimodal config (THINKER) in the config of a model with speech output."""
MULTIMODAL_ROPE = ("mrope_section", "mrope_interleaved", "interleaved")
"""Rotary settings that divide the channels between time, height and width of an image. Positions of text are the same
in all three, so for text these settings change nothing."""


@dataclass(frozen=True)
class TextModel:
    """The text model in a multimodal checkpoint.

    Args:
        family: family of the text model as a checkpoint of its own.
        defaults: fields with other defaults than in the family.
        unread: fields of the family that transformers does not read here; a config that sets one is an error.
        fixed: fields of the family -> the value that transformers computes with here, whatever the config says; another
            value is an error.
    """

    family: Family
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: Sequence[str] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)


def layouts(
    *prefixes: tuple[str, str], ignored: Sequence[str], names: Sequence[Mapping[str, str]] = ({},)
) -> list[dict[str, Any]]:
    """Layouts of a text model: all combinations of `prefixes` and `names`.

    Args:
        prefixes: pairs of the prefix of the text model's tensors and the name of its head.
        ignored: patterns of tensors outside the text model.
        names: maps from a part of a layer to its name.
    """
    return [
        {"prefix": prefix, "head": head, "names": parts, "ignored": tuple(ignored)}
        for parts in names
        for prefix, head in prefixes
    ]


BESIDE_VISION_TOWER = layouts(
    ("model.language_model", "lm_head.weight"),
    ("language_model.model", "language_model.lm_head.weight"),
    ignored=(r"^(model\.)?vision_tower\.", r"^(model\.)?multi_modal_projector\."),
)
"""Layouts of LLaVA-like models with a vision tower: of the state dict in transformers 5, and of checkpoints."""


def wrapper(
    model_type: str,
    text_models: Mapping[str, TextModel],
    layouts: Sequence[Mapping[str, Any]],
    *,
    tied: bool = False,
    either: bool = False,
    flat: bool = False,
    absent: Mapping[str, Any] | None = None,
) -> Family:
    """The family of multimodal checkpoints of a type. Only their text model is loaded.

    Args:
        model_type: `model_type` of the checkpoints.
        text_models: `text_config.model_type` -> text model. The first is used if the config names none.
        layouts: keyword arguments of `DecoderConfig.weight_map` for each layout of the checkpoints.
        tied: whether head and embedding are tied if config.json has no `tie_word_embeddings`.
        either: whether `tie_word_embeddings` of `text_config` ties them too. Default: it must not contradict.
        flat: whether the text model's fields may be beside `vision_config`, without a `text_config`.
        absent: `text_config` of a config without these fields.
    """

    def text_of(config: Config) -> dict[str, Any]:
        fields = _text_fields(config, flat, absent or {})
        shared = {name: config[name] for name in SHARED if config.get(name) is not None}
        ends = {name: shared[name] for name in ENDS if name in shared}
        text = plain_rope({**shared, **fields, **ends})
        text_type = text.get("model_type") or next(iter(text_models))
        model = text_models.get(str(text_type))
        if model is None:
            known = ", ".join(map(repr, text_models))
            raise ConfigError(
                f"config.json: text_config.model_type = {short(text_type)} is not implemented for model_type "
                f"{model_type!r}; implemented: {known}"
            )
        if unread := [name for name in model.unread if text.get(name) is not None]:
            raise ConfigError(
                f"config.json: {unread[0]} = {short(text[unread[0]])} is not read for model_type {model_type!r}"
            )
        stated = Fields(text, where=f"config.json: {TEXT}")
        fixed = {name: stated.choices(name, only, default=only) for name, only in model.fixed.items()}
        beside, within = config.get(TIED, tied), text.get(TIED, tied)
        if TIED not in config and within != tied and not either:
            # Some releases of transformers read the outer flag, others the inner one.
            raise ConfigError(
                f"config.json: text_config.{TIED} = {short(text[TIED])}: set {TIED} beside text_config too"
            )
        own = {"model_type": model.family.model_type, "architectures": [model.family.causal_lm]}
        newer = model.family.attribute_map
        defaults = {name: value for name, value in model.defaults.items() if newer.get(name) not in text}
        return {**defaults, **text, **fixed, **own, TIED: within if either and not beside else beside}

    def decoder_config(config: Config) -> DecoderConfig:
        text = text_of(config)
        # Some releases of transformers wrote the text model's fields twice: beside `text_config` and in it.
        outer = Fields({name: value for name, value in config.items() if name not in text or text[name] != value})
        outer.ignore(*SHARED, *BESIDE_TEXT)
        outer.check_token("pad_token_id")
        outer.check_unread()
        family = next(m.family for m in text_models.values() if m.family.model_type == text["model_type"])
        if flat and config.get(TEXT) is None:
            return family.decoder_config(text)
        with _within(TEXT):
            return family.decoder_config(text)

    first = next(iter(text_models.values()))
    theta = first.defaults.get("rope_theta", first.family.default_theta)
    return Family(model_type, decoder_config, layouts, theta, text=text_of, attribute_map=first.family.attribute_map)


def around(thinker: Family, model_type: str, layouts: Sequence[Mapping[str, Any]]) -> Family:
    """The family of checkpoints of models with speech output, which nest a multimodal model in `thinker_config`.

    Args:
        thinker: family of the multimodal model, made by `wrapper`.
        model_type: `model_type` of the checkpoints.
        layouts: keyword arguments of `DecoderConfig.weight_map` for each layout of the checkpoints.
    """

    def thinker_of(config: Config) -> dict[str, Any]:
        fields = config.get(THINKER)
        if not is_object(fields):
            raise ConfigError(f"config.json: field {THINKER!r} must be an object, got {short(fields)}")
        own = thinker.model_type
        if (stated := fields.get("model_type") or own) != own:
            raise ConfigError(
                f"config.json: {THINKER}.model_type = {short(stated)} is not implemented for model_type "
                f"{model_type!r}; implemented: {own!r}"
            )
        shared = {name: config[name] for name in SHARED if config.get(name) is not None}
        return {**shared, **fields, "model_type": own}

    def decoder_config(config: Config) -> DecoderConfig:
        outer = Fields(config)
        outer.ignore(*SHARED, *BESIDE_THINKER)
        outer.check_token("pad_token_id")
        outer.check_unread()
        fields = thinker_of(config)
        with _within(THINKER):
            return thinker.decoder_config(fields)

    text = thinker.text or dict
    return replace(
        thinker,
        model_type=model_type,
        decoder_config=decoder_config,
        layouts=layouts,
        text=lambda config: text(thinker_of(config)),
    )


def _text_fields(config: Config, flat: bool, absent: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields: `text_config`; without it, if `flat`, the fields beside it; otherwise `absent`."""
    fields = config.get(TEXT)
    if fields is None and flat:
        beside = {*BESIDE_TEXT, "model_type", "architectures"}
        fields = {name: value for name, value in config.items() if name not in beside}
    fields = absent if fields is None else fields
    if not is_object(fields):
        raise ConfigError(f"config.json: field 'text_config' must be an object, got {short(fields)}")
    return fields


@contextmanager
def _within(field: str) -> Iterator[None]:
    """Context manager that adds `field` to errors of the config nested in it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json: ", f"config.json: {field}: ", 1)) from None


def plain_rope(config: Config) -> dict[str, Any]:
    """`config` without the settings of MULTIMODAL_ROPE, and with the plain rope in place of Qwen2-VL's "mrope"."""
    fields = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        settings = config.get(name)
        if is_object(settings):
            plain = {key: value for key, value in settings.items() if key not in MULTIMODAL_ROPE}
            for key in ("type", "rope_type"):
                plain |= {key: "default"} if plain.get(key) == "mrope" else {}
            fields[name] = plain
    return fields
