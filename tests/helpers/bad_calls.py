"""Bad input, one fault a function, by the door it comes through: what a call does that must end in our own error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ligermodels as lm
from ligermodels.convert import journal
from ligermodels.data.chat import ChatTemplate
from ligermodels.data.documents import Documents
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.speculative.head_files import TorchFile
from ligermodels.speculative.medusa_files import open_heads
from ligermodels.training.fine_tuning_recipe import FineTuningRecipe
from ligermodels.training.medusa_recipe import MedusaRecipe
from ligermodels.training.recipe_file import parse_setting


class Place(NamedTuple):
    """What a fault works with: a checkpoint of its own, the model loaded from another, and a folder."""

    checkpoint: Path
    model: lm.CausalLM
    tmp: Path


class Fault(NamedTuple):
    """A fault: the door and the class it is of, its name, the call, and what the message must hold."""

    door: str
    kind: str
    name: str
    call: Callable[[Place], object]
    message: str


FAULTS: list[Fault] = []
IDS = torch.tensor([[3, 4, 5, 6]])
DEEP = 100_000
HUGE = 2**70
PLAN = f"{journal.JOURNAL}/{journal.PLAN}"


def fault(door: str, kind: str, message: str = "") -> Callable[[Any], Any]:
    """Add the decorated function, or the functions that a decorated generator of (name, call) gives."""

    def add(make: Callable[[], Any]) -> Any:
        for name, call, *words in make():
            FAULTS.append(Fault(door, kind, name, call, *(words or [message])))
        return make

    return add


def edited(place: Place, file: str, **fields: Any) -> Path:
    path = place.checkpoint / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return place.checkpoint


def with_file(name: str, make: Callable[[Path], object]) -> Callable[[Place], Path]:
    """A checkpoint whose file `name` is what `make` leaves at its path."""

    def at(place: Place) -> Path:
        path = place.checkpoint / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)
        return place.checkpoint

    return at


def sparse(size: int) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path),
    "3 GB": sparse(3 * 2**30),
}
"""What stands in the place of a file."""

NAMES = {
    "null byte": "a\0b",
    "surrogate": "a\ud800b",
    "too long": "x" * 5000,
    "long path": "x/" * 5000,
    "~user": "~nobody_/x",
}
"""Names that no file has."""


# -- files -------------------------------------------------------------------------------------------------------------


@fault("file", "FIFOs, devices, folders, links to themselves, 3 GB in place of a file")
def special_files() -> Any:
    def opens(file: str, use: Callable[[Path, Place], object]) -> Any:
        for kind, make in SPECIAL.items():
            if kind == "3 GB" and file.startswith("data"):
                continue  # as data may be
            yield f"{kind} as {file}", lambda place, make=make: use(with_file(file, make)(place), place), file

    def model(folder: Path, place: Place) -> object:
        return lm.from_pretrained(folder)

    yield from opens("config.json", model)
    for read in (lm.from_pretrained, Tokenizer, ChatTemplate.from_folder):
        yield from opens(PLAN, lambda folder, place, read=read: read(folder))
    yield from opens(PLAN, lambda folder, place: place.model.save_pretrained(folder, overwrite=True))
    yield (
        "a journal without a plan",
        lambda place: ((place.checkpoint / journal.JOURNAL).mkdir(), model(place.checkpoint, place)),
        PLAN,
    )
    yield from opens("config.json", lambda folder, place: lm.from_config(folder))
    yield from opens("generation_config.json", model)
    yield from opens(
        "model.safetensors.index.json",
        lambda folder, place: ((folder / "model.safetensors").unlink(), lm.from_pretrained(folder)),
    )
    yield from opens("model.safetensors", model)
    yield from opens("tokenizer.json", lambda folder, place: Tokenizer(folder))
    yield from opens("tokenizer_config.json", lambda folder, place: ChatTemplate.from_folder(folder))
    yield from opens("chat_template.jinja", lambda folder, place: ChatTemplate.from_folder(folder))
    yield from opens("medusa_lm_head.pt", lambda folder, place: TorchFile(folder / "medusa_lm_head.pt"))
    yield from opens("adapter_config.json", lambda folder, place: lm.load_adapter(place.model, folder))
    yield from opens("recipe.yaml", lambda folder, place: FineTuningRecipe.read(folder / "recipe.yaml"))
    for data in ("data.jsonl", "data.txt"):
        yield from (
            each
            for each in opens(
                data, lambda folder, place, data=data: Documents.of_checkpoint(folder, [folder / data]).read(range(1))
            )
        )


@fault("file", "names too long, with null bytes or surrogates, of no home")
def names() -> Any:
    for kind, name in NAMES.items():
        for what, call in {
            "from_pretrained": lm.from_pretrained,
            "from_config": lm.from_config,
            "from_config json": lambda name: lm.from_config(name + ".json"),
            "Tokenizer": Tokenizer,
            "template": ChatTemplate.from_folder,
            "template file": lambda name: ChatTemplate.from_folder(".", name),
            "heads": lambda name: open_heads(Path(name)).__enter__(),
            "recipe": FineTuningRecipe.read,
        }.items():
            yield f"{what} of a {kind}", lambda place, call=call, name=name: call(name)
        yield f"data of a {kind}", lambda place, name=name: Documents.of_checkpoint(place.checkpoint, [name])
        yield f"adapter of a {kind}", lambda place, name=name: lm.load_adapter(place.model, name)
        yield f"Medusa heads of a {kind}", lambda place, name=name: lm.MedusaModel.from_pretrained(place.model, name)


# -- JSON --------------------------------------------------------------------------------------------------------------

NESTED = "[" * DEEP + "]" * DEEP
MIDDLING = "[" * 3000 + "]" * 3000
"""Python 3.12 and later parse it, and cannot walk it."""


@fault("JSON", "nested without end")
def nested_json() -> Any:
    for depth, text in (("deep", NESTED), ("middling", MIDDLING)):
        for file, use in {
            "config.json": lm.from_pretrained,
            "generation_config.json": lm.from_pretrained,
            PLAN: lm.from_pretrained,
            "tokenizer.json": Tokenizer,
            "tokenizer_config.json": ChatTemplate.from_folder,
        }.items():

            def call(place: Place, file: str = file, use: Any = use, text: str = text) -> object:
                path = place.checkpoint / file
                path.parent.mkdir(exist_ok=True)
                before = path.read_text() if path.exists() else '{"old": [], "new": []}'
                path.write_text(before.replace("{", '{"more": ' + text + ",", 1))
                return use(place.checkpoint)

            yield f"{depth} in {file}", call, file

        def index(place: Place, text: str = text) -> object:
            (place.checkpoint / "model.safetensors").unlink()
            (place.checkpoint / "model.safetensors.index.json").write_text('{"weight_map": ' + text + "}")
            return lm.from_pretrained(place.checkpoint)

        yield f"{depth} in the index", index, "index"
        for field in ("text", "tools", "messages"):

            def line(place: Place, text: str = text, field: str = field) -> object:
                more = {
                    "text": text,
                    "tools": '[{"role": "assistant", "content": "x"}], "tools": ' + text,
                    "messages": text,
                }[field]
                (place.tmp / "d.jsonl").write_text(f'{{"{"text" if field == "text" else "messages"}": {more}}}\n')
                return Documents.of_checkpoint(place.checkpoint, [place.tmp / "d.jsonl"]).read([0])

            yield f"{depth} in the {field} of a line", line, "d.jsonl:1"


def a_loop() -> Any:
    found: dict[str, Any] = {}
    found["more"] = found
    return found


VALUES: dict[str, Any] = {
    "list": [[]],
    "object": {"a": []},
    "1e400": float("inf"),
    "nan": float("nan"),
    "beyond int64": HUGE,
    "below": -HUGE,
    "many digits": 10**4000,
    "text": "x" * 9,
    "true": True,
    "bytes": b"x",
    "set": {1},
    "surrogate": "\ud800",
}
FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_scaling",
    "rope_theta",
    "rope_parameters",
    "hidden_act",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "initializer_range",
    "tie_word_embeddings",
    "layer_types",
    "quantization_config",
    "text_config",
    "no_such_field",
)
PASSES = {
    ("no_such_field", each)
    for each in (
        "list",
        "object",
        "1e400",
        "nan",
        "beyond int64",
        "below",
        "many digits",
        "text",
        "true",
        "bytes",
        "set",
        "surrogate",
    )
}
PASSES |= {("tie_word_embeddings", "true"), ("rope_scaling", "object"), ("rope_parameters", "object")}
PASSES |= {(each, "beyond int64") for each in ("rms_norm_eps", "rope_theta", "initializer_range")}


def config_of(place: Place) -> dict[str, Any]:
    return json.loads((place.checkpoint / "config.json").read_text())


@fault("JSON", "values of any kind in any field of a config, in a dict or in the file; keys that are no text")
def config_values() -> Any:
    for field in FIELDS:
        for kind, value in VALUES.items():
            if (field, kind) in PASSES:
                continue
            yield (
                f"{field}: {kind}",
                lambda place, field=field, value=value: lm.from_config({**config_of(place), field: value}),
                field,
            )
    yield "loop", lambda place: lm.from_config({**config_of(place), "more": a_loop()}), "nested"
    for key in (1, None, ("a",), b"a"):
        yield f"key {key!r}", lambda place, key=key: lm.from_config({**config_of(place), key: 1}), "key"


# -- YAML --------------------------------------------------------------------------------------------------------------


def bomb(width: int = 10, depth: int = 12) -> str:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join([*lines, f"data: *a{depth - 1}"])


YAMLS = {
    "nested": "data: " + "[" * DEEP,
    "aliases": bomb(),
    "alias in a scalar": "steps: &a [*a]",
    "unhashable key": "[1]: 2",
    "object as key": "{a: 1}: 2",
    "tag": "data: !!timestamp x",
    "bool": "data: !!bool x",
    "int": "steps: !!int x",
    "python": "data: !!python/name:os.system",
    "binary": "data: !!binary é",
    "merge": "<<: 3",
    "digits": "steps: " + "9" * 5000,
    "1e400": "learning_rate: 1e400",
    "nan": "learning_rate: .nan",
    "null byte": "base: a\0b",
    "beyond int64": f"seed: {HUGE}",
    "below int64": f"seed: {-HUGE}",
    "steps": f"steps: {HUGE}",
    "batch": f"batch_tokens: {HUGE}",
    "seq_len": f"seq_len: {HUGE}",
    "keep": f"keep_checkpoints: {HUGE}",
    "sexagesimal": "steps: " + ":".join(["1"] * 4000),
    "list key": "? [a, b]\n: 1",
}


@fault("YAML", "nesting, alias bombs, keys that cannot be hashed, tags, numbers beyond int64")
def yamls() -> Any:
    for name, text in YAMLS.items():

        def read(place: Place, text: str = text) -> object:
            (place.tmp / "recipe.yaml").write_text(text)
            return FineTuningRecipe.read(place.tmp / "recipe.yaml")

        yield name, read, "recipe.yaml"
    yield "surrogate", lambda place: parse_setting("seed=\udcff", "--set"), "--set"
    for decay in ("nan", ".nan", ".inf", "-0.5"):
        yield (
            f"decay {decay}",
            lambda place, decay=decay: MedusaRecipe().changed(dict([parse_setting(f"decay={decay}", "--set")])),
            "decay",
        )


# -- templates ---------------------------------------------------------------------------------------------------------

LOOP = "{% for i in range(90000) %}{% for j in range(90000) %}"
TEMPLATES = {
    "loops": LOOP + "{% endfor %}{% endfor %}",
    "output": LOOP + "{{ 'x' * 1000 }}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "power of a variable": "{% set n = messages | length * 10 %}{{ n ** n ** n ** n }}",
    "repeat": "{{ 'x' * 10 ** 11 }}",
    "list": "{{ ([1] * 10 ** 11) | length }}",
    "double": "{% set n = namespace(x='xx') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "center": "{{ 'x' | center(10 ** 11) }}",
    "format": "{{ '%099999999999d' % 1 }}",
    "ljust": "{{ 'x'.ljust(10 ** 11) }}",
    "macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "batch": "{{ [1] | batch(10 ** 11, 0) | list }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "attributes": "{{ ''.__class__.__mro__ }}",
    "includes": "{% include 'x' %}",
    "extends": "{% extends 'x' %}",
    "divides": "{{ 1 // 0 }}",
    "raises": "{{ raise_exception('no') }}",
    "raises a number": "{{ raise_exception(7) }}",
    "syntax": "{% for %}",
    "strftime": "{{ strftime_now('%Y' * 10 ** 9) }}",
    "strftime of a number": "{{ strftime_now(7) }}",
    "unknown filter": "{{ 1 | nothing }}",
}
CHAT = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]


@fault("template", "templates that run for ever, take gigabytes or raise", "mine")
def templates() -> Any:
    for name, source in TEMPLATES.items():
        yield name, lambda place, source=source: ChatTemplate(source, name="mine").render(CHAT)
    echo = "{{ messages[0].content }}{{ more }}"
    for name, message in {"object": object(), "loop": a_loop()}.items():
        yield (
            f"variable: {name}",
            lambda place, message=message: ChatTemplate(echo, name="mine").render(
                [{"role": "user", "content": message}], more=message
            ),
        )
