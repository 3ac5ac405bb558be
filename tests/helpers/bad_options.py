"""Bad options of generation, losses, adapters, loading and saving, and state dicts; as the faults of bad_calls.py."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import numpy as np
import torch
from bad_calls import CHAT, HUGE, IDS, Place, config_of, fault

import ligermodels as lm
from ligermodels import losses as losses_module
from ligermodels.adapt.adapter import save_adapter
from ligermodels.data.chat import ChatTemplate
from ligermodels.training import FusedAdamW


class Streamer:
    """One that must be an object, not this class."""

    def put(self, value: Any) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


ONES = torch.ones(1, 4)
META = torch.tensor([1], device="meta")
GENERATION: dict[str, list[Any]] = {
    "stop_strings": [3, [3], b"ab", {"a": 1}, True, "a\ud800", "", ["a", ""]],
    "stopping_criteria": [3, "x", [3], [lambda ids, scores: "x"], [lambda ids, scores: torch.ones(3)]],
    "logits_processor": [3, "x", {"a": 1}, [lambda i, s: None], [lambda i, s: s[:, 1:]], [lambda i, s: s.to("meta")]],
    "streamer": [3, Streamer, print],
    "on_token": [3, "print", [print]],
    "cuda_graph": ["no", 3, 1.0, [True]],
    "generator": [3, np.random.default_rng(), "cpu"],
    "attention_mask": [
        *[[1, 1, 1, 1], np.ones((1, 4)), ONES[:, :3], ONES * 2, ONES * 0, ONES * float("nan"), ONES + 0j],
        *[ONES.to_sparse(), ONES.to("meta"), torch.quantize_per_tensor(ONES, 1.0, 0, torch.qint8)],
    ],
    "eos_token_id": ["</s>", 1.5, [[1]], {1}, torch.tensor([1.5]), META, torch.tensor([1]).to_sparse()],
    "pad_token_id": ["x", [0], torch.tensor([1, 2]), torch.tensor(1.5), META],
    "generation_config": [3, "x", [1], {3: 4}, {"generation_config": {}}, {"nonsense": 1}, {"top_k": "x"}],
    "temperature": ["hot", -1, float("nan"), torch.tensor(0.7)],
    "top_p": ["x", 7, -0.1],
    "min_p": ["x", 7, -0.1],
    "num_return_sequences": [2],  # greedy
    "max_new_tokens": [0, -1, 2.0, "2"],
    "num_beams": [2, "x"],
}
HEADS_GENERATION: dict[str, list[Any]] = {
    "on_tokens": [3, [print]],
    "cuda_graph": ["no", 3],
    "return_stats": ["no", 3],
    "epsilon": [-1, 0, "x", float("nan")],
    "delta": [-1, 0, "x", float("inf")],
    "temperature": ["hot", -1],
    "tree": [3, [(0,)], "x"],
    "do_sample": ["yes", 1],
    "top_k": [3],  # without do_sample
    "num_return_sequences": [0, 2],
    "stop_strings": ["a"],
    "streamer": [Streamer()],
    "max_new_tokens": [0, 2.0],
}


@fault("argument", "options of generate, of a model and of heads: functions, generators, masks, flags, tokens")
def generation() -> Any:
    for name, values in GENERATION.items():
        for value in values:
            yield (
                f"{name}: {value!r}",
                lambda place, name=name, value=value: place.model.generate(IDS, **{"max_new_tokens": 2, name: value}),
                name if name != "streamer" else "streamer: must be an object",
            )
            if name not in ("streamer", "on_token"):
                yield (
                    f"{name} of a stream: {value!r}",
                    lambda p, name=name, value=value: list(p.model.stream(IDS, **{"max_new_tokens": 2, name: value})),
                    name,
                )
    yield "a model without values", lambda p: lm.from_config(config_of(p), device="meta").generate(IDS), "meta"
    for name in ("streamer", "on_token"):
        yield f"{name} of a stream", lambda p, name=name: p.model.stream(IDS, 2, **{name: print}), "iterate over it"
    for name, values in HEADS_GENERATION.items():
        for value in values:
            for kind in (lm.MedusaModel, lm.MTPModel):
                yield (
                    f"{name} of {kind.__name__}: {value!r}",
                    lambda place, kind=kind, name=name, value=value: kind.from_base(place.model).generate(
                        IDS, **{"max_new_tokens": 2, name: value}
                    ),
                    name,
                )


LOSS: dict[str, list[Any]] = {
    "label_smoothing": ["x", -0.1, 2, float("nan"), [0.1]],
    "z_loss": ["x", -0.1, float("nan")],
    "memory_budget": ["x", 0, -1, [1]],
    "token_scaling": ["no", 1, [True]],
    "reduction": ["x", 3, ["sum"]],
    "class_weights": [[1.0], torch.ones(3)],
    "token_weights": [[1.0], torch.ones(3)],
    "num_items_in_batch": ["x", -1, float("nan"), [1, 2, 3, 4, 5, 6, 7], torch.ones(7)],
    "position_ids": [[1], ONES],
    "cu_seqlens": [[0, 4], torch.tensor([0, 9], dtype=torch.int32)],
    "nonsense": [1],
}


@fault("argument", "options of losses, and labels to count")
def losses() -> Any:
    heads: dict[str, Any] = {"Medusa": lm.MedusaModel.from_base, "MTP": lm.MTPModel.from_base}
    for kind, make in {"model": lambda model: model, **heads}.items():
        for name, values in LOSS.items():
            for value in values:
                yield (
                    f"{name} of {kind}: {value!r}",
                    lambda place, make=make, name=name, value=value: make(place.model)(
                        IDS, labels=IDS, **{name: value}
                    ),
                    name,
                )
        for ids in (IDS.tolist(), "hello", IDS.numpy()):
            yield (
                f"ids of {kind}: {type(ids)}",
                lambda p, make=make, ids=ids: make(p.model)(ids, labels=IDS),
                "input_ids",
            )
        for labels in (IDS.tolist(), IDS[0], IDS.float(), IDS.int(), IDS.numpy(), None):
            yield (
                f"targets of {kind}: {labels!r}",
                lambda place, make=make, labels=labels: make(place.model).num_targets(labels),
                "labels: ",
            )
    yield "several counts of one loss", lambda p: p.model(IDS, labels=IDS, num_items_in_batch=[1]), "num_items_in_batch"
    yield (
        "budget of log-probabilities",
        lambda place: place.model(IDS, labels=IDS, return_log_probs=True, memory_budget="x"),
        "memory_budget",
    )
    yield "joint training of a model", lambda place: lm.JointMedusa(place.model), "medusa: "  # type: ignore[arg-type]
    yield (
        "a reference of joint training",
        lambda place: lm.JointMedusa(medusa := lm.MedusaModel.from_base(place.model, 1), medusa),  # type: ignore[arg-type]
        "reference: ",
    )


FLAGS = ("no", 1, None, [True])
ADAPTER: dict[str, list[Any]] = {
    "r": [0, -1, 1.5, "4", None, [4], True, HUGE],
    "lora_alpha": [0, "x", None, -1, float("nan"), float("inf"), 10**400],
    "rank_pattern": [3, {"q_proj": "x"}, {"q_proj": HUGE}, {"q_proj": 0}, {"((": 2}],
    "alpha_pattern": [3, {"q_proj": None}, {"q_proj": 10**400}],
    "use_rslora": ["x", 3],
    "lora_dropout": ["x", -1, 2],
    "peft_type": ["IA3", None, 3, []],
    "bias": ["all", 3],
    "use_dora": [True, "x"],
    "modules_to_save": [["x"], 3],
    "target_parameters": [["x"]],
}


def changed_adapter(place: Place, **fields: Any) -> object:
    folder = place.tmp / "adapter"
    save_adapter(lm.add_lora(lm.from_config(config_of(place)), 2), folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return lm.load_adapter(place.model, folder)


@fault("JSON", "fields of an adapter of other kinds and sizes", "adapter_config.json")
def adapters() -> Any:
    for field, values in ADAPTER.items():
        for value in values:
            word = "lora_dropout" if field == "lora_dropout" else "adapter_config.json"
            yield (
                f"{field}: {str(value)[:20]}",
                lambda place, field=field, value=value: changed_adapter(place, **{field: value}),
                word,
            )


@fault("argument", "flags, functions and names of loading, saving and float8", "")
def flags() -> Any:
    write: dict[str, Any] = {
        "model": lambda model, **o: model.save_pretrained(o.pop("folder"), **o),
        "adapter": lambda model, **o: save_adapter(lm.add_lora(lm.from_config(model.hf_config), 2), **o),
        "heads": lambda model, **o: lm.MedusaModel.from_base(model, 1).save_pretrained(**o),
        "export": lambda model, **o: lm.MedusaModel.from_base(model, 1).export(**o),
        "whole": lambda model, **o: lm.MedusaModel.from_base(model, 1).save_whole(**o),
        "MTP": lambda model, **o: lm.MTPModel.from_base(model).save_pretrained(**o),
        "MTP head": lambda model, **o: lm.MTPModel.from_base(model).save_head(**o),
    }
    for kind, call in write.items():
        for value in FLAGS:
            yield (
                f"overwrite of {kind}: {value!r}",
                lambda place, call=call, value=value: call(place.model, folder=place.checkpoint, overwrite=value),
                "overwrite",
            )
    for value in FLAGS:
        yield f"mapped {value!r}", lambda p, value=value: lm.from_pretrained(p.checkpoint, mapped=value), "mapped"
        yield (
            f"is_trainable {value!r}",
            lambda place, value=value: lm.load_adapter(place.model, place.tmp, is_trainable=value),
            "is_trainable",
        )
        for name in ("forward_fast", "backward_fast"):
            yield f"{name} {value!r}", lambda p, name=name, value=value: lm.Float8Recipe(**{name: value}), name
    for name in ("prepare", "progress"):
        yield (
            f"{name} of no kind",
            lambda place, name=name: lm.from_pretrained(place.checkpoint, **{name: 3}),  # type: ignore[arg-type]
            name,
        )
    yield "prepare of a config", lambda place: lm.from_config(config_of(place), prepare=3), "prepare"  # type: ignore
    for dtype in (3, torch.float16, "float8_e5m2", None):
        yield f"gradient_dtype {dtype}", lambda p, dtype=dtype: lm.Float8Recipe(gradient_dtype=dtype), "gradient_dtype"
    for name in (3, ["x"], "", "a\0b", "a\ud800b", b"x"):
        for profile in ("vllm", "fasterdecoding"):
            yield (
                f"base_model {name!r} in {profile}",
                lambda place, name=name, profile=profile: lm.MedusaModel.from_base(place.model, 1).export(
                    place.tmp / "out", profile, base_model=name
                ),
                "base_model",
            )
    for name in (3, None, [], "x", {}):
        yield (
            f"profile {name!r}",
            lambda place, name=name: lm.MedusaModel.from_base(place.model, 1).export(place.tmp / "out", name),
            "profile",
        )


@fault("tensor", "state dicts that are none, of other keys and values", "state_dict: ")
def state_dicts() -> Any:
    changes: dict[str, Any] = {
        "text": lambda each: "x",
        "None": lambda each: None,
        "numpy": lambda each: each.numpy(),
        "sparse": lambda each: each.to_sparse(),
        "meta": lambda each: each.to("meta"),
    }
    for name, change in changes.items():

        def call(place: Place, change: Any = change) -> object:
            state = place.model.hf_state_dict()
            return lm.from_config(config_of(place)).load_hf_state_dict({k: change(v) for k, v in state.items()})

        yield name, call
    for other in (3, None, [], "x", {3: torch.ones(2)}):
        yield f"{other!r}", lambda place, other=other: lm.from_config(config_of(place)).load_hf_state_dict(other)
    yield "a model", lambda place: lm.from_config(config_of(place)).load_hf_state_dict(place.model)  # type: ignore


def parameters(place: Place) -> list[torch.nn.Parameter]:
    return list(lm.from_config(config_of(place)).parameters())


@fault("argument", "options and state dicts of the optimizer")
def optimizers() -> Any:
    numbers: list[Any] = ["x", -1, float("nan"), float("inf"), None, [1]]
    options: dict[str, list[Any]] = {
        **dict.fromkeys(("lr", "eps", "weight_decay"), numbers),
        "betas": [3, "x", (0.9,), (1, 0.9), (0.9, -1), ("a", "b"), (0.9, float("nan")), None],
        "rounding": ["x", 3, []],
    }
    for name, values in options.items():
        for value in values:
            yield (
                f"{name}: {value!r}",
                lambda p, name=name, value=value: FusedAdamW(parameters(p), **{name: value}),
                name,
            )
            if name != "rounding":
                yield (
                    f"{name} of a group: {value!r}",
                    lambda p, name=name, value=value: FusedAdamW([{"params": parameters(p), name: value}]),
                    name,
                )
    for params in (3, None):
        yield f"params {params}", lambda place, params=params: FusedAdamW(params), "params: "
    for state in (3, None, {}, {"state": 3, "param_groups": []}, {"state": {}, "param_groups": 3}):
        yield (
            f"state {state}",
            lambda p, state=state: FusedAdamW(parameters(p)).load_state_dict(state),  # type: ignore[arg-type]
            "state_dict: ",
        )
    yield (
        "a group of no kind",
        lambda p: FusedAdamW(parameters(p)).load_state_dict({"state": {}, "param_groups": [3]}),
        "param_groups",
    )


@fault("template", "chats that are none, and arguments that no template has")
def chats() -> Any:
    for chat in (None, 3, "hello", b"x", {}, [3], [[]], ["x"], [{1: 2}], (each for each in CHAT), [None]):
        yield (
            f"render {chat!r}",
            lambda place, chat=chat: ChatTemplate.from_folder(place.checkpoint).render(chat),
            "messages: ",
        )
        yield (
            f"spans of {chat!r}",
            lambda place, chat=chat: ChatTemplate.from_folder(place.checkpoint).spans(chat, special=re.compile("x")),
            "messages: ",
        )
    for name in ("continue_final_message", "tokenize", "return_tensors", "max_length", "chat_template"):
        yield (
            f"{name}",
            lambda p, name=name: ChatTemplate.from_folder(p.checkpoint).render(CHAT, **{name: True}),
            f"{name}: ",
        )
    for value in ("x", 1, None):
        yield (
            f"add_generation_prompt {value!r}",
            lambda p, value=value: ChatTemplate.from_folder(p.checkpoint).render(CHAT, add_generation_prompt=value),
            "add_generation_prompt: ",
        )


TOKENS = {"log_probs": torch.zeros(2, 4), "mask": torch.ones(2, 4) > 0}
OBJECTIVES: dict[str, dict[str, torch.Tensor]] = {
    "sequence_log_probs": TOKENS,
    "cpo_loss": TOKENS,
    "simpo_loss": TOKENS,
    "orpo_loss": TOKENS,
    "dpo_loss": {**TOKENS, "ref_log_probs": torch.zeros(2, 4)},
    "kto_loss": {**TOKENS, "ref_log_probs": torch.zeros(2), "label": torch.ones(2) > 0, "kl": torch.tensor(0.0)},
    "grpo_loss": {**TOKENS, "advantages": torch.ones(2)},
    "generalized_jsd_loss": {
        name: torch.zeros(2, 4) for name in ("hidden", "weight", "teacher_hidden", "teacher_weight")
    },
}
"""Objectives of `ligermodels.losses` with arguments that fit."""


@fault("tensor", "objectives of log-probabilities, given what is no tensor, of another shape, or no number")
def objectives() -> Any:
    others: list[Any] = ["x", [1], object(), torch.zeros(3), torch.full((2, 4), HUGE % 97)]
    for name, given in OBJECTIVES.items():
        function = getattr(losses_module, name)
        for argument, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            for value in (*others, None) if parameter.default is parameter.empty else others:
                if name != "generalized_jsd_loss" or not isinstance(value, torch.Tensor):
                    yield (
                        f"{name} {argument}: {str(value)[:20]}",
                        lambda _, function=function, given=given, argument=argument, value=value: function(
                            **{**given, argument: value}
                        ),
                        argument,
                    )
        for option, parameter in inspect.signature(function).parameters.items():
            if isinstance(parameter.default, float):
                for value in (float("nan"), float("inf"), "0.1", None, *([-1] if option == "beta" else [])):
                    yield (
                        f"{name} {option} {value}",
                        lambda _, f=function, given=given, one={option: value}: f(**given, **one),
                        option,
                    )
