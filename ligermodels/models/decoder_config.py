"""The config of a decoder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.layers import BlockConfig, HeadConfig, NormConfig, PerLayerInputsConfig
from ligermodels.models.transformers_tools import native_config


@native_config
@dataclass(frozen=True)
class DecoderConfig:
    """A whole decoder as data.

    Args:
        vocab_size: number of tokens in the vocabulary.
        hidden_size: channels of the hidden states, H.
        blocks: configs of the blocks, one for each layer.
        norm: config of the final norm.
        head: config of the language-model head.
        embed_scale: factor of token embeddings, rounded to their dtype.
        embed_norm_eps: eps of an RMSNorm without weight of token embeddings (Muse Glimmer), or None.
        input_scale: factor of the first block's input, `inputs_embeds` too.
        token_scale: factor of the first block's input, but not of `inputs_embeds` (Falcon-H1).
        padding_idx: token whose embedding gets no gradient from the inputs.
        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts in the whole loss.
        initializer_range: standard deviation of new weights.
        max_position_embeddings: longest context, in tokens, that the checkpoint was made for.
        num_mtp_layers: number of multi-token prediction layers that checkpoints hold after the layers of the blocks
            (DeepSeek-V3, GLM-4.5); they are no part of the model.
        mtp_block: config of the block of each multi-token prediction layer. Default: None, the block that
            `models.mtp_format.mtp_block` says.
        per_layer_inputs: config of inputs that each layer takes beside the hidden states (Gemma 4).
        dropout: fields of config.json that ask for dropout in training, such as "attention_dropout = 0.1". It is not
            implemented: such a model is in eval mode, and refuses training.
    """

    vocab_size: int
    hidden_size: int
    blocks: tuple[BlockConfig, ...]
    norm: NormConfig
    head: HeadConfig = field(default_factory=HeadConfig)
    embed_scale: float | None = None
    embed_norm_eps: float | None = None
    input_scale: float = 1.0
    token_scale: float = 1.0
    padding_idx: int | None = None
    router_aux_loss_coef: float = 0.0
    initializer_range: float = 0.02
    max_position_embeddings: int | None = None
    num_mtp_layers: int = 0
    mtp_block: BlockConfig | None = None
    per_layer_inputs: PerLayerInputsConfig | None = None
    dropout: tuple[str, ...] = ()

    def weight_map(
        self,
        *,
        prefix: str = "model",
        head: str = "lm_head.weight",
        names: Mapping[str, str] | None = None,
        ignored: tuple[str, ...] = (),
    ) -> WeightMap:
        """Where the tensors of a `CausalLM` of this config are in a checkpoint of Hugging Face's usual layout.

        Args:
            prefix: prefix of the names `layers`, `embed_tokens` and `norm`, or those in `names`; "" for none, as in
                checkpoints of a base model.
            head: name of the language-model head.
            names: the family's names of parts of a layer, where they differ from `NAMES` of the layers' configs; and
                the names of the embedding, the list of layers and the final norm, "decoder.embed", "decoder.layers" and
                "decoder.norm".
            ignored: patterns of tensors of the checkpoint to skip.
        """
        at = f"{prefix}." if prefix else ""
        embedding = f"{at}{(names or {}).get('decoder.embed', 'embed_tokens')}.weight"
        entries: list[WeightMapping] = [rename("decoder.embed.weight", embedding)]
        unused: list[str] = []
        layers, norm = ((names or {}).get(f"decoder.{part}", part) for part in ("layers", "norm"))
        if self.per_layer_inputs is not None:
            entries += self.per_layer_inputs.weight_mappings("decoder.per_layer_inputs.", at)
        for layer, block in enumerate(self.blocks):
            here, there = f"decoder.blocks.{layer}", f"{at}{layers}.{layer}"
            entries += block.weight_mappings(self.hidden_size, here, there, names or {})
            unused += block.unused(there, names or {})
        for kind in ("weight", "bias") if self.norm.bias else ("weight",):
            entries.append(rename(f"decoder.norm.{kind}", f"{at}{norm}.{kind}"))
        if not self.head.tied:
            entries.append(rename("head.weight", head))
        if self.head.bias:
            entries.append(rename("head.bias", f"{head.removesuffix('.weight')}.bias"))
        aliases = {head: embedding} if self.head.tied else {}
        first = len(self.blocks)
        mtp = [rf"^{re.escape(f'{at}{layers}.{layer}.')}" for layer in range(first, first + self.num_mtp_layers)]
        return WeightMap(entries, ignored=[r"rotary_emb\.inv_freq$", *mtp, *unused, *ignored], aliases=aliases)
