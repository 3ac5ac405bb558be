"""Medusa: extra heads that predict further tokens from the same hidden state (Cai et al., 2024)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, nn

from ligermodels import ops
from ligermodels.archs.distillation import divergence
from ligermodels.archs.medusa_checkpoint import export_heads, load_heads, repeats_lm_head
from ligermodels.convert.medusa_files import open_heads
from ligermodels.convert.medusa_hub import heads_folder
from ligermodels.convert.medusa_profiles import HeadsShape, profile_named
from ligermodels.errors import InputError
from ligermodels.generation import SpeculativeOutput, Tree, default_tree, medusa_generate
from ligermodels.layers import IGNORE_INDEX, LMHead, TargetRows, shift_labels
from ligermodels.layers.medusa_head import MedusaHead, propose
from ligermodels.model import CausalLM

TOP_K = (1, 5)
"""Ranks at which accuracy is reported."""


@dataclass
class MedusaOutput:
    """`loss`: scalar; `head_losses` (K,) undecayed; `ranks` (K, B, T) long, how many tokens a head finds likelier than
    the right one, -1 where there is no target; `accuracy` {1: (K,), 5: (K,)}, the share of targets among each head's 1
    or 5 likeliest tokens; `counts` (K,) targets each head had; `logits` (K, B, T, V), without labels; `base_loss` the
    base model's own loss, where that is part of it."""

    loss: Tensor | None = None
    head_losses: Tensor | None = None
    ranks: Tensor | None = None
    accuracy: dict[int, Tensor] | None = None
    counts: Tensor | None = None
    logits: Tensor | None = None
    base_loss: Tensor | None = None


class MedusaModel(nn.Module):
    """A base model with K Medusa heads. Head i (from 0) at position t predicts token t + 2 + i."""

    def __init__(
        self,
        base: CausalLM,
        num_heads: int = 5,
        num_layers: int = 1,
        lm_head: Literal["own", "shared"] = "own",
        decay: float = 0.8,
    ) -> None:
        """New heads: identity ResBlocks and, with own lm_heads, copies of the base's. See `from_base`."""
        super().__init__()
        if num_heads < 1 or num_layers < 1:
            raise InputError(f"num_heads and num_layers must be at least 1, got {num_heads} and {num_layers}")
        if lm_head not in ("own", "shared"):
            raise InputError(f"lm_head must be 'own' or 'shared', got {lm_head!r}")
        self.base, self.lm_head, self.decay = base, lm_head, decay
        self.shape = HeadsShape(num_heads, num_layers, base.config.hidden_size, base.config.vocab_size)
        with base.device:
            self.heads = nn.ModuleList(self._new_head() for _ in range(num_heads)).to(base.dtype)

    def _new_head(self) -> MedusaHead:
        lm_head = None
        if self.lm_head == "own":
            config = replace(self.base.config.head, tied=False)
            lm_head = LMHead(self.shape.hidden_size, self.shape.vocab_size, config)
            lm_head.load_state_dict(self.base.head.state_dict())
        return MedusaHead(self.shape.hidden_size, self.shape.num_layers, lm_head)

    @classmethod
    def from_base(
        cls,
        base: CausalLM,
        num_heads: int = 5,
        num_layers: int = 1,
        lm_head: Literal["own", "shared"] = "own",
        decay: float = 0.8,
    ) -> MedusaModel:
        """Fresh heads on `base`, whose parameters are frozen (stage 1).

        Args:
            base: the model to speed up; `base.requires_grad_()` afterwards has it trained too (stage 2).
            num_heads: K, tokens predicted beyond the next one.
            num_layers: ResBlocks in each head.
            lm_head: "own", a trained copy of the base's for each head; or "shared", the base's own, trained as it is.
            decay: head i's loss counts decay ** i.

        Raises InputError on a bad argument.
        """
        base.requires_grad_(False)
        return cls(base, num_heads, num_layers, lm_head, decay)

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that stage 1 trains."""
        return self.heads.parameters()

    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        num_items_in_batch: Tensor | int | None = None,
        base_loss: bool = False,
        heads_scale: Tensor | float = 1.0,
        reference: CausalLM | None = None,
        **loss_options: Any,
    ) -> MedusaOutput:
        """Loss sum_i decay ** i * CE_i over the heads; or, without labels, every head's logits.

        With `base_loss` (stage 2) it is L_lm + heads_scale * that, L_lm the base model's own loss, in which a
        `reference` takes the labels' place: L_lm is the mean of KL(reference || base) then, over the same targets, and
        `token_weights` and other options of the cross entropy are for the heads alone.

        Arguments and errors are those of `CausalLM.forward`; targets never cross a document's end. Logits are not
        materialised where there are labels. `num_items_in_batch` may be one for each loss: see `num_targets`.
        Raises InputError for a reference without `base_loss`.
        """
        if reference is not None and not base_loss:
            raise InputError("reference: is for the base model's loss; give base_loss=True too")
        shape = self.base.check_inputs(input_ids, inputs_embeds, labels, loss_options)
        bounds = self.base.document_bounds(shape, position_ids, cu_seqlens)
        inputs: dict[str, Any] = {"position_ids": position_ids, "cu_seqlens": bounds, "inputs_embeds": inputs_embeds}
        if labels is None:
            hidden = self.base.hidden_states(input_ids, **inputs)
            return MedusaOutput(logits=torch.stack([head(hidden, self.base.head) for head in self.heads]))

        reduction = self._reduction(loss_options, num_items_in_batch)
        ahead = self._ahead(base_loss)
        targets = self._targets(labels, bounds, ahead)
        rows = inputs["target_rows"] = TargetRows(targets)
        router_logits: list[Tensor] = []
        hidden = self.base.hidden_states(input_ids, **inputs, router_logits=router_logits)
        targets, weights = rows.take(targets), loss_options.pop("token_weights", None)
        if weights is not None:
            weights = rows.take(torch.stack([shift_labels(weights, distance) for distance in ahead]))
        known, of_heads = rows.counts, slice(int(base_loss), None)
        loss, head_losses, ranks = self._head_losses(
            hidden,
            targets[of_heads],
            None if known is None else known[of_heads],
            self._normalizer(reduction, num_items_in_batch),
            token_weights=None if weights is None else weights[of_heads],
            **loss_options,
        )
        first = None
        if base_loss:
            options: dict[str, Any] = {"reduction": reduction, "num_targets": None if known is None else known[0]}
            if reference is None:
                options |= {"token_weights": None if weights is None else weights[0], **loss_options}
                first = self.base.head(hidden, targets[0], **options)
            else:
                with torch.no_grad():
                    untouched = reference.hidden_states(input_ids, **inputs)
                first = divergence(hidden, self.base.head, untouched, reference.head, targets[0], **options)
            if num_items_in_batch is not None:
                first = first / torch.as_tensor(num_items_in_batch).flatten()[0].to(first.device)
            loss = first + heads_scale * loss
            balance = self.base.load_balancing_loss(router_logits) if reference is None else None
            if balance is not None:
                loss = loss + self.base.config.router_loss * balance
        counts = (ranks >= 0).sum((1, 2))
        correct = {k: ((ranks >= 0) & (ranks < k)).sum((1, 2)) for k in TOP_K}
        return MedusaOutput(
            loss=loss,
            head_losses=head_losses,
            ranks=rows.put_back(ranks, -1),
            accuracy={k: right / counts.clamp(min=1) for k, right in correct.items()},
            counts=counts,
            base_loss=None if first is None else first.detach(),
        )

    def _reduction(self, loss_options: dict[str, Any], num_items_in_batch: Tensor | int | None) -> str:
        """The reduction of each loss, taken out of the options: "sum" where it is divided by counts that are given."""
        reduction: str = loss_options.pop("reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction: must be 'mean' or 'sum' for Medusa heads, got {reduction!r}")
        return reduction if num_items_in_batch is None else "sum"

    def _normalizer(self, reduction: str, num_items_in_batch: Tensor | int | None) -> Tensor | float | None:
        """What each head's summed loss is divided by; None for the number of its targets."""
        if num_items_in_batch is None:
            return None if reduction == "mean" else 1.0
        items = torch.as_tensor(num_items_in_batch, device=self.base.device).flatten()[-len(self.heads) :]
        return items.expand(len(self.heads)).float()

    def _ahead(self, base_loss: bool) -> range:
        """How far ahead the targets of each loss lie: with `base_loss` the base model's own first, then each head's."""
        return range(1 if base_loss else 2, 2 + len(self.heads))

    def _targets(self, labels: Tensor, bounds: Tensor | None, ahead: Sequence[int]) -> Tensor:
        """Targets (n, B, T), each as many tokens ahead of the labels (B, T), which are checked once."""
        first = self.base.shift_labels(labels, ahead[0], bounds)
        return torch.stack([first, *(shift_labels(labels, distance, bounds) for distance in ahead[1:])])

    def _head_losses(
        self,
        hidden: Tensor,
        targets: Tensor,
        num_targets: Sequence[int] | None,
        normalizer: Tensor | float | None,
        **loss_options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The decayed sum of the heads' losses, each of them (K,), and the ranks (K, B, T), in one op."""
        heads = cast(Sequence[MedusaHead], self.heads)
        lm_heads = [self.base.head if head.lm_head is None else head.lm_head for head in heads]
        shared, config = self.lm_head == "shared", lm_heads[0].config
        biases = [head.bias for head in lm_heads if head.bias is not None]
        return ops.multi_head_linear_cross_entropy(
            hidden,
            lm_heads[0].weight if shared else [head.weight for head in lm_heads],
            targets,
            [[(block.weight, block.bias) for block in head.linears] for head in heads],
            None if not biases else biases[0] if shared else biases,
            head_weights=[self.decay**i for i in range(len(heads))],
            normalizer=normalizer,
            num_targets=num_targets,
            softcap=config.softcap,
            logit_scale=config.logit_scale,
            return_rank=True,
            **loss_options,
        )

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        base_loss: bool = False,
    ) -> Tensor:
        """Labels that each head counts, long (K,): summed over batches, they are their `num_items_in_batch`.

        With `base_loss` (K + 1,), the base model's first.
        """
        bounds = self.base.document_bounds((labels.shape[0], labels.shape[1]), position_ids, cu_seqlens)
        counts = [(shift_labels(labels, each, bounds) != IGNORE_INDEX).sum() for each in self._ahead(base_loss)]
        return torch.stack(counts)

    def propose(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Hidden states (B, H) -> logits (B, n, V) of all heads, or of the first `num_heads`; InputError below 1."""
        if num_heads is not None and num_heads < 1:
            raise InputError(f"num_heads: must be at least 1, got {num_heads}")
        return propose(list(cast(Sequence[MedusaHead], self.heads))[:num_heads], hidden, self.base.head)

    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        max_new_tokens: int = ...,
        *,
        tree: Tree | None = ...,
        return_stats: Literal[False] = ...,
        **options: Any,
    ) -> Tensor: ...
    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        max_new_tokens: int = ...,
        *,
        tree: Tree | None = ...,
        return_stats: Literal[True],
        **options: Any,
    ) -> SpeculativeOutput: ...
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        max_new_tokens: int = 64,
        *,
        tree: Tree | None = None,
        return_stats: bool = False,
        **options: Any,
    ) -> Tensor | SpeculativeOutput:
        """Tree decoding, several tokens a step: by default the very tokens of `base.generate`.

        With a `temperature`, tokens that are not the greedy ones are accepted where they are likely enough (typical
        acceptance); this is no sampling: see `generation.medusa_generate`.

        Args:
            input_ids: one prompt or several of any lengths; rows of a batch go on at their own pace.
            tree: candidates checked at each step; by default 63 grown from published head accuracies.
            return_stats: give a `SpeculativeOutput`, with steps and tokens a step, instead of the token ids alone.
            options: as `generation.medusa_generate`.
        """
        tree = default_tree(self.shape.num_heads, vocab_size=self.shape.vocab_size) if tree is None else tree
        out = medusa_generate(
            self.base,
            partial(self.propose, num_heads=max(1, tree.max_depth)),  # the others would be read for nothing
            input_ids,
            tree=tree,
            max_new_tokens=max_new_tokens,
            **{**self.base.generation_defaults(), **options},
        )
        return out if return_stats else out.sequences

    # -- files ---------------------------------------------------------------------------------------------------------

    def export(
        self,
        folder: str | os.PathLike[str],
        profile: str = "vllm",
        *,
        base_model: str | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
    ) -> None:
        """Write the heads in the format of another program, and check what was written against it.

        Heads on a shared lm_head go into a format of separate ones by repeating it.

        Args:
            folder: created if need be.
            profile: one of `convert.medusa_profiles.PROFILES`: vllm, vllm-shared, tgi, tgi-v2, tensorrt-llm,
                fasterdecoding; or full-hf, which is the base model's checkpoint with the heads in it.
            base_model: the base model's hub id or folder, which the formats of TGI, TensorRT-LLM and FasterDecoding
                name; by default the one that the base model's own config names.
            max_shard_size: of full-hf, as in `CausalLM.save_pretrained`; the other formats are one file.
            overwrite: replace a checkpoint or heads in `folder`; what is no part of them stays.

        Raises InputError for an unknown profile or one that cannot hold these heads, CheckpointError when the folder
        cannot be written; nothing is left half-written.
        """
        export_heads(
            self.base,
            self.heads,
            self.shape,
            Path(folder),
            profile_named(profile),
            base_model=base_model,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the heads alone, in the `vllm` or `vllm-shared` format, for `from_pretrained`."""
        self.export(folder, "vllm" if self.lm_head == "own" else "vllm-shared", overwrite=overwrite)

    @classmethod
    def from_pretrained(
        cls,
        base: CausalLM,
        folder: str | os.PathLike[str],
        *,
        decay: float = 0.8,
        own_lm_heads: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> MedusaModel:
        """Heads in `folder`, or under that name on the hub, in any format of `export`, on the (now frozen) `base`.

        The format is recognised; the number of heads and their depth are taken from the tensors, not from the config.
        ResBlocks without biases get biases of zero, which is the same. Of a `full-hf` checkpoint, `base` is what
        `ligermodels.from_pretrained` loads from the same folder. Where every head's lm_head is, in the base's dtype and
        bit for bit, the base's, they share that, even if the format repeats it; `own_lm_heads` gives each a copy of it.

        Raises CheckpointError when files or tensors are missing, damaged, in no known format or made for another base;
        HubError when they cannot be fetched.
        """
        path = heads_folder(folder)
        with open_heads(path) as found:
            repeated = repeats_lm_head(base, path, found)
            lm_head: Literal["own", "shared"] = "shared" if repeated and not own_lm_heads else "own"
            model = cls.from_base(base, found.num_heads, found.num_layers, lm_head, decay)
            load_heads(model.heads, model.shape, found, repeated, progress)
        return model
