"""The base class of models with a trained draft head beside the model: EAGLE-3, DFlash and DSpark."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError, short
from ligermodels.layers import LMHead
from ligermodels.layers.initialization import allocate, initialize, skip_init
from ligermodels.layers.sharding import call_gathered
from ligermodels.speculative.draft_projection import DraftProjection
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.multi_head import MultiHeadModel

LOSS_OPTIONS = ("token_weights", "reduction", "memory_budget")
"""What a caller of these models may choose of the loss."""


def check_draft_options(options: Mapping[str, Any]) -> None:
    """InputError for an option of the loss that is none of LOSS_OPTIONS."""
    if others := options.keys() - set(LOSS_OPTIONS):
        raise InputError(f"{min(others)}: is no option of this loss, which takes {', '.join(LOSS_OPTIONS)}")


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
    head: Any
    config: Any
    vocabulary: DraftVocabulary
    embed: nn.Embedding | None
    lm_head: LMHead | None

    def _check_config(self) -> None:
        """InputError unless the head's config fits the base model and the draft vocabulary."""
        if not isinstance(self.vocabulary, DraftVocabulary):
            raise InputError(f"vocabulary: must be a DraftVocabulary, got {short(self.vocabulary)}")
        config, base = self.config, self.base.config
        for name, ours, theirs in (
            ("target_hidden_size", config.target_hidden_size, base.hidden_size),
            ("hidden_size", config.decoder.hidden_size, base.hidden_size),
            ("vocab_size", config.decoder.vocab_size, base.vocab_size),
            ("vocab_size", self.vocabulary.vocab_size, base.vocab_size),
            ("draft_vocab_size", config.draft_vocab_size, len(self.vocabulary)),
        ):
            if ours != theirs:
                raise InputError(f"{name}: of the head is {ours}, where the model and its draft tokens need {theirs}")
        if config.boundaries[-1] > len(base.blocks):
            raise InputError(f"boundaries: the model has {len(base.blocks)} layers, got {config.boundaries}")

    def _build(self, network: type[nn.Module], name: str) -> nn.Module:
        """The head's network with random weights, on the device and in the dtype of the base model."""
        with torch.device("meta"), skip_init():
            head = network(self.config)
        allocate(head, self.base.dtype, self.base.device)
        initialize(head, self.base.config.initializer_range, name)
        return head

    @property
    def projection(self) -> DraftProjection:
        """The projection of the head to the draft vocabulary."""
        return DraftProjection(self.base, self.vocabulary, self.lm_head)

    def embeddings(self, input_ids: Tensor) -> Tensor:
        """Embeddings (B, T, H) of token ids (B, T), also if FSDP2 shards the base model."""
        if self.embed is not None:
            return self.embed(input_ids)
        return call_gathered(self.base, lambda ids: self.base.decoder.embed(ids), input_ids)

    def export(
        self,
        folder: str | os.PathLike[str],
        profile: Any = "speculators",
        *,
        base_model: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the head for a server: see the subclasses.

        Args:
            folder: created if need be.
            profile: name of the format.
            base_model: the base model's hub id or folder, for config.json.
            overwrite: replace a checkpoint in the folder.
        """
        raise NotImplementedError

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

    def save_whole(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", overwrite: bool = False
    ) -> None:
        """InputError: no format holds a model together with such a head.

        Args:
            folder: not used.
            max_shard_size: not used.
            overwrite: not used.
        """
        raise InputError(
            f"{self.kind}: heads are checkpoints of their own; call export, and save_pretrained of the base"
        )
