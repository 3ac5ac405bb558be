"""Medusa: extra heads that predict further tokens from the same hidden state (Cai et al., 2024)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ligermodels.arguments import MOST_HEADS, check_count
from ligermodels.convert.input_files import as_path, folder_to_write
from ligermodels.errors import InputError, short
from ligermodels.layers import LMHead
from ligermodels.layers.memory import memory_for
from ligermodels.layers.quantized import dense_state
from ligermodels.layers.sharding import TensorSharding, gathered
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.speculative.checkpoint import load_heads, repeats_lm_head, tensors_to_export
from ligermodels.speculative.drafting import HeadsDrafter
from ligermodels.speculative.files import open_heads, save_heads
from ligermodels.speculative.heads import MedusaHead
from ligermodels.speculative.hub import heads_folder
from ligermodels.speculative.multi_head import MultiHeadModel, check_decay
from ligermodels.speculative.profiles import HeadsShape, profile_named
from ligermodels.speculative.tree import Tree, default_tree


class MedusaModel(MultiHeadModel):
    """A base model with K Medusa heads. Head i (from 0) at position t predicts token t + 2 + i."""

    kind = "Medusa"
    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def __init__(
        self,
        base: CausalLM,
        num_heads: int = 5,
        num_layers: int = 1,
        lm_head: Literal["own", "shared"] = "own",
        decay: float = 0.8,
    ) -> None:
        """New heads: identity ResBlocks and, with own lm_heads, copies of the base's (of its rounded weight, where that
        is quantised). See `from_base`."""
        super().__init__()
        check_native(base, "base")
        num_heads = check_count("num_heads", num_heads, most=MOST_HEADS)
        num_layers = check_count("num_layers", num_layers, most=MOST_HEADS)
        if lm_head not in ("own", "shared"):
            raise InputError(f"lm_head must be 'own' or 'shared', got {short(lm_head)}")
        self.base, self.lm_head, self.decay = base, lm_head, check_decay(decay)
        self.shape = HeadsShape(num_heads, num_layers, base.config.hidden_size, base.config.vocab_size)
        state = dense_state(base.head, base.dtype) if lm_head == "own" else {}
        state = {name: gathered(tensor) for name, tensor in state.items()}
        hidden = self.shape.hidden_size
        elements = num_heads * (num_layers * hidden * (hidden + 1) + (hidden * self.shape.vocab_size if state else 0))
        what = f"{num_heads} heads of num_layers = {num_layers}"
        with base.device, memory_for(what, base.device, elements * base.dtype.itemsize):
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
        model = cls(base, num_heads, num_layers, lm_head, decay)
        base.requires_grad_(False)
        return model

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """K."""
        return self.shape.num_heads

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that stage 1 trains."""
        return self.heads.parameters()

    def loss_weights(self) -> Sequence[float]:
        """decay ** i for each head."""
        return [self.decay**i for i in range(self.num_heads)]

    def default_tree(self) -> Tree:
        """63 candidates, grown from published accuracies of heads."""
        return default_tree(self.num_heads, vocab_size=self.shape.vocab_size)

    def drafter(self, tree: Tree) -> HeadsDrafter:
        """Runs the heads that `tree` uses; the others would be run in vain."""
        return HeadsDrafter(partial(self.propose, num_heads=max(1, tree.max_depth)))

    def _head_states(self, hidden: Tensor, batch: PreparedBatch) -> Iterable[Tensor]:
        return repeat(hidden, self.num_heads)

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """Logits or `HeadLoss` of head `index`, by its own lm_head, or by the shared one through the base model."""
        head = self.heads[index]
        if self.lm_head == "own":
            return head(hidden, targets, **loss_options)
        return self._through_base(head(hidden), targets, **loss_options)

    def propose(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Hidden states (B, H) -> logits (B, n, V) of all heads, or of the first `num_heads`; InputError below 1."""
        if num_heads is not None and num_heads < 1:
            raise InputError(f"num_heads: must be at least 1, got {num_heads}")
        heads = list(self.heads)[:num_heads]
        if self.lm_head == "own":
            return torch.stack([head(hidden) for head in heads], dim=1)
        # One product with the shared weight for all heads.
        return self.base.logits(torch.stack([head(hidden) for head in heads], dim=1))

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
        if base_model is not None:
            as_path(base_model, InputError, "base_model")
        state = tensors_to_export(self.base, self.heads, self.shape, chosen)
        if base_model is None and spec is not None:
            base_model = spec.hf_config.get("_name_or_path") or None
        base = spec if chosen.prefix else None
        options: dict[str, Any] = {"max_shard_size": max_shard_size, "overwrite": overwrite}
        save_heads(folder_to_write(folder), chosen, self.shape, state, base_model=base_model, base=base, **options)

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """Write the base model's checkpoint with the heads in it: `export` with the profile full-hf.

        Args:
            folder: created if need be.
            max_shard_size: largest size of a safetensors file, such as "5GB".
            overwrite: replace a checkpoint in the folder.
        """
        self.export(folder, "full-hf", max_shard_size=max_shard_size, overwrite=overwrite)

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
        A quantised head of the base counts as the weights that are rounded to it.

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
