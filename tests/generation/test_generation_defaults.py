"""Options of generation that a checkpoint sets: what transformers' `generate` takes of them."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError, ConfigWarning
from ligermodels.generation.options import GENERATION, generation_defaults

LLAMA = CONFIGS["llama-3"]
IDS = {"eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture(scope="module")
def oracle() -> Iterator[PreTrainedModel]:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    yield AutoModelForCausalLM.from_config(AutoConfig.for_model(**copy.deepcopy(LLAMA)))
    logging.set_verbosity(verbosity)


def theirs(oracle: PreTrainedModel, options: dict[str, Any]) -> GenerationConfig:
    """What transformers makes of a generation_config.json for a call of `generate` without options."""
    oracle.generation_config = GenerationConfig(**copy.deepcopy(options))
    prepared, _ = oracle._prepare_generation_config(None)
    prepared.max_length = oracle.generation_config.max_length  # Its default, 20, is of new tokens.
    return prepared


values = {
    "do_sample": st.booleans(),
    "temperature": st.floats(0.1, 2.0),
    "top_k": st.integers(0, 100),
    "top_p": st.floats(0.0, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "repetition_penalty": st.floats(0.5, 2.0),
    "max_new_tokens": st.integers(1, 100),
    "max_length": st.integers(1, 100),
    "eos_token_id": st.integers(0, 100) | st.lists(st.integers(0, 100), min_size=1, max_size=3),
    "pad_token_id": st.integers(0, 100),
}
optional = {name: st.none() | value for name, value in values.items()}


@given(st.fixed_dictionaries({}, optional=optional))
def test_options_are_those_that_transformers_takes(oracle: PreTrainedModel, options: dict[str, Any]) -> None:
    wanted = theirs(oracle, options)
    found = generation_defaults(options, {})
    assert found.keys() == GENERATION.keys() | IDS.keys()
    assert found == {name: getattr(wanted, name) for name in found}


@given(st.fixed_dictionaries({}, optional=optional))
def test_options_of_an_old_config(options: dict[str, Any]) -> None:
    """Without a generation_config.json, transformers takes them of config.json."""
    options = {name: value for name, value in options.items() if value is not None}
    wanted = GenerationConfig.from_model_config({**LLAMA, **options})
    found = generation_defaults(None, {**LLAMA, **options})
    for name, value in found.items():
        assert value == (GENERATION.get(name) if getattr(wanted, name) is None else getattr(wanted, name))


def test_options_of_a_config_beside_a_generation_config_do_not_count() -> None:
    assert generation_defaults({}, {**LLAMA, "do_sample": True, "temperature": 0.3}) == {**GENERATION, **IDS}
    assert generation_defaults({"eos_token_id": None}, LLAMA)["eos_token_id"] is None


SETS = {
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "bad_words_ids": [[1]],
    "min_length": 5,
    "min_new_tokens": 5,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": [5, 1.2],
    "suppress_tokens": [4],
    "begin_suppress_tokens": [4],
    "sequence_bias": [[[1], 2.0]],
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
}
SETS_WHEN_SAMPLING = {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_h": 0.5}
MODES = {"num_beams": 4, "constraints": [1], "force_words_ids": [[1]], "dola_layers": "high", "penalty_alpha": 0.6}
STOPS = {"stop_strings": ["x"], "max_time": 1.0, "num_return_sequences": 2, "token_healing": True}
NEUTRAL = {
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "min_length": 0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1.0, "length_penalty": 2.0,
    "encoder_repetition_penalty": 1.0, "early_stopping": True, "num_beams": 1, "num_return_sequences": 1,
    "use_cache": False, "cache_implementation": "hybrid", "renormalize_logits": False, "diversity_penalty": 0.0,
    "num_beam_groups": 1, "output_scores": True, "transformers_version": "4.57.6", "_from_model_config": True,
    "bos_token_id": 1,
}  # fmt: skip


def processors(oracle: PreTrainedModel, options: dict[str, Any]) -> list[str]:
    prepared = theirs(oracle, {**IDS, **options})
    oracle._prepare_special_tokens(prepared, device="cpu")
    found = oracle._get_logits_processor(
        prepared, input_ids_seq_length=3, encoder_input_ids=torch.ones(1, 3, dtype=torch.long), device="cpu"
    )
    return [type(each).__name__ for each in found]


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize(("name", "value"), {**SETS, **SETS_WHEN_SAMPLING, **MODES, **STOPS}.items())
def test_options_that_are_not_implemented_are_named(
    oracle: PreTrainedModel, name: str, value: Any, samples: bool
) -> None:
    options = {name: value, "do_sample": samples}
    without = processors(oracle, {"do_sample": samples})
    if name in SETS or name in SETS_WHEN_SAMPLING:
        changes = name in SETS or samples
        assert (processors(oracle, options) != without) == changes
    else:
        changes = name != "penalty_alpha" or not samples
        if name in MODES:
            plain = theirs(oracle, {"do_sample": samples}).get_generation_mode()
            assert (theirs(oracle, options).get_generation_mode() != plain) == changes
    if changes:
        with pytest.raises(ConfigError, match=rf"^generation_config\.json: .*not implemented: {name} = "):
            generation_defaults(options, LLAMA)
        with pytest.raises(ConfigError, match=name):
            generation_defaults({name: value}, LLAMA, do_sample=samples)
    else:
        assert generation_defaults(options, LLAMA)["do_sample"] is samples


def test_options_that_change_nothing(oracle: PreTrainedModel) -> None:
    for samples in (False, True):
        plain = {"do_sample": samples}
        assert processors(oracle, {**NEUTRAL, **plain}) == processors(oracle, plain)
        assert generation_defaults({**NEUTRAL, **plain}, LLAMA) == generation_defaults(plain, LLAMA)


def test_all_that_is_not_implemented_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"no_repeat_ngram_size = 3, num_beams = 4; remove"):
        generation_defaults({"num_beams": 4, "no_repeat_ngram_size": 3}, {})
    with pytest.raises(ConfigError, match=r"^config\.json: .*num_beams"):
        generation_defaults(None, {"num_beams": 4})


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": "yes"},
        {"do_sample": 1},
        {"temperature": "hot"},
        {"temperature": -0.1},
        {"top_k": 2.5},
        {"top_k": -1},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"max_length": True},
    ],
)
def test_bad_values_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: field '{next(iter(options))}' is not usable"):
        generation_defaults(options, LLAMA, do_sample=None if "do_sample" in options else True)


def test_misspelt_fields_are_a_warning() -> None:
    """Fields of other programs, which resemble no option, pass as in transformers."""
    for name, near in (("temprature", "temperature"), ("topp", "top_p"), ("eos_token_ids", "eos_token_id")):
        with pytest.warns(ConfigWarning, match=rf"^generation_config\.json: field '{name}' = 3 is .*mean '{near}'\?$"):
            generation_defaults({name: 3}, LLAMA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generation_defaults({"chat_format": "chatml", "assistant_token_id": 3, "max_window_size": 9}, LLAMA)
        generation_defaults({"eot_token_id": 3, "eom_token_id": 4, "eod_token_id": 5}, LLAMA)


def test_bad_options_of_sampling_are_no_error_in_greedy_decoding() -> None:
    """They have no effect there: transformers decodes, and so do draft heads."""
    for bad in ({"temperature": "hot"}, {"temperature": -0.1}, {"top_k": -1}, {"top_p": 1.5}, {"min_p": True}):
        name = next(iter(bad))
        for stored, do_sample in ((bad, None), ({**bad, "do_sample": True}, False)):
            assert generation_defaults(stored, LLAMA, do_sample=do_sample)[name] == GENERATION[name]
        with pytest.raises(ConfigError, match=rf"^generation_config: field '{name}' is not usable"):
            generation_defaults({}, LLAMA, overrides=bad)  # of the call


def test_options_of_sampling_in_greedy_decoding_are_a_warning() -> None:
    """Those of the call, as in transformers; not those of the checkpoint, and no values without an effect."""
    model = lm.from_config(LLAMA)
    with pytest.warns(UserWarning, match=r"^generate: temperature = 0.7, top_p = 0.9: without .*; give do_sample=True"):
        found = model.generate([[3, 1]], 2, temperature=0.7, generation_config={"top_p": 0.9, "top_k": 50})
    with pytest.warns(UserWarning, match=r"^generate: generator: without effect"):
        model.generate([[3, 1]], 2, generator=torch.Generator())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found.equal(model.generate([[3, 1]], 2, temperature=1.0, top_k=0, top_p=None, min_p=0.0))
        model.generate([[3, 1]], 2, temperature=0.7, do_sample=True)
