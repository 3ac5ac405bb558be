"""EAGLE-3: a draft head of one layer, trained towards the model's own distributions (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from ligermodels.arguments import (
    EAGLE_DECAY,
    EAGLE_FLAGS,
    EAGLE_STEPS,
    MOST_HEADS,
    Divergence,
    check_count,
    check_names,
    parameter_names,
)
from ligermodels.errors import InputError, short
from ligermodels.layers import IGNORE_INDEX, Targets
from ligermodels.losses.sequences import per_item
from ligermodels.models.capture import default_boundaries
from ligermodels.models.causal_lm import CausalLM
from ligermodels.models.extra_heads import EAGLE_TYPE
from ligermodels.models.inputs import check_boundaries
from ligermodels.models.native import check_native
from ligermodels.models.prepared_batch import PreparedBatch
from ligermodels.ops.loss.token_losses import check_mean_weights
from ligermodels.speculative import eagle3_formats as formats
from ligermodels.speculative.block_training import check_divergence
from ligermodels.speculative.draft_head import DraftHeadModel
from ligermodels.speculative.draft_layer import check_layers, following, layer_like
from ligermodels.speculative.draft_projection import DraftProjection, copy_rows, own_lm_head, repeats_rows
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.eagle3_head import KINDS, DraftStates, Eagle3Config, Eagle3Head
from ligermodels.speculative.multi_head import check_decay
from ligermodels.speculative.output import ACCEPTED, MultiHeadOutput
from ligermodels.speculative.step_drafter import StepDrafter, TreeDrafter
from ligermodels.speculative.tree import DynamicTree, Tree, require_candidates


class Eagle3Model(DraftHeadModel):
    """A base model with an EAGLE-3 head (`Eagle3Head`), which is applied K times.

    Step k (from 0) at position t reads token t + 1 + k and, in step 0, the model's states at t, later the result of
    step k - 1 at t. It proposes token t + 2 + k. In training the tokens come from the text, and each step is trained
    towards the model's distribution of that token ("training-time test").

    The loss is sum_k decay^k * D_k. D_k is the divergence of the head's distribution in step k at t from the model's
    distribution at t + 1 + k, both over the draft vocabulary, for each t for which the label of token t + 2 + k is not
    -100; of labels only that counts. Acceptance and agreement compare with the model's distribution over all its
    tokens. With a reduced draft vocabulary that takes one more product with the model's head, so a pass with gradients
    measures them at about `COMPARED` evenly spaced tokens; `trials` has their numbers.
    """

    kind, head_type = "EAGLE-3", EAGLE_TYPE
    formats: ClassVar[ModuleType] = formats
    training_names = ("num_steps", "decay", "divergence")

    def __init__(
        self,
        base: CausalLM,
        config: Eagle3Config,
        vocabulary: DraftVocabulary | None = None,
        *,
        num_steps: int = EAGLE_STEPS,
        decay: float = EAGLE_DECAY,
        divergence: Divergence = "forward_kl",
        lm_head: Literal["own", "shared"] = "own",
    ) -> None:
        """A head with random weights on `base`. `from_base` and `from_pretrained` also freeze the base model.

        Args:
            base: the base model.
            config: the head's config.
            vocabulary: the tokens that the head can propose; None for all.
            num_steps: K, steps of training.
            decay: step k has the weight decay ** k in the loss.
            divergence: from the model's distribution: a name of `ops.linear_distillation`.
            lm_head: "own", a trained projection to the draft vocabulary; or "shared", the rows of the base model's.

        Raises:
            InputError: an argument is out of range, or the config does not fit the base model.
        """
        if lm_head not in ("own", "shared"):
            raise InputError(f"lm_head: must be 'own' or 'shared', got {short(lm_head)}")
        self.check_training({"num_steps": num_steps, "decay": decay, "divergence": divergence})
        super().__init__(base, config, vocabulary, Eagle3Head)
        self.divergence, self.decay, self.num_heads = divergence, float(decay), int(num_steps)
        self.lm_head = own_lm_head(base, self.vocabulary) if lm_head == "own" else None

    def choose(self, vocabulary: DraftVocabulary) -> None:
        """Propose other tokens, of the same number. The head's own lm_head starts again from the base model's rows.

        Args:
            vocabulary: the tokens.

        Raises:
            InputError: their number, or the model's number of tokens, is another.
        """
        if (len(vocabulary), vocabulary.vocab_size) != (len(self.vocabulary), self.vocabulary.vocab_size):
            raise InputError(
                f"vocabulary: must have {len(self.vocabulary)} of {self.vocabulary.vocab_size} tokens, has "
                f"{len(vocabulary)} of {vocabulary.vocab_size}"
            )
        self.vocabulary = vocabulary.copied_to(self.base.device)
        if self.lm_head is not None:
            copy_rows(self.base, vocabulary, self.lm_head)

    @classmethod
    def from_base(
        cls,
        base: CausalLM,
        num_steps: int = EAGLE_STEPS,
        *,
        boundaries: Sequence[int] | None = None,
        vocabulary: DraftVocabulary | None = None,
        layer: Literal["llama", "qwen3"] | Mapping[str, Any] = "llama",
        decay: float = EAGLE_DECAY,
        divergence: Divergence = "forward_kl",
        lm_head: Literal["own", "shared"] = "own",
        **flags: bool,
    ) -> Eagle3Model:
        """A new head on `base`, and freeze the base model's parameters.

        Args:
            base: the base model.
            num_steps: K, steps of training, and tokens proposed by default.
            boundaries: the states that the head reads: L is the residual stream after L layers. By default after 2,
                half, and all but 3 of the layers.
            vocabulary: the tokens that the head can propose, such as `DraftVocabulary.counted(...)`; None for all.
            layer: kind of the head's layer, with the sizes of the model's layers; or a Hugging Face config of a Llama
                or Qwen3 model with one layer.
            decay: step k has the weight decay ** k in the loss.
            divergence: from the model's distribution: a name of `ops.linear_distillation`.
            lm_head: "own", a trained projection to the draft vocabulary; or "shared", the rows of the base model's.
            flags: `norm_before_residual`, `norm_before_fc`, `fc_norm`, `norm_output`: see `Eagle3Config`.

        Returns:
            The model, on the device and in the dtype of `base`.

        Raises:
            InputError: an argument is out of range, or does not fit the base model, which is then not frozen.
            ConfigError: the layer's config has a bad value.

        Examples:
            >>> eagle = lm.Eagle3Model.from_base(model, num_steps=3)
            >>> eagle(input_ids, labels=input_ids).loss.backward()  # gradients of the head only
        """
        check_native(base, "base")
        check_names("Eagle3Model.from_base", flags, (*parameter_names(cls.from_base), *EAGLE_FLAGS))
        if boundaries is not None:
            boundaries = check_boundaries("boundaries", boundaries, len(base.config.blocks))
        check_layers("layer", {"model_type": layer} if isinstance(layer, str) else layer, KINDS)
        config = Eagle3Config(
            layer_like(base.config, layer) if isinstance(layer, str) else layer,
            default_boundaries(len(base.config.blocks)) if boundaries is None else tuple(boundaries),
            base.config.hidden_size,
            base.config.vocab_size if vocabulary is None else len(vocabulary),
            **flags,
        )
        model = cls(
            base, config, vocabulary, num_steps=num_steps, decay=decay, divergence=divergence, lm_head=lm_head
        )  # fmt: skip
        base.requires_grad_(False)
        return model

    def head_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the head, and of its lm_head unless it is the base model's."""
        yield from self.head.parameters()
        if self.lm_head is not None:
            yield from self.lm_head.parameters()

    def loss_weights(self) -> Sequence[float]:
        """decay ** k for each step."""
        return [self.decay**step for step in range(self.num_heads)]

    # -- loss ----------------------------------------------------------------------------------------------------------

    def _output(self, batch: PreparedBatch, labels: Tensor | None, **loss_options: Any) -> MultiHeadOutput:
        inputs, targets, projection = batch.inputs, batch.targets, self.projection
        states, last = self._captured(inputs)
        with torch.no_grad():
            embeds = inputs["inputs_embeds"]
            embeds = self.embeddings(inputs["input_ids"]) if embeds is None else embeds
        drafted = self.head.training_steps(
            states, embeds, self.num_heads, position_ids=inputs["position_ids"], cu_seqlens=inputs["cu_seqlens"]
        )
        if targets is None:
            logits = [batch.layout.packing.restore(projection.logits(normed)) for normed in drafted]
            return MultiHeadOutput(logits=torch.stack(logits))
        ranks = list[Tensor]()
        if not torch.is_grad_enabled():
            drafted = list(drafted)
            budget = loss_options.get("memory_budget", 2**30)
            ranks = [projection.ranks(*each, budget) for each in zip(drafted, targets.values, strict=True)]
        # All steps are compared with the model's distribution once: row u of step k is here its row u - 1 - k.
        drafted = torch.stack([following(x, -1 - k) for k, x in enumerate(drafted)], dim=2)
        return self._steps_loss(projection, drafted, last, targets, ranks, **loss_options)

    def _steps_loss(
        self, projection: DraftProjection, drafted: Tensor, last: Tensor, targets: Targets, ranks: list[Tensor], *,
        num_items_in_batch: Tensor | int | None = None, reduction: str = "mean", token_weights: Tensor | None = None,
        memory_budget: int = 2**30,
    ) -> MultiHeadOutput:  # fmt: skip
        """The loss of the results (rows, length, K, H) of the steps, each at the token before its target, towards the
        model's states `last` (rows, length, H); `ranks`: K times long (rows, length), with gradients none."""
        items, steps = self._items(num_items_in_batch, reduction, self.num_heads), range(self.num_heads)
        mask = torch.stack([following(targets.values[k] != IGNORE_INDEX, -1 - k) for k in steps], dim=2)
        weights = mask.to(torch.promote_types(drafted.dtype, torch.float32))
        if token_weights is not None:
            shifted = [following(targets.shifted(token_weights.detach(), k), -1 - k) for k in steps]
            weights = torch.where(mask, torch.stack(shifted, dim=2).to(weights), 0.0)
            if reduction == "mean" and items is None:
                check_mean_weights(weights)
        sums = weights.sum((0, 1)) if reduction == "mean" else torch.ones_like(weights[0, 0])
        divisors = sums if items is None else items.to(sums)
        divided = weights / divisors.masked_fill(divisors == 0, 1)
        # Numbers, not a tensor of the weights: a CUDA graph takes no copy from the host.
        in_loss = [column * factor for column, factor in zip(divided.unbind(2), self.loss_weights(), strict=True)]
        found = projection.divergence(
            last, drafted, mask, torch.stack(in_loss, dim=2), self.divergence, targets.wait_for_count(0), memory_budget
        )
        head_losses = (found.losses * (divided if items is None else weights)).sum((0, 1))
        if items is not None:
            head_losses = torch.stack([per_item(x, n) for x, n in zip(head_losses, items, strict=True)])
        counts, trials = mask.sum((0, 1)), (mask & found.compared[..., None]).sum((0, 1))
        accepted, agreed = (x.sum((0, 1), dtype=weights.dtype) for x in (found.acceptance, found.agreement))
        at_least_one = trials.clamp(min=1)
        fields: dict[str, Any] = {
            "loss": found.total, "head_losses": head_losses, "acceptance": accepted / at_least_one,
            "agreement": agreed / at_least_one, "trials": dict.fromkeys(ACCEPTED, trials),
        }  # fmt: skip
        if not ranks:
            return MultiHeadOutput(counts=counts, **fields)
        return MultiHeadOutput.of_ranks(torch.stack([targets.layout.restore(x, -1) for x in ranks]), **fields)

    # -- decoding ------------------------------------------------------------------------------------------------------

    def drafter(self, tree: Tree | DynamicTree) -> StepDrafter:
        """A drafter that applies the head once per level of `tree`, whatever `num_steps` is."""
        require_candidates(tree, self.config.draft_vocab_size)
        head = self.head
        dtype = head.reader.fc.weight.dtype
        project = self.project_with(dtype)

        def lm_head(hidden: Tensor) -> Tensor:
            return project(hidden if self.config.norm_output else head.norm(hidden))

        def step(embeds: Tensor, hidden: Tensor, *, layer: int, **options: Any) -> Tensor:
            return cast(DraftStates, head(embeds, hidden, **options)).next

        return (TreeDrafter if isinstance(tree, DynamicTree) else StepDrafter)(
            self.embeddings,
            step,
            lm_head,
            lambda batch_size, max_length: head.new_state(batch_size, max_length, self.base.device),
            read=lambda states: head.reader(states.to(dtype)),
            token_ids=self.vocabulary.ids,
            boundaries=self.config.boundaries,
        )

    # -- files ---------------------------------------------------------------------------------------------------------

    @classmethod
    def check_training(cls, options: Mapping[str, Any]) -> None:
        """See `DraftHeadModel.check_training`. None is the value in the files."""
        given = {"num_steps": EAGLE_STEPS, "decay": EAGLE_DECAY, "divergence": "forward_kl"} | _given(options)
        check_count("num_steps", given["num_steps"], most=MOST_HEADS)
        check_decay(given["decay"])
        check_divergence(given["divergence"])

    def stored_settings(self) -> dict[str, Any]:
        return {"num_steps": self.num_heads, "decay": self.decay}

    @classmethod
    def of_file(
        cls, base: CausalLM, config: Any, vocabulary: DraftVocabulary | None, stored: Mapping[str, Any],
        lm_head: Tensor | None, options: Mapping[str, Any],
    ) -> Eagle3Model:  # fmt: skip
        """See `DraftHeadModel.of_file` for base, config, vocabulary, stored, lm_head and options. A head without an
        lm_head, or with the rows of the base model's, uses the base model's: formats repeat a shared lm_head."""
        decay = formats.stored_decay(stored)
        defaults = {
            "num_steps": formats.stored_steps(stored) or EAGLE_STEPS,
            "decay": EAGLE_DECAY if decay is None else decay,
        }
        tokens = DraftVocabulary.whole(base.config.vocab_size) if vocabulary is None else vocabulary
        on_meta = base.device.type == "meta"  # where an lm_head in the file counts as the head's own
        shared = lm_head is None or (not on_meta and repeats_rows(base, tokens, lm_head))
        own: Literal["own", "shared"] = "shared" if shared else "own"
        return cls(base, config, vocabulary, lm_head=own, **{**defaults, **_given(options)})


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
