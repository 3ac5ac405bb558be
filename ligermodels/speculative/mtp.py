"""Multi-token prediction (MTP): a head that predicts further tokens one by one, each from its previous hidden state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast, overload

from torch import Tensor, nn

from ligermodels.arguments import MOST_HEADS, MTP_STEPS, check_count, check_names, names_checked, parameter_names
from ligermodels.convert import hub
from ligermodels.convert.export_spec import Keep
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.mappings import rename
from ligermodels.convert.ranks import Ranks
from ligermodels.errors import CheckpointError, InputError
from ligermodels.generation.state import DecodingState
from ligermodels.layers.initialization import initialize, persistent_tensors
from ligermodels.layers.sharding import gathered
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import MTP_TYPE, require_type
from ligermodels.models.mtp_format import mtp_block
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.pretrained import from_pretrained
from ligermodels.speculative.decoding import SpeculativeOutput
from ligermodels.speculative.draft_layer import following
from ligermodels.speculative.head_files import allocated, head_state, save_alone
from ligermodels.speculative.hub import config_of_heads
from ligermodels.speculative.mtp_files import MTPLayout, load_head, stored_layers
from ligermodels.speculative.mtp_head import MTPHead
from ligermodels.speculative.multi_head import MultiHeadModel, check_decay
from ligermodels.speculative.step_drafter import StepDrafter, TreeDrafter
from ligermodels.speculative.tree import DynamicTree, Tree, require_candidates

DECAY = 0.6

Model = TypeVar("Model", bound="MTPModel")


class MTPModel(MultiHeadModel):
    """A base model with an MTP head (`MTPHead`), which is applied K times.

    Step j (from 0) at position t reads token t + 1 + j and a hidden state: in step 0 the base model's h_t, later the
    result of step j - 1. It predicts token t + 2 + j with the base model's lm_head. In training the tokens come from
    the text, and step j attends causally to its own keys and values (FastMTP, arXiv 2509.18362). If the head has
    several layers, step j uses layer j; the steps after the last layer use the last layer again.
    """

    kind = "MTP"
    reads_every_token = True

    def __init__(self, base: CausalLM, num_steps: int | None = None, decay: float = DECAY, num_layers: int = 1) -> None:
        """A head with random weights on `base`, which `from_base` also freezes: see there for base, num_steps, decay,
        num_layers and errors."""
        super().__init__()
        check_native(base, "base")
        num_layers = check_count("num_layers", num_layers, most=MOST_HEADS)
        num_steps = check_count(
            "num_steps", max(MTP_STEPS, num_layers) if num_steps is None else num_steps, most=MOST_HEADS
        )
        self.base, self.num_heads, self.decay = base, num_steps, check_decay(decay)
        self.layout = MTPLayout.of(base, num_layers)
        network = partial(MTPHead, base.config, num_layers, separate=self.layout.format.separate)
        self.head: MTPHead = allocated(network, base.dtype, base.device)
        initialize(self.head, base.config.initializer_range, "mtp")

    @classmethod
    @names_checked
    def from_base(
        cls: type[Model], base: CausalLM, num_steps: int | None = None, decay: float = DECAY, num_layers: int = 1
    ) -> Model:
        """A new head on `base`, and freeze the base model's parameters.

        The weights are random, except for the norm after the block, which is a copy of the base's final norm. (Small
        models' heads learned faster from random weights than from a copy of one of the base's blocks.)

        Args:
            base: the base model; its blocks take only hidden states (no per-layer inputs).
            num_steps: K, tokens predicted beyond the next one, at least `num_layers`; by default 3, or `num_layers` if
                that is larger.
            decay: step j has the weight decay ** j in the loss; the weights are scaled to sum to 1.
            num_layers: layers of the head, each with its own weights.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range.
            ConfigError: MTP is not implemented for this base model, which is then not frozen.

        Examples:
            >>> mtp = lm.MTPModel.from_base(model, num_steps=3)
            >>> mtp(input_ids, labels=input_ids).loss.backward()
        """
        model = cls(base, num_steps, decay, num_layers)
        if model.num_heads < model.head.num_layers:
            raise InputError(
                f"num_steps: {model.num_heads} steps do not reach all of {num_layers} layers (num_layers), and no loss "
                "would train the others"
            )
        state = {name: gathered(tensor) for name, tensor in base.decoder.norm.state_dict().items()}
        try:
            for norm in (model.head.norm, *(layer.norm for layer in model.head.later if model.head.separate)):
                cast(nn.Module, norm).load_state_dict(state)
        except RuntimeError as error:
            raise InputError(f"base: its final norm differs from its config, and cannot be copied: {error}") from None
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
        """Load a head from a checkpoint, and freeze the base model's parameters.

        Args:
            base: the base model; or its folder or hub id, from which `ligermodels.from_pretrained` loads it.
            head: folder or hub id of a checkpoint with an MTP head, or of a head written by `save_head`; by default
                the checkpoint that `base` was loaded from.
            num_steps: K, tokens predicted beyond the next one; by default 3, or the head's number of layers if that is
                larger. Checkpoints do not store it.
            decay: step j has the weight decay ** j in the loss; the weights are scaled to sum to 1. Checkpoints do not
                store it.
            progress: called with (bytes loaded, bytes in total) of the head.
            options: options of `ligermodels.from_pretrained`, such as `dtype` and `device`, if `base` is a folder or
                hub id.

        Returns:
            The model.

        Raises:
            CheckpointError: files or tensors are missing, damaged, or made for another base model; or config.json and
                the tensors disagree about the number of layers.
            HubError: the files cannot be fetched.
            InputError: an argument is out of range, or `options` with a base model in memory.
            ConfigError: MTP is not implemented for this base model, or config.json is of heads of another kind.

        Examples:
            >>> mtp = lm.MTPModel.from_pretrained("Qwen/Qwen3.5-9B", dtype=torch.bfloat16, device="cuda")
            >>> mtp.generate([[1, 5, 9]], max_new_tokens=64)
        """
        names = (*parameter_names(MTPModel.from_pretrained), *parameter_names(from_pretrained))
        check_names("MTPModel.from_pretrained", options, names)
        if num_steps is not None:
            check_count("num_steps", num_steps, most=MOST_HEADS)
        check_decay(decay)
        if isinstance(base, str | os.PathLike):
            base = from_pretrained(base, **options)
        elif options:
            raise InputError(f"{next(iter(options))}: loads the base model, but base is loaded already; leave it out")
        check_native(base, "base")
        if head is None:
            source = base.require_export_spec().source
            if source is None:
                raise CheckpointError(
                    "head: the base model was not loaded from a checkpoint; give the folder or hub id of a checkpoint "
                    "with a head, or make a new head with MTPModel.from_base"
                )
            folder = source.folder
        else:
            require_type(config_of_heads(head), MTP_TYPE, head)
            folder = hub.resolve(head)
        model = cls(base, num_steps, decay, stored_layers(base, folder) or 1)
        model.layout = load_head(base, model.head, folder, progress)
        base.requires_grad_(False)
        return model

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the head; the embedding and the lm_head are the base model's."""
        return self.head.parameters()

    def loss_weights(self) -> Sequence[float]:
        """decay ** j for each step, scaled to sum to 1."""
        weights = [self.decay**step for step in range(self.num_heads)]
        return [weight / sum(weights) for weight in weights]

    def _head_states(self, hidden: Tensor, batch: PreparedBatch) -> Iterator[Tensor]:
        inputs = batch.inputs
        embeds = inputs["inputs_embeds"]
        embeds = self.embeddings(inputs["input_ids"]) if embeds is None else embeds
        for step in range(self.num_heads):
            # In the last step + 1 positions of a document the next token is wrong. This changes no loss: they have no
            # target, and causal attention within documents keeps them from the positions with a target.
            hidden = self.head(
                following(embeds, step + 1),
                hidden,
                layer=min(step, self.head.num_layers - 1),
                position_ids=inputs["position_ids"],
                cu_seqlens=inputs["cu_seqlens"],
                activation_checkpointing=self.base.activation_checkpointing,
            )
            yield hidden

    def _head(self, index: int, hidden: Tensor, targets: Tensor | None = None, **loss_options: Any) -> Any:
        return self._through_base(hidden, targets, **loss_options)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def drafter(self, tree: Tree | DynamicTree) -> StepDrafter:
        """A drafter that applies the head once per level of `tree`, whatever `num_steps` is."""
        layers, grows = self.head.num_layers, isinstance(tree, DynamicTree)
        if grows and layers > 1:
            raise InputError(f"tree: a DynamicTree needs a head of one layer, this head has {layers}; give a Tree")
        require_candidates(tree, self.base.config.vocab_size)
        drafter = TreeDrafter if grows else StepDrafter
        return drafter(self.embeddings, self.head, self._through_base, self._new_state, layers)

    def _new_state(self, batch_size: int, max_length: int) -> DecodingState:
        mixer, size = mtp_block(self.base.config).mixer, self.base.config.hidden_size
        dtype = next(self.head.parameters()).dtype
        options: dict[str, Any] = {"hidden_size": size, "dtype": dtype, "device": self.base.device}
        return DecodingState([mixer] * self.head.num_layers, batch_size, max_length, **options)

    @overload
    def generate(self, *args: Any, return_stats: Literal[False] = ..., **options: Any) -> Tensor: ...
    @overload
    def generate(self, *args: Any, return_stats: Literal[True], **options: Any) -> SpeculativeOutput: ...
    def generate(self, *args: Any, draft: str | None = "mtp", **options: Any) -> Tensor | SpeculativeOutput:
        """Tree decoding with the head, several tokens per step: see `MultiHeadModel.generate`.

        Args:
            args: `input_ids` and `max_new_tokens`.
            draft: "mtp"; or None to decode with the base model alone, by `base.generate`.
            options: other arguments of `MultiHeadModel.generate`, or of `base.generate`.

        Returns:
            Long (B, T'), the prompts and the new tokens; or a `SpeculativeOutput`.

        Raises:
            InputError: another `draft`, or a bad option.

        Examples:
            >>> out = mtp.generate([[1, 5, 9]], max_new_tokens=64, return_stats=True)
            >>> out.sequences, out.tokens_per_step
        """
        if draft is None:
            return self.base.generate(*args, **options)
        if draft != "mtp":
            raise InputError(f"draft: must be 'mtp', or None to decode without the head, got {draft!r}")
        return super().generate(*args, **options)

    # -- files ---------------------------------------------------------------------------------------------------------

    @names_checked
    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = "5GB",
        overwrite: bool = False,
        keep: Keep = "all",
    ) -> None:
        """Write the base model's checkpoint with the head in it.

        The head's tensors have the names that the base model's family uses for MTP heads; families without MTP heads
        get the names of Qwen3.5. vLLM and SGLang decode with the heads of the families that they support.

        Args:
            folder: created if need be.
            max_shard_size: largest size of a safetensors file, in bytes or as a string such as "5GB".
            overwrite: replace a checkpoint in the folder.
            keep: "all" writes the whole checkpoint that the model was loaded from, such as a multimodal model, with the
                language model and this head in it. "without-heads" leaves out other draft heads of that checkpoint.
                "model" writes the language model and this head alone.

        Raises:
            ConfigError: the base model has no config.json, or no longer matches it.
            CheckpointError: the folder is in use or cannot be written.
            InputError: a bad `keep`, `max_shard_size` or `overwrite`.

        Examples:
            >>> mtp.save_pretrained("with-mtp/")
        """
        spec, layout = self.base.checked_export_spec(), self.layout
        state = persistent_tensors(self.base)
        copies = {f"mtp.copies.{i}": names for i, names in enumerate(layout.copies.items())}
        mappings = [*layout.weight_map.mappings, *(rename(native, name) for native, (name, _) in copies.items())]
        whole = spec.with_heads(
            replace(layout.weight_map, mappings=mappings),
            partial(layout.format.written, num_layers=layout.num_layers),
            layout.format.fields,
            layout.holds,
        )
        state |= head_state(self.head, "mtp") | {native: state[original] for native, (_, original) in copies.items()}
        whole.save(folder, state, max_shard_size=max_shard_size, overwrite=overwrite, keep=keep)

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """`save_pretrained`: see `MultiHeadModel.save_whole` for folder, max_shard_size and overwrite."""
        self.save_pretrained(folder, max_shard_size=max_shard_size, overwrite=overwrite)

    def save_head(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the head alone, as config.json and model.safetensors, for `from_pretrained`.

        Args:
            folder: created if need be.
            overwrite: replace a checkpoint in the folder.

        Raises:
            CheckpointError: the folder is in use or cannot be written.
        """
        base, layout, state = self.base, self.layout, head_state(self.head, "mtp")
        config: dict[str, Any] = {"model_type": MTP_TYPE}
        if base.export_spec is not None:
            config["base_model_type"] = base.export_spec.hf_config["model_type"]
            config["base_model_name_or_path"] = base.export_spec.base_name
        config |= {
            layout.format.fields[0]: layout.num_layers,
            "hidden_size": base.config.hidden_size,
            "vocab_size": base.config.vocab_size,
            "dtype": str(next(self.head.parameters()).dtype).removeprefix("torch."),
        }
        config = {name: value for name, value in config.items() if value is not None}
        tensors, ranks = layout.weight_map.export(state), Ranks(state.values())
        save_alone(base, folder_to_write(folder), tensors, config, ranks, overwrite=overwrite)
