"""Methods of a model that generate text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol, cast, overload

from torch import Tensor

from ligermodels.convert.config_json import check_generation
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.errors import InputError
from ligermodels.generation import DecodingModel, generate, stream
from ligermodels.generation.options import (
    as_options,
    check_options,
    generation_defaults,
    renamed_options,
    warn_of_greedy,
    without_none,
)
from ligermodels.generation.prompts import TokenIds
from ligermodels.generation.routing import GenerateOutput
from ligermodels.generation.sampling import SHAPING

_SAMPLING = (*SHAPING, "generator")


class DraftHeads(Protocol):
    """Draft heads on a model, such as a `MedusaModel`."""

    base: Any

    def generate(self, input_ids: TokenIds, **options: Any) -> Any:
        """Speculative decoding: see `speculative.decoding.speculative_generate`."""


class GenerationMixin:
    """`generate` and `stream`, with defaults from the checkpoint that the model was loaded from."""

    export_spec: ExportSpec | None
    batch_invariant: bool = False
    """Whether the results for a token depend on its own document alone, bit for bit, and not on the batch, in
    `forward`, `log_probs`, `logits`, `head_loss`, `generate` and `stream`: see `ops.set_batch_invariant`. Set it to
    change it."""

    def generation_defaults(self, do_sample: bool | None = None, *, given: Iterable[str] = ()) -> dict[str, Any]:
        """Defaults of `generate` that the checkpoint sets, in generation_config.json or, if old, in config.json.

        Args:
            do_sample: whether to return the options for sampling; by default the checkpoint decides.
            given: names of options that a call sets; those of the checkpoint do not count.

        Raises:
            ConfigError: the checkpoint sets an option that changes the text and is not implemented.
        """
        return self._defaults(do_sample, dict.fromkeys(given))

    @overload
    def generate(
        self,
        input_ids: TokenIds,
        max_new_tokens: int | None = ...,
        *,
        return_routing: Literal[False] = ...,
        **options: Any,
    ) -> Tensor: ...

    @overload
    def generate(
        self, input_ids: TokenIds, max_new_tokens: int | None = ..., *, return_routing: Literal[True], **options: Any
    ) -> GenerateOutput: ...

    def generate(
        self,
        input_ids: TokenIds,
        max_new_tokens: int | None = None,
        *,
        draft: DraftHeads | None = None,
        tree: Any = None,
        return_routing: bool = False,
        **options: Any,
    ) -> Tensor | GenerateOutput:
        """Continue each prompt until it ends with an EOS token or another stop, or has `max_new_tokens` new tokens.

        Options that are not given come from the checkpoint's generation_config.json, as in transformers; it may turn on
        sampling.

        Args:
            input_ids: prompts: long (B, T) or (T,), a list of ids, or a list of such lists of any lengths.
            max_new_tokens: number of new tokens, at least 1. Default: `max_length` minus the prompt's length, or 64.
            draft: draft heads on this model, for speculative decoding: the same greedy tokens, or
                samples of the same distribution, in fewer steps.
            tree: with `draft`, the candidates to check in each step; by default `draft.default_tree()`.
            return_routing: also return the experts of each token, of a mixture of experts. Not with `draft`.
            options: keyword arguments as in transformers: `generation_config`, `max_length`, `attention_mask`,
                `do_sample`, `temperature`, `top_k`, `top_p`, `min_p`, `num_return_sequences`, `repetition_penalty`,
                `logits_processor`, `eos_token_id`, `stop_strings` (with `tokenizer`), `stopping_criteria`,
                `pad_token_id`, `streamer`. And `generator`, `cuda_graph`, `batch_invariant`, `on_token`.
                `generation.generate.generate` describes their values. `generation_config` is a dict or an object
                with `to_dict()`; it overrides the checkpoint, and keyword arguments override it.

        Returns:
            Long (B, T + n): the prompts, padded on the left, then up to `max_new_tokens` new tokens. Rows that end
            earlier are padded on the right. With `return_routing` a `GenerateOutput`, with these `sequences` and the
            experts of each token.

        Raises:
            InputError: an option is not usable, or is an option of transformers that is not implemented; the message
                says what to use instead. Options of sampling in greedy decoding are a UserWarning.
            ConfigError: `generation_config` or the checkpoint has an option that is not usable or not implemented.
            TypeError: an unknown option.

        Examples:
            >>> ids = model.generate(input_ids, max_new_tokens=64, do_sample=True, top_p=0.9)
        """
        given = renamed_options({**options, "return_routing": return_routing})
        options, neutral = self._options(max_new_tokens, given)
        if draft is None:
            if tree is not None:
                raise InputError("tree: is for speculative decoding; give draft too, the heads on this model")
            return generate(cast(DecodingModel, self), input_ids, **options)
        if options.pop("batch_invariant", False):  # `draft` refuses that of the model
            raise InputError("batch_invariant: speculative decoding has no such form; generate without draft")
        if getattr(draft, "base", None) is not self:
            raise InputError(f"draft: must be draft heads on this model, whose base it is, got {type(draft).__name__}")
        if not options["return_routing"]:
            del options["return_routing"]
        if not options.get("do_sample"):  # as without heads, these are then without effect
            options = {name: value for name, value in options.items() if name not in _SAMPLING}
        return cast(Tensor, draft.generate(input_ids, tree=tree, **neutral, **options))

    def stream(self, input_ids: TokenIds, max_new_tokens: int | None = None, **options: Any) -> Iterator[Tensor]:
        """Generate as `generate` does, and yield the new tokens of each step as soon as they are known.

        The model is in eval mode until the iterator is exhausted or closed.

        Args:
            input_ids: prompts: long (B, T) or (T,), a list of ids, or a list of such lists of any lengths.
            max_new_tokens: number of new tokens, at least 1. Default: `max_length` minus the prompt's length, or 64.
            options: the options of `generate`, except `on_token`, `streamer` and `return_routing`.

        Returns:
            An iterator over long (B,): the new token of each row, padding for rows that have ended.

        Raises:
            InputError: an option is not usable, or is an option of transformers that is not implemented.
            ConfigError: `generation_config` or the checkpoint has an option that is not usable or not implemented.
            TypeError: an unknown option.

        Examples:
            >>> for token in model.stream(input_ids, max_new_tokens=64):
            ...     print(token.tolist())
        """
        options = without_none(renamed_options(options))
        if drafting := sorted(options.keys() & {"draft", "tree"}):
            raise InputError(
                f"{drafting[0]}: a step with draft heads adds several tokens, which stream does not yield; use "
                "generate, or the heads' generate with on_tokens=function, which receives the tokens of each step"
            )
        if wrong := sorted(options.keys() & {"on_token", "streamer", "return_routing"}):
            raise InputError(f"{wrong[0]}: stream yields the tokens of each step; iterate over it, or use generate")
        options, _ = self._options(max_new_tokens, options)
        return stream(cast(DecodingModel, self), input_ids, **options)

    def _options(self, max_new_tokens: int | None, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of a call with the checkpoint's defaults; and its options that are not implemented, which have
        neutral values."""
        given = without_none({**options, "max_new_tokens": max_new_tokens})
        options, used = check_options(given, "generate")
        fields = as_options(options.pop("generation_config", None))
        config, unused = check_options(fields, "generation_config")
        neutral = {name: value for name, value in {**fields, **given}.items() if name in used | unused}
        # Options of the call replace those of the checkpoint, so a bad option of the checkpoint is no error then.
        overrides = {**config, **dict.fromkeys((*neutral, *options))}
        merged = self._defaults(options.get("do_sample", config.get("do_sample")), overrides)
        for level in (config, options):
            if "max_length" in level and "max_new_tokens" not in level:
                merged["max_new_tokens"] = None  # it would take precedence over the caller's max_length
            merged |= level
        if not merged.get("do_sample"):
            warn_of_greedy({**config, **options})
        return merged, neutral

    def _defaults(self, do_sample: bool | None, overrides: dict[str, Any]) -> dict[str, Any]:
        spec = self.export_spec
        if spec is None:
            return {}
        check_generation(spec.generation_config or {})
        check_generation(overrides, "generation_config")
        return generation_defaults(spec.generation_config, spec.hf_config, do_sample=do_sample, overrides=overrides)
