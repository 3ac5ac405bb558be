"""Multi-token prediction: a head that predicts one further token at a time, from its own result for the one before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arguments import MOST_HEADS, MTP_STEPS, check_count
from ligermodels.convert import hub
from ligermodels.convert.export_spec import Keep
from ligermodels.convert.input_files import folder_to_write
from ligermodels.errors import CheckpointError, InputError
from ligermodels.generation.state import DecodingState
from ligermodels.layers.initialization import allocate, initialize, skip_init
from ligermodels.layers.sharding import call_gathered, gathered
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.mtp_format import mtp_block
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.pretrained import from_pretrained
from ligermodels.speculative.decoding import SpeculativeOutput
from ligermodels.speculative.mtp_drafter import MTPDrafter
from ligermodels.speculative.mtp_files import Layout, checkpoint_spec, load_head, save_head, stored_layers
from ligermodels.speculative.mtp_head import MTPHead
from ligermodels.speculative.multi_head import MultiHeadModel, check_decay
from ligermodels.speculative.tree import Tree, chain

DECAY = 0.6

Model = TypeVar("Model", bound="MTPModel")


class MTPModel(MultiHeadModel):
    """A base model with a head of multi-token prediction (`MTPHead`), applied `num_steps` times, K.

    Step j (from 0) at position t reads the hidden state h_t of the base model, or the result of step j - 1, and token
    t + 1 + j; it predicts token t + 2 + j through the base's own lm_head. In training, tokens are those of the text,
    and each step attends causally to its own results (FastMTP, arXiv 2509.18362). Of a head of several layers step j
    takes layer j, and from the last one on that one.
    """

    kind = "MTP"
    reads_every_token = True

    def __init__(self, base: CausalLM, num_steps: int | None = None, decay: float = DECAY, num_layers: int = 1) -> None:
        """A head of random weights. See `from_base` and `from_pretrained`."""
        super().__init__()
        check_native(base, "base")
        num_layers = check_count("num_layers", num_layers, most=MOST_HEADS)
        num_steps = check_count(
            "num_steps", max(MTP_STEPS, num_layers) if num_steps is None else num_steps, most=MOST_HEADS
        )
        self.base, self.num_heads, self.decay = base, num_steps, check_decay(decay)
        self.layout = Layout.of(base, num_layers)
        with torch.device("meta"), skip_init():
            self.head = MTPHead(base.config, num_layers, separate=self.layout.format.separate)
        allocate(self.head, base.dtype, base.device)
        initialize(self.head, base.config.initializer_range, "mtp")

    @classmethod
    def from_base(
        cls: type[Model], base: CausalLM, num_steps: int | None = None, decay: float = DECAY, num_layers: int = 1
    ) -> Model:
        """A new head on `base`, whose parameters are frozen.

        Its weights are random, as those of a new model are, but for the norm after the block, a copy of the base's
        final norm. (In training, small models' heads learned faster so than from a copy of one of the base's blocks.)

        Args:
            base: the model to speed up; one of any family whose blocks take nothing beside hidden states.
            num_steps: K, tokens predicted beyond the next one; by default 3, or `num_layers` if that is more.
            num_layers: of the head. Its later ones start as the first does, with weights of their own.
            decay: step j counts decay ** j in the loss, whose weights add up to 1.

        Raises InputError on a bad argument, ConfigError for a base model that is not of this kind; the base model is
        then not frozen.
        """
        model = cls(base, num_steps, decay, num_layers)
        state = {name: gathered(tensor) for name, tensor in base.decoder.norm.state_dict().items()}
        try:
            for norm in (model.head.norm, *(each.norm for each in model.head.later if model.head.separate)):
                cast(nn.Module, norm).load_state_dict(state)
        except RuntimeError as error:
            raise InputError(f"base: its final norm is not that of its config: {error}") from None
        base.requires_grad_(False)
        return model

    @classmethod
    def from_pretrained(
        cls: type[Model],
        base: CausalLM | str | os.PathLike[str],
        head: str | os.PathLike[str] | None = None,
        *,
        num_steps: int | None = None,
        decay: float = DECAY,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Model:
        """The head in a checkpoint, on the (now frozen) `base`.

        Args:
            base: the model; or a folder or hub id, of which the model is loaded with `options`, those of
                `ligermodels.from_pretrained`.
            head: folder or hub id of a checkpoint that holds a head of multi-token prediction, or of what `save_head`
                writes; by default the checkpoint that `base` was loaded from.
            num_steps, decay: as of `from_base`; no checkpoint names them.
            progress: called with bytes done and bytes in all, of the head.

        Raises CheckpointError when files or tensors are missing, damaged, or made for another base, or config.json
        gives another number of layers than they have; HubError when they cannot be fetched; InputError and ConfigError
        as `from_base`.
        """
        if isinstance(base, str | os.PathLike):
            base = from_pretrained(base, **options)
        elif options:
            raise InputError(f"{next(iter(options))}: is for loading the base model, which is given already")
        check_native(base, "base")
        if head is None:
            source = base.require_export_spec().source
            if source is None:
                raise CheckpointError(
                    "head: the base model was not loaded from a checkpoint; give the folder or hub id of one with a "
                    "head, or make a new head with MTPModel.from_base"
                )
            folder = source.folder
        else:
            folder = hub.resolve(head)
        model = cls(base, num_steps, decay, stored_layers(base, folder) or 1)
        model.layout = load_head(base, model.head, folder, progress)
        base.requires_grad_(False)
        return model

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """The head's parameters; embedding and lm_head are the base model's."""
        return self.head.parameters()

    def loss_weights(self) -> Sequence[float]:
        """decay ** j of each step, divided by their sum."""
        weights = [self.decay**step for step in range(self.num_heads)]
        return [weight / sum(weights) for weight in weights]

    def _head_states(self, hidden: Tensor, batch: PreparedBatch) -> Iterator[Tensor]:
        inputs = batch.inputs
        embeds = inputs["inputs_embeds"]
        embeds = self._embed(inputs["input_ids"]) if embeds is None else embeds
        needed = None if batch.targets is None else batch.targets.wait_for_needed()
        for step in range(self.num_heads):
            # Tokens with less than step + 1 after them in their document get a wrong one. They have no target, and
            # nothing attends to them that has one: attention is causal, and within a document.
            following = F.pad(embeds[:, step + 1 :], (0, 0, 0, min(step + 1, embeds.shape[1])))
            hidden = self.head(
                following,
                hidden,
                layer=min(step, self.head.num_layers - 1),
                position_ids=inputs["position_ids"],
                cu_seqlens=inputs["cu_seqlens"],
                activation_checkpointing=self.base.activation_checkpointing,
            )
            yield hidden if needed is None else needed.take(hidden)

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        return self._through_base(hidden, targets, **loss_options)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, H) of tokens, also where FSDP2 shards the base model."""
        embed = self.base.decoder.embed
        return call_gathered(self.base, lambda ids: embed(ids), input_ids)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def default_tree(self) -> Tree:
        """A chain of `num_steps` tokens."""
        return chain(self.num_heads)

    def drafter(self, tree: Tree) -> MTPDrafter:
        """Runs the head once for each level of `tree`, whatever `num_steps` is."""
        return MTPDrafter(self._embed, self.head, self._through_base, self._new_state, self.head.num_layers)

    def _new_state(self, batch_size: int, max_length: int) -> DecodingState:
        mixer, size = mtp_block(self.base.config)[1].mixer, self.base.config.hidden_size
        dtype = next(self.head.parameters()).dtype
        options: dict[str, Any] = {"hidden_size": size, "dtype": dtype, "device": self.base.device}
        return DecodingState([mixer] * self.head.num_layers, batch_size, max_length, **options)

    @overload
    def generate(self, *args: Any, return_stats: Literal[False] = ..., **options: Any) -> Tensor: ...
    @overload
    def generate(self, *args: Any, return_stats: Literal[True], **options: Any) -> SpeculativeOutput: ...
    def generate(self, *args: Any, draft: str | None = "mtp", **options: Any) -> Tensor | SpeculativeOutput:
        """As `MultiHeadModel.generate`; `draft` "mtp" drafts with the head, None is `base.generate`, whose options are
        then the `options`. InputError for another `draft`."""
        if draft is None:
            return self.base.generate(*args, **options)
        if draft != "mtp":
            raise InputError(f"draft: must be 'mtp', or None to decode without a draft, got {draft!r}")
        return super().generate(*args, **options)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        keep: Keep = "model",
    ) -> None:
        """Write the base model's checkpoint with the head in it, under the names of its family; of a family without
        such names, under those of Qwen3.5. vLLM and SGLang decode with the head of those families that they know.

        Arguments and errors are those of `CausalLM.save_pretrained`.
        """
        spec, state = checkpoint_spec(self.base, self.head, self.layout)
        spec.save(folder, state, max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """`save_pretrained`."""
        self.save_pretrained(folder, max_shard_size=max_shard_size, overwrite=overwrite)

    def save_head(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the head alone, under the names that it has in a checkpoint, for `from_pretrained`: config.json and
        model.safetensors. Errors are those of `CausalLM.save_pretrained`."""
        save_head(self.base, self.head, self.layout, folder_to_write(folder), overwrite=overwrite)
