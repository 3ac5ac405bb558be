"""`generate` and `stream` with arguments of transformers' users: as transformers, or errors that say what to use."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError, SequenceLengthWarning
from ligermodels.generation import generate
from ligermodels.generation.options import INSTEAD, OPTIONS, UNUSED

IDS = torch.tensor([[0, 0, 5, 9, 17], [11, 40, 7, 66, 101]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, lm.CausalLM]:
    folder = tmp_path_factory.mktemp("llama")
    oracle = make_checkpoint(folder, CONFIGS["llama-3"])
    return oracle, lm.from_pretrained(folder)


class Letters:
    """A tokenizer of one or two letters a token."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens and all(i >= 0 for i in ids)
        return "".join(chr(97 + i % 26) + (chr(97 + i // 26) if i % 3 else "") for i in ids)


class Listener:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def favour(ids: Tensor, scores: Tensor) -> Tensor:
    """Depends on the ids that it is given, padding included, and changes the scores in place."""
    assert ids.shape[0] == scores.shape[0] and scores.dtype == torch.float32
    scores[:, (ids.sum(1) % 131).tolist()] += 2.0
    return scores


def both(pair: tuple[Any, lm.CausalLM], **options: Any) -> tuple[Tensor, Tensor]:
    found = []
    for model in pair:
        torch.manual_seed(3)
        found.append(model.generate(input_ids=IDS, attention_mask=MASK, **({"max_new_tokens": 12} | options)))
    return found[0], found[1]


CALLS: dict[str, dict[str, Any]] = {
    "sequences": {"do_sample": True, "num_return_sequences": 3},
    "sequences, shaped": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.7, "top_k": 20, "top_p": 0.9},
    "processor": {"logits_processor": [favour]},
    "processors": {
        "logits_processor": LogitsProcessorList(
            [NoRepeatNGramLogitsProcessor(1), MinNewTokensLengthLogitsProcessor(5, 9, torch.tensor([2])), favour]
        ),
        "repetition_penalty": 1.3,
    },
    "processor, eos": {"logits_processor": [favour], "eos_token_id": list(range(0, 131, 9)), "pad_token_id": 1},
    "processor, sampled": {"logits_processor": [favour], "do_sample": True, "num_return_sequences": 2},
    "config": {"generation_config": GenerationConfig(repetition_penalty=1.5, max_new_tokens=7)},
    "config, sampled": {"generation_config": GenerationConfig(do_sample=True, num_return_sequences=2, top_k=5)},
    "config, overridden": {"generation_config": GenerationConfig(do_sample=True, top_k=5), "do_sample": False},
    "max_length": {"max_length": 9, "max_new_tokens": None},
    "neutral": {"num_beams": 1, "no_repeat_ngram_size": 0, "use_cache": True, "temperature": None, "bos_token_id": 1},
    "criteria": {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(8)])},
    "criteria by row": {"stopping_criteria": [EosTokenCriteria(torch.tensor(list(range(0, 131, 5))))]},
}


@pytest.mark.parametrize("name", CALLS)
def test_generate_as_transformers(pair: tuple[Any, lm.CausalLM], name: str) -> None:
    theirs, ours = both(pair, **CALLS[name])
    assert ours.tolist() == theirs.tolist()
    assert name in ("neutral", "config, overridden") or not torch.equal(ours, both(pair)[1])
    tokens = list(pair[1].stream(IDS[1:], **{"max_new_tokens": 4}))
    assert torch.stack(tokens, 1).tolist() == pair[1].generate(IDS[1:], 4)[:, 5:].tolist()


@pytest.mark.parametrize("ids", [IDS, torch.tensor([[0, 5, 0, 9], [11, 0, 7, 66]])], ids=["left", "between"])
def test_padding_without_a_mask(pair: tuple[Any, lm.CausalLM], ids: Tensor) -> None:
    """As in transformers, tokens that are `pad_token_id` are padding, for draft heads too."""
    theirs, ours = (model.generate(input_ids=ids, max_new_tokens=6) for model in pair)
    assert ours[:, ids.shape[1] :].tolist() == theirs[:, ids.shape[1] :].tolist()
    medusa = lm.MedusaModel.from_base(pair[1], num_heads=2)
    assert medusa.generate(ids, max_new_tokens=6).tolist() == ours.tolist()
    assert not torch.equal(pair[1].generate(ids, max_new_tokens=6, attention_mask=torch.ones_like(ids)), ours)
    lists = pair[1].generate(ids.tolist(), max_new_tokens=6)  # prompts without padding
    assert torch.equal(lists, pair[1].generate(ids, max_new_tokens=6, attention_mask=torch.ones_like(ids)))
    with pytest.raises(InputError, match=r"no token but pad_token_id \(0\)"):
        pair[1].generate(torch.tensor([[0, 0], [3, 4]]))


@pytest.mark.parametrize(
    ("rows", "padded"),
    [
        ([[2, 2, 5, 9], [11, 40, 7, 66]], True),
        ([[2, 5, 9], [11, 40, 7]], True),
        ([[5, 9, 2], [11, 40, 7]], True),
        ([[2, 5, 9], [2, 40, 7]], False),  # as BOS
        ([[2], [2]], False),
        ([[5, 2, 9, 2]], False),
    ],
)
def test_padding_that_is_an_eos_too(pair: tuple[Any, lm.CausalLM], rows: list[list[int]], padded: bool) -> None:
    """It is text, as in transformers, with a warning where it looks like padding."""
    ids, options = torch.tensor(rows), {"eos_token_id": 2, "pad_token_id": 2, "max_new_tokens": 4}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = pair[1].generate(ids, **options)
    assert ["which is read as text" in str(each.message) for each in caught] == [True] * padded
    assert ours.tolist() == pair[0].generate(input_ids=ids, **options).tolist()


def test_text_beyond_the_context_warns_once() -> None:
    model = lm.from_config({**CONFIGS["llama-3"], "max_position_embeddings": 8, "rope_parameters": None})
    medusa = lm.MedusaModel.from_base(lm.from_config(model.hf_config), num_heads=2)

    def warned(generate: Any, tokens: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            generate([[3, 1, 4], [5]], max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
        return [str(each.message) for each in caught if each.category is SequenceLengthWarning]

    for generate_ in (model.generate, medusa.generate):
        assert warned(generate_, 4) == []
        (message,) = warned(generate_, 16)
        assert "longer than the model's max_position_embeddings, 8;" in message
        assert warned(generate_, 16) == []


def test_an_object_of_any_kind_is_a_generation_config(pair: tuple[Any, lm.CausalLM]) -> None:
    wanted = both(pair, repetition_penalty=1.5)[1]

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"repetition_penalty": 1.5, "num_beams": 1, "max_time": None, "transformers_version": "4.0"}

    for config in (Config(), Config().to_dict()):
        assert torch.equal(both((pair[1], pair[1]), generation_config=config)[1], wanted)


@pytest.mark.parametrize("do_sample", [False, True])
def test_streams(pair: tuple[Any, lm.CausalLM], do_sample: bool) -> None:
    """The streamer sees what transformers' does; `stream` gives the same tokens one step at a time."""
    listeners, eos = (Listener(), Listener()), list(range(0, 131, 9))
    out: list[Tensor] = []
    options: dict[str, Any] = {"do_sample": do_sample, "eos_token_id": eos, "pad_token_id": 1, "max_new_tokens": 12}
    for model, listener in zip(pair, listeners, strict=True):
        torch.manual_seed(3)
        out.append(model.generate(input_ids=IDS, attention_mask=MASK, streamer=listener, **options))
    assert listeners[0].calls == listeners[1].calls and listeners[1].calls[-1] == "end"
    torch.manual_seed(3)
    steps = pair[1].stream(IDS, attention_mask=MASK, **options)
    assert isinstance(steps, Iterator)
    assert torch.stack(list(steps), 1).tolist() == out[1][:, 5:].tolist()


def test_a_stream_that_is_left_gives_the_training_flags_back(pair: tuple[Any, lm.CausalLM]) -> None:
    model = pair[1].train()
    steps = model.stream([[5, 6]], max_new_tokens=5)
    assert next(steps).shape == (1,) and not model.training
    del steps
    assert model.training
    with pytest.raises(InputError, match="max_new_tokens"):  # at the call
        model.stream([[5, 6]], max_new_tokens=0)
    model.eval()


@pytest.mark.parametrize("place", range(1, 7))
def test_stop_strings(pair: tuple[Any, lm.CausalLM], place: int) -> None:
    """A row ends with the token that completes a text, wherever in it; the prompt may have its beginning."""
    model, letters = pair[1], Letters()
    prompt = [5, 9, 17]
    options: dict[str, Any] = {"do_sample": True, "eos_token_id": None}
    torch.manual_seed(place)
    whole = model.generate([prompt], 12, **options)[0].tolist()
    text = letters.decode(whole, False)
    for width in (1, 2, 5):
        end = len(letters.decode(whole[: 3 + place], False))
        stop = text[max(0, end - width) : end]
        lengths = [len(letters.decode(whole[:n], False)) for n in range(13 + 3)]
        found = [
            n
            for n in range(4, 16)
            if any(text[e - len(stop) : e] == stop for e in range(lengths[n - 1] + 1, lengths[n] + 1) if e >= len(stop))
        ]
        torch.manual_seed(place)
        out = model.generate([prompt], 12, stop_strings=stop, tokenizer=letters, **options)[0].tolist()
        assert out == whole[: found[0]]


def test_stop_strings_in_a_batch(pair: tuple[Any, lm.CausalLM]) -> None:
    model, letters = pair[1], Letters()
    plain = model.generate(IDS, 8, attention_mask=MASK, eos_token_id=None, pad_token_id=0)
    stop = letters.decode(plain[1, 6:8].tolist(), False)
    out = model.generate(
        IDS, 8, attention_mask=MASK, eos_token_id=None, pad_token_id=0, stop_strings=[stop, "#"], tokenizer=letters
    )
    ended = next(n for n in range(6, 14) if stop in letters.decode(plain[1, :n].tolist(), False))
    assert out[1].tolist()[:ended] == plain[1].tolist()[:ended] and not out[1, ended:].any()


BAD: list[tuple[str, Any, str]] = [
    ("stop_strings", ["x"], "tokenizer"),
    ("logits_processor", lambda ids, scores: scores, "list of functions"),
    ("stopping_criteria", [3], "list of functions"),
    ("stopping_criteria", [lambda ids, scores: "x"], r"\[0\]: must return bool"),
    ("stopping_criteria", [lambda ids, scores: [True]], r"\[0\]: must return bool"),
    ("streamer", print, "put"),
    ("num_return_sequences", 2, "do_sample"),
    ("num_return_sequences", 1.0, "whole number"),
    ("generation_config", 3, "to_dict"),
    ("max_new_tokens", 2.0, "whole number"),
    ("max_new_tokens", "3", "whole number"),
    ("max_length", 99.0, "whole number"),
    ("do_sample", "yes", "True or False"),
    ("temperature", "hot", "a number"),
    ("top_k", 2.5, "1 or more"),
    ("top_p", "a", r"a number in \[0, 1\]"),
    ("repetition_penalty", "a", "a number above 0"),
    ("eos_token_id", "3", "a token's id"),
    ("eos_token_id", 3.0, "a token's id"),
    ("pad_token_id", 1.5, "a token's id"),
    ("attention_mask", [[1]], "must be a tensor"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_bad_options(pair: tuple[Any, lm.CausalLM], name: str, value: Any, message: str) -> None:
    sampled = {"do_sample": True} if name in ("temperature", "top_k", "top_p") else {}
    with pytest.raises(InputError, match=rf"{name}.*{message}"):
        pair[1].generate(IDS, **{"pad_token_id": 0, **sampled, name: value})


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["num_return_sequences", "cuda_graph", "batch_invariant"])
def test_none_stands_for_the_default(pair: tuple[Any, lm.CausalLM], name: str, sampled: bool) -> None:
    """As for `model.generate`, and in functions that take no defaults from a checkpoint."""
    options: dict[str, Any] = {"do_sample": sampled, "pad_token_id": 0}

    def sampled_or_not(**more: Any) -> Tensor:
        return generate(pair[1], IDS, 3, **options, **more, generator=torch.Generator().manual_seed(0))

    assert torch.equal(sampled_or_not(**{name: None}), sampled_or_not())


@pytest.mark.parametrize("prompt", ["text", numpy.array([[5, 6]]), {"input_ids": [5]}, [True, False], [5.0]])
def test_bad_prompts(pair: tuple[Any, lm.CausalLM], prompt: Any) -> None:
    with pytest.raises(InputError, match="input_ids must be a tensor"):
        pair[1].generate(prompt, 2)


def test_ids_of_any_kind(pair: tuple[Any, lm.CausalLM]) -> None:
    wanted = pair[1].generate([5, 6], 4, eos_token_id=[7, 8])
    ids: Any = [numpy.int64(5), numpy.int64(6)]
    assert torch.equal(
        pair[1].generate(ids, 4, eos_token_id=torch.tensor([7, 8]), pad_token_id=torch.tensor(7)), wanted
    )
    for counts in ({"max_new_tokens": numpy.int64(4)}, {"max_length": numpy.int32(6)}):
        assert torch.equal(pair[1].generate(ids, eos_token_id=[7, 8], **counts), wanted)
    with pytest.raises(InputError, match="tree: must be a Tree or a DynamicTree, got int"):
        lm.MedusaModel.from_base(pair[1], num_heads=1).generate([5, 6], 4, tree=3)


FOREIGN = {
    "generation_config": GenerationConfig(max_new_tokens=1),
    "lm_head": torch.nn.Linear(2, 2),
    "loss_function": max,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_attributes_of_transformers_models_are_not_set_without_effect(pair: tuple[Any, lm.CausalLM], name: str) -> None:
    models = [pair[1]] if name != "generation_config" else [pair[1], lm.MedusaModel.from_base(pair[1], num_heads=1)]
    for model in models:
        with pytest.raises(AttributeError, match=f"^{name}: would have no effect on a native model; "):
            setattr(model, name, FOREIGN[name])
        assert not hasattr(model, name)
    with pytest.raises(AttributeError, match="give the options to generate"):
        pair[1].generation_config.pad_token_id = 0


def test_a_subclass_may_have_attributes_of_these_names(pair: tuple[Any, lm.CausalLM]) -> None:
    class Own(lm.CausalLM):
        lm_head = loss_function = None

    model, head = Own(pair[1].config), torch.nn.Linear(2, 2)
    model.lm_head, model.loss_function = head, max
    assert vars(model)["_modules"]["lm_head"] is head and model.loss_function is max
    with pytest.raises(AttributeError, match="generation_config: would have no effect"):
        model.generation_config = None


@pytest.mark.parametrize("name", ["draft", "tree"])
def test_streams_have_no_draft_heads(pair: tuple[Any, lm.CausalLM], name: str) -> None:
    assert len(list(pair[1].stream(IDS, 2, **{name: None, "on_token": None, "streamer": None}))) == 2
    with pytest.raises(InputError, match=f"^{name}: a step with draft heads adds several tokens"):
        pair[1].stream([[5, 6]], max_new_tokens=2, **{name: lm.MedusaModel.from_base(pair[1], num_heads=1)})


def test_what_a_processor_returns_is_checked(pair: tuple[Any, lm.CausalLM]) -> None:
    with pytest.raises(InputError, match=r"logits_processor\[0\]: must return scores \(2, 131\), got NoneType"):
        pair[1].generate(IDS, logits_processor=[lambda ids, scores: None])
    with pytest.raises(InputError, match=r"stopping_criteria\[0\]"):
        pair[1].generate(IDS, pad_token_id=0, stopping_criteria=[lambda ids, scores: [True] * 3])
    with pytest.raises(InputError, match="pad_token_id"):
        generate(pair[1], IDS, stopping_criteria=[lambda ids, scores: True])


@pytest.mark.parametrize("name", INSTEAD)
def test_options_that_are_not_implemented_say_what_to_use(pair: tuple[Any, lm.CausalLM], name: str) -> None:
    neutral, instead = INSTEAD[name]
    value = not neutral if isinstance(neutral, bool) else 7
    for method in (pair[1].generate, pair[1].stream):
        with pytest.raises(InputError, match=rf"generate: {name} = {value} is not implemented; ") as error:
            method(IDS, **{name: value})
        assert str(error.value).endswith(instead)
    with pytest.raises(ConfigError, match=f"^generation_config: {name} = "):
        pair[1].generate(IDS, generation_config={name: value})
    pair[1].generate(IDS[1:], 1, **{name: neutral})


def test_every_option_of_transformers_is_known(pair: tuple[Any, lm.CausalLM]) -> None:
    import inspect

    from transformers import GenerationMixin

    names = GenerationConfig().to_dict().keys() | inspect.signature(GenerationMixin.generate).parameters.keys()
    assert names - {"self", "kwargs"} <= OPTIONS | INSTEAD.keys() | UNUSED
    with pytest.raises(TypeError, match=r"'temprature'; did you mean 'temperature'\?"):
        pair[1].generate(IDS, temprature=0.3)
    with pytest.raises(ConfigError, match="generation_config: unknown option 'temprature'"):
        pair[1].generate(IDS, generation_config={"temprature": 0.3})
    with pytest.raises(ConfigError, match="generation_config: field 'temperature' is not usable"):
        pair[1].generate(IDS, generation_config={"temperature": "hot"})


@pytest.mark.parametrize("name", ["num_beams", "logits_processor", "streamer", "generation_config", "stop_strings"])
def test_tree_decoding_names_what_it_does_not_have(pair: tuple[Any, lm.CausalLM], name: str) -> None:
    medusa = lm.MedusaModel.from_base(pair[1], num_heads=1)
    with pytest.raises(InputError, match=name):
        medusa.generate([[5, 6]], 3, **{name: 7})
    assert medusa.generate([[5, 6]], 3, num_beams=1).shape == (1, 5)
    with pytest.raises(InputError, match="generate: inputs_embeds = "):
        pair[1].generate([[5, 6]], 3, inputs_embeds=numpy.zeros((1, 2, 3)))


def test_a_length_goes_before_the_checkpoints_number_of_tokens(
    pair: tuple[Any, lm.CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair[1]
    monkeypatch.setattr(model, "export_spec", replace(model.export_spec, generation_config={"max_new_tokens": 3}))
    medusa = lm.MedusaModel.from_base(model, num_heads=1)
    for each in (model, medusa):
        assert each.generate([[5, 6]], max_length=9, eos_token_id=None, pad_token_id=0).shape == (1, 9)
        assert each.generate([[5, 6]], eos_token_id=None, pad_token_id=0).shape == (1, 5)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_none_turns_an_option_of_the_checkpoint_off(
    pair: tuple[Any, lm.CausalLM], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = {"do_sample": True, "temperature": 0.05, "repetition_penalty": 5.0, "pad_token_id": 0, "eos_token_id": 2}
    monkeypatch.setattr(pair[0], "generation_config", GenerationConfig(**stored))
    monkeypatch.setattr(pair[1], "export_spec", replace(pair[1].export_spec, generation_config=stored))
    (theirs, ours), kept = both(pair, **{name: None}), both(pair)[1]
    assert torch.equal(theirs, ours) and not torch.equal(ours, kept)


def test_the_call_goes_before_the_checkpoint(pair: tuple[Any, lm.CausalLM], monkeypatch: pytest.MonkeyPatch) -> None:
    model = pair[1]
    wanted = model.generate(IDS, 6)
    spec = {"num_beams": 4, "max_new_tokens": 3, "eos_token_id": 2, "pad_token_id": 0}
    monkeypatch.setattr(model, "export_spec", replace(model.export_spec, generation_config=spec))
    with pytest.raises(ConfigError, match="num_beams"):
        model.generate(IDS)
    assert torch.equal(model.generate(IDS, num_beams=1, max_length=11), wanted)
    assert torch.equal(model.generate(IDS, generation_config={"num_beams": 1, "max_length": 11}), wanted)
    heads = lm.MedusaModel.from_base(model, num_heads=1)
    assert torch.equal(model.generate(IDS, num_beams=1, max_length=11, draft=heads), wanted)
    config = {"num_beams": 1, "max_length": 11}
    assert torch.equal(model.generate(IDS, generation_config=config, draft=heads), wanted)
    assert torch.equal(heads.generate(IDS, num_beams=1, max_length=11), wanted)
    with pytest.raises(ConfigError, match="num_beams"):
        heads.generate(IDS)
