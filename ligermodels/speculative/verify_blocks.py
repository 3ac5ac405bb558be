"""Checks of the files of a DFlash or DSpark head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels.convert.json_values import object_field
from ligermodels.layers import AttentionConfig, KeysValues
from ligermodels.models.extra_heads import DSPARK_TYPE, draft_type
from ligermodels.ops import block_context_attention
from ligermodels.speculative import block_formats as formats
from ligermodels.speculative.block_head import GEMMA4, BlockDraftConfig, BlockHead
from ligermodels.speculative.block_loss import capped
from ligermodels.speculative.checks import ROWS, compare, random, require
from ligermodels.speculative.draft_checks import DraftFiles, Formulas, attention
from ligermodels.speculative.draft_files import D2T, EMBEDDING, LM_HEAD, SERVING, stored_tokens

LENGTH, ANCHORS = 12, (0, 5, 11)
"""Tokens of the context, and the tokens of it that start a block."""
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
GEMMA4_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
NAMES = ("hidden states", "logits", "logits with the Markov head", "confidence")
"""Names of the results in `Slots`."""


class BlockFiles(DraftFiles[BlockDraftConfig]):
    """The checks of a DFlash or DSpark head."""

    network = BlockHead

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "config.json", self.fields
        yield "layer ids", self.layer_ids
        yield "norms", self.norms
        yield "vocabulary tables", self.vocabulary
        yield "Markov and confidence heads", self.markov
        yield "shapes", self.shapes
        yield "values", self.values
        yield "logits", self.logits

    def fields(self) -> str:
        """Sizes of the model, and fields that do not contradict one another."""
        config, kind = self.config, draft_type(self.stored)
        self.check_sizes()
        nested = object_field(self.stored, formats.NESTED)
        for name in ("block_size", "mask_token_id"):
            inner, outer = nested.get(name), self.stored.get(name)
            same = None in (inner, outer) or inner == outer
            require(same, f"{name}: is {outer}, but {formats.NESTED}.{name} is {inner}")
        serving = object_field(self.stored, SERVING)
        algorithm = serving.get("algorithm", kind)
        require(algorithm == kind, f"speculators_config.algorithm: is {algorithm!r}, and the head is of {kind!r}")
        tokens = stored_tokens(self.stored) or config.num_drafts
        problem = f"speculative_tokens: is {tokens}, but a block of {config.block_size} slots proposes"
        require(tokens <= config.num_drafts, f"{problem} {config.num_drafts}")
        missing = kind == DSPARK_TYPE and formats.misses_anchor(self.stored)
        note = "; sample_from_anchor is not in config.json, and vLLM then takes it for false" if missing else ""
        return (
            f"{len(config.decoder.blocks)} layers, hidden size {config.decoder.hidden_size}, blocks of "
            f"{config.block_size} slots, mask token {config.mask_token_id}{note}"
        )

    def norms(self) -> str:
        """The norms of the formulas, and no other."""
        count = len(self.config.decoder.blocks)
        wanted = {f"{name}.weight" for name in ("hidden_norm", "norm")}
        names = LAYER_NORMS + GEMMA4_NORMS * (self.config.layers["model_type"] in GEMMA4)
        wanted |= {f"layers.{i}.{name}.weight" for i in range(count) for name in names}
        found = {name for name in self.tensors if name.endswith("norm.weight")}
        missing, others = min(wanted - found, default=None), min(found - wanted, default=None)
        require(missing is None, f"{missing}: is missing")
        require(others is None, f"{others}: is no norm of a head with {count} layers")
        return f"{len(wanted)}; the context is normalised by hidden_norm alone"

    def vocabulary(self) -> str:
        found = super().vocabulary()
        missing = D2T in self.tensors and LM_HEAD not in self.tensors
        require(not missing, f"{LM_HEAD}: is missing; servers need it with a reduced vocabulary")
        return found

    def markov(self) -> str:
        """The tensors that config.json announces, and no other."""
        config, size = self.config, self.config.decoder.hidden_size
        rank, kind = config.markov_rank, config.markov_head_type
        wanted: dict[str, tuple[int, ...]] = {}
        if rank:
            wanted[f"{MARKOV}.markov_w1.weight"] = (config.decoder.vocab_size, rank)
            wanted[f"{MARKOV}.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if rank and kind in GATES:
            rows, columns = (rank, size + rank) if kind == "gated" else (3 * rank, size + 2 * rank)
            wanted |= {f"{GATES[kind]}.weight": (rows, columns), f"{GATES[kind]}.bias": (rows,)}
        if config.enable_confidence_head:
            wanted |= {f"{CONFIDENCE}.weight": (1, size + config.confidence_rank), f"{CONFIDENCE}.bias": (1,)}
        fields = f"markov_rank {rank}, markov_head_type {kind}, enable_confidence_head {config.enable_confidence_head}"
        fields += f", confidence_head_with_markov {config.confidence_head_with_markov}"
        for name, shape in wanted.items():
            require(name in self.tensors, f"{name}: is missing, where config.json has {fields}")
            found = tuple(self.tensors[name].shape)
            require(found == shape, f"{name}: {list(found)}, not {list(shape)} as by {fields}")
        for name in sorted(self.tensors.keys() - wanted):
            other = name.startswith((f"{MARKOV}.", "confidence_head."))
            require(not other, f"{name}: is in the files, where config.json has {fields}")
        return fields if wanted else "none"

    def logits(self) -> str:
        """The head with the states of a stub target: s_L are random numbers that depend on L alone."""
        config, tensors, count = self.config, self.tensors, len(self.base.config.blocks)
        size, rows = config.decoder.hidden_size, min(ROWS, config.draft_vocab_size)
        states = [random(level, LENGTH, config.target_hidden_size) for level in range(count + 1)]
        lm_head = tensors.get(LM_HEAD, random(count + 1, rows, size))[:rows].float()
        generator = torch.Generator().manual_seed(0)
        previous = torch.randint(config.decoder.vocab_size, (len(ANCHORS), config.num_drafts), generator=generator)
        roots = torch.randint(config.decoder.vocab_size, (len(ANCHORS), 1), generator=generator)
        tokens = F.pad(roots, (0, config.block_size - 1), value=config.mask_token_id)
        own = tensors.get(EMBEDDING)
        # Without an embedding in the files, one random row for each anchor, and one for the mask token.
        table = random(count + 2, len(ANCHORS) + 1, size)
        others = F.pad(torch.arange(len(ANCHORS))[:, None], (0, config.block_size - 1), value=len(ANCHORS))
        embeds = table[others] if own is None else own[tokens].float()

        context = torch.cat([states[level] for level in config.boundaries], dim=-1)
        ours = self._slots(context, embeds, previous, lm_head)
        theirs = formulas(config, tensors, context.double(), embeds.double(), ANCHORS, previous, lm_head.double())
        results = zip(NAMES, ours, theirs, strict=True)
        return compare((name, cast(Tensor, x), y) for name, x, y in results if y is not None)

    @torch.no_grad()
    def _slots(self, states: Tensor, embeds: Tensor, previous: Tensor, lm_head: Tensor) -> Slots:
        """The results of the package's head in float32. See `formulas`."""
        config, head = self.config, self.loaded()
        anchors = torch.tensor(ANCHORS)
        contexts: list[KeysValues] = head.context(states[None], torch.arange(len(states))[None])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            options = config.sees(layer)
            return block_context_attention(q[None], k[None], v[None], *contexts[layer], anchors[None], **options)[0]

        hidden = head(embeds, anchors[:, None] + torch.arange(config.block_size), attend)
        drafted = head.drafted(hidden, previous)
        logits = capped(F.linear(hidden, lm_head), config.decoder.head.softcap)
        if head.markov is None:
            return Slots(hidden, logits, None, drafted.confidence)
        return Slots(hidden, logits, logits + head.markov.w2(drafted.codes)[..., : len(lm_head)], drafted.confidence)


MARKOV, CONFIDENCE = "markov_head", "confidence_head.proj"
GATES = {"gated": f"{MARKOV}.gate_proj", "rnn": f"{MARKOV}.joint_proj"}
"""Kind of Markov head -> its linear layer."""


class Slots(NamedTuple):
    """Results of the K slots of N blocks that propose tokens.

    hidden: (N, K, H), after the final norm.
    logits: (N, K, rows), without the Markov head's.
    corrected: (N, K, rows), with the Markov head's; None without one.
    confidence: (N, K), logits of the confidence head, or None.
    """

    hidden: Tensor
    logits: Tensor
    corrected: Tensor | None
    confidence: Tensor | None


def formulas(
    config: BlockDraftConfig,
    w: Mapping[str, Tensor],
    states: Tensor,
    embeds: Tensor,
    anchors: Sequence[int],
    previous: Tensor,
    lm_head: Tensor,
) -> Slots:
    """The results of the slots in float64, one block after another.

    Args:
        config: the head's config.
        w: the tensors, by their names in speculators' form.
        states: (T, n H_target), states of the boundaries, side by side.
        embeds: (N, B, H), embeddings of the tokens of the blocks.
        anchors: of each of the N blocks the position of its first slot; the block sees the states before it.
        previous: long (N, K), the token before the one that each slot predicts.
        lm_head: (rows, H), the first rows of the LM head.
    """
    mixer = cast(AttentionConfig, config.decoder.blocks[0].mixer)
    (rope,), gemma4 = mixer.ropes, config.layers["model_type"] in GEMMA4
    f = Formulas(w, config.decoder.norm.eps, rope)
    context = f.norm(f.linear(states, "fc"), "hidden_norm")
    hidden = []
    for anchor, x in zip(anchors, embeds, strict=True):
        end = anchor + config.block_size
        queries, keys = torch.arange(anchor, end)[:, None], torch.arange(end)
        for number in range(len(config.decoder.blocks)):
            layer, sees = f"layers.{number}", config.sees(number)
            allowed = (keys < anchor) | (keys <= queries) | (not sees["causal"])
            allowed &= keys > queries - (end if sees["window"] is None else sees["window"])
            y = f.norm(x, f"{layer}.input_layernorm")
            source = torch.cat([context[:anchor], y])
            q = f.rotate(f.heads(y, layer, "q", mixer.head_dim), range(anchor, end))
            k = f.rotate(f.heads(source, layer, "k", mixer.head_dim), range(end))
            if gemma4:
                part = "v" if f"{layer}.self_attn.v_proj.weight" in w else "k"
                v = f.divided(f.linear(source, f"{layer}.self_attn.{part}_proj").unflatten(-1, (-1, mixer.head_dim)))
                mixed = f.linear(attention(q, k, v, allowed, scale=1.0), f"{layer}.self_attn.o_proj")
                x = x + f.norm(mixed, f"{layer}.post_attention_layernorm")
                y = f.mlp(x, layer, "pre_feedforward_layernorm", partial(F.gelu, approximate="tanh"))
                x = (x + f.norm(y, f"{layer}.post_feedforward_layernorm")) * f.weight(f"{layer}.layer_scalar")
            else:
                v = f.heads(source, layer, "v", mixer.head_dim)
                x = x + f.linear(attention(q, k, v, allowed), f"{layer}.self_attn.o_proj")
                x = x + f.mlp(x, layer)
        hidden.append(f.norm(x, "norm")[config.block_size - config.num_drafts :])
    h = torch.stack(hidden)
    logits, confidence, corrected = F.linear(h, lm_head), None, None
    if softcap := config.final_logit_softcapping or config.layers.get("final_logit_softcapping"):
        logits = softcap * (logits / softcap).tanh()
    e = f.weight(f"{MARKOV}.markov_w1.weight")[previous] if config.markov_rank else h[..., :0]
    if config.markov_rank:
        codes = torch.stack(_codes(f, config.markov_head_type, h.unbind(1), e.unbind(1)), dim=1)
        corrected = logits + F.linear(codes, f.weight(f"{MARKOV}.markov_w2.weight")[: len(lm_head)])
    if config.enable_confidence_head:
        features = torch.cat([h, e], dim=-1) if config.confidence_head_with_markov else h
        confidence = f.linear(features, CONFIDENCE)[..., 0]
    return Slots(h, logits, corrected, confidence)


def _codes(f: Formulas, kind: str, hidden: tuple[Tensor, ...], embeds: tuple[Tensor, ...]) -> list[Tensor]:
    """The Markov head's code (N, r) of each slot.

    Args:
        f: the formulas, with the tensors.
        kind: `markov_head_type`.
        hidden: (N, H) of each slot.
        embeds: (N, r) of each slot, the embedding of the token before.
    """
    if kind == "vanilla":
        return list(embeds)
    if kind == "gated":
        return [
            f.linear(torch.cat([h, e], dim=-1), GATES[kind]).sigmoid() * e for h, e in zip(hidden, embeds, strict=True)
        ]
    codes, state = [], torch.zeros_like(embeds[0])
    for h, e in zip(hidden, embeds, strict=True):
        forget, update, out = f.linear(torch.cat([state, e, h], dim=-1), GATES[kind]).chunk(3, dim=-1)
        state = forget.sigmoid() * state + (1 - forget.sigmoid()) * update.tanh()
        codes.append(out.tanh())
    return codes
