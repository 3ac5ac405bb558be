"""DFlash (arXiv 2602.06036) and DSpark (https://github.com/deepseek-ai/DeepSpec): draft heads that propose a block."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from ligermodels.arguments import MOST_HEADS, check_count
from ligermodels.models.capture import boundaries_of
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.inputs import check_boundaries
from ligermodels.models.native import check_native
from ligermodels.speculative.block_draft import BlockDraftModel
from ligermodels.speculative.block_files import load_head, save_head
from ligermodels.speculative.block_head import BlockDraftConfig
from ligermodels.speculative.block_training import default_layer_ids
from ligermodels.speculative.draft_layer import check_layers, layer_like
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.markov_head import MarkovHeadType

Model = TypeVar("Model", bound=BlockDraftModel)


class DFlashModel(BlockDraftModel):
    """A base model with a DFlash head. Slot j of a block, from 1 on, predicts the token at its own position.

    It is trained by cross entropy to the text. Slots do not see one another's tokens.
    """

    kind = "DFlash"
    from_anchor = False
    training_defaults: ClassVar[Mapping[str, Any]] = {"gamma": 7.0}

    @classmethod
    def from_base(
        cls,
        base: CausalLM,
        block_size: int = 16,
        *,
        num_layers: int = 5,
        boundaries: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        vocabulary: DraftVocabulary | None = None,
        layers: Mapping[str, Any] | None = None,
        **training: Any,
    ) -> DFlashModel:
        """A new head on `base`, and freeze the base model's parameters.

        Args:
            base: the base model.
            block_size: B, slots of a block, the anchor's included; B - 1 tokens are proposed.
            num_layers: layers of the head.
            boundaries: the states that the head reads: L is the residual stream after L layers. By default one for each
                layer of the head, spread over the model: see `default_layer_ids`.
            mask_token_id: token of the slots after the anchor, one that texts do not have. Default: the last id.
            vocabulary: the tokens that the head can propose; None for all.
            layers: Hugging Face config of a Qwen3 model with the head's layers. Default: the sizes of the base model's
                layers.
            training: fields of `BlockTraining`, such as num_anchors, gamma and dpace_alpha.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range, or does not fit the base model, which is then not frozen.
            ConfigError: the layers' config has a bad value.

        Examples:
            >>> dflash = lm.DFlashModel.from_base(model, block_size=8, num_layers=2)
            >>> dflash(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
        """
        shape = {"block_size": block_size, "boundaries": boundaries, "mask_token_id": mask_token_id}
        return _new(cls, base, num_layers, layers, vocabulary, shape, training)

    @classmethod
    def from_pretrained(
        cls,
        base: CausalLM,
        folder: str | os.PathLike[str],
        *,
        progress: Callable[[int, int], None] | None = None,
        **training: Any,
    ) -> DFlashModel:
        """Load a head from a folder or the hub, in speculators' form or z-lab's, and freeze the base model.

        Args:
            base: the base model, in memory.
            folder: folder or hub id of the head.
            progress: called with (bytes loaded, bytes in total) of the head.
            training: fields of `BlockTraining`.

        Returns:
            The model.

        Raises:
            CheckpointError: files or tensors are missing, damaged, or made for another base model.
            ConfigError: config.json is not of a DFlash head, or has a bad value.
            HubError: the files cannot be fetched.

        Examples:
            >>> dflash = lm.DFlashModel.from_pretrained(model, "z-lab/Qwen3-8B-DFlash-b16")
        """
        return load_head(cls, base, folder, training, progress)

    def export(
        self,
        folder: str | os.PathLike[str],
        profile: Literal["speculators", "z-lab"] = "speculators",
        *,
        base_model: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the head for a server.

        Args:
            folder: created if need be.
            profile: "speculators", which vLLM reads; or "z-lab", which SGLang and vLLM read.
            base_model: the base model's hub id or folder, for config.json. Default: the checkpoint that the base model
                was loaded from.
            overwrite: replace a checkpoint in the folder.

        Raises:
            InputError: the profile is unknown, cannot hold this head, or needs `base_model`.
            CheckpointError: the folder is in use or cannot be written.
        """
        save_head(self, folder, profile, base_model, overwrite=overwrite)


class DSparkModel(BlockDraftModel):
    """A base model with a DSpark head. Slot k of a block predicts the token after its position, from the anchor's own
    slot on. A Markov head corrects its logits by the token before; a confidence head estimates its acceptance.

    It is trained by 0.1 times the cross entropy to the text, 0.9 times the L1 distance from the model's distribution,
    and the confidence head's cross entropy.
    """

    kind = "DSpark"
    from_anchor = True
    training_defaults: ClassVar[Mapping[str, Any]] = {"ce_weight": 0.1, "divergence_weight": 0.9}

    @classmethod
    def from_base(
        cls,
        base: CausalLM,
        block_size: int = 7,
        *,
        num_layers: int = 5,
        boundaries: Sequence[int] | None = None,
        mask_token_id: int | None = None,
        vocabulary: DraftVocabulary | None = None,
        layers: Mapping[str, Any] | None = None,
        markov_rank: int = 256,
        markov_head_type: MarkovHeadType = "vanilla",
        confidence: bool = True,
        confidence_with_markov: bool = True,
        **training: Any,
    ) -> DSparkModel:
        """A new head on `base`, and freeze the base model's parameters.

        Args:
            base: the base model.
            block_size: B, slots of a block, which propose B tokens.
            num_layers: layers of the head.
            boundaries: the states that the head reads: L is the residual stream after L layers. By default one for each
                layer of the head, spread over the model: see `default_layer_ids`.
            mask_token_id: token of the slots after the anchor, one that texts do not have. Default: the last id.
            vocabulary: the tokens that the head can propose; None for all.
            layers: Hugging Face config of a Qwen3 model with the head's layers. Default: the sizes of the base model's
                layers.
            markov_rank: rank of the Markov head; 0 for none.
            markov_head_type: "vanilla", "gated" or "rnn": see `MarkovHead`.
            confidence: whether there is a confidence head.
            confidence_with_markov: whether it reads the Markov head's embeddings, if there are any.
            training: fields of `BlockTraining`, such as num_anchors, gamma and ce_weight.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range, or does not fit the base model, which is then not frozen.
            ConfigError: the layers' config has a bad value.

        Examples:
            >>> dspark = lm.DSparkModel.from_base(model, block_size=7, num_layers=2)
            >>> dspark(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
        """
        shape = {
            "block_size": block_size,
            "boundaries": boundaries,
            "mask_token_id": mask_token_id,
            "markov_rank": markov_rank,
            "markov_head_type": markov_head_type,
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": confidence_with_markov and markov_rank > 0,
        }
        return _new(cls, base, num_layers, layers, vocabulary, shape, training)

    @classmethod
    def from_pretrained(
        cls,
        base: CausalLM,
        folder: str | os.PathLike[str],
        *,
        progress: Callable[[int, int], None] | None = None,
        **training: Any,
    ) -> DSparkModel:
        """Load a head from a folder or the hub, in speculators' form or DeepSpec's, and freeze the base model.

        DeepSpec's DFlash heads are of this form too, without a Markov head and a confidence head.

        Args:
            base: the base model, in memory.
            folder: folder or hub id of the head.
            progress: called with (bytes loaded, bytes in total) of the head.
            training: fields of `BlockTraining`.

        Returns:
            The model.

        Raises:
            CheckpointError: files or tensors are missing, damaged, or made for another base model.
            ConfigError: config.json is not of a DSpark head, or has a bad value.
            HubError: the files cannot be fetched.

        Examples:
            >>> dspark = lm.DSparkModel.from_pretrained(model, "deepseek-ai/dspark_qwen3_8b_block7")
        """
        return load_head(cls, base, folder, training, progress)

    def export(
        self,
        folder: str | os.PathLike[str],
        profile: Literal["speculators", "deepspec"] = "speculators",
        *,
        base_model: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the head for a server.

        Args:
            folder: created if need be.
            profile: "speculators", which vLLM reads; or "deepspec", which SGLang and vLLM read.
            base_model: the base model's hub id or folder, for config.json. Default: the checkpoint that the base model
                was loaded from.
            overwrite: replace a checkpoint in the folder.

        Raises:
            InputError: the profile is unknown, cannot hold this head, or needs `base_model`.
            CheckpointError: the folder is in use or cannot be written.
        """
        save_head(self, folder, profile, base_model, overwrite=overwrite)


def _new(
    model_class: type[Model],
    base: CausalLM,
    num_layers: int,
    layers: Mapping[str, Any] | None,
    vocabulary: DraftVocabulary | None,
    shape: dict[str, Any],
    training: Mapping[str, Any],
) -> Model:
    """A model with a new head.

    Args:
        model_class: class of the model.
        base: the base model; its parameters are frozen.
        num_layers: layers of the head, where `layers` is None.
        layers: Hugging Face config of the layers, or None.
        vocabulary: the tokens that the head can propose; None for all.
        shape: fields of `BlockDraftConfig`; boundaries and mask_token_id may be None.
        training: fields of `BlockTraining`.
    """
    check_native(base, "base")
    target = base.config
    if layers is None:
        layers = layer_like(target, "qwen3", check_count("num_layers", num_layers, most=MOST_HEADS))
    check_layers("layers", layers, ("qwen3",))
    if shape["boundaries"] is None:
        count = int(layers.get("num_hidden_layers", num_layers))
        shape["boundaries"] = boundaries_of(default_layer_ids(count, len(target.blocks)))
    else:
        shape["boundaries"] = check_boundaries("boundaries", shape["boundaries"], len(target.blocks))
    if shape["mask_token_id"] is None:
        shape["mask_token_id"] = target.vocab_size - 1
    config = BlockDraftConfig(
        layers=layers,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size if vocabulary is None else len(vocabulary),
        sample_from_anchor=model_class.from_anchor,
        **{**shape, "boundaries": tuple(shape["boundaries"])},
    )
    model = model_class(base, config, vocabulary, **training)
    base.requires_grad_(False)
    return model
