"""The options of transformers' `generate`: implemented options, alternatives to the other options, and defaults that a
checkpoint sets."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ligermodels.arguments import check_names, nearest, parameter_names
from ligermodels.errors import ConfigError, ConfigWarning, InputError, short, warn_caller
from ligermodels.generation.generate import Decoding, generate
from ligermodels.generation.sampling import SHAPING, check_values

WRAP = "transformers' own generate has it: ligermodels.integrations.wrap(model).generate(...)"
BEAMS = f"there is no beam search; sample, with do_sample=True and num_return_sequences, or {WRAP}"
OUTPUTS = "generate returns token ids; for the logits call the model with them: model(ids).logits"
SPECULATIVE = f"give draft, Medusa, MTP, EAGLE-3, DFlash or DSpark heads on this model; or {WRAP}"
CACHE = "leave it out: decoding always has a cache, of fixed size; cuda_graph=False turns CUDA graphs off"
INPUTS = "generate takes token ids: give input_ids, and attention_mask where they have padding"


def _processor(name: str) -> str:
    return f"give it in logits_processor, a list of functions (ids, scores) -> scores: transformers' {name} is one"


INSTEAD: dict[str, tuple[Any, str]] = {
    **{name: (neutral, BEAMS) for name, neutral in {
        "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0, "length_penalty": 1, "early_stopping": False,
        "constraints": None, "force_words_ids": None, "low_memory": False,
    }.items()},
    **{name: (False, OUTPUTS) for name in (
        "return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states",
    )},
    **{name: (neutral, SPECULATIVE) for name, neutral in {
        "assistant_model": None, "assistant_tokenizer": None, "prompt_lookup_num_tokens": None,
        "max_matching_ngram_size": None, "num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.4, "assistant_early_exit": None, "assistant_lookbehind": 10,
        "target_lookbehind": 10, "assistant_ensemble_weight": None, "is_assistant": False, "use_mtp": False,
        "speculation_type": None,
    }.items()},
    **{name: (neutral, CACHE) for name, neutral in {
        "use_cache": True, "cache_implementation": None, "cache_config": None, "max_cache_len": None,
        "past_key_values": None, "compile_config": None, "disable_compile": False, "prefill_chunk_size": None,
        "return_legacy_cache": True, "continuous_batching_config": None, "logits_to_keep": 1,
    }.items()},
    **{name: (None, INPUTS) for name in ("inputs", "inputs_embeds", "position_ids", "token_type_ids")},
    **{name: (neutral, _processor(processor)) for name, (neutral, processor) in {
        "no_repeat_ngram_size": (0, "NoRepeatNGramLogitsProcessor"),
        "encoder_no_repeat_ngram_size": (0, "EncoderNoRepeatNGramLogitsProcessor"),
        "encoder_repetition_penalty": (1, "EncoderRepetitionPenaltyLogitsProcessor"),
        "bad_words_ids": (None, "NoBadWordsLogitsProcessor"),
        "min_length": (0, "MinLengthLogitsProcessor"),
        "min_new_tokens": (0, "MinNewTokensLengthLogitsProcessor"),
        "forced_bos_token_id": (None, "ForcedBOSTokenLogitsProcessor"),
        "forced_eos_token_id": (None, "ForcedEOSTokenLogitsProcessor"),
        "exponential_decay_length_penalty": (None, "ExponentialDecayLengthPenalty"),
        "suppress_tokens": (None, "SuppressTokensLogitsProcessor"),
        "begin_suppress_tokens": (None, "SuppressTokensAtBeginLogitsProcessor"),
        "sequence_bias": (None, "SequenceBiasLogitsProcessor"),
        "watermarking_config": (None, "WatermarkLogitsProcessor"),
        "prefix_allowed_tokens_fn": (None, "PrefixConstrainedLogitsProcessor"),
        "renormalize_logits": (False, "LogitNormalization"),
        "remove_invalid_values": (False, "InfNanRemoveLogitsProcessor"),
        "typical_p": (1, "TypicalLogitsWarper"),
        "epsilon_cutoff": (0, "EpsilonLogitsWarper"),
        "eta_cutoff": (0, "EtaLogitsWarper"),
        "top_h": (None, "TopHLogitsWarper"),
    }.items()},
    "max_time": (
        None, "give stopping_criteria, a list of functions (ids, scores) -> bool: transformers' MaxTimeCriteria is one"
    ),
    "synced_gpus": (False, "leave it out: the ranks of a sharded model wait for each other without it"),
    **{name: (neutral, WRAP) for name, neutral in {
        "token_healing": False, "penalty_alpha": 0, "dola_layers": None, "guidance_scale": 1,
        "negative_prompt_ids": None, "negative_prompt_attention_mask": None, "custom_generate": None,
        "trust_remote_code": False, "decoder_start_token_id": None,
    }.items()},
}  # fmt: skip
"""Options of transformers' `generate` that are not implemented -> (neutral value, alternative for messages). None is
neutral for every option."""

CHANGES_TEXT = (
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "min_length",
    "min_new_tokens", "num_beams", "num_return_sequences", "guidance_scale", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "sequence_bias", "stop_strings", "token_healing", "constraints", "force_words_ids",
    "forced_bos_token_id", "forced_eos_token_id", "dola_layers", "max_time", "exponential_decay_length_penalty",
    "watermarking_config",
)  # fmt: skip
"""Options that change the text and are not read from a checkpoint: in a checkpoint they are an error."""

CHANGES_SAMPLES = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Further such options, for sampling only."""

GENERATION: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "max_new_tokens": None,
    "max_length": None,
}
"""Options that are read from a checkpoint -> the defaults of transformers."""

CHECKPOINT_FIELDS = frozenset(
    {*GENERATION, *CHANGES_TEXT, *CHANGES_SAMPLES, "penalty_alpha", "bos_token_id", "eos_token_id"}
)
"""Fields of a checkpoint that `generation_defaults` reads or refuses, and `bos_token_id`; not the padding token."""

UNUSED = frozenset({"bos_token_id", "transformers_version", "_from_model_config", "_commit_hash"})
"""Fields of a `GenerationConfig` without effect here; `bos_token_id` is for empty prompts, which are an error."""

FURTHER_ENDS = ("eot_token_id", "eom_token_id", "eod_token_id")
"""Tokens at the end of turns, messages and documents, which some checkpoints name and transformers does not read."""

NONE_COUNTS = frozenset(
    {"eos_token_id", "pad_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
)
"""Arguments for which None is a value: it turns off the checkpoint's setting."""

OPTIONS = frozenset(
    name
    for function in (generate, Decoding.__init__)
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD and name not in ("self", "model", "input_ids")
) | {"generation_config"}
"""The options of `generate`."""
WITH_DRAFTS = ("draft", "tree")
"""Further options of the `generate` methods of models."""
OF_HEADS = ("return_stats", "on_tokens", "epsilon", "delta")
"""Options that only the `generate` methods of draft heads have."""


def check_options(options: Mapping[str, Any], where: str) -> tuple[dict[str, Any], set[str]]:
    """Separate implemented options from options with neutral values.

    Args:
        options: options of transformers' `generate`, by name.
        where: "generate", for arguments of a call, or "generation_config".

    Returns:
        The implemented options, and the names of the other options, which have neutral values.

    Raises:
        InputError: an option of transformers that is not implemented; a ConfigError in a `generation_config`.
        TypeError: an unknown option; a ConfigError in a `generation_config`.
    """
    called = where == "generate"
    neutral = set()
    for name, value in options.items():
        if not isinstance(name, str) or (name == "generation_config" and not called):
            raise ConfigError(f"{where}: {short(name)} is no name of an option")
        if name in UNUSED:
            neutral.add(name)
        elif name in INSTEAD:
            if _changes(name, value):
                message = f"{where}: {name} = {short(value)} is not implemented; {INSTEAD[name][1]}"
                raise InputError(message) if called else ConfigError(message)
            neutral.add(name)
        elif called and name in OF_HEADS:
            raise InputError(
                f"{name}: is an option of the generate of draft heads; call heads.generate(..., {name}=...)"
            )
        elif name not in OPTIONS:
            message = f"{where}: unknown option {name!r}{nearest(name, (*OPTIONS, *WITH_DRAFTS, *INSTEAD))}"
            raise TypeError(message) if called else ConfigError(message)
    return {name: value for name, value in options.items() if name not in neutral}, neutral


PLAIN = (bool, int, float, str, list, tuple, dict)
"""Types of neutral values. Values of other types, such as tensors, may not be comparable."""


def _changes(name: str, value: Any) -> bool:
    """Whether the value of an option that is not implemented has an effect; empty values have none."""
    neutral = 1 if name == "num_return_sequences" else INSTEAD.get(name, (False,))[0]
    if value is None:
        return False
    return not isinstance(value, PLAIN) or value not in (neutral, "", [], (), {})


def generation_defaults(
    generation_config: Mapping[str, Any] | None,
    hf_config: Mapping[str, Any],
    *,
    do_sample: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The options that a checkpoint sets for `generate`, as transformers reads them.

    Args:
        generation_config: content of generation_config.json; None without this file: older checkpoints have the options
            in config.json.
        hf_config: content of config.json; it also provides token ids that generation_config.json does not have.
        do_sample: the caller's choice; None for the checkpoint's. Some options apply only to sampling.
        overrides: the `generation_config` of a call; its options replace the checkpoint's.

    Returns:
        The options of GENERATION, `eos_token_id` and `pad_token_id`. `max_length` includes the prompt;
        `max_new_tokens` takes precedence.

    Raises:
        ConfigError: an option has a bad value, or changes the text and is not implemented.
    """
    file = "config.json" if generation_config is None else "generation_config.json"
    overrides = overrides or {}
    stored = hf_config if generation_config is None else generation_config
    fields = {name: value for name, value in {**stored, **overrides}.items() if value is not None}
    if generation_config is not None:
        _warn_of_misspelt(generation_config)
    check_values(do_sample=do_sample)
    options = {name: fields.get(name, default) for name, default in GENERATION.items()}
    samples = options["do_sample"] if do_sample is None else do_sample
    options = {name: _usable(name, value, file, overrides, samples) for name, value in options.items()}
    checkpoint_fields = {name: value for name, value in fields.items() if name not in overrides}
    _check_implemented(file, checkpoint_fields, samples=samples, contrastive=not samples and options["top_k"] > 1)
    ids = {**hf_config, **(generation_config or {}), **overrides}
    return {**options, **{name: ids.get(name) for name in ("eos_token_id", "pad_token_id")}}


def _warn_of_misspelt(generation_config: Mapping[str, Any]) -> None:
    """ConfigWarning for unknown fields whose names are nearly those of an option; transformers ignores unknown ones."""
    known = {*OPTIONS, *INSTEAD, *UNUSED, *GENERATION, *CHANGES_TEXT, *CHANGES_SAMPLES, *FURTHER_ENDS}
    for name in sorted(generation_config.keys() - known):
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.88):
            warn_caller(
                f"generation_config.json: field {name!r} = {short(generation_config[name])} is unknown and not used; "
                f"did you mean {near[0]!r}?",
                ConfigWarning,
            )


def _usable(name: str, value: Any, file: str, overrides: Collection[str], samples: bool) -> Any:
    """The `value` of an option. A bad value of the checkpoint is a ConfigError, or the default if the option has no
    effect, as options of sampling in greedy decoding."""
    try:
        check_values(**{name: value})
    except InputError:
        if name in SHAPING and name not in overrides and not samples:
            return GENERATION[name]
        source = "generation_config" if name in overrides else file
        raise ConfigError(f"{source}: field {name!r} is not usable for generation: {short(value)}") from None
    return value


def _check_implemented(file: str, fields: Mapping[str, Any], *, samples: bool, contrastive: bool) -> None:
    """ConfigError for fields of a checkpoint that change the text and are not implemented."""
    names = (*CHANGES_TEXT, *(CHANGES_SAMPLES if samples else ()), *(("penalty_alpha",) if contrastive else ()))
    unsupported = [f"{n} = {short(fields[n])}" for n in names if n in fields and _changes(n, fields[n])]
    if unsupported:
        raise ConfigError(
            f"{file}: options of generation that are not implemented: {', '.join(unsupported)}; "
            "remove them to generate without"
        )


def check_tree_options(options: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """`options` for tree decoding by `function`: without None values, as in `without_none`, and without neutral values
    of options that it does not have.

    Raises InputError for other options of transformers' `generate`, and TypeError for unknown options.
    """
    own = [name for name in parameter_names(function) if name not in ("model", "drafter", "input_ids")]
    if "draft" in options:
        raise InputError(
            "draft: the generate of draft heads decodes with these heads; leave it out, or use base.generate"
        )
    check_names("generate", options, (*own, *OPTIONS, *INSTEAD, *UNUSED))
    options = without_none(options)
    rest = {name: value for name, value in options.items() if name not in own}
    penalty = {"repetition_penalty"}  # the caller checks it
    effective, _ = check_options(rest, "generate")
    if unsupported := sorted(name for name in effective.keys() - penalty if _changes(name, effective[name])):
        raise InputError(f"{unsupported[0]}: tree decoding does not have it; use base.generate, or leave it out")
    return {name: value for name, value in options.items() if name not in rest or name in penalty & effective.keys()}


def warn_of_greedy(given: Mapping[str, Any]) -> None:
    """UserWarning if `given` options of a call are for sampling, and decoding is greedy."""
    shaping = {name: given.get(name) for name in SHAPING}
    unused = [f"{name} = {short(x)}" for name, x in shaping.items() if x not in (None, 0, GENERATION[name])]
    unused += ["generator"] if given.get("generator") is not None else []
    if unused:
        message = f"generate: {', '.join(unused)}: without effect in greedy decoding; give do_sample=True to sample"
        warnings.warn(message, UserWarning, stacklevel=4)


def as_options(generation_config: Any) -> dict[str, Any]:
    """The options in a `generation_config`, a dict or transformers' object. Raises InputError for any other type."""
    if generation_config is None:
        return {}
    fields = generation_config
    # `to_dict` includes the defaults in older releases of transformers.
    for method in ("to_diff_dict", "to_dict"):
        if callable(to_dict := getattr(generation_config, method, None)):
            fields = to_dict()
            break
    if not isinstance(fields, Mapping):
        type_name = type(generation_config).__name__
        raise InputError(f"generation_config: must be a dict or an object with to_dict(), got {type_name}")
    return {name: value for name, value in fields.items() if value is not None}


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` without None values, except options in NONE_COUNTS."""
    return {name: value for name, value in options.items() if value is not None or name in NONE_COUNTS}


def renamed_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` of a `generate` method, with the deprecated `eos_token_ids` renamed to `eos_token_id`."""
    if "eos_token_ids" not in options:
        return options
    warnings.warn("eos_token_ids is now eos_token_id", DeprecationWarning, stacklevel=3)
    return {"eos_token_id": options["eos_token_ids"], **{k: v for k, v in options.items() if k != "eos_token_ids"}}
