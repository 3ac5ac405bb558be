"""A model trained on the predictions of a teacher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ligermodels.convert import hub
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import ConfigError, InputError
from ligermodels.layers import IGNORE_INDEX, LMHead, Targets
from ligermodels.layers.sharding import call_gathered, reshard_before_pass
from ligermodels.losses.distillation import generalized_jsd_loss
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.passes import DecoderResult, ModelInputs, run_decoder
from ligermodels.models.routing import RouterResults
from ligermodels.pretrained import from_config, from_pretrained
from ligermodels.training.objective_evaluation import ObjectiveModel, ObjectiveOutput
from ligermodels.training.recording import unrecordable_reasons


class DistillationModel(ObjectiveModel):
    """A model whose forward computes `generalized_jsd_loss` from a teacher's predictions, without logits in memory.

    Args:
        model: the student.
        teacher: the teacher, with the same tokens; it gets no gradient, and is not registered as a submodule.
        options: `beta` and `temperature` of `generalized_jsd_loss`.

    Raises:
        InputError: a head has no weight of its own that a fused loss could read: it is quantised, or a user's class.
    """

    def __init__(self, model: CausalLM, teacher: CausalLM, **options: Any) -> None:
        super().__init__(model)
        for name, each in (("student", model), ("teacher", teacher)):
            if type(each.head).forward is not LMHead.forward or each.head.weight is None:
                raise InputError(f"distill: the {name}'s head is a {each.head}, and must be an LMHead with a weight")
        self.options = options
        self._teacher = (teacher.requires_grad_(False).eval(),)  # in a tuple: not registered as a submodule
        self._vocab_size = min(model.config.vocab_size, teacher.config.vocab_size)

    @property
    def unrecordable(self) -> str:
        """Why passes of the teacher are not recorded in CUDA graphs; "" if they are."""
        return next(unrecordable_reasons(self.teacher), "")

    @property
    def teacher(self) -> CausalLM:
        """The teacher."""
        return self._teacher[0]

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> ObjectiveOutput:
        """The divergence, summed over the tokens with a target.

        Args:
            input_ids: (B, T).
            labels: (B, T), -100 where the teacher's prediction is not learned.
            cu_seqlens: bounds of packed documents.
            num_items_in_batch: divides the sum. Default: the number of targets.
        """
        if num_items_in_batch is None:
            num_items_in_batch = self.num_targets(labels, cu_seqlens=cu_seqlens).clamp(min=1)
        inputs = ModelInputs(input_ids=input_ids, labels=labels, cu_seqlens=cu_seqlens)
        # The states of both models are those of the same tokens.
        every_token = not (self.model.decoder.narrows and self.teacher.decoder.narrows)
        with torch.no_grad():
            taught = run_decoder(self.teacher, inputs, every_token)
        reshard_before_pass(self.model)
        total, count, routers = call_gathered(self.model, self._divergence, inputs, taught, every_token)
        return ObjectiveOutput.of(self.model, total / num_items_in_batch, count / num_items_in_batch, routers)

    def _divergence(
        self, inputs: ModelInputs, taught: DecoderResult, every_token: bool
    ) -> tuple[Tensor, Tensor, RouterResults]:
        """The summed divergence, the number of its tokens, and the results of the routers."""
        decoded = run_decoder(self.model, inputs, every_token)
        targets, head = cast(Targets, decoded.targets), self.model.head
        mask = targets.take(targets.values[0]) != IGNORE_INDEX
        states = decoded.hidden, taught.hidden
        total = call_gathered(head, self._head_divergence, *states, mask, targets.wait_for_count(0))
        return total, mask.sum(), decoded.routers

    def _head_divergence(self, hidden: Tensor, taught: Tensor, mask: Tensor, num_tokens: int | None) -> Tensor:
        head, other, size = self.model.head, self.teacher.head, self._vocab_size
        with head.loss_weight(hidden.dtype) as weight, other.loss_weight(taught.dtype) as teacher_weight:
            return generalized_jsd_loss(  # type: ignore[return-value]  # a tensor without extras
                hidden, weight[:size], taught, teacher_weight[:size], mask, reduction="sum", num_tokens=num_tokens,
                bias=None if head.bias is None else head.bias[:size],
                teacher_bias=None if other.bias is None else other.bias[:size],
                softcap=head.config.softcap, logit_scale=head.config.logit_scale, teacher_softcap=other.config.softcap,
                teacher_logit_scale=other.config.logit_scale, **self.options,
            )  # fmt: skip


def load_teacher(name: str, tokenizer: Path, model: CausalLM) -> CausalLM:
    """Load the teacher of `model`, on its device and in its dtype. On the meta device no
    tensor is read, and no weights are fetched from the hub.

    Args:
        name: a checkpoint folder, or a hub id.
        tokenizer: folder of the student's tokenizer.
        model: the student.

    Raises:
        ConfigError: the teacher has other tokens.
        CheckpointError, HubError: it cannot be loaded.
    """
    fetches = model.device.type != "meta"
    folder = hub.resolve(name, weights=fetches)
    _check_tokens(folder, tokenizer, model)
    load: Callable[..., CausalLM] = from_pretrained if fetches or Path(name).expanduser().is_dir() else from_config
    return load(folder, dtype=model.dtype, device=model.device)


def _check_tokens(teacher: Path, student: Path, model: CausalLM) -> None:
    """Raise ConfigError unless each token of the student has the same id in the teacher's tokenizer."""
    if not (teacher / "tokenizer.json").is_file():
        return  # the sizes of the vocabularies decide
    known = Tokenizer(teacher).backend.get_vocab()
    for token, index in Tokenizer(student).backend.get_vocab().items():
        if known.get(token) != index:
            place = "is missing" if token not in known else f"has id {known[token]}"
            raise ConfigError(
                f"teacher: token {token!r} has id {index} in the student's tokenizer and {place} in {teacher}; "
                "distillation needs a teacher with the same tokens"
            )
