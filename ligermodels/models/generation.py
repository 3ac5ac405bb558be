"""The methods of a model that generate text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor

from ligermodels.convert.config_json import check_generation
from ligermodels.convert.export_spec import ExportSpec
from ligermodels.errors import InputError
from ligermodels.generation import DecodingModel, generate, stream
from ligermodels.generation.options import as_options, check_options, generation_defaults, renamed_options, without_none
from ligermodels.generation.prompts import TokenIds


class GenerationMixin:
    """`generate` and `stream` of a `DecodingModel`, with the options that the checkpoint in `export_spec` sets."""

    export_spec: ExportSpec | None

    def generation_defaults(self, do_sample: bool | None = None) -> dict[str, Any]:
        """The options of `generate` that the checkpoint sets, in generation_config.json or, of old, in config.json.

        Raises ConfigError for an option that changes the text and is not implemented.
        """
        return self._defaults(do_sample, {})

    def generate(self, input_ids: TokenIds, max_new_tokens: int | None = None, **options: Any) -> Tensor:
        """Continue each prompt: long (B, T + n), the prompts, padded on the left, and the new tokens.

        What is not given is as the checkpoint's generation_config.json says, as in transformers: it may say to sample.

        Args:
            input_ids, max_new_tokens: as of `generation.generate.Decoding`.
            generation_config: more options, a dict or an object with `to_dict()`, as transformers' `GenerationConfig`;
                they go before those of the checkpoint, and arguments of their own before both.
            options: `on_token` and `streamer` of `generation.generate`, and those of `generation.generate.Decoding`.

        Raises:
            InputError: an option that is not usable; or one of transformers that is not implemented, with what to use
                instead.
            ConfigError: `generation_config`, or the checkpoint's, has an option that is not usable or not implemented.
            TypeError: an unknown option.
        """
        return generate(cast(DecodingModel, self), input_ids, **self._options(max_new_tokens, renamed_options(options)))

    def stream(self, input_ids: TokenIds, max_new_tokens: int | None = None, **options: Any) -> Iterator[Tensor]:
        """The new tokens that `generate` would give, long (B,), as soon as each step has them; pad for finished rows.

        Options and errors are those of `generate`, but for `on_token` and `streamer`. Until the iterator is exhausted
        or closed the model is in eval mode.
        """
        if wrong := sorted(options.keys() & {"on_token", "streamer"}):
            raise InputError(
                f"{wrong[0]}: stream gives the tokens of each step itself; iterate over it, or use generate"
            )
        return stream(cast(DecodingModel, self), input_ids, **self._options(max_new_tokens, renamed_options(options)))

    def _options(self, max_new_tokens: int | None, options: dict[str, Any]) -> dict[str, Any]:
        options, used = check_options(without_none({**options, "max_new_tokens": max_new_tokens}), "generate")
        config, unused = check_options(as_options(options.pop("generation_config", None)), "generation_config")
        # What the call says takes the place of what the checkpoint says, which then need not be usable.
        settled = {**config, **dict.fromkeys((*used, *unused, *options))}
        found = self._defaults(options.get("do_sample", config.get("do_sample")), settled)
        for level in (config, options):
            if "max_length" in level and "max_new_tokens" not in level:
                found["max_new_tokens"] = None  # it would go before the caller's max_length
            found |= level
        return found

    def _defaults(self, do_sample: bool | None, overrides: dict[str, Any]) -> dict[str, Any]:
        spec = self.export_spec
        if spec is None:
            return {}
        check_generation(spec.generation_config or {})
        check_generation(overrides, "generation_config")
        return generation_defaults(spec.generation_config, spec.hf_config, do_sample=do_sample, overrides=overrides)
