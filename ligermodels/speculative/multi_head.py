"""What multi-head models share: a base model with K heads, the heads' loss, and decoding with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_number
from ligermodels.errors import InputError
from ligermodels.generation.options import check_tree_options, renamed_options
from ligermodels.generation.sampling import check_values
from ligermodels.layers import Targets
from ligermodels.layers.lm_head import check_loss_options
from ligermodels.layers.packing import Unpadding, check_plain, check_same_tokens, document_bounds
from ligermodels.layers.sharding import call_gathered, reshard
from ligermodels.layers.targets import count_targets
from ligermodels.models.causal_lm import CausalLM
from ligermodels.speculative.decoding import SpeculativeOutput, speculative_generate
from ligermodels.speculative.drafting import Drafter
from ligermodels.speculative.output import MultiHeadOutput
from ligermodels.speculative.tree import Tree


class PreparedBatch(NamedTuple):
    """A batch without padding: the base model's `inputs`, the `targets` of its labels, if it has any, the
    `loss_options`, and what took the padding out."""

    inputs: dict[str, Any]
    targets: Targets | None
    loss_options: dict[str, Any]
    unpad: Unpadding | None

    def padded(self, output: MultiHeadOutput) -> MultiHeadOutput:
        """`output` with the padding again."""
        return output if self.unpad is None else output.padded(self.unpad)


class MultiHeadModel(nn.Module):
    """A base model with `num_heads` heads, K. Head i (from 0) at position t predicts token t + 2 + i.

    A kind of head is a subclass: it gives the methods below that raise NotImplementedError.
    """

    base: CausalLM
    num_heads: int
    kind: ClassVar[str]
    """What users call these heads."""
    reads_every_token: ClassVar[bool] = False
    """Whether heads need the base model's states of tokens that have no target too."""

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the heads, which are trained while the base model is frozen."""
        raise NotImplementedError

    def loss_weights(self) -> Sequence[float]:
        """Each head's weight in the loss, (K,)."""
        raise NotImplementedError

    def default_tree(self) -> Tree:
        """Candidates that `generate` checks in each step, where it is given none."""
        raise NotImplementedError

    def drafter(self, tree: Tree) -> Drafter:
        """What proposes the candidates of a call of `generate`."""
        raise NotImplementedError

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """Write the base model's checkpoint with the heads in it."""
        raise NotImplementedError

    def _head_states(self, hidden: Tensor, batch: PreparedBatch) -> Iterable[Tensor]:
        """What each of the K heads reads, of hidden states of the base model: (B, T, H), or (1, n, H) of the batch's
        `targets.token_indices`."""
        raise NotImplementedError

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """Head `index` as `LMHead.forward`, of its states."""
        raise NotImplementedError

    def _through_base(self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """The base model's lm_head, as `LMHead.forward`."""
        out = self.base(last_hidden_state=hidden, targets=targets, **loss_options)
        if targets is None:
            return out.logits
        return out.loss if out.ranks is None else (out.loss, out.ranks)

    # -- loss ----------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **loss_options: Any,
    ) -> MultiHeadOutput:
        """Loss sum_i w_i * CE_i over the heads, of `loss_weights`; or, without labels, every head's logits.

        Arguments and errors are those of `CausalLM.forward`; targets never cross a document's end. Logits are not
        materialised where there are labels. `num_items_in_batch` may be one for each head: see `num_targets`. The base
        model's own loss is no part of it.
        """
        batch = self.prepare(
            2,
            input_ids,
            labels,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            inputs_embeds=inputs_embeds,
            num_items_in_batch=num_items_in_batch,
            **loss_options,
        )
        states = self._head_states(self.base(**batch.inputs)["last_hidden_state"], batch)
        if batch.targets is None:
            logits = [self._head(i, each) for i, each in enumerate(states)]
            return batch.padded(MultiHeadOutput(logits=torch.stack(logits)))
        return batch.padded(self._heads_loss(states, batch.targets, **batch.loss_options))

    def prepare(
        self,
        first: int,
        input_ids: Tensor | None,
        labels: Tensor | None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **loss_options: Any,
    ) -> PreparedBatch:
        """The arguments of `forward`, checked and without padding. The targets are those of the heads; with `first` 1
        those of the base model before them."""
        tokens = {"input_ids": input_ids, "labels": labels, "inputs_embeds": inputs_embeds}
        check_loss_options(loss_options, labels, of_heads=True)
        if (inputs := input_ids if inputs_embeds is None else inputs_embeds) is not None:  # else the base model says it
            check_plain("input_ids" if inputs_embeds is None else "inputs_embeds", inputs)
            token_weights = loss_options.get("token_weights")
            check_same_tokens(inputs, labels=labels, attention_mask=attention_mask, token_weights=token_weights)
        unpad = self.base.unpadding(attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens)
        if unpad is not None:
            tokens, loss_options = unpad.take_all(tokens), unpad.take_weights(loss_options)
            labels, cu_seqlens = tokens["labels"], unpad.cu_seqlens
        del tokens["labels"]
        targets = None
        if labels is not None:
            bounds = document_bounds(labels.shape, position_ids, cu_seqlens)
            ahead = range(first, 2 + self.num_heads)
            targets = Targets(labels, ahead, vocab_size=self.base.config.vocab_size, cu_seqlens=bounds)
        needed = None if self.reads_every_token else targets
        given = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "token_indices": needed}
        return PreparedBatch({**tokens, **given, "return_last_hidden_state": True}, targets, loss_options, unpad)

    def _heads_loss(
        self,
        states: Iterable[Tensor],
        targets: Targets,
        *,
        num_items_in_batch: Tensor | int | None = None,
        reduction: str = "mean",
        **loss_options: Any,
    ) -> MultiHeadOutput:
        """The heads' loss, of what each head reads: see `_head_states`.

        Args:
            targets: with one loss for each head at the end.
            num_items_in_batch: one for each loss of `targets`, or one for all.

        Raises InputError for another number of these, and for a reduction other than "mean" and "sum".
        """
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction: must be 'mean' or 'sum' for the loss of heads, got {reduction!r}")
        count, items = self.num_heads, None
        if num_items_in_batch is not None:
            given = torch.as_tensor(num_items_in_batch, device=self.base.device).flatten()
            if len(given) not in (1, len(targets.ahead)):
                raise InputError(f"num_items_in_batch: must be 1 or {len(targets.ahead)} numbers, got {len(given)}")
            items = given[-count:].expand(count).float()
        losses, all_ranks = [], []
        for i, hidden in enumerate(states):
            loss, ranks = targets.loss(
                len(targets.ahead) - count + i,
                partial(self._head, i),
                hidden,
                num_items_in_batch=None if items is None else items[i],
                reduction=reduction,
                return_rank=True,
                **loss_options,
            )
            losses.append(loss)
            all_ranks.append(ranks)
        head_losses, ranks = torch.stack(losses), torch.stack(all_ranks)
        weights = torch.tensor(self.loss_weights(), dtype=head_losses.dtype).to(head_losses.device)
        return MultiHeadOutput.of_ranks(ranks, loss=(weights * head_losses).sum(), head_losses=head_losses.detach())

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        first: int = 2,
    ) -> Tensor:
        """Labels that each head counts, long (K,): summed over batches, they are their `num_items_in_batch`.

        With `first` 1 long (K + 1,), the base model's before them.
        """
        return count_targets(labels, range(first, 2 + self.num_heads), position_ids, cu_seqlens, attention_mask)

    # -- decoding ------------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        max_new_tokens: int | None = ...,
        *,
        return_stats: Literal[False] = ...,
        **options: Any,
    ) -> Tensor: ...
    @overload
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        max_new_tokens: int | None = ...,
        *,
        return_stats: Literal[True],
        **options: Any,
    ) -> SpeculativeOutput: ...
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        *,
        tree: Tree | None = None,
        return_stats: bool = False,
        **options: Any,
    ) -> Tensor | SpeculativeOutput:
        """Tree decoding, several tokens per step: by default the tokens of greedy `base.generate`.

        It does not sample, whatever the checkpoint's generation_config.json says.

        With a `temperature`, tokens that are not the greedy ones are accepted where they are likely enough (typical
        acceptance); this is no sampling: see `speculative_generate`.

        Args:
            input_ids: one prompt or several of any lengths; sequences of a batch grow at their own pace.
            tree: candidates checked at each step; by default `default_tree`.
            return_stats: give a `SpeculativeOutput`, with steps and tokens per step, instead of the token ids alone.
            options: as `speculative_generate`; `on_tokens` gets the tokens of each step.
        """
        check_values(return_stats=return_stats)
        tree = self.default_tree() if tree is None else tree
        if not isinstance(tree, Tree):
            raise InputError(f"tree: must be a Tree, got {type(tree).__name__}")
        # What the checkpoint says of sampling is for `base.generate`.
        found = self.base.generation_defaults(do_sample=False)
        defaults: dict[str, Any] = {
            name: found[name] for name in ("eos_token_id", "pad_token_id", "max_length") if name in found
        }
        if max_new_tokens is None and options.get("max_length") is None:
            max_new_tokens = found.get("max_new_tokens")
        options = check_tree_options(renamed_options(options), speculative_generate)
        if options.pop("do_sample", False):
            raise InputError("do_sample: tree decoding does not sample; use base.generate, or leave it out")
        penalty = options.pop("repetition_penalty", found.get("repetition_penalty", 1.0))
        if penalty != 1.0:
            raise InputError(
                f"repetition_penalty: tree decoding has none, and the checkpoint or the call sets {penalty}; give "
                "repetition_penalty=1.0 to decode without"
            )
        options = {**defaults, **options, "tree": tree, "max_new_tokens": max_new_tokens}
        out = call_gathered(self, speculative_generate, self.base, self.drafter(tree), input_ids, **options)
        reshard(self)
        return out if return_stats else out.sequences


def check_decay(decay: Any) -> float:
    """`decay`; InputError unless it is a number that is at least 0."""
    return float(check_number("decay", decay))
