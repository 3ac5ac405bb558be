"""Medusa: extra heads that predict further tokens from the same hidden state (Cai et al., 2024)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from ligermodels.archs.causal_lm import CausalLM
from ligermodels.archs.generation_options import check_tree_options, renamed_options
from ligermodels.errors import InputError
from ligermodels.layers import LMHead, Targets
from ligermodels.layers.lm_head import check_loss_options
from ligermodels.layers.packing import Unpadding, check_same_tokens, document_bounds
from ligermodels.layers.sharding import TensorSharding, call_gathered, gathered, reshard
from ligermodels.layers.targets import count_targets
from ligermodels.speculative.checkpoint import load_heads, repeats_lm_head, tensors_to_export
from ligermodels.speculative.decoding import SpeculativeOutput, medusa_generate
from ligermodels.speculative.files import open_heads, save_heads
from ligermodels.speculative.heads import MedusaHead
from ligermodels.speculative.hub import heads_folder
from ligermodels.speculative.output import MedusaOutput
from ligermodels.speculative.profiles import HeadsShape, profile_named
from ligermodels.speculative.tree import Tree, default_tree


class PreparedBatch(NamedTuple):
    """A batch without padding: the base model's `inputs`, the `targets` of its labels, if it has any, the
    `loss_options`, and what took the padding out."""

    inputs: dict[str, Any]
    targets: Targets | None
    loss_options: dict[str, Any]
    unpad: Unpadding | None

    def padded(self, output: MedusaOutput) -> MedusaOutput:
        """`output` with the padding again."""
        return output if self.unpad is None else output.padded(self.unpad)


class MedusaModel(nn.Module):
    """A base model with K Medusa heads. Head i (from 0) at position t predicts token t + 2 + i."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

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
        if not isinstance(decay, int | float) or not 0 <= decay < math.inf:
            raise InputError(f"decay must be a number, at least 0, got {decay!r}")
        self.base, self.lm_head, self.decay = base, lm_head, decay
        self.shape = HeadsShape(num_heads, num_layers, base.config.hidden_size, base.config.vocab_size)
        state = {name: gathered(tensor) for name, tensor in base.head.state_dict().items()} if lm_head == "own" else {}
        with base.device:
            self.heads = nn.ModuleList(self._new_head(state) for _ in range(num_heads)).to(base.dtype)

    def _new_head(self, lm_head_state: dict[str, Tensor]) -> MedusaHead:
        lm_head = None
        if self.lm_head == "own":
            config = replace(self.base.config.head, tied=False)
            lm_head = LMHead(self.shape.hidden_size, self.shape.vocab_size, config)
            try:
                lm_head.load_state_dict(lm_head_state)
            except RuntimeError as error:
                kind = type(self.base.head).__name__
                raise InputError(
                    f"lm_head='own' copies the base's LMHead, but base.head is a {kind}: {error}"
                ) from None
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
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **loss_options: Any,
    ) -> MedusaOutput:
        """Loss sum_i decay ** i * CE_i over the heads; or, without labels, every head's logits.

        Arguments and errors are those of `CausalLM.forward`; targets never cross a document's end. Logits are not
        materialised where there are labels. `num_items_in_batch` may be one for each head: see `num_targets`. The base
        model's own loss is no part of it: see `JointMedusa`.
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
        hidden = self.base(**batch.inputs)["last_hidden_state"]
        if batch.targets is None:
            return batch.padded(
                MedusaOutput(logits=torch.stack([self._head(i, hidden) for i in range(len(self.heads))]))
            )
        return batch.padded(self.heads_loss(hidden, batch.targets, **batch.loss_options))

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
        check_loss_options(loss_options, labels)
        if (inputs := input_ids if inputs_embeds is None else inputs_embeds) is not None:  # else the base model says it
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
            ahead = range(first, 2 + len(self.heads))
            targets = Targets(labels, ahead, vocab_size=self.base.config.vocab_size, cu_seqlens=bounds)
        given = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "token_indices": targets}
        return PreparedBatch({**tokens, **given, "return_last_hidden_state": True}, targets, loss_options, unpad)

    def heads_loss(
        self,
        hidden: Tensor,
        targets: Targets,
        *,
        num_items_in_batch: Tensor | int | None = None,
        reduction: str = "mean",
        **loss_options: Any,
    ) -> MedusaOutput:
        """The heads' loss, of hidden states (B, T, H) of the base model or (1, n, H) of `targets.token_indices`.

        Args:
            targets: with one loss for each head at the end.
            num_items_in_batch: one for each loss of `targets`, or one for all.

        Raises InputError for another number of these, and for a reduction other than "mean" and "sum".
        """
        if reduction not in ("mean", "sum"):
            raise InputError(f"reduction: must be 'mean' or 'sum' for Medusa heads, got {reduction!r}")
        count = len(self.heads)
        items: Tensor | list[None] = [None] * count
        if num_items_in_batch is not None:
            given = torch.as_tensor(num_items_in_batch, device=hidden.device).flatten()
            if len(given) not in (1, len(targets.ahead)):
                raise InputError(f"num_items_in_batch: must be 1 or {len(targets.ahead)} numbers, got {len(given)}")
            items = given[-count:].expand(count).float()
        losses, all_ranks = [], []
        for i in range(count):
            loss, ranks = targets.loss(
                len(targets.ahead) - count + i,
                partial(self._head, i),
                hidden,
                num_items_in_batch=items[i],
                reduction=reduction,
                return_rank=True,
                **loss_options,
            )
            losses.append(loss)
            all_ranks.append(ranks)
        head_losses, ranks = torch.stack(losses), torch.stack(all_ranks)
        decay = torch.tensor([self.decay**i for i in range(count)], dtype=head_losses.dtype).to(hidden.device)
        return MedusaOutput.of_ranks(ranks, loss=(decay * head_losses).sum(), head_losses=head_losses.detach())

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """Head `index` as `LMHead.forward`, with its own lm_head, or with the shared one through the base model."""
        head = self.heads[index]
        if self.lm_head == "own":
            return head(hidden, targets, **loss_options)
        out = self.base(last_hidden_state=head(hidden), targets=targets, **loss_options)
        if targets is None:
            return out.logits
        return out.loss if out.ranks is None else (out.loss, out.ranks)

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
        return count_targets(labels, range(first, 2 + len(self.heads)), position_ids, cu_seqlens, attention_mask)

    def propose(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Hidden states (B, H) -> logits (B, n, V) of all heads, or of the first `num_heads`; InputError below 1."""
        if num_heads is not None and num_heads < 1:
            raise InputError(f"num_heads: must be at least 1, got {num_heads}")
        heads = list(self.heads)[:num_heads]
        if self.lm_head == "own":
            return torch.stack([head(hidden) for head in heads], dim=1)
        # One product with the shared weight for all heads.
        return self.base(last_hidden_state=torch.stack([head(hidden) for head in heads], dim=1))["logits"]

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
        acceptance); this is no sampling: see `medusa_generate`.

        Args:
            input_ids: one prompt or several of any lengths; sequences of a batch grow at their own pace.
            tree: candidates checked at each step; by default 63 grown from published head accuracies.
            return_stats: give a `SpeculativeOutput`, with steps and tokens per step, instead of the token ids alone.
            options: as `medusa_generate`.
        """
        tree = default_tree(self.shape.num_heads, vocab_size=self.shape.vocab_size) if tree is None else tree
        if not isinstance(tree, Tree):
            raise InputError(f"tree: must be a Tree, got {type(tree).__name__}")
        # What the checkpoint says of sampling is for `base.generate`.
        found = self.base.generation_defaults(do_sample=False)
        defaults: dict[str, Any] = {
            name: found[name] for name in ("eos_token_id", "pad_token_id", "max_length") if name in found
        }
        if max_new_tokens is None and options.get("max_length") is None:
            max_new_tokens = found.get("max_new_tokens")
        options = check_tree_options(renamed_options(options), medusa_generate)
        if options.pop("do_sample", False):
            raise InputError("do_sample: tree decoding does not sample; use base.generate, or leave it out")
        penalty = options.pop("repetition_penalty", found.get("repetition_penalty", 1.0))
        if penalty != 1.0:
            raise InputError(
                f"repetition_penalty: tree decoding has none, and the checkpoint or the call sets {penalty}; give "
                "repetition_penalty=1.0 to decode without"
            )
        options = {**defaults, **options, "tree": tree, "max_new_tokens": max_new_tokens}
        propose = partial(self.propose, num_heads=max(1, tree.max_depth))  # the other heads would be run in vain
        out = call_gathered(self, medusa_generate, self.base, propose, input_ids, **options)
        reshard(self)
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
            profile: one of `speculative.profiles.PROFILES`: vllm, vllm-shared, tgi, tgi-v2, tensorrt-llm,
                fasterdecoding; or full-hf, which is the base model's checkpoint with the heads in it.
            base_model: the base model's hub id or folder, which the formats of TGI, TensorRT-LLM and FasterDecoding
                name; by default the one that the base model's own config names.
            max_shard_size: of full-hf, as in `CausalLM.save_pretrained`; the other formats are one file.
            overwrite: replace a checkpoint or heads in `folder`; what is no part of them stays.

        Raises InputError for an unknown profile or one that cannot hold these heads, CheckpointError when the folder
        cannot be written; nothing is left half-written.
        """
        chosen, spec = profile_named(profile), self.base.export_spec
        state = tensors_to_export(self.base, self.heads, self.shape, chosen)
        if base_model is None and spec is not None:
            base_model = spec.hf_config.get("_name_or_path") or None
        base = spec if chosen.prefix else None
        options: dict[str, Any] = {"max_shard_size": max_shard_size, "overwrite": overwrite}
        save_heads(Path(folder), chosen, self.shape, state, base_model=base_model, base=base, **options)

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
