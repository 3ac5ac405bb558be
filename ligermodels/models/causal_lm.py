"""CausalLM: a decoder and a language-model head."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ligermodels.convert.export_spec import ExportSpec
from ligermodels.errors import ConfigError, InputError
from ligermodels.generation import DecodingState
from ligermodels.generation.step import rope_thresholds
from ligermodels.layers import LMHead, RouterOutput, Targets, TreeTokens, load_balancing_loss
from ligermodels.layers.checkpointing import ActivationCheckpointing
from ligermodels.layers.context_parallel import shard_of
from ligermodels.layers.initialization import fill_meta_buffers, initialize, skip_init
from ligermodels.layers.linear_parts import check_exportable
from ligermodels.layers.lm_head import check_log_prob_options, check_loss_options, named_results
from ligermodels.layers.packing import Unpadding, document_bounds
from ligermodels.layers.sharding import TensorSharding
from ligermodels.layers.targets import count_targets
from ligermodels.models.decoder import Decoder, DecoderConfig
from ligermodels.models.differences import first_difference, module_difference
from ligermodels.models.export import ExportMixin
from ligermodels.models.families import family_of
from ligermodels.models.generation import GenerationMixin
from ligermodels.models.inputs import check_inputs, check_token_indices, prefill_lengths
from ligermodels.models.output import CausalLMOutput


class CausalLM(GenerationMixin, ExportMixin, nn.Module):
    """A decoder-only language model.

    `config` is the composed config. `export_spec` says which Hugging Face checkpoint the model goes back out as
    (`save_pretrained`); a model composed by hand has none until one is set.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}

    def __init__(self, config: DecoderConfig, export_spec: ExportSpec | None = None) -> None:
        super().__init__()
        self.config, self.export_spec = config, export_spec
        self.decoder = Decoder(config)
        self.head = LMHead(config.hidden_size, config.vocab_size, config.head)
        self._tie()
        self.register_load_state_dict_post_hook(_after_loading)
        self.reset_parameters()

    @property
    def _tied(self) -> bool:
        return isinstance(self.head, LMHead) and self.head.weight is getattr(self.decoder.embed, "weight", None)

    def _tie(self) -> None:
        if self.config.head.tied and isinstance(self.head, LMHead) and hasattr(self.decoder.embed, "weight"):
            self.head.weight = self.decoder.embed.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Moving between devices makes new Parameters, each module its own: tie them again.
        tied = self._tied
        super()._apply(fn, recurse)
        if tied:
            self._tie()
        return self

    def reset_parameters(self) -> None:
        """New random weights: every module fills its own parameters and buffers, see `layers.initialization`."""
        for name, module in self.named_children():
            initialize(module, self.config.initializer_range, name)

    @property
    def hf_config(self) -> dict[str, Any]:
        """The Hugging Face config this model came from, as found."""
        return self.require_export_spec().hf_config

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """What the backward pass computes again instead of keeping it in memory; set it to change it.

        "none"; "selective": results of attention and of widening matrix products are kept, norms, activations and
        rotations computed again; "full": all but the input of each block is, which then runs forward twice.

        In bfloat16 a block of Llama-3-8B (H = 4096, I = 14336, K = V = 1024) keeps 136 KiB a token with "none", 92 KiB
        with "selective", 8 KiB with "full".
        """
        return self.decoder.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        self.decoder.activation_checkpointing = mode

    @property
    def recompute(self) -> str:
        """Deprecated: `activation_checkpointing`."""
        return {new: old for old, new in _RECOMPUTE.items()}[self.activation_checkpointing]

    @recompute.setter
    def recompute(self, what: str) -> None:
        warnings.warn("model.recompute is now model.activation_checkpointing", DeprecationWarning, stacklevel=2)
        if not isinstance(what, str) or what not in _RECOMPUTE:
            raise InputError(f"recompute: must be one of {', '.join(_RECOMPUTE)}, got {what!r}")
        self.activation_checkpointing = _RECOMPUTE[what]

    def extra_repr(self) -> str:
        config = self.config
        return f"vocab_size={config.vocab_size}, hidden_size={config.hidden_size}, num_layers={len(config.blocks)}"

    @property
    def device(self) -> torch.device:
        """Device of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first parameter."""
        return next(self.parameters()).dtype

    # -- forward -------------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_logits: bool | None = None,
        return_last_hidden_state: bool = False,
        return_log_probs: bool = False,
        return_entropy: bool = False,
        return_z_loss: bool = False,
        return_predicted: bool = False,
        token_indices: Tensor | Targets | None = None,
        state: DecodingState | None = None,
        tree: TreeTokens | None = None,
        num_items_in_batch: Tensor | int | None = None,
        last_hidden_state: Tensor | None = None,
        targets: Tensor | None = None,
        **loss_options: Any,
    ) -> CausalLMOutput:
        """Logits without labels; with labels the loss, for which logits are never materialised.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side: padding is left out of the pass, and
                is zero in logits and losses. Positions count from each row's first token.
            position_ids: (B, T) long. Positions that restart mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1). Documents neither attend to nor
                predict one another.
            inputs_embeds: (B, T, H) in place of `input_ids`.
            return_logits: by default exactly when there are no labels.
            return_last_hidden_state: also return the states after the final norm; without labels and `return_logits`,
                these alone.
            return_log_probs: with labels, the log-probability of each, in place of the loss, and with any gradient:
                what objectives such as those of `ligermodels.losses` are computed from. See `ops.linear_log_probs`.
            return_entropy: with `return_log_probs`, also the entropies.
            return_z_loss: with the loss, also what of it is the z-loss, without a gradient.
            return_predicted: with the loss or log-probabilities, also the likeliest token in the place of each label.
            token_indices: long (n,), indices of the flattened B * T: logits and states are computed for these tokens
                alone, (1, n, ...). `Targets` stand for the tokens that have one.
            state: a decoding state (`new_state`), to which the tokens are added. In a prefill, the pass with an empty
                one, `attention_mask` may have padding on the right. Token ids are not checked then.
            tree: with a state, the new tokens are a tree of candidates.
            num_items_in_batch: divide the summed loss by this instead of the number of targets (gradient accumulation).
                Above 0; 0 only where no label is counted, whose loss is 0. The load-balancing loss of a mixture of
                experts then counts by this batch's share of the targets, so that over all micro-batches it counts once.
            last_hidden_state: (..., H) in place of inputs: the head alone is run. With `targets` (...), already
                shifted, it returns their loss, with the options of `ops.linear_cross_entropy`.
            loss_options: token_weights (B, T), class_weights (V,), token_scaling, label_smoothing, z_loss, reduction,
                memory_budget: see `ops.linear_cross_entropy`. With `return_log_probs` memory_budget and
                entropy_in_loss: see `ops.linear_log_probs`.

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, an unknown option.
        """
        returns = {"return_z_loss": return_z_loss, "return_predicted": return_predicted}
        if any(returns.values()) and (labels if last_hidden_state is None else targets) is None:
            raise InputError(f"{next(name for name in returns if returns[name])}: is of a loss, which needs labels")
        if last_hidden_state is not None:
            if input_ids is not None or inputs_embeds is not None or labels is not None:
                raise InputError("last_hidden_state: is in place of inputs; give no ids, embeddings or labels with it")
            if return_log_probs or return_entropy:
                raise InputError("return_log_probs: is of labels, not of last_hidden_state; give inputs and labels")
            return self._run_head(
                last_hidden_state, targets, {**loss_options, **{k: v for k, v in returns.items() if v}}
            )
        if targets is not None:
            raise InputError("targets: go with last_hidden_state; give labels with inputs")
        if state is not None and cu_seqlens is not None:
            raise InputError("cu_seqlens: a decoding state takes one sequence a row; give no packed documents with it")
        if tree is not None and state is None:
            raise InputError("tree: is for decoding, and needs a state")
        if state is not None and not isinstance(state, DecodingState):
            raise InputError(f"state: must be what new_state gives, got a {type(state).__name__}")
        if labels is not None and token_indices is not None:
            raise InputError("token_indices: with labels, the tokens are those that have one; give one of the two")
        options = {"num_items_in_batch": num_items_in_batch, **loss_options}
        if return_log_probs:
            check_log_prob_options({**options, "return_z_loss": return_z_loss or None}, labels)
        else:
            check_loss_options(options, labels)
            if return_entropy:
                raise InputError("return_entropy: goes with return_log_probs")
        shape = check_inputs(self, input_ids, inputs_embeds, labels, attention_mask, state, loss_options)
        unpad = None
        if state is None and isinstance(token_indices, Tensor | Sequence):
            check_token_indices(token_indices, shape[0] * shape[1])
        if state is None:
            others = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "token_indices": token_indices}
            unpad = self.unpadding(attention_mask, **others)
        if unpad is not None:
            tokens = unpad.take_all({"input_ids": input_ids, "labels": labels, "inputs_embeds": inputs_embeds})
            options = {
                "return_logits": return_logits,
                "return_last_hidden_state": return_last_hidden_state,
                "return_log_probs": return_log_probs,
                "return_entropy": return_entropy,
                **returns,
                "num_items_in_batch": num_items_in_batch,
                **unpad.take_weights(loss_options),
            }
            return CausalLM.forward(self, **tokens, cu_seqlens=unpad.cu_seqlens, **options).padded(unpad)
        if isinstance(token_indices, Targets):
            bounds = token_indices.cu_seqlens
        else:
            bounds = None if state is not None else document_bounds(shape, position_ids, cu_seqlens)
        shard = None if state is not None else shard_of(self.decoder, *shape, packed=bounds is not None)
        made: Targets | None = None
        if labels is not None:
            every, size = bool(return_logits) or return_last_hidden_state, self.config.vocab_size
            made = Targets(labels, (1,), vocab_size=size, cu_seqlens=bounds, every_token=every, shard=shard)
        router_outputs: list[RouterOutput] = []
        hidden = self.decoder(
            input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            cu_seqlens=bounds,
            state=state,
            seq_lens=prefill_lengths(attention_mask, state),
            tree=tree,
            token_indices=token_indices if made is None else made,
            router_outputs=router_outputs,
        )
        with_logits = return_logits or (return_logits is None and labels is None and not return_last_hidden_state)
        whole = hidden
        if made is not None and shard is not None and (with_logits or return_last_hidden_state):
            whole = shard.gather(hidden)
        output = CausalLMOutput(last_hidden_state=whole if return_last_hidden_state else None)
        if made is not None and return_log_probs:
            output.log_probs, output.entropy, output.predicted = made.log_probs(
                0, self.head, hidden, return_entropy=return_entropy, return_predicted=return_predicted, **loss_options
            )
        elif made is not None:
            options = {**returns, **loss_options}
            found = made.loss(0, self.head, hidden, num_items_in_batch=num_items_in_batch, **options)
            results = named_results(found, options)
            output.loss, output.z_loss = results["loss"], results.get("return_z_loss")
            output.predicted = results.get("return_predicted")
        if router_outputs and (made is not None or isinstance(token_indices, Targets)):
            output.aux_loss = load_balancing_loss(router_outputs, shard=shard)
            # Losses of single tokens have no share of it.
            weight = self.config.router_aux_loss_coef
            if weight and made is not None and output.loss is not None and output.loss.ndim == 0:
                output.loss = output.loss + weight * made.share(num_items_in_batch) * output.aux_loss
        if with_logits:
            output.logits = self.head(whole)
        return output

    if TYPE_CHECKING:
        __call__ = forward

    def _run_head(self, hidden: Tensor, targets: Tensor | None, loss_options: dict[str, Any]) -> CausalLMOutput:
        if targets is None:
            check_loss_options(loss_options, None, "targets")
            return CausalLMOutput(logits=self.head(hidden))
        results = named_results(self.head(hidden, targets, **loss_options), loss_options)
        return CausalLMOutput(
            loss=results["loss"],
            ranks=results.get("return_rank"),
            z_loss=results.get("return_z_loss"),
            predicted=results.get("return_predicted"),
        )

    def unpadding(self, attention_mask: Tensor | None, **others: Any) -> Unpadding | None:
        """What takes the padding out of a batch, None where there is none.

        Raises InputError where one of `others` is given too, or where frequencies depend on the length of a row.
        """
        if attention_mask is None:
            return None
        if any(other is not None for other in others.values()):
            raise InputError(f"attention_mask: give no {' or '.join(others)} with it")
        unpad = Unpadding(attention_mask)
        if unpad.trivial:
            return None
        if rope_thresholds(self):
            raise InputError(
                "attention_mask: rotary frequencies of this model depend on the length of a row, which padding "
                "hides in a batch; give rows of equal length, one at a time, or packed by cu_seqlens"
            )
        return unpad

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Labels that `forward` counts, a long scalar: summed over batches, it is their `num_items_in_batch`."""
        return count_targets(labels, (1,), position_ids, cu_seqlens, attention_mask)[0]

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        """An empty decoding state for `batch_size` sequences of up to `max_length` tokens."""
        return self.decoder.new_state(batch_size, max_length)

    # -- export --------------------------------------------------------------------------------------------------------

    def checked_export_spec(self) -> ExportSpec:
        """The `export_spec`; ConfigError when the checkpoint that it writes would be of another model than this, and
        InputError when the model has LoRA or quantised weights."""
        check_exportable(self)
        spec = self.require_export_spec()
        composed = family_of(spec.hf_config).decoder_config(spec.hf_config)
        difference = first_difference(self.config, composed, "config")
        if difference is None:
            with torch.device("meta"), skip_init():
                difference = module_difference(self, CausalLM(composed, spec))
        if difference is not None:
            where, ours, theirs = difference
            raise ConfigError(
                f"model.{where} is {ours}, but the model's config.json composes to {theirs}: it would be loaded "
                "as another model. Change model.hf_config so that it says the same, or change the config back"
            )
        return spec

    def require_export_spec(self) -> ExportSpec:
        """The `export_spec`; ConfigError when there is none."""
        if (other := getattr(self.decoder, "exported_by", None)) is not None:
            raise ConfigError(f"this model computes by the modules of another one: export it by {other}")
        if self.export_spec is None:
            raise ConfigError(
                "this model was composed by hand: set model.export_spec (hf_config and weight map) to export it"
            )
        return self.export_spec


_RECOMPUTE: dict[str, ActivationCheckpointing] = {"nothing": "none", "activations": "selective", "blocks": "full"}


def _after_loading(model: CausalLM, _: object) -> None:
    # With `assign`, tied weights are two parameters, and what no state has is still on the meta device.
    model._tie()
    fill_meta_buffers(model, model.config.initializer_range)
