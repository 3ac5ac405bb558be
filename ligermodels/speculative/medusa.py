"""Medusa: extra heads that predict further tokens from the same hidden state (Cai et al., 2024)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arguments import MOST_HEADS, check_count, check_flag, names_checked
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import InputError, short
from ligermodels.layers import LMHead
from ligermodels.layers.linear import Linear
from ligermodels.layers.memory import memory_for
from ligermodels.layers.quantized import dense_state
from ligermodels.layers.sharding import TensorSharding, gathered
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import MEDUSA_TYPE, require_type
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.speculative.drafting import HeadsDrafter
from ligermodels.speculative.head_files import check_base_model, head_state, name_of_base, save_alone
from ligermodels.speculative.hub import config_of_heads, heads_folder
from ligermodels.speculative.medusa_files import open_heads, repeats_lm_head, tensors_to_export
from ligermodels.speculative.multi_head import MultiHeadModel, check_decay
from ligermodels.speculative.profiles import HeadsShape, profile_named
from ligermodels.speculative.tree import DynamicTree, Tree, default_tree, require_fixed


class ResBlock(nn.Module):
    """x + SiLU(linear(x)). Weight and bias start at zero, so that a new block is the identity."""

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {"linear": "replicated"}

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., H) -> (..., H)."""
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """ResBlocks, then the head's own `lm_head`.

    Args:
        hidden_size: H.
        num_layers: number of ResBlocks.
        lm_head: the head's projection to the vocabulary. None: the head returns hidden states for the base's lm_head.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def __init__(self, hidden_size: int, num_layers: int, lm_head: LMHead | None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(ResBlock(hidden_size) for _ in range(num_layers)))
        self.lm_head = lm_head

    def forward(self, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """The logits of the head; with targets, its loss.

        Args:
            hidden: hidden states (..., H).
            targets: long (...), -100 where ignored.
            loss_options: options of `LMHead.forward`.

        Returns:
            Logits (..., V); with targets a `HeadLoss`; hidden states (..., H) if the head has no lm_head.
        """
        # The head's dtype may differ from the model's; hidden states go on to the model's lm_head.
        dtype = next(self.parameters()).dtype
        transformed = self.layers(hidden.to(dtype))
        if self.lm_head is None:
            return transformed.to(hidden.dtype)
        return self.lm_head(transformed, targets, **loss_options)


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
        """New heads on `base`, which `from_base` also freezes: see there for base, num_heads, num_layers, lm_head,
        decay and errors.

        ResBlocks start as the identity. A head's own lm_head starts as a copy of the base's; if the base's lm_head is
        quantised, as a copy of its rounded weight.
        """
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
        heads = f"{num_heads} heads of num_layers = {num_layers}"
        with base.device, memory_for(heads, base.device, elements * base.dtype.itemsize):
            self.heads = nn.ModuleList(self._new_head(state).to(base.dtype) for _ in range(num_heads))

    def _new_head(self, lm_head_state: dict[str, Tensor]) -> MedusaHead:
        lm_head = None
        if self.lm_head == "own":
            config = replace(self.base.config.head, tied=False)
            lm_head = LMHead(self.shape.hidden_size, self.shape.vocab_size, config)
            try:
                lm_head.load_state_dict(lm_head_state)
            except RuntimeError as error:
                name = type(self.base.head).__name__
                raise InputError(
                    f"lm_head='own' copies the base's LMHead, but base.head is a {name}: {error}"
                ) from None
        return MedusaHead(self.shape.hidden_size, self.shape.num_layers, lm_head)

    @classmethod
    @names_checked
    def from_base(
        cls,
        base: CausalLM,
        num_heads: int = 5,
        num_layers: int = 1,
        lm_head: Literal["own", "shared"] = "own",
        decay: float = 0.8,
    ) -> MedusaModel:
        """New heads on `base`, and freeze the base model's parameters (stage 1).

        Args:
            base: the base model. To train it too (stage 2), use `JointMedusa`.
            num_heads: K, tokens predicted beyond the next one.
            num_layers: ResBlocks in each head.
            lm_head: "own", a trainable copy of the base's lm_head in each head; or "shared", the base model's lm_head,
                which is frozen with it.
            decay: the weight of head i's loss is decay ** i.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range, or the heads do not fit in memory.

        Examples:
            >>> medusa = lm.MedusaModel.from_base(model, num_heads=5)
            >>> medusa(input_ids, labels=input_ids).loss.backward()  # gradients of the heads only
        """
        model = cls(base, num_heads, num_layers, lm_head, decay)
        base.requires_grad_(False)
        return model

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        """K."""
        return self.shape.num_heads

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the base model that the heads were made for."""
        return self.shape.vocab_size

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the heads; a shared lm_head is the base model's."""
        return self.heads.parameters()

    def loss_weights(self) -> Sequence[float]:
        """decay ** i for each head."""
        return [self.decay**i for i in range(self.num_heads)]

    def default_tree(self) -> Tree:
        """A tree of 63 candidates, grown from published accuracies of Medusa heads."""
        return default_tree(self.num_heads, vocab_size=self.shape.vocab_size)

    def drafter(self, tree: Tree | DynamicTree) -> HeadsDrafter:
        """A drafter that runs only the heads that `tree` uses."""
        require_fixed(tree, self.kind)
        return HeadsDrafter(partial(self.propose, num_heads=max(1, tree.max_depth)))

    def _head_states(self, hidden: Tensor, batch: PreparedBatch) -> Iterable[Tensor]:
        return repeat(hidden, self.num_heads)

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        """Logits or `HeadLoss` of head `index`, computed by its own lm_head or by the base model's."""
        head = self.heads[index]
        if self.lm_head == "own":
            return head(hidden, targets, **loss_options)
        return self._through_base(head(hidden), targets, **loss_options)

    def propose(self, hidden: Tensor, num_heads: int | None = None) -> Tensor:
        """Hidden states (B, H) -> logits (B, n, V) of the first `num_heads` heads; of all heads by default."""
        if num_heads is not None and num_heads < 1:
            raise InputError(f"num_heads: must be at least 1, got {num_heads}")
        heads = list(self.heads)[:num_heads]
        if self.lm_head == "own":
            return torch.stack([head(hidden) for head in heads], dim=1)
        # A single product with the shared weight.
        return self.base.logits(torch.stack([head(hidden) for head in heads], dim=1))

    # -- files ---------------------------------------------------------------------------------------------------------

    @names_checked
    def export(
        self,
        folder: str | os.PathLike[str],
        profile: str = "vllm",
        *,
        base_model: str | None = None,
        max_shard_size: int | str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the heads in the format of another program.

        The folder is written completely or not at all. If the heads share an lm_head and the format stores an lm_head
        per head, the shared lm_head is written for each head.

        Args:
            folder: created if need be.
            profile: name of the format: "vllm", "vllm-shared", "tgi", "tgi-v2", "tensorrt-llm", "fasterdecoding"; or
                "full-hf", the base model's checkpoint with the heads in it.
            base_model: the base model's hub id or folder, for config.json in the formats of TGI, TensorRT-LLM and
                FasterDecoding; an error for the others. A folder is written as an absolute path. Default: the
                checkpoint that the base model was loaded from.
            max_shard_size: largest size of a safetensors file of "full-hf", in bytes or as a string such as "5GB"; an
                error for the other formats, which have a single file. Default: "5GB".
            overwrite: replace a checkpoint or heads in `folder`; other files in it stay.

        Raises:
            InputError: the profile is unknown, cannot hold these heads, needs `base_model`, or has no place for
                `base_model` or `max_shard_size`.
            ConfigError: "full-hf", and the base model has no config.json or no longer matches it.
            CheckpointError: the folder is in use or cannot be written.

        Examples:
            >>> medusa.export("heads/", profile="tgi", base_model="meta-llama/Llama-3.1-8B")
        """
        self.check_vocabulary()
        chosen, spec = profile_named(profile), self.base.export_spec
        check_base_model(base_model, profile, names_base=chosen.names_base)
        if max_shard_size is not None and not chosen.prefix:
            raise InputError(f"max_shard_size: is for profile='full-hf', and profile {profile!r} has one file")
        state = tensors_to_export(self.base, self.heads, self.shape, chosen)
        folder, weights = folder_to_write(folder), chosen.weight_map(self.shape)
        config = chosen.filled(self.shape, name_of_base(base_model, spec))
        if spec is not None and chosen.prefix:
            names = (weights, lambda fields: {**fields, **config}, config, lambda name: name.startswith(chosen.prefix))
            size = "5GB" if max_shard_size is None else max_shard_size
            spec.with_heads(*names).save(folder, state, max_shard_size=size, overwrite=overwrite)
        else:
            ranks = Ranks(state.values())
            save_alone(self.base, folder, weights.export(state), config, ranks, file=chosen.file, overwrite=overwrite)

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """`export` as full-hf. See `MultiHeadModel.save_whole` for folder, max_shard_size and overwrite."""
        self.export(folder, "full-hf", max_shard_size=max_shard_size, overwrite=overwrite)

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the heads without the base model, for `from_pretrained`.

        The format is "vllm", or "vllm-shared" for heads that share the base's lm_head.

        Args:
            folder: created if need be.
            overwrite: replace heads in the folder.

        Raises:
            InputError, CheckpointError: see `export`.
        """
        self.export(folder, "vllm" if self.lm_head == "own" else "vllm-shared", overwrite=overwrite)

    @classmethod
    @names_checked
    def from_pretrained(
        cls,
        base: CausalLM,
        folder: str | os.PathLike[str],
        *,
        decay: float = 0.8,
        own_lm_heads: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> MedusaModel:
        """Load heads from a folder or the hub, in any format of `export`, and freeze the base model.

        The format is recognised. The number of heads and of their ResBlocks is read from the tensors, since config.json
        is often wrong. ResBlocks without biases get biases of zero. If every stored lm_head equals the base's lm_head,
        bit for bit in the base's dtype, the heads share the base's lm_head, even if the format repeats it. A quantised
        lm_head of the base equals a stored lm_head that rounds to it.

        Args:
            base: the base model, in memory; for "full-hf", loaded by `ligermodels.from_pretrained` from this folder.
            folder: folder or hub id of the heads.
            decay: the weight of head i's loss is decay ** i; checkpoints do not store it.
            own_lm_heads: give each head its own lm_head, even if all are equal to the base's.
            progress: called with (bytes loaded, bytes in total) of the heads.

        Returns:
            The model.

        Raises:
            CheckpointError: files or tensors are missing, damaged, in no known format or made for another base.
            ConfigError: config.json is of heads of another kind.
            HubError: the files cannot be fetched.

        Examples:
            >>> medusa = lm.MedusaModel.from_pretrained(model, "FasterDecoding/medusa-vicuna-7b-v1.3")
            >>> medusa.generate([[1, 5, 9]], max_new_tokens=64)
        """
        check_native(base, "base")
        check_decay(decay)
        check_flag("own_lm_heads", own_lm_heads)
        path = heads_folder(folder)
        require_type(config_of_heads(path), MEDUSA_TYPE, path)
        with open_heads(path) as stored:
            repeated = repeats_lm_head(base, path, stored)
            lm_head: Literal["own", "shared"] = "shared" if repeated and not own_lm_heads else "own"
            model = cls(base, stored.num_heads, stored.num_layers, lm_head, decay)
            state = head_state(model.heads, "heads")
            if not stored.biases:
                state = {name: tensor for name, tensor in state.items() if not name.endswith(".linear.bias")}
            if repeated:  # new heads have, or share, the base's lm_head
                state = {name: tensor for name, tensor in state.items() if ".lm_head." not in name}
            weight_map = stored.weight_map(model.shape, lm_heads=not repeated)
            what = f"{path}: the checkpoint of the heads"
            if base.device.type == "meta":  # names and shapes are checked
                weight_map.plan(stored.reader.headers, state, what)
            else:
                weight_map.load(stored.reader, state, progress, what=what)
        base.requires_grad_(False)
        return model
