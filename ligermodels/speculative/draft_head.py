"""The base class of models with a trained draft head beside the model: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels.arguments import check_names, names_checked
from ligermodels.convert import hub
from ligermodels.convert.input_files import folder_to_write
from ligermodels.convert.ranks import Ranks
from ligermodels.convert.reading import reading
from ligermodels.convert.weight_map import LazyTensor
from ligermodels.errors import CheckpointError, InputError, short
from ligermodels.layers import LMHead
from ligermodels.layers.initialization import initialize
from ligermodels.layers.sharding import reshard
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import require_type
from ligermodels.models.native import check_native, check_own_modules
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.speculative import draft_files as files
from ligermodels.speculative.block_loss import capped
from ligermodels.speculative.draft_projection import DraftProjection
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.head_files import allocated, check_base_model, save_alone
from ligermodels.speculative.multi_head import MultiHeadModel

Model = TypeVar("Model", bound="DraftHeadModel")


class DraftHeadModel(MultiHeadModel):
    """A base model with a network `head`, which reads states of several of its layers and the embeddings of tokens.

    Attributes:
        head: the network.
        config: its config, with `decoder`, `boundaries`, `target_hidden_size` and `draft_vocab_size`.
        vocabulary: the tokens that the head can propose.
        embed: the head's own embedding; None where it is the base model's.
        lm_head: the head's own projection to the draft vocabulary; None where it is the base model's.
    """

    reads_every_token = True
    loss_options: ClassVar[tuple[str, ...]] = ("token_weights", "reduction", "memory_budget")
    formats: ClassVar[ModuleType]
    """The file formats of such heads: `eagle3_formats` or `block_formats`."""
    head_type: ClassVar[str]
    """Their type in files: a name of `models.extra_heads.HEADS`."""
    training_names: ClassVar[tuple[str, ...]]
    """Options of `from_pretrained`: how the head is trained."""

    def __init__(
        self, base: CausalLM, config: Any, vocabulary: DraftVocabulary | None, network: Callable[[Any], nn.Module]
    ) -> None:
        """A head with random weights, on the device and in the dtype of `base`.

        Args:
            base: the base model.
            config: the head's config.
            vocabulary: the tokens that the head can propose; None for all.
            network: config -> the head's network.

        Raises:
            InputError: the config does not fit the base model and the draft vocabulary.
        """
        super().__init__()
        check_native(base, "base")
        check_own_modules(base.decoder, type(self).__name__)
        if vocabulary is None:
            vocabulary = DraftVocabulary.whole(base.config.vocab_size)
        if not isinstance(vocabulary, DraftVocabulary):
            raise InputError(f"vocabulary: must be a DraftVocabulary, got {short(vocabulary)}")
        files.check_fit(base.config, config, vocabulary)
        self.base, self.config, self.vocabulary = base, config, vocabulary.copied_to(base.device)
        self.embed: nn.Embedding | None = None
        self.lm_head: LMHead | None = None
        self.head: Any = allocated(partial(network, config), base.dtype, base.device)
        initialize(self.head, base.config.initializer_range, self.head_type)

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the base model that the head was made for."""
        return self.vocabulary.vocab_size

    # -- parts of the loss and of drafting -----------------------------------------------------------------------------

    def prepare(self, first: int, inputs: Mapping[str, Any], loss_options: Mapping[str, Any]) -> PreparedBatch:
        """See `MultiHeadModel.prepare` for `first`, `inputs` and `loss_options`. UserWarning if parameters of the base
        model require gradients, which the loss does not give them."""
        trains = inputs["labels"] is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trains and any(parameter.requires_grad for parameter in self.base.parameters()):
            warnings.warn(
                f"{self.kind}: parameters of the base model require gradients, and this loss gives them none, as it "
                "trains the head alone; freeze them with base.requires_grad_(False), or train them by base(...).loss",
                UserWarning,
                stacklevel=5,
            )
        return super().prepare(first, inputs, loss_options)

    @torch.no_grad()
    def _captured(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The base model's states at the boundaries, side by side (rows, length, n H), and after its final norm."""
        out = self.base(**inputs, return_hidden_states=self.config.boundaries)
        return torch.cat(cast("tuple[Tensor, ...]", out.hidden_states), dim=-1), cast(Tensor, out.last_hidden_state)

    @property
    def projection(self) -> DraftProjection:
        """The projection of the head to the draft vocabulary."""
        return DraftProjection(self.base, self.vocabulary, self.lm_head, self.config.decoder.head.softcap)

    def project_with(self, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The projection for decoding: hidden states (..., H) -> logits (..., V_d), capped ones in at least float32, as
        two of them may be equal in bfloat16. The rows are taken once."""
        softcap, project = self.projection.softcap, cast(Callable[[Tensor], Tensor], self.lm_head)
        if self.lm_head is None:
            project = partial(F.linear, weight=self.projection.rows(dtype))
        wide = torch.promote_types(dtype, torch.float32)
        return project if softcap is None else lambda hidden: capped(project(hidden).to(wide), softcap)

    def embeddings(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, H) of token ids (B, T), also if FSDP2 shards the base model."""
        return super().embeddings(input_ids) if self.embed is None else self.embed(input_ids)

    # -- files ---------------------------------------------------------------------------------------------------------

    def stored_settings(self) -> dict[str, Any]:
        """Settings of the training that files name, by the arguments of a format's `config`."""
        raise NotImplementedError

    @classmethod
    def check_training(cls, options: Mapping[str, Any]) -> None:
        """InputError for an option of `training_names` with a bad value."""
        raise NotImplementedError

    @classmethod
    def of_file(
        cls: type[Model],
        base: CausalLM,
        config: Any,
        vocabulary: DraftVocabulary | None,
        stored: Mapping[str, Any],
        lm_head: Tensor | None,
        options: Mapping[str, Any],
    ) -> Model:
        """A model for a head in a file, with random weights.

        Args:
            base: the base model.
            config: the head's config.
            vocabulary: the tokens that the head can propose; None for all.
            stored: config.json.
            lm_head: the lm_head (V_d, H) in the file, or None.
            options: options of `from_pretrained`, of `training_names`.
        """
        raise NotImplementedError

    @classmethod
    def from_pretrained(
        cls: type[Model],
        base: CausalLM,
        folder: str | os.PathLike[str],
        *,
        progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Model:
        """Load a head from a folder or the hub, in any format of `export`, and freeze the base model.

        DeepSpec's DFlash heads are DSpark heads without a Markov head and a confidence head. An lm_head that equals the
        base model's rows is the base model's, frozen with it.

        Args:
            base: the base model, in memory.
            folder: folder or hub id of the head.
            progress: called with (bytes loaded, bytes in total) of the head.
            options: how the head is trained. EAGLE-3: `num_steps`, by default `speculative_tokens` or `ttt_length` in
                config.json, or 7; `decay`, by default `step_loss_decay` in config.json, or 0.8; and `divergence`: see
                `Eagle3Model.from_base`. DFlash and DSpark: fields of `BlockTraining`.

        Returns:
            The model.

        Raises:
            CheckpointError: files or tensors are missing, damaged, or made for another base model.
            ConfigError: config.json is not of such a head, or has a bad value.
            HubError: the files cannot be fetched.
            TypeError: an unknown option, before anything is read.
            InputError: an option's value is out of range, before anything is read.

        Examples:
            >>> eagle = lm.Eagle3Model.from_pretrained(model, "RedHatAI/Qwen3-8B-speculator.eagle3")
            >>> dflash = lm.DFlashModel.from_pretrained(model, "z-lab/Qwen3-8B-DFlash-b16")
            >>> dspark = lm.DSparkModel.from_pretrained(model, "deepseek-ai/dspark_qwen3_8b_block7")
        """
        check_native(base, "base")
        check_names(f"{cls.__name__}.from_pretrained", options, ("progress", *cls.training_names))
        cls.check_training(options)
        path, formats = hub.resolve(folder), cls.formats
        with reading(path, partial(files.open_head, path, names=formats.tensor_name)) as (stored, reader):
            require_type(stored, cls.head_type, path)
            with files.errors_of(path):
                config = formats.read_config(stored, base.config)
                vocabulary = files.stored_vocabulary(reader.headers, base.config.vocab_size)
            try:
                files.check_fit(base.config, config, vocabulary)
            except InputError as error:
                raise CheckpointError(f"{path}: {error}") from None
            model = cls.of_file(base, config, vocabulary, stored, reader.headers.get(files.LM_HEAD), options)
            weight_map = formats.weight_map(config, lm_head=model.lm_head is not None)
            if base.device.type == "meta":  # names and shapes are checked
                weight_map.plan(reader.headers, files.native_state(model), f"{path}: the head")
            else:
                weight_map.load(reader, files.native_state(model), progress, what=f"{path}: the head")
                if files.EMBEDDING in reader.headers:
                    files.take_embedding(model, path, reader.headers[files.EMBEDDING])
        base.requires_grad_(False)
        return model

    @names_checked
    def export(
        self,
        folder: str | os.PathLike[str],
        profile: str = "speculators",
        *,
        base_model: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the head for a server.

        Args:
            folder: created if need be.
            profile: "speculators", which vLLM reads. EAGLE-3: also "specforge", which SGLang and vLLM read, or
                "deepspec", whose heads are of Qwen3's kind, with all tokens and the states of five layers. DFlash: also
                "z-lab", DSpark: also "deepspec", which SGLang and vLLM read.
            base_model: the base model's hub id or folder, for config.json of formats that name it: "speculators", and
                "deepspec" of EAGLE-3; an error for the others. Default: the checkpoint that the base model was loaded
                from.
            overwrite: replace a checkpoint in the folder.

        Raises:
            InputError: the profile is unknown, cannot hold this head, or needs `base_model` or does not name it.
            CheckpointError: the folder is in use or cannot be written.

        Examples:
            >>> eagle.export("head/", profile="specforge")
        """
        self.check_vocabulary()
        formats = self.formats
        form = files.profile_named(profile, formats.PROFILES[self.head_type], self.kind, self.config)
        check_base_model(base_model, profile, names_base=form.names_base)
        config = form.config(self.config, files.Target.of(self, base_model), **self.stored_settings())
        config["dtype"] = str(next(self.head.parameters()).dtype).removeprefix("torch.")
        for name, own, holds in (("lm_head", self.lm_head, form.lm_head), ("embedding", self.embed, form.embedding)):
            if own is not None and not holds:
                raise InputError(f"profile {profile!r}: holds no {name} of the head's own; export another profile")
        weight_map = formats.weight_map(self.config, form.prefix, lm_head=form.lm_head)
        reshard(self)
        state = files.native_state(self)
        if form.lm_head and self.lm_head is None:
            state[files.LM_HEAD] = self.projection.rows(self.base.dtype)
        further = {} if self.vocabulary.is_whole else self.vocabulary.tables()  # vLLM refuses tables of all tokens
        if form.embedding:
            further[files.EMBEDDING] = files.stored_embedding(self)
        tensors = weight_map.export(state)
        tensors += [LazyTensor(key, tuple(x.shape), x.dtype, partial(torch.clone, x)) for key, x in further.items()]
        save_alone(self.base, folder_to_write(folder), tensors, config, Ranks(state.values()), overwrite=overwrite)

    def save_pretrained(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Write the head without the base model, for `from_pretrained`: `export` in speculators' form.

        Args:
            folder: created if need be.
            overwrite: replace a head in the folder.

        Raises:
            InputError, CheckpointError: see `export`.
        """
        spec = self.base.export_spec
        name = "" if spec is None or spec.base_name is None else spec.base_name
        self.export(folder, base_model=name, overwrite=overwrite)
