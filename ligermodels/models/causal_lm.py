"""CausalLM: a decoder and a language-model head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from ligermodels.convert.export_spec import ExportSpec
from ligermodels.convert.mappings import WeightMapping
from ligermodels.errors import InputError
from ligermodels.generation import DecodingState
from ligermodels.generation.step import rope_thresholds
from ligermodels.layers import LMHead, Targets, TreeTokens
from ligermodels.layers.checkpointing import ActivationCheckpointing
from ligermodels.layers.initialization import fill_meta_buffers, initialize
from ligermodels.layers.lm_head import HeadLoss, as_head_loss, check_log_prob_options, check_loss_options, given_options
from ligermodels.layers.sharding import TensorSharding, call_gathered, reshard, reshard_before_pass
from ligermodels.layers.targets import count_targets
from ligermodels.layers.tokens import TokenLayout, token_layout
from ligermodels.models.decoder import Decoder, DecoderConfig, RefusesDropout
from ligermodels.models.deprecated import DEPRECATED, DeprecatedNames, deprecated_call
from ligermodels.models.export import ExportMixin
from ligermodels.models.generation import GenerationMixin
from ligermodels.models.inputs import requested_returns
from ligermodels.models.output import CausalLMOutput
from ligermodels.models.passes import ModelInputs, in_mode_of_model, output_of, run_decoder
from ligermodels.models.routing import with_router_loss
from ligermodels.models.transformers_tools import NativeModel
from ligermodels.models.untie import EMBEDDING, HEAD


class CausalLM(GenerationMixin, ExportMixin, DeprecatedNames, NativeModel, RefusesDropout):
    """A decoder-only language model.

    `config` is the composed config. `export_spec` says which Hugging Face checkpoint the model goes back out as
    (`save_pretrained`); a model composed by hand has none until one is set.
    """

    tensor_parallel: ClassVar[Mapping[str, TensorSharding]] = {}
    router_z_loss_coef: float = 0.0
    """Weight of the routers' z-loss (`layers.router_z_loss`) in the loss of training mode; set it to change it. It is
    multiplied as the load-balancing loss, see `labels` at `forward`; it is no field of config.json, and not saved."""
    modules_to_save: tuple[WeightMapping, ...] = ()
    """Parameters that an adapter has whole beside LoRA, mapped to its tensors: see `adapt.saved_modules`."""

    def __init__(self, config: DecoderConfig, export_spec: ExportSpec | None = None) -> None:
        super().__init__()
        self.config, self.export_spec = config, export_spec
        self.decoder = Decoder(config)
        self.head = LMHead(config.hidden_size, config.vocab_size, config.head)
        self._tie()
        self.register_load_state_dict_post_hook(_after_loading)
        self.reset_parameters()
        self.train(self.decoder.training)

    @property
    def _weight_to_tie(self) -> Any:
        """The embedding's weight; None where a user's module without one is the embedding, or another head the head."""
        return getattr(self.decoder.embed, "weight", None) if isinstance(self.head, LMHead) else None

    def _tie(self) -> None:
        if self.config.head.tied and self._weight_to_tie is not None:
            self.head.weight = self._weight_to_tie

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        self._loads_head_alone = f"{prefix}{HEAD}" in state_dict and f"{prefix}{EMBEDDING}" not in state_dict
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Moving between devices makes new Parameters, each module its own: tie them again.
        tied = self._weight_to_tie is not None and self.head.weight is self._weight_to_tie
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
        rotations computed again; "full": all but the input of each block is, which then runs forward twice; "offload":
        as "full", with the inputs in host memory until the backward pass, if the model is on a GPU.

        In bfloat16 a block of Llama-3-8B (H = 4096, I = 14336, K = V = 1024) keeps 136 KiB a token with "none", 92 KiB
        with "selective", 8 KiB with "full", and with "offload" 8 KiB on the host.
        """
        return self.decoder.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, mode: ActivationCheckpointing) -> None:
        self.decoder.activation_checkpointing = mode

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

    @in_mode_of_model
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
        return_z_loss: bool = False,
        return_predicted: bool = False,
        return_hidden_states: Sequence[int] | None = None,
        routing: Tensor | None = None,
        return_routing: bool = False,
        token_indices: Tensor | Targets | None = None,
        state: DecodingState | None = None,
        tree: TreeTokens | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **loss_options: Any,
    ) -> CausalLMOutput:
        """Logits without labels; with labels the loss, for which logits are never materialised.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored. The loss of a
                mixture of experts includes `aux_loss` times the config's `router_aux_loss_coef`, in eval mode too, as
                in transformers, and in training mode `router_z_loss` times `router_z_loss_coef`. With the reduction
                "sum" both are multiplied by the number of targets; with "none" they are not added.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side. Padding is left out of the pass, and
                is zero in results. Positions count from each row's first token.
            position_ids: (B, T) long. Positions that do not rise by 1 mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1). Documents neither attend to nor
                predict one another.
            inputs_embeds: (B, T, H) in place of `input_ids`.
            return_logits: by default exactly when there are no labels.
            return_last_hidden_state: also return the states after the final norm; without labels and `return_logits`,
                only these.
            return_z_loss: with the loss, also return the z-loss within it, without a gradient.
            return_predicted: with the loss, also return the likeliest token at the place of each label.
            return_hidden_states: also return the residual stream (B, T, H) at these boundaries between blocks: after
                this many blocks, from 0, the scaled embeddings, to the number of blocks, the states before the final
                norm. Always of all tokens, also with labels or `token_indices`.
            routing: the experts of each token, in place of the routers' choice: any integer dtype (B, T, layers with
                experts, experts per token), as `return_routing` returns them, or (B, T, all layers, ...), as servers
                do. The current router computes their weights, with its gradient. A token with -1 is routed by the
                router.
            return_routing: also return the experts of each token.
            token_indices: long (n,), indices of the flattened B * T tokens: only the logits and states of these tokens
                are computed, (1, n, ...). An index may occur several times. `Targets` stand for the tokens that have a
                target.
            state: a decoding state (`new_state`), to which the tokens are added. In a prefill, the pass with an empty
                state, `attention_mask` may have padding on the right. Token ids are not checked then.
            tree: with a state, the new tokens are a tree of candidates.
            num_items_in_batch: divide the summed loss by this instead of the number of targets (gradient accumulation).
                It is above 0, or 0 where no label is counted, whose loss is 0. It excludes the reduction "none". The
                routers' losses are multiplied by this batch's share of the targets: over all batches they count once.
            loss_options: token_weights (B, T), class_weights (V,), token_scaling, label_smoothing, z_loss, reduction,
                memory_budget: see `ops.linear_cross_entropy`. None stands for the default.

        Returns:
            The loss or the logits, and what was asked for beside them.

        Raises:
            InputError: ids out of range (on a GPU: a device assertion), shapes that do not fit, an unknown option.

        Examples:
            >>> model = lm.from_config({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2})
            >>> input_ids = torch.arange(10)[None]
            >>> model(input_ids, labels=input_ids).loss.backward()
            >>> model(input_ids).logits.shape
            torch.Size([1, 10, 32000])
        """
        inputs = ModelInputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels, attention_mask=attention_mask,
            position_ids=position_ids, cu_seqlens=cu_seqlens, state=state, tree=tree, token_indices=token_indices,
            return_hidden_states=return_hidden_states, routing=routing, return_routing=return_routing,
        )  # fmt: skip
        if loss_options or num_items_in_batch is not None or return_z_loss or return_predicted:
            loss_options["num_items_in_batch"] = num_items_in_batch
            returns = {"return_z_loss": return_z_loss, "return_predicted": return_predicted}
            if not DEPRECATED.isdisjoint(loss_options):
                states = {"with_logits": bool(return_logits), "with_last_hidden_state": return_last_hidden_state}
                if (answer := deprecated_call(self, inputs, returns, loss_options, **states)) is not None:
                    return answer
            loss_options = check_loss_options(loss_options, labels) | requested_returns(labels, **returns)

        with_logits = labels is None and not return_last_hidden_state if return_logits is None else return_logits
        decoded = run_decoder(self, inputs, with_logits or return_last_hidden_state, loss_options.get("token_weights"))
        output = output_of(self, decoded, with_logits, return_last_hidden_state)
        if decoded.targets is not None:
            result = decoded.targets.loss(0, self.head, decoded.hidden, **loss_options)
            output.loss, output.z_loss, output.predicted = result.loss, result.z_loss, result.predicted
            if output.aux_loss is not None or output.router_z_loss is not None:
                share = decoded.targets.share(num_items_in_batch, loss_options.get("reduction"))
                output.loss = with_router_loss(self, output, share)
        return output

    if TYPE_CHECKING:
        __call__ = forward

    @in_mode_of_model
    def log_probs(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        routing: Tensor | None = None,
        return_logits: bool = False,
        return_last_hidden_state: bool = False,
        return_routing: bool = False,
        return_entropy: bool = False,
        return_predicted: bool = False,
        return_log_kept_mass: bool = False,
        **options: Any,
    ) -> CausalLMOutput:
        """Log-probabilities of the labels, with any gradient: objectives such as DPO and GRPO are computed from them.

        Logits are never materialised. See `ligermodels.losses` for objectives. With the temperature and filters of a
        sampler they are the log-probabilities with which it draws tokens: over the tokens that it keeps, -inf for a
        label that it does not keep.

        Args:
            input_ids: (B, T) long.
            labels: (B, T) long, aligned with `input_ids` (the model shifts them); -100 is ignored.
            attention_mask: (B, T), 1 on tokens and 0 on padding, on either side. Padding is left out of the pass, and
                is zero in results. Positions count from each row's first token.
            position_ids: (B, T) long. Positions that do not rise by 1 mark documents packed into a row.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row (B = 1). Documents neither attend to nor
                predict one another.
            inputs_embeds: (B, T, H) in place of `input_ids`.
            routing: the experts of each token, in place of the routers' choice: see `forward`.
            return_logits: also return the logits.
            return_last_hidden_state: also return the states after the final norm.
            return_routing: also return the experts of each token.
            return_entropy: also return the entropy of each prediction.
            return_predicted: also return the likeliest token at the place of each label.
            return_log_kept_mass: also return the log of the probability of the kept tokens together.
            options: temperature (a number, or a tensor (B, T) aligned with the labels), top_k, top_p, min_p,
                memory_budget and entropy_in_loss: see `ops.linear_log_probs`.

        Returns:
            `log_probs` (B, T), and what was asked for beside them.

        Raises:
            InputError: no labels, ids out of range (on a GPU: a device assertion), a wrong shape or an unknown option.

        Examples:
            >>> model = lm.from_config({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2})
            >>> input_ids = torch.arange(10)[None]
            >>> model.log_probs(input_ids, input_ids).log_probs.shape
            torch.Size([1, 10])
        """
        options = check_log_prob_options(options, labels)
        inputs = ModelInputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels, attention_mask=attention_mask,
            position_ids=position_ids, cu_seqlens=cu_seqlens, routing=routing, return_routing=return_routing,
        )  # fmt: skip
        options |= {"return_entropy": return_entropy, "return_predicted": return_predicted}
        options |= {"return_log_kept_mass": True} if return_log_kept_mass else {}
        reshard_before_pass(self)
        return self._gathered(self._log_probs, inputs, return_logits, return_last_hidden_state, **options)

    def logits(self, last_hidden_state: Tensor) -> Tensor:
        """Logits (..., V) of states (..., H) after the final norm."""
        return cast(Tensor, self._gathered(self.head, last_hidden_state))

    def head_loss(self, last_hidden_state: Tensor, targets: Tensor, **options: Any) -> HeadLoss:
        """The loss of the language-model head alone; logits are never materialised.

        Args:
            last_hidden_state: states (..., H) after the final norm.
            targets: long (...), already shifted; -100 is ignored.
            options: options of `ops.linear_cross_entropy`; None stands for the default.

        Returns:
            The loss, and what the options ask for beside it.

        Raises:
            InputError: an option that the head does not have, or a value out of its range.
        """
        options = given_options(options)
        return as_head_loss(self._gathered(self.head, last_hidden_state, targets, **options), options)

    @in_mode_of_model
    def _gathered(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function outside of `forward`, with the parameters that FSDP2 gathers for `forward`."""
        output = call_gathered(self, function, *args, **options)
        if not torch.is_grad_enabled():  # no backward pass will release them, and an optimizer would not find its own
            reshard(self)
        return output

    def layout(
        self,
        shape: tuple[int, int],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        sharded: bool = True,
    ) -> TokenLayout:
        """How the tokens of a batch lie in a pass: without padding, packed, and divided over ranks.

        Args:
            shape: (B, T) of the batch.
            attention_mask: (B, T), 1 on tokens and 0 on padding. It excludes the next two arguments.
            position_ids: (B, T) long. Positions that do not rise by 1 mark packed documents.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into a single row.
            sharded: divide the tokens over the ranks of context parallelism.

        Returns:
            The layout.

        Raises:
            InputError: an argument does not fit; or there is padding, and rotary frequencies depend on the length.
        """
        mesh = self.decoder._context_mesh if sharded else None
        layout = token_layout(shape, attention_mask, position_ids, cu_seqlens, mesh)
        if layout.packing.padded and rope_thresholds(self):
            raise InputError(
                "attention_mask: rotary frequencies of this model depend on the length of a row, which padding "
                "hides in a batch; give rows of equal length, one at a time, or packed by cu_seqlens"
            )
        return layout

    def _targets(self, labels: Tensor, ahead: Sequence[int], layout: TokenLayout, *, every_token: bool) -> Targets:
        """The `Targets` of labels (B, T), for losses from the states of all tokens, or of as few as will do."""
        narrow, vocab_size = self.decoder.narrows and not every_token, self.config.vocab_size
        return Targets(labels, ahead, vocab_size=vocab_size, layout=layout, narrow=narrow)

    def _log_probs(
        self, inputs: ModelInputs, with_logits: bool, with_last_hidden_state: bool, **options: Any
    ) -> CausalLMOutput:
        decoded = run_decoder(self, inputs, with_logits or with_last_hidden_state)
        output = output_of(self, decoded, with_logits, with_last_hidden_state)
        result = cast(Targets, decoded.targets).log_probs(0, self.head, decoded.hidden, **options)
        output.log_probs, output.entropy = result.log_probs, result.entropy
        output.predicted, output.log_kept_mass = result.predicted, result.log_kept_mass
        return output

    def num_targets(
        self,
        labels: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Count the targets of a batch: summed over batches, this is their `num_items_in_batch`.

        Args:
            labels: (B, T) long, -100 where ignored.
            position_ids: (B, T) long. Positions that do not rise by 1 mark packed documents.
            cu_seqlens: int32 (n + 1,), bounds of documents packed into one row.
            attention_mask: (B, T), 1 on tokens and 0 on padding.

        Returns:
            A long scalar.
        """
        return count_targets(labels, (1,), position_ids, cu_seqlens, attention_mask)[0]

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        """An empty decoding state for `batch_size` sequences of up to `max_length` tokens."""
        return self.decoder.new_state(batch_size, max_length)


def _after_loading(model: CausalLM, _: object) -> None:
    # With `assign`, tied weights are two parameters, and what no state has is still on the meta device.
    if model._loads_head_alone and model.config.head.tied and model._weight_to_tie is not None:
        model.decoder.embed.weight = model.head.weight
    model._tie()
    fill_meta_buffers(model, model.config.initializer_range)
