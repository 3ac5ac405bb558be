"""The network of DFlash and DSpark: a block of slots that attends to the model's states before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.arguments import check_count, check_flag, check_number
from ligermodels.convert.mappings import WeightMapping, concat, rename
from ligermodels.errors import ConfigError, short
from ligermodels.generation.state import DecodingState
from ligermodels.layers import AttentionConfig, KeysValues, LayerConfig, RotaryEmbedding
from ligermodels.layers.block import BlockConfig
from ligermodels.layers.linear import Linear
from ligermodels.models.decoder import DecoderConfig
from ligermodels.models.families import family_of
from ligermodels.speculative.draft_layer import check_ascending
from ligermodels.speculative.markov_head import MARKOV_HEAD_TYPES, ConfidenceHead, MarkovHead, MarkovHeadType

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(number of the layer, q (N, B, Hq, D), k and v (N, B, Hkv, D) of N blocks) -> (N, B, Hq, D)."""
Tables = tuple[Tensor, Tensor]
GEMMA4 = ("gemma4_text", "gemma4_unified_text")
KINDS = ("qwen3", *GEMMA4)
"""`model_type` of the layers that servers and DeepSpec implement."""


@dataclass(frozen=True)
class BlockDraftConfig:
    """A DFlash or DSpark head as data. Names are the fields of published heads, where these have one name.

    Args:
        layers: Hugging Face config of a Qwen3 model, or of Gemma 4's text model, with the head's layers.
        boundaries: the states that the head reads, in ascending order: L is the residual stream after L layers.
        target_hidden_size: channels of the model's states.
        draft_vocab_size: number of tokens that the head can propose.
        block_size: B, slots of a block.
        mask_token_id: token in all slots but the first, which holds the last verified token, the anchor.
        sample_from_anchor: slot k predicts the token after its position (DSpark); else, from slot 1, the token at its
            position (DFlash).
        markov_rank: rank of the Markov head; 0 for none.
        markov_head_type: "vanilla", "gated" or "rnn": see `MarkovHead`.
        enable_confidence_head: whether there is a `ConfidenceHead`.
        confidence_head_with_markov: whether it reads the Markov head's embeddings.
        causal: whether slots see no later slot of their block, in all layers. None: in layers with a sliding window.
        final_logit_softcapping: softcap of the logits before the Markov head's; None for that of `layers`, which only
            layers of Gemma 4's kind have.

    Raises:
        ConfigError, InputError: a field has a bad value.
    """

    layers: Mapping[str, Any]
    boundaries: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    causal: bool | None = None
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", deepcopy(dict(self.layers)))  # the caller may change its own
        if self.layers.get("model_type") not in KINDS:
            kind = short(self.layers.get("model_type"))
            raise ConfigError(f"transformer_layer_config: model_type must be one of {', '.join(KINDS)}, got {kind}")
        if self.layers["model_type"] in GEMMA4:
            self._check_gemma4()
        check_ascending(self.boundaries)
        for flag in ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov"):
            check_flag(flag, getattr(self, flag))
        if self.causal is not None:
            check_flag("causal", self.causal)
        if self.final_logit_softcapping is not None:
            check_number("final_logit_softcapping", self.final_logit_softcapping, positive=True)
        check_count("draft_vocab_size", self.draft_vocab_size, most=self.decoder.vocab_size)
        check_count("block_size", self.block_size, least=1 if self.sample_from_anchor else 2)
        check_count("mask_token_id", self.mask_token_id, least=0, most=self.decoder.vocab_size - 1)
        check_count("markov_rank", self.markov_rank, least=0)
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ConfigError(
                f"markov_head_type: must be one of {', '.join(MARKOV_HEAD_TYPES)}, got {short(self.markov_head_type)}"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and not self.markov_rank:
            raise ConfigError("confidence_head_with_markov: needs a Markov head, a markov_rank above 0")
        if not self.sample_from_anchor and (self.markov_rank or self.enable_confidence_head):
            raise ConfigError("sample_from_anchor: a Markov head or a confidence head needs it")

    @cached_property
    def decoder(self) -> DecoderConfig:
        """The composed config of `layers`, with the head's own softcap."""
        decoder, softcap = family_of(self.layers).decoder_config(self.layers), self.final_logit_softcapping
        return decoder if softcap is None else replace(decoder, head=replace(decoder.head, softcap=float(softcap)))

    def _check_gemma4(self) -> None:
        """ConfigError for a field of Gemma 4 that layers of a head do not have."""
        blocks = self.decoder.blocks
        for name, has_it in (
            ("enable_moe_block", self.layers.get("enable_moe_block")),
            ("hidden_size_per_layer_input", blocks[0].after is not None),
            ("num_kv_shared_layers", self.layers.get("num_kv_shared_layers")),
            ("layer_types", any(self.windows)),
        ):
            if has_it:
                value = short(self.layers.get(name, "the default"))
                raise ConfigError(f"{name}: {value} is not implemented in the layers of a head")

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer: the positions that a slot sees up to its own; None for all."""
        return tuple(cast(AttentionConfig, block.mixer).window for block in self.decoder.blocks)

    def sees(self, layer: int) -> dict[str, Any]:
        """What slots of a layer see, as options of `ops.block_context_attention`: `causal`, `window`, and
        `softmax_scale`."""
        window, scale = self.windows[layer], cast(AttentionConfig, self.decoder.blocks[layer].mixer).softmax_scale
        causal = window is not None if self.causal is None else self.causal
        return {"causal": causal, "window": window, "softmax_scale": scale}

    @property
    def num_drafts(self) -> int:
        """K, tokens that a block proposes."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def confidence_rank(self) -> int:
        """Channels of the Markov head's embeddings that the confidence head reads."""
        return self.markov_rank if self.confidence_head_with_markov else 0


class BlockAttention(nn.Module):
    """The attention of a layer. Keys and values of the context and of blocks come from the same projection.

    Args:
        hidden_size: H.
        config: config of the attention.
    """

    NAMES: ClassVar[Mapping[str, str]] = {"q": "q_proj", "o": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}

    def __init__(self, hidden_size: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config, dim = config, config.head_dim
        self.q = Linear(hidden_size, config.num_heads * dim, bias=config.bias)
        self.kv = Linear(hidden_size, len(_kv_names(config)) * config.num_kv_heads * dim, bias=config.bias)
        self.o = Linear(config.num_heads * dim, hidden_size, bias=config.o_bias)
        norm = config.qk_norm
        self.q_norm = None if norm is None else norm.norm.build(dim)
        self.k_norm = None if norm is None else norm.norm.build(dim)

    def keys_values(self, x: Tensor) -> KeysValues:
        """Normalised keys, not yet rotated, and values (..., Hkv, D) of states (..., H)."""
        config = self.config
        k, *rest = self.kv(x).unflatten(-1, (-1, config.num_kv_heads, config.head_dim)).unbind(-3)
        v = rest[0] if rest else k
        if config.values is not None and config.values.norm_eps is not None:
            v = ops.rms_norm(v, None, config.values.norm_eps)
        return KeysValues(k if self.k_norm is None else self.k_norm(k), v)

    def context(self, states: Tensor, tables: Tables) -> KeysValues:
        """Keys and values (B, T, Hkv, D) of context states (B, T, H)."""
        k, v = self.keys_values(states)
        return KeysValues(ops.rope(k, k.detach()[:, :, :0], *tables)[0], v)

    def forward(self, x: Tensor, tables: Tables, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Run the layer.

        Args:
            x: (N, B, H), the states of N blocks, after the norm.
            tables: cos and sin of the slots' positions, (N, B, D / 2).
            attend: q, k, v -> the heads' outputs: an `Attend` of this layer.

        Returns:
            (N, B, H).
        """
        q = self.q(x).unflatten(-1, (self.config.num_heads, -1))
        k, v = self.keys_values(x)
        q, k = ops.rope(q if self.q_norm is None else self.q_norm(q), k, *tables)
        return cast(Tensor, self.o(attend(q, k, v).flatten(2)))

    @classmethod
    def weight_mappings(cls, config: AttentionConfig, native: str, checkpoint: str) -> list[WeightMapping]:
        """How checkpoints store such a layer.

        Args:
            config: config of the attention.
            native: name of the module.
            checkpoint: its prefix in files.
        """
        found, rows = list[WeightMapping](), config.num_kv_heads * config.head_dim
        names = dict(cls.NAMES) if config.qk_norm is not None else {"q": "q_proj", "o": "o_proj"}
        for part, name in names.items():
            biased = (part == "q" and config.bias) or (part == "o" and config.o_bias)
            found += [rename(f"{native}.{part}.{kind}", f"{checkpoint}.{name}.{kind}") for kind in _kinds(biased)]
        for kind in _kinds(config.bias):
            sources = [f"{checkpoint}.{name}.{kind}" for name in _kv_names(config)]
            found.append(concat(f"{native}.kv.{kind}", sources, [rows] * len(sources)))
        return found


def _kv_names(config: AttentionConfig) -> tuple[str, ...]:
    """The projections of keys and values; of keys alone where these are the values too."""
    return ("k_proj",) if config.values is not None and config.values.from_keys else ("k_proj", "v_proj")


def _kinds(bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if bias else ("weight",)


class BlockLayer(nn.Module):
    """A layer of the head: attention and a feed-forward layer, each after a norm. In layers of Gemma 4's kind a norm
    follows each of them too, and a buffer `layer_scalar` (1,) multiplies the result.

    Args:
        hidden_size: H.
        config: config of the block.
    """

    layer_scalar: Tensor | None

    def __init__(self, hidden_size: int, config: BlockConfig) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = config.norm.build(hidden_size), config.norm.build_before(hidden_size)
        self.mixer = BlockAttention(hidden_size, cast(AttentionConfig, config.mixer))
        self.mlp = cast(LayerConfig, config.mlp).build(hidden_size)
        self.mixer_post_norm, self.mlp_post_norm = (
            config.build_norm_after(part, hidden_size) for part in ("mixer", "mlp")
        )
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalar else None)

    def init_weights(self, std: float = 0.0) -> None:
        """Layer scalar one."""
        if self.layer_scalar is not None:
            nn.init.ones_(self.layer_scalar)

    def forward(self, x: Tensor, tables: Tables, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Run the layer.

        Args:
            x: (N, B, H), the states of N blocks.
            tables: cos and sin of the slots' positions, (N, B, D / 2).
            attend: q, k, v -> the heads' outputs: an `Attend` of this layer.

        Returns:
            (N, B, H).
        """
        branch = self.mixer(self.mixer_norm(x), tables, attend)
        if self.mixer_post_norm is not None:
            x, branch = self.mixer_post_norm(branch, x), None
        normed, x = self.mlp_norm(x, branch)
        branch = self.mlp(normed)
        x = x + branch if self.mlp_post_norm is None else self.mlp_post_norm(branch, x)
        return x if self.layer_scalar is None else x * self.layer_scalar


class Drafted(NamedTuple):
    """Results of the slots that propose tokens, of N blocks.

    hidden: (N, K, H), after the final norm.
    codes: (N, K, r) of the Markov head, or None.
    confidence: (N, K), logits of the confidence head, or None.
    """

    hidden: Tensor
    codes: Tensor | None
    confidence: Tensor | None


class BlockHead(nn.Module):
    """The network of DFlash (https://arxiv.org/abs/2602.06036) and of DSpark (https://github.com/deepseek-ai/DeepSpec).

    The context c = hidden_norm(fc states) has one vector for each verified token. A block holds the last verified token
    at its position a, and mask tokens after it. In each layer, the slots attend to the keys of the context before a and
    to all slots of the block, or to fewer (`BlockDraftConfig.sees`). Keys and values of both come from the same
    projection, c without the layer's norm.

    Args:
        config: the config of the head.
    """

    tensor_parallel: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: BlockDraftConfig) -> None:
        super().__init__()
        self.config, decoder = config, config.decoder
        size = decoder.hidden_size
        self.fc = Linear(len(config.boundaries) * config.target_hidden_size, size, bias=False)
        self.hidden_norm, self.norm = decoder.norm.build(size), decoder.norm.build(size)
        self.layers = nn.ModuleList(BlockLayer(size, block) for block in decoder.blocks)
        self.rope = RotaryEmbedding(decoder.blocks[0].ropes[0])
        self.markov: MarkovHead | None = None
        if config.markov_rank:
            sizes = decoder.vocab_size, config.draft_vocab_size, size, config.markov_rank
            self.markov = MarkovHead(*sizes, config.markov_head_type)
        self.confidence = ConfidenceHead(size, config.confidence_rank) if config.enable_confidence_head else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters; it may differ from the model's."""
        return self.fc.weight.dtype

    @property
    def mixers(self) -> Iterable[BlockAttention]:
        """The attention of each layer."""
        return (cast(BlockLayer, layer).mixer for layer in self.layers)

    def context(self, states: Tensor, positions: Tensor) -> list[KeysValues]:
        """Keys and values of the context.

        Args:
            states: (B, T, n H_target), the model's states at the boundaries, side by side.
            positions: long (B or 1, T).

        Returns:
            For each layer the keys and values, (B, T, Hkv, D).
        """
        context = self.hidden_norm(self.fc(states.to(self.dtype)))
        tables = self.rope(positions, context.dtype)
        return [mixer.context(context, tables) for mixer in self.mixers]

    def forward(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The hidden states of the slots that propose tokens.

        Args:
            embeds: (N, B, H), embeddings of the blocks' tokens.
            positions: long (N, B), positions of the slots.
            attend: computes the attention of a layer.

        Returns:
            (N, K, H), after the final norm.
        """
        x = embeds.to(self.dtype)
        tables = self.rope(positions, x.dtype)
        for number, layer in enumerate(self.layers):
            x = layer(x, tables, lambda q, k, v, number=number: attend(number, q, k, v))
        return cast(Tensor, self.norm(x if self.config.sample_from_anchor else x[:, 1:]))

    def drafted(self, hidden: Tensor, previous: Tensor) -> Drafted:
        """The codes and the confidence of all slots, where the tokens before them are known.

        Args:
            hidden: (N, K, H), a result of `forward`.
            previous: long (N, K), the token before the one that each slot predicts.
        """
        embeds = None if self.markov is None else self.markov.w1(previous)
        codes = None if self.markov is None else self.markov(embeds, hidden)
        confidence = None if self.confidence is None else self.confidence(hidden, embeds)
        return Drafted(hidden, codes, confidence)

    def new_state(self, batch_size: int, max_length: int, device: torch.device) -> DecodingState:
        """Empty caches of the context's keys and values, on `device`, for `batch_size` sequences of up to `max_length`
        tokens."""
        # Whole caches, also of layers with a sliding window: a block is written behind the text, and overwritten.
        mixers = [replace(cast(AttentionConfig, block.mixer), window=None) for block in self.config.decoder.blocks]
        options: dict[str, Any] = {"hidden_size": self.config.decoder.hidden_size, "dtype": self.dtype}
        return DecodingState(mixers, batch_size, max_length, device=device, **options)
