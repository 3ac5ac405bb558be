"""Tiny configs of checkpoints of more than a language model."""

from collections.abc import Mapping
from typing import Any

Configs = Mapping[str, dict[str, Any]]
HIDDEN = 60
"""Channels of all the text models."""


def within(texts: Configs, text: str, vision: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A multimodal config around the text config of this name."""
    text_config = {name: value for name, value in texts[text].items() if name != "rope_scaling"}
    return {"text_config": text_config, "vision_config": vision, **fields}


def qwen_vl(texts: Configs, model_type: str, text: str, **rope: Any) -> dict[str, Any]:
    """A tiny Qwen-VL around the text config of this name."""
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 2}
    vision |= {"out_hidden_size": HIDDEN}
    if model_type == "qwen2_vl":  # There the width of the tower is embed_dim, and hidden_size that of its output.
        vision |= {"hidden_size": HIDDEN, "embed_dim": 16, "mlp_ratio": 2}
    if model_type.startswith("qwen3"):
        vision |= {"num_position_embeddings": 16}
    if model_type == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0]}
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = within(texts, text, vision, model_type=model_type, **{name: 127 + i for i, name in enumerate(tokens)})
    config["text_config"] |= {"model_type": f"{model_type}_text", "rope_parameters": rope}
    if not model_type.startswith("qwen3"):
        del config["text_config"]["head_dim"]
    return config | {"tie_word_embeddings": config["text_config"]["tie_word_embeddings"]}


SIGLIP = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP |= {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
PIXTRAL = {**SIGLIP, "model_type": "pixtral", "head_dim": 4}
GEMMA4_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA4_VISION |= {"num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 8}
UNIFIED_VISION = {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 16}


def gemma4(texts: Configs, text: str, vision: dict[str, Any], model_type: str = "gemma4") -> dict[str, Any]:
    """A tiny Gemma 4 around the text config of this name."""
    tokens = ("image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "eoi_token_id")
    fields = {"model_type": model_type, "tie_word_embeddings": True, "audio_config": None}
    vision = {"model_type": f"{model_type}_vision", **vision}
    return within(texts, text, vision, **fields, **{name: 126 + i for i, name in enumerate(tokens)})


MUSE_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MUSE_VISION |= {"patch_size": 2, "pos_emb_height": 4, "pos_emb_width": 4, "model_type": "muse_glimmer_vision"}
MUSE = {"out_hidden_size": 64, "projector_hidden_size": 12, "image_token_id": 130, "video_token_id": 129}

LLAMA4_VISION = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA4_VISION |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 12, "model_type": "llama4_vision_model"}
LLAMA4_VISION |= {"projector_input_dim": 12, "projector_output_dim": 12}
LLAMA4 = {"image_token_index": 130, "boi_token_index": 129, "eoi_token_index": 128, "tie_word_embeddings": False}

AUDIO = {"num_mel_bins": 4, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "d_model": 8}
AUDIO |= {"output_dim": HIDDEN, "max_source_positions": 20}
SPEECH = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPEECH |= {"num_key_value_heads": 2, "head_dim": 8}
QWEN2_5_SPEECH = {
    "talker_config": {**SPEECH, "vocab_size": 32, "embedding_size": HIDDEN, "pad_token_id": 0},
    "token2wav_config": {
        "dit_config": {
            **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8, "emb_dim": 8},
            **{"num_embeds": 9, "mel_dim": 4, "enc_emb_dim": 8, "enc_dim": 8, "enc_channels": [16, 16, 16, 16, 48]},
            **{"enc_attention_channels": 4, "enc_se_channels": 4},
        },
        "bigvgan_config": {
            **{"mel_dim": 4, "upsample_initial_channel": 8, "upsample_rates": [2], "upsample_kernel_sizes": [4]},
            **{"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 1, 1]]},
        },
    },
}
QWEN3_EXPERTS = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 2}
QWEN3_SPEECH = {
    "talker_config": {
        **{"thinker_hidden_size": HIDDEN, "num_code_groups": 2, "accept_hidden_layer": 1},
        "spatial_merge_size": 2,
        "text_config": {**SPEECH, **QWEN3_EXPERTS, "num_experts_per_tok": 1, "vocab_size": 32},
        "code_predictor_config": {**SPEECH, "num_code_groups": 2, "vocab_size": 16},
    },
    "code2wav_config": {
        **{key: value for key, value in SPEECH.items() if key != "head_dim"},
        **{"codebook_size": 8, "num_quantizers": 2, "upsample_rates": [2], "upsampling_ratios": [2], "decoder_dim": 8},
    },
}
"""What speaks beside the thinkers."""


def qwen_omni(texts: Configs, model_type: str, text: str, **rope: Any) -> dict[str, Any]:
    """The tiny thinker of a Qwen-Omni around the text config of this name."""
    config = qwen_vl(texts, model_type, text, **rope)
    config["model_type"] += "_thinker"
    config["audio_config"] = AUDIO
    config |= {"audio_end_token_id": 125, "seconds_per_chunk": 2, "user_token_id": 9}
    if model_type.startswith("qwen3"):  # With the fields of published checkpoints.
        config["text_config"] |= {"use_qk_norm": True, "shared_expert_intermediate_size": 0}
        config["audio_config"] = {**AUDIO, "downsample_hidden_size": 4}
        config["vision_config"] |= {"deepstack_visual_indexes": [0]}
    else:
        config["vision_config"] |= {"fullatt_block_indexes": [0]}
    return config


def multimodal(texts: Configs) -> dict[str, dict[str, Any]]:
    """Such configs by name, around the text models' configs `texts`."""
    omni = {
        "qwen2_5_omni_thinker": qwen_omni(
            texts, "qwen2_5_omni", "qwen2-windows", rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 1]
        ),
        "qwen3_omni_moe_thinker": qwen_omni(
            texts, "qwen3_omni_moe", "qwen3_moe", rope_type="default", interleaved=True, mrope_section=[3, 2, 2]
        ),
    }
    return {
        "gemma3": within(
            texts,
            "gemma3_text",
            SIGLIP,
            model_type="gemma3",
            mm_tokens_per_image=4,
            image_token_index=130,
            eos_token_id=[1, 7],
        ),
        "mistral3": within(
            texts, "mistral-nemo", PIXTRAL, model_type="mistral3", image_token_index=130, tie_word_embeddings=False
        ),
        "mistral3-ministral3": within(
            texts, "ministral3", PIXTRAL, model_type="mistral3", image_token_index=130, tie_word_embeddings=False
        ),
        "mistral3-mistral4": within(
            texts, "mistral4", PIXTRAL, model_type="mistral3", image_token_index=130, tie_word_embeddings=False
        ),
        "qwen2_vl": qwen_vl(
            texts, "qwen2_vl", "qwen2-windows", rope_type="default", rope_theta=1e4, mrope_section=[2, 2, 1]
        ),
        "qwen2_5_vl": qwen_vl(
            texts,
            "qwen2_5_vl",
            "qwen2",
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mrope_section=[2, 2, 1],
        ),
        "qwen3_5": qwen_vl(
            texts,
            "qwen3_5",
            "qwen3_5_text",
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_interleaved=True,
            mrope_section=[1, 1, 0],
        ),
        "qwen3_5_moe": qwen_vl(
            texts,
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            rope_type="default",
            partial_rotary_factor=0.25,
            mrope_section=[1, 1, 0],
        ),
        "qwen3_vl": qwen_vl(
            texts, "qwen3_vl", "qwen3", rope_type="default", mrope_interleaved=True, mrope_section=[3, 2, 2]
        ),
        "qwen3_vl_moe": qwen_vl(
            texts,
            "qwen3_vl_moe",
            "qwen3_moe-normalised",
            rope_type="default",
            mrope_interleaved=True,
            mrope_section=[2, 2, 1],
        ),
        "muse_glimmer": within(texts, "muse_glimmer_text", MUSE_VISION, model_type="muse_glimmer", **MUSE),
        "llama4": within(texts, "llama4_text", LLAMA4_VISION, model_type="llama4", **LLAMA4),
        "gemma4": gemma4(texts, "gemma4_text-few-layers", GEMMA4_VISION),
        "gemma4-experts": gemma4(texts, "gemma4_text-experts", GEMMA4_VISION),
        "gemma4_unified": gemma4(texts, "gemma4_unified_text", UNIFIED_VISION, "gemma4_unified"),
        **omni,
        "qwen2_5_omni": {
            "model_type": "qwen2_5_omni",
            "thinker_config": omni["qwen2_5_omni_thinker"],
            **QWEN2_5_SPEECH,
        },
        "qwen3_omni_moe": {
            "model_type": "qwen3_omni_moe",
            "thinker_config": omni["qwen3_omni_moe_thinker"],
            **QWEN3_SPEECH,
            **{"system_token_id": 8, "tts_bos_token_id": 131, "im_start_token_id": 126},
        },
    }
