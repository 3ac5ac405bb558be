"""How checkpoints store layers of multi-token prediction (MTP): tensor names and the field of config.json, as data."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ligermodels.convert.config_json import TEXT
from ligermodels.convert.json_values import as_object, is_int
from ligermodels.convert.mappings import WeightMapping, rename
from ligermodels.convert.weight_map import WeightMap
from ligermodels.errors import ConfigError, short
from ligermodels.layers import BlockConfig
from ligermodels.models.untie import EMBEDDING, HEAD

if TYPE_CHECKING:
    from ligermodels.models.decoder import DecoderConfig

QWEN_NAMES = {
    "fc": "fc",
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "norm": "norm",
}
"""Part of an `MTPHead` -> its name in checkpoints of Qwen3-Next and Qwen3.5."""


@dataclass(frozen=True)
class MTPFormat:
    """How the checkpoints of a family store layers of multi-token prediction. The default is the format of Qwen3-Next
    and Qwen3.5, where the layers share all parts except their blocks.

    In `prefix`, `block` and `mlp_block`, {model} stands for the prefix of the language model ("model"), {index} for the
    number of the MTP layer from 0, {layer} for that number plus the number of the model's own layers, and {first} and
    {second} for twice the number of the MTP layer, and one more.

    Args:
        fields: names of the field with the number of MTP layers, in config.json or its `text_config`. All of them are
            read.
        written_fields: the names under which exports write the number. Default: the first of `fields`.
        prefix: prefix of the tensors outside the block. With a number in it, each MTP layer has these tensors; without,
            all MTP layers share them.
        names: part of an `MTPHead` (except its block) -> its name after the prefix.
        block: prefix of the tensors of a block.
        mlp_block: prefix of the tensors of the block's feed-forward layer, of its norm and of the norm after the block,
            where files have them as a layer of its own. Default: `block`, and `prefix` for the norm after the block.
        copies: name after the prefix -> native tensor of the model that this checkpoint tensor repeats.
    """

    fields: tuple[str, ...] = ("mtp_num_hidden_layers",)
    written_fields: tuple[str, ...] = ()
    prefix: str = "mtp."
    names: Mapping[str, str] = field(default_factory=QWEN_NAMES.copy)
    block: str = "mtp.layers.{index}"
    mlp_block: str | None = None
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def separate(self) -> bool:
        """Whether each MTP layer has all parts of an `MTPHead`, instead of only a block."""
        return any(f"{{{number}}}" in self.prefix for number in ("layer", "index", "first"))

    def weight_map(self, config: DecoderConfig, layout: Mapping[str, Any], num_layers: int = 1) -> WeightMap:
        """The weight map of an `MTPHead`, whose native tensors are called "mtp.*".

        Args:
            config: the model's config.
            layout: the layout of the model's checkpoint, one of `Family.layouts`.
            num_layers: number of MTP layers.
        """
        mappings: list[WeightMapping] = []
        copied = self.copied(config, layout, num_layers)
        ignored = [r"rotary_emb\.inv_freq$", *(f"^{re.escape(name)}$" for name in copied)]
        block, names = mtp_block(config), layout.get("names") or {}
        kinds = ("weight", "bias") if config.norm.bias else ("weight",)
        prefixes: list[str] = []
        for index in range(num_layers):
            prefix, stored, stored_mlp = self._prefixes(config, layout, index)
            native = "mtp" if index == 0 else f"mtp.later.{index - 1}"
            prefixes += [prefix, f"{stored}.", f"{stored_mlp}."]
            if index == 0 or self.separate:
                after = prefix if stored_mlp == stored else f"{stored_mlp}."
                mappings.append(rename(f"{native}.fc.weight", f"{prefix}{self.names['fc']}.weight"))
                mappings += [
                    rename(f"{native}.{part}.{kind}", f"{place}{self.names[part]}.{kind}")
                    for part, place in (("embedding_norm", prefix), ("hidden_norm", prefix), ("norm", after))
                    for kind in kinds
                ]
            own = f"{native}.block" if index == 0 or self.separate else native
            parts = [(block, stored)]
            if stored_mlp != stored:
                parts = [(replace(block, mlp=None), stored), (replace(block, mixer=None), stored_mlp)]
            for part, place in parts:
                mappings += part.weight_mappings(config.hidden_size, own, place, names)
                ignored += part.unused(place, names)
        others = f"^(?!{'|'.join(map(re.escape, prefixes))})"
        return WeightMap(mappings, ignored=[others, *ignored])

    def copied(self, config: DecoderConfig, layout: Mapping[str, Any], num_layers: int = 1) -> dict[str, str]:
        """Checkpoint tensor -> native tensor of the model that it repeats, for `num_layers` MTP layers of a model of
        this `config`, stored in this `layout`."""
        tied = {HEAD: EMBEDDING} if config.head.tied else {}
        return {
            f"{self._prefixes(config, layout, index)[0]}{name}": tied.get(native, native)
            for index in range(num_layers)
            for name, native in self.copies.items()
        }

    def layers_in(self, config: DecoderConfig, layout: Mapping[str, Any], names: Iterable[str]) -> int:
        """Number of MTP layers that have tensors among `names`, the tensor names of a checkpoint of a model of this
        `config`, stored in this `layout`. Counting stops at the first layer without tensors."""
        stored = list(names)
        starts = (
            tuple(f"{block}." for block in self._prefixes(config, layout, index)[1:]) for index in itertools.count()
        )
        return sum(1 for _ in itertools.takewhile(lambda start: any(n.startswith(start) for n in stored), starts))

    def holds(self, name: str, config: DecoderConfig, layout: Mapping[str, Any], num_layers: int) -> bool:
        """Whether the checkpoint tensor `name` belongs to one of `num_layers` MTP layers of a model of this `config`,
        stored in this `layout`."""
        prefixes = (self._prefixes(config, layout, index) for index in range(num_layers))
        return any(name.startswith((shared, *(f"{block}." for block in blocks))) for shared, *blocks in prefixes)

    def _prefixes(self, config: DecoderConfig, layout: Mapping[str, Any], index: int) -> tuple[str, str, str]:
        """Prefixes of MTP layer `index`: outside its block, of its block, and of the block's feed-forward layer."""
        values = {"model": layout.get("prefix", "model"), "layer": len(config.blocks) + index, "index": index}
        values |= {"first": 2 * index, "second": 2 * index + 1}
        names = (self.prefix, self.block, self.mlp_block or self.block)
        prefix, block, mlp = (name.format(**values).removeprefix(".") for name in names)  # without {model}
        return prefix, block, mlp

    def renamed(
        self, name: str, config: DecoderConfig, layout: Mapping[str, Any], other: Mapping[str, Any], num_layers: int
    ) -> str:
        """The name of a checkpoint tensor of an MTP layer in another layout.

        Args:
            name: the name of a checkpoint tensor in `layout`.
            config: the decoder's config.
            layout: the layout of the checkpoint.
            other: the other layout.
            num_layers: the number of MTP layers in the checkpoint.

        Returns:
            The name in `other`, or `name` itself if the tensor belongs to no MTP layer.
        """
        for index in range(num_layers):
            shared, *blocks = self._prefixes(config, layout, index)
            own, *others = self._prefixes(config, other, index)
            starts = [(f"{block}.", f"{new}.") for block, new in zip(blocks, others, strict=True)]
            for start, new in [*starts, (shared, own)]:
                if name.startswith(start):
                    return new + name.removeprefix(start)
        return name

    def ignored(self, hf_config: Mapping[str, Any]) -> list[str]:
        """Patterns of the tensors of MTP layers, in a checkpoint with this config.json. Empty where `Decoder` knows the
        names itself: of layers that are numbered after the model's own."""
        is_numbered = "{layer}" in self.prefix
        return [] if is_numbered or not self.count(hf_config) else [f"^{re.escape(self.prefix.partition('{')[0])}"]

    def count(self, hf_config: Mapping[str, Any]) -> int:
        """Number of MTP layers that config.json names; 0 where it has none of the `fields`.

        Raises:
            ConfigError: the number is not a whole number of at least 0.
        """
        for config in (hf_config, as_object(hf_config.get(TEXT))):
            for name in self.fields:
                count = config.get(name)
                if count is None:
                    continue
                if not is_int(count) or count < 0:
                    raise ConfigError(f"config.json: {name} must be a number of layers, got {short(count)}")
                return count
        return 0

    def written(self, hf_config: Mapping[str, Any], num_layers: int = 1) -> dict[str, Any]:
        """`hf_config` with `num_layers` as its number of MTP layers."""
        if isinstance(text := hf_config.get(TEXT), Mapping):
            return {**hf_config, TEXT: self.written(text, num_layers)}
        names = {*(self.written_fields or self.fields[:1]), *(hf_config.keys() & set(self.fields))}
        return {**hf_config, **dict.fromkeys(sorted(names), num_layers)}


NUMBERED_LAYERS = MTPFormat(
    fields=("num_nextn_predict_layers", "num_mtp_layers"),
    prefix="{model}.layers.{layer}.",
    names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"},
    block="{model}.layers.{layer}",
    copies={"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD},
)
"""Format of DeepSeek-V3 and GLM-4.5: MTP layers are numbered after the model's own layers, and each has copies of the
embedding and the head."""


PAIRS_OF_LAYERS = MTPFormat(
    fields=("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    prefix="mtp.layers.{first}.",
    names={"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "final_layernorm"},
    block="mtp.layers.{first}",
    mlp_block="mtp.layers.{second}",
)
"""Format of Nemotron 3: an MTP layer is a layer of attention and a feed-forward layer, numbered apart, the first with
the parts before the block, the second with the norm after it."""


def mtp_block(config: DecoderConfig) -> BlockConfig:
    """The config of the block of an MTP layer: `config.mtp_block`, or without one that of a block of the model.

    It is the last block with full attention or, without one, the last with sliding-window attention; of mixers side by
    side it has the attention alone.

    Raises:
        ConfigError: the model has no attention, or no block with attention and a feed-forward layer, or its blocks
            take per-layer inputs beside hidden states.
    """
    if config.mtp_block is not None:
        return config.mtp_block
    if config.per_layer_inputs is not None:
        raise ConfigError(
            "per_layer_inputs: the blocks of this model take an embedding of each token for each layer; multi-token "
            "prediction is not implemented for such models"
        )
    mixers = [(i, part) for i, block in enumerate(config.blocks) if block.mixer for part in block.mixer.parts]
    # The state of attention grows with each token, the state of a recurrent mixer does not.
    attention = [
        (i, mixer)
        for i, mixer in mixers
        if mixer.state_from is None and mixer.state_elements(2) > mixer.state_elements(1)
    ]
    if not attention:
        raise ConfigError("blocks: none of them has attention, and a layer of multi-token prediction needs it")
    full = [(i, mixer) for i, mixer in attention if getattr(mixer, "window", None) is None]
    layer, mixer = (full or attention)[-1]
    if config.blocks[layer].mlp is None:
        raise ConfigError(
            f"blocks[{layer}]: has attention and no feed-forward layer; new layers of multi-token prediction are not "
            "implemented for such models"
        )
    if mixer.has_extra_output:  # keys and values, for later layers
        mixer = replace(mixer, shares_kv=False)  # type: ignore[type-var]
    return replace(config.blocks[layer], mixer=mixer)
