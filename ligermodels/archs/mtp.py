"""Layers of multi-token prediction as checkpoints hold them: their tensors' names and their field of config.json, as
data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError
from ligermodels.layers import BlockConfig
from ligermodels.models.untie import EMBEDDING, HEAD

if TYPE_CHECKING:
    from ligermodels.models.decoder import DecoderConfig


@dataclass(frozen=True)
class MTPFormat:
    """How the checkpoints of a family hold their layers of multi-token prediction.

    Args:
        fields: of config.json, or of its `text_config`, that give the number of such layers; exports write the first.
        prefix: of the tensors' names; {model} is the prefix of the language model, {layer} its number of layers plus
            that of the layer of multi-token prediction, counted from 0. Where it has no {layer}, the parts but the
            blocks are shared by all layers.
        names: of the parts of an `MTPHead` but its block, after the prefix.
        block: prefix of a block's tensors; {index} counts the layers of multi-token prediction from 0.
        copies: further tensors after the prefix -> the model's own tensor that they repeat.
    """

    fields: tuple[str, ...]
    prefix: str
    names: Mapping[str, str]
    block: str
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def separate(self) -> bool:
        """Whether each layer has all parts of an `MTPHead`, and not only a block, of its own."""
        return "{layer}" in self.prefix

    def weight_map(self, config: DecoderConfig, layout: Mapping[str, Any], num_layers: int = 1) -> WeightMap:
        """Where the tensors of an `MTPHead` of so many layers, "mtp.*", are in a checkpoint of this `layout` (of
        `Family.layouts`)."""
        mappings: list[WeightMapping] = []
        copied = self.copied(config, layout, num_layers)
        ignored = [r"rotary_emb\.inv_freq$", *(f"^{re.escape(name)}$" for name in copied)]
        block, names = mtp_block(config)[1], layout.get("names") or {}
        kinds = ("weight", "bias") if config.norm.bias else ("weight",)
        prefixes = []
        for index in range(num_layers):
            prefix, stored = self._prefixes(config, layout, index)
            native = "mtp" if index == 0 else f"mtp.later.{index - 1}"
            if index == 0 or self.separate:
                prefixes.append(prefix)
                mappings.append(rename(f"{native}.fc.weight", f"{prefix}{self.names['fc']}.weight"))
                mappings += [
                    rename(f"{native}.{part}.{kind}", f"{prefix}{self.names[part]}.{kind}")
                    for part in ("embedding_norm", "hidden_norm", "norm")
                    for kind in kinds
                ]
            own = f"{native}.block" if index == 0 or self.separate else native
            mappings += block.weight_mappings(config.hidden_size, own, stored, names)
            ignored += block.mixer.unused(stored, names)
        others = f"^(?!{'|'.join(map(re.escape, prefixes))})"
        return WeightMap(mappings, ignored=[others, *ignored])

    def copied(self, config: DecoderConfig, layout: Mapping[str, Any], num_layers: int = 1) -> dict[str, str]:
        """Checkpoint tensor -> the native tensor of the model that it repeats."""
        tied = {HEAD: EMBEDDING} if config.head.tied else {}
        return {
            f"{self._prefixes(config, layout, index)[0]}{name}": tied.get(native, native)
            for index in range(num_layers)
            for name, native in self.copies.items()
        }

    def layers_in(self, config: DecoderConfig, layout: Mapping[str, Any], names: Iterable[str]) -> int:
        """How many layers, one after another, have tensors among the checkpoint tensors `names`."""
        known = list(names)
        starts = (f"{self._prefixes(config, layout, index)[1]}." for index in itertools.count())
        return sum(1 for _ in itertools.takewhile(lambda start: any(n.startswith(start) for n in known), starts))

    def _prefixes(self, config: DecoderConfig, layout: Mapping[str, Any], index: int) -> tuple[str, str]:
        """Those of the tensors of layer `index`, and of its block's."""
        where = {"model": layout.get("prefix", "model"), "layer": len(config.blocks) + index, "index": index}
        return self.prefix.format(**where), self.block.format(**where)

    def ignored(self, hf_config: Mapping[str, Any]) -> list[str]:
        """Patterns of tensors that are no part of the model itself in a checkpoint of this config.json."""
        own = not self.separate and self.count(hf_config)
        return [f"^{re.escape(self.prefix)}"] if own else []

    def count(self, hf_config: Mapping[str, Any]) -> int:
        """Layers of multi-token prediction that config.json names; 0 where it has no such field.

        Raises ConfigError for a number that is none."""
        text = hf_config.get("text_config")
        for config in (hf_config, text if isinstance(text, Mapping) else {}):
            for name in self.fields:
                if (found := config.get(name)) is not None:
                    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
                        raise ConfigError(f"config.json: {name} must be a number of layers, got {found!r}")
                    return found
        return 0

    def written(self, hf_config: Mapping[str, Any], num_layers: int = 1) -> dict[str, Any]:
        """config.json of a checkpoint with so many such layers."""
        if self.count(hf_config) == num_layers:
            return dict(hf_config)
        text = hf_config.get("text_config")
        if isinstance(text, Mapping):
            return {**hf_config, "text_config": self.written(text, num_layers)}
        others = {name: value for name, value in hf_config.items() if name not in self.fields}
        return {**others, self.fields[0]: num_layers}


QWEN = MTPFormat(
    fields=("mtp_num_hidden_layers",),
    prefix="mtp.",
    names={"fc": "fc", "embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"},
    block="mtp.layers.{index}",
)
"""Of Qwen3-Next and Qwen3.5, whose layers share all but their blocks; and of all families that have no format of their
own."""

DEEPSEEK = MTPFormat(
    fields=("num_nextn_predict_layers", "num_mtp_layers"),
    prefix="{model}.layers.{layer}.",
    names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"},
    block="{model}.layers.{layer}",
    copies={"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD},
)
"""Of DeepSeek-V3 and GLM-4.5: layers after the model's own, with copies of the embedding and the head."""


def mtp_block(config: DecoderConfig) -> tuple[int, BlockConfig]:
    """The block of a layer of multi-token prediction: number and config of the model's last one of full attention, or,
    if there is none, of attention within a window.

    Raises ConfigError for models without attention, and for those whose blocks take inputs of their own beside the
    hidden states.
    """
    if config.per_layer_inputs is not None:
        raise ConfigError(
            "per_layer_inputs: blocks of this model take inputs for each layer by token; a layer of multi-token "
            "prediction is not implemented for it"
        )
    mixers = [block.mixer for block in config.blocks]
    # Attention is what keeps something of every token.
    own = [m.state_from is None and m.state_elements(2) > m.state_elements(1) for m in mixers]
    attention = [i for i, attends in enumerate(own) if attends]
    full = [i for i in attention if getattr(mixers[i], "window", None) is None]
    if not attention:
        raise ConfigError("blocks: none of them has attention, which a layer of multi-token prediction needs")
    layer = (full or attention)[-1]
    block, mixer = config.blocks[layer], mixers[layer]
    if getattr(mixer, "shares_kv", False):
        block = replace(block, mixer=replace(mixer, shares_kv=False))  # type: ignore[type-var]
    return layer, block
