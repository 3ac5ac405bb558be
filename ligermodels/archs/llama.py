"""Llama 2, 3, 3.1, 3.2 (text) and 3.3; and models with the layers of Llama: InternLM 3 and IQuest-Coder."""

from __future__ import annotations

from typing import Any

from ligermodels.archs.compose import Config, DecoderConfig, Family, Fields, decoder
from ligermodels.archs.fields import name_of
from ligermodels.errors import ConfigError

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
INTERNLM3 = {
    **DEFAULTS,
    "vocab_size": 128512,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 2,
}
INTERNLM3_FIELDS = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}
"""Field of published InternLM 3 configs -> Llama's name, which transformers 5 writes."""
IQUESTCODER = {
    **DEFAULTS,
    "vocab_size": 76800,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 80,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def decoder_config(config: Config) -> DecoderConfig:
    """The composed config of a `LlamaConfig` dict."""
    return llama_decoder(Fields(config, DEFAULTS))


def llama_decoder(
    fields: Fields, attention_bias: str = "attention_bias", mlp_bias: str = "mlp_bias", **more: Any
) -> DecoderConfig:
    """The decoder of Llama and of families with the same layers.

    Args:
        fields: the config, with the family's defaults.
        attention_bias: name of the field that gives the projections of attention biases.
        mlp_bias: name of the field that gives the projections of feed-forward layers biases.
        more: further arguments of `compose.decoder`.

    Raises:
        ConfigError: a field is missing, bad or not implemented; the message names it.
    """
    bias = fields.flag(attention_bias, False)
    return decoder(
        fields,
        attention=lambda layer, common: {"bias": bias, "o_bias": bias},
        mlp_bias=fields.flag(mlp_bias, False),
        **more,
    )


def internlm3(config: Config) -> DecoderConfig:
    """The composed config of an `InternLM3Config` dict."""
    bias, mlp_bias = (name_of(config, name, published) for published, name in INTERNLM3_FIELDS.items())
    fields = Fields(config, INTERNLM3)
    fields.ignore(*INTERNLM3_FIELDS, *INTERNLM3_FIELDS.values())
    if fields.flag(bias, False) != fields.flag(mlp_bias, False):
        raise ConfigError(
            f"{fields.where}: {bias} and {mlp_bias} must be equal: readers disagree about the bias of the output "
            "projection"
        )
    return llama_decoder(fields, bias, mlp_bias)


def iquestcoder(config: Config) -> DecoderConfig:
    """The composed config of an `IQuestCoderConfig` dict."""
    return llama_decoder(Fields(config, IQUESTCODER))


FAMILIES = (
    Family("llama", decoder_config),
    Family("internlm3", internlm3, attribute_map=INTERNLM3_FIELDS, architecture="LlamaForCausalLM"),
    Family("iquestcoder", iquestcoder, architecture="LlamaForCausalLM"),
)
