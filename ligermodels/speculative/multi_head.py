"""The base class of multi-head models: a base model with K heads, the heads' loss, and decoding with them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, cast, overload

import torch
from torch import Tensor, nn

from ligermodels.arguments import check_number
from ligermodels.errors import InputError
from ligermodels.generation.options import check_tree_options, renamed_options, without_none
from ligermodels.generation.sampling import SHAPING, check_values
from ligermodels.layers import Targets
from ligermodels.layers.lm_head import check_loss_options, given_options
from ligermodels.layers.sharding import call_gathered, reshard
from ligermodels.layers.targets import count_targets
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.decoder import RefusesDropout
from ligermodels.models.prepared_batch import PreparedBatch, prepare_batch
from ligermodels.models.transformers_tools import RefusesForeignNames
from ligermodels.speculative.decoding import SpeculativeOutput, speculative_generate
from ligermodels.speculative.drafting import Drafter
from ligermodels.speculative.output import MultiHeadOutput
from ligermodels.speculative.tree import DynamicTree, Tree, chain


class MultiHeadModel(RefusesForeignNames, RefusesDropout):
    """Base class of models with K draft heads. Head i (from 0) at position t predicts token t + 2 + i.

    Subclasses implement the methods that raise NotImplementedError here.

    Attributes:
        base: the base model.
        num_heads: K.
    """

    base: CausalLM
    num_heads: int
    kind: ClassVar[str]
    """Name of this type of heads in messages."""
    reads_every_token: ClassVar[bool] = False
    """Whether the heads also need the base model's hidden states of tokens without a target."""
    first_ahead: ClassVar[int] = 2
    """How many tokens the target of head 0 at position t lies ahead of t."""
    loss_options: ClassVar[tuple[str, ...] | None] = None
    """Options of the loss that a caller may choose; None for all of `ops.linear_cross_entropy`."""
    every_token: ClassVar[Mapping[str, Any]] = {}
    """Options of `forward` with which heads that are trained on some of the tokens are scored on all of them."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the base model that the heads were made for."""
        return self.base.config.vocab_size

    def check_vocabulary(self) -> None:
        """Raise InputError if the base model's vocabulary has grown since the heads were made for it."""
        if (size := self.base.config.vocab_size) != self.vocab_size:
            raise InputError(
                f"base: has {size:,} tokens, and the {self.kind} heads were made when it had {self.vocab_size:,}; load "
                "the adapter with new tokens before you make or load heads, and train them on the larger vocabulary"
            )

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the heads, without the base model's parameters."""
        raise NotImplementedError

    def loss_weights(self) -> Sequence[float]:
        """Each head's weight in the loss, (K,)."""
        raise NotImplementedError

    def default_tree(self) -> Tree:
        """The candidate tree that `generate` uses by default: a chain of K tokens."""
        return chain(self.num_heads)

    def embeddings(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, H) of token ids (B, T), also if FSDP2 shards the base model."""
        embed = self.base.decoder.embed
        return call_gathered(self.base, lambda ids: embed(ids), input_ids)

    def drafter(self, tree: Tree | DynamicTree) -> Drafter:
        """A new drafter, which proposes candidate tokens during one call of `generate`.

        Args:
            tree: the candidates to propose in each step.

        Raises:
            InputError: these heads cannot draft such a tree.
        """
        raise NotImplementedError

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """Write the base model's checkpoint with the heads in it.

        Args:
            folder: created if need be.
            max_shard_size: largest size of a safetensors file, in bytes or as a string such as "5GB".
            overwrite: replace a checkpoint in the folder.

        Raises:
            CheckpointError: the folder is in use or cannot be written.
            ConfigError: the model's config no longer matches its config.json.
            InputError: the format cannot hold these heads, or no format holds a model together with such heads.
        """
        raise InputError(
            f"{self.kind}: heads are checkpoints of their own; call export (on the command line: the export of their "
            "command, such as `ligermodels eagle export`), and save_pretrained of the base"
        )

    def _head_states(self, hidden: Tensor, batch: PreparedBatch) -> Iterable[Tensor]:
        """The input of each of the K heads.

        Args:
            hidden: hidden states of the base model, (rows, length, H), or (1, n, H) of the tokens with a target.
            batch: the inputs and targets.

        Returns:
            K tensors, (rows, length, H) or (1, n, H).
        """
        raise NotImplementedError

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """Logits (..., V) of head `index` from its input (..., H); with targets (...) a `HeadLoss`."""
        raise NotImplementedError

    def _through_base(self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """Logits (..., V) of the base model's lm_head; with targets (...) a `HeadLoss`."""
        return self.base.logits(hidden) if targets is None else self.base.head_loss(hidden, targets, **loss_options)

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
        """The loss of the heads, sum_i w_i * L_i with the weights of `loss_weights`; without labels, the logits.

        L_i is the cross entropy of head i; EAGLE-3, DFlash and DSpark heads say in their class what it is. With labels,
        no logits are materialised. The loss of the base model's own lm_head is not included.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side.
            position_ids: (B, T) long. Positions that do not rise by 1 mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1). Targets never cross the end
                of a document.
            inputs_embeds: (B, T, H) in place of `input_ids`. The tokens of DFlash's and DSpark's blocks are then the
                labels.
            num_items_in_batch: divides the summed losses, in place of the numbers of targets in this batch; one
                number, or (K,), one number for each head: see `num_targets`.
            loss_options: token_weights (B, T), reduction ("mean" or "sum") and memory_budget, for all heads; of Medusa
                and MTP heads also class_weights (V,), token_scaling, label_smoothing and z_loss: see
                `ops.linear_cross_entropy`; of DFlash and DSpark heads also num_anchors, most blocks of each of the B
                rows, by default `training_options.num_anchors`.

        Returns:
            With labels, the loss and the losses of the heads; without gradients, their ranks and accuracy; of EAGLE-3,
            DFlash and DSpark heads, acceptance and agreement. Without labels, the logits (K, B, T, V), or of the draft
            vocabulary.

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, an unknown option.

        Examples:
            >>> medusa = lm.MedusaModel.from_base(model, num_heads=3)
            >>> medusa(input_ids, labels=input_ids).loss.backward()
        """
        inputs = {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "cu_seqlens": cu_seqlens,
            "inputs_embeds": inputs_embeds,
        }
        batch = self.prepare(self.first_ahead, inputs, {"num_items_in_batch": num_items_in_batch, **loss_options})
        return self._output(batch, labels, num_items_in_batch=num_items_in_batch, **given_options(loss_options))

    def _output(self, batch: PreparedBatch, labels: Tensor | None, **loss_options: Any) -> MultiHeadOutput:
        """The result of `forward` for a prepared batch and its labels (B, T), or None."""
        states = self._head_states(self.base(**batch.inputs)["last_hidden_state"], batch)
        if batch.targets is None:
            logits = [batch.layout.packing.restore(self._head(i, each)) for i, each in enumerate(states)]
            return MultiHeadOutput(logits=torch.stack(logits))
        return self._heads_loss(states, batch.targets, **loss_options)

    def prepare(self, first: int, inputs: Mapping[str, Any], loss_options: Mapping[str, Any]) -> PreparedBatch:
        """Check the arguments of `forward`, and lay the tokens out in rows without padding.

        Args:
            first: how many tokens the labels of the first loss lie ahead: `first_ahead` for the heads' losses; 1, where
                that is 2, for the base model's loss and then the heads' losses.
            inputs: the tensors of `forward`, from `input_ids` to `inputs_embeds`, by name.
            loss_options: the other arguments of `forward`, checked only.

        Returns:
            The batch.

        Raises:
            InputError: an argument is of a wrong type, dtype or shape, does not go with another, or is unknown.
        """
        self.check_vocabulary()
        self._check_loss_options(loss_options, inputs["labels"])
        ahead, weights = range(first, self.first_ahead + self.num_heads), loss_options.get("token_weights")
        every_token = self.reads_every_token
        return prepare_batch(self.base, ahead, **inputs, token_weights=weights, every_token=every_token)

    def _check_loss_options(self, options: Mapping[str, Any], labels: Tensor | None) -> None:
        """InputError for an option of the loss that is unknown or has a bad value, or for one without labels."""
        if self.loss_options is not None and (others := options.keys() - {*self.loss_options, "num_items_in_batch"}):
            names = ", ".join(self.loss_options)
            raise InputError(f"{min(others)}: is no option of this loss, which takes {names}")
        check_loss_options(options, labels, of_heads=True)

    def _heads_loss(
        self,
        states: Iterable[Tensor],
        targets: Targets,
        *,
        num_items_in_batch: Tensor | int | None = None,
        reduction: str = "mean",
        **loss_options: Any,
    ) -> MultiHeadOutput:
        """The losses of the heads, and their weighted sum.

        Args:
            states: the input of each head: see `_head_states`.
            targets: targets of K losses, the heads' losses, or of K + 1, the base model's loss before them.
            num_items_in_batch: divides the summed losses: one number, or one for each loss of `targets`.
            reduction: "mean" or "sum".
            loss_options: other options of `Targets.loss`.

        Raises:
            InputError: another number of `num_items_in_batch`, or another reduction.
        """
        count, items = self.num_heads, self._items(num_items_in_batch, reduction, len(targets.ahead))
        results = [
            targets.loss(
                len(targets.ahead) - count + i,
                partial(self._head, i),
                hidden,
                num_items_in_batch=None if items is None else items[i],
                reduction=reduction,
                return_rank=True,
                **loss_options,
            )
            for i, hidden in enumerate(states)
        ]
        losses = [cast(Tensor, result.loss) for result in results]
        ranks = [result.ranks for result in results if result.ranks is not None]
        # Numbers, not a tensor of the weights: a CUDA graph takes no copy from the host.
        total = torch.stack([weight * loss for weight, loss in zip(self.loss_weights(), losses, strict=True)]).sum()
        found: dict[str, Any] = {"loss": total, "head_losses": torch.stack(losses).detach()}
        return MultiHeadOutput.of_ranks(torch.stack(ranks), **found) if ranks else MultiHeadOutput(**found)

    def _items(self, num_items_in_batch: Any, reduction: str, count: int) -> Tensor | None:
        """The divisors of the heads' losses, fp32 (K,), or None; InputError unless they are 1 or `count` numbers, and
        the reduction is "mean" or "sum"."""
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction: must be 'mean' or 'sum' for heads, got {reduction!r}")
        if num_items_in_batch is None:
            return None
        numbers = torch.as_tensor(num_items_in_batch, device=self.base.device).flatten()
        if len(numbers) not in (1, count):
            raise InputError(f"num_items_in_batch: must be 1 or {count} numbers, got {len(numbers)}")
        return numbers[-self.num_heads :].expand(self.num_heads).float()

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        first: int = 2,
    ) -> Tensor:
        """Count the targets of each head. The sum over micro-batches is the `num_items_in_batch` of `forward`.

        Args:
            labels: (B, T) long, -100 where ignored.
            position_ids: (B, T) long. Positions that do not rise by 1 mark packed documents.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row.
            attention_mask: (B, T), 1 on tokens and 0 on padding.
            first: 2 to count the targets of the heads; 1 to count the base model's targets too.

        Returns:
            Long (K,); with `first=1` (K + 1,), the base model's number first.

        Raises:
            InputError: a tensor of a wrong dtype or shape.
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
        tree: Tree | DynamicTree | None = None,
        return_stats: bool = False,
        **options: Any,
    ) -> Tensor | SpeculativeOutput:
        """Tree decoding, several tokens per step. By default the result is the tokens of greedy `base.generate`.

        With `do_sample=True` the result is a sample of the same distribution as in `base.generate`; `temperature`,
        `top_k`, `top_p` and `min_p` that are not given are the checkpoint's. Without, a `temperature` accepts tokens
        other than the greedy tokens if they are probable enough (typical acceptance), which is not sampling: see
        `speculative_generate`.

        Args:
            input_ids: token ids of one prompt or several, long (B, T) or lists of any lengths. Each sequence of a batch
                accepts its own number of tokens per step.
            max_new_tokens: largest number of new tokens per sequence; by default the checkpoint's.
            tree: candidates to check in each step; by default `default_tree()`. A `DynamicTree` grows anew in each
                step; EAGLE-3 and MTP heads of one layer can draft it.
            return_stats: return a `SpeculativeOutput`, with steps and tokens per step, instead of the token ids alone.
            options: other arguments of `speculative_generate`: max_length, do_sample, temperature, top_k, top_p, min_p,
                num_return_sequences, generator, epsilon, delta, eos_token_id, pad_token_id, attention_mask, cuda_graph,
                on_tokens.

        Returns:
            Long (B, T'), the prompts and the new tokens; or a `SpeculativeOutput`.

        Raises:
            InputError: an unknown option, or an option that tree decoding does not support.

        Examples:
            >>> out = medusa.generate([[1, 5, 9]], max_new_tokens=64, return_stats=True)
            >>> out.sequences, out.tokens_per_step
        """
        check_values(return_stats=return_stats)
        self.check_vocabulary()
        tree = self.default_tree() if tree is None else tree
        if not isinstance(tree, Tree | DynamicTree):
            raise InputError(f"tree: must be a Tree or a DynamicTree, got {type(tree).__name__}")
        options = renamed_options(options)
        given = without_none({**options, "max_new_tokens": max_new_tokens})
        options = check_tree_options(options, speculative_generate)
        check_values(**{name: options.get(name) for name in ("do_sample", "repetition_penalty")})
        do_sample = bool(options.get("do_sample"))
        generation_defaults = self.base.generation_defaults(do_sample, given=given)
        names = ("eos_token_id", "pad_token_id", "max_length", *(SHAPING if do_sample else ()))
        defaults = {name: generation_defaults[name] for name in names if name in generation_defaults}
        if max_new_tokens is None and options.get("max_length") is None:
            max_new_tokens = generation_defaults.get("max_new_tokens")
        penalty = options.pop("repetition_penalty", generation_defaults.get("repetition_penalty", 1.0))
        if penalty not in (None, 1.0):
            raise InputError(
                f"repetition_penalty: tree decoding does not support it, and the checkpoint or the call sets "
                f"{penalty}; give repetition_penalty=1.0 to decode without a penalty"
            )
        options = {**defaults, **options, "tree": tree, "max_new_tokens": max_new_tokens}
        # The drafter too: it may read the head's weight, and FSDP2 needs this module to be the first that gathers.
        out = call_gathered(self, lambda: speculative_generate(self.base, self.drafter(tree), input_ids, **options))
        reshard(self)
        return out if return_stats else out.sequences


def check_decay(decay: Any) -> float:
    """`decay` as a float; InputError unless it is a number of at least 0."""
    return float(check_number("decay", decay))
