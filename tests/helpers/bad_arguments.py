"""Arguments of other kinds than a function takes: models, plans, recipes, folders; as the faults of bad_calls.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from bad_calls import Place, fault
from torch import nn

import ligermodels as lm
from ligermodels import cli
from ligermodels.adapt.adapter import save_adapter
from ligermodels.integrations import wrap
from ligermodels.training import FineTuningRecipe, MedusaRecipe, MTPRecipe, fine_tune, train_heads, train_mtp

BASE = "base_model_name_or_path"
TAKE_A_MODEL: dict[str, Any] = {
    "quantize": lambda model: lm.quantize(model, "int4"),
    "dequantize": lm.dequantize,
    "float8": lm.float8,
    "add_lora": lm.add_lora,
    "merge_lora": lm.merge_lora,
    "save_adapter": lambda model: save_adapter(model, "never"),
    "load_adapter": lambda model: lm.load_adapter(model, "never"),
    "parallelize": lm.parallelize,
    "wrap": wrap,
    "from_transformers": lm.from_transformers,
    "nativize": lm.nativize,
    "restore": lm.restore,
    "MedusaModel": lm.MedusaModel.from_base,
    "MTPModel": lm.MTPModel.from_base,
    "capture": lambda model: lm.capture(model, torch.ones(1, 2, dtype=torch.long), [1]),
}


class Configured(nn.Linear):
    """A module with a `config`, which is no config of transformers."""

    config = {"model_type": "llama"}  # noqa: RUF012


@fault("argument", "what is no model, where a model is taken")
def models() -> Any:
    others = {"None": None, "a name": "meta-llama/Llama-3.1-8B", "a layer": Configured(2, 2), "a class": lm.CausalLM}
    for function, call in TAKE_A_MODEL.items():
        for name, other in others.items():
            message = "causal language model" if function in ("nativize", "restore") else type(other).__name__
            yield f"{function} of {name}", lambda place, call=call, other=other: call(other), message
        if function not in ("parallelize",):
            yield (
                f"{function} of heads",
                lambda place, call=call: call(lm.MedusaModel.from_base(place.model, 1)),
                "causal language model" if function in ("nativize", "restore") else "MedusaModel",
            )


@fault("argument", "plans, recipes and formats of other types")
def plans() -> Any:
    for plan in ({"tensor": 2}, "tensor", 2, lm.ParallelPlan):
        yield f"parallelize by {plan!r}", lambda place, plan=plan: lm.parallelize(place.model, plan), "plan: "
        yield f"from_config by {plan!r}", lambda p, plan=plan: lm.from_config(p.checkpoint, plan=plan), "plan: "
    for kind in ([], "INT4", torch.int8, 4):
        yield f"quantize to {kind!r}", lambda place, kind=kind: lm.quantize(place.model, kind), "quantize: "
    for exclude in ("mlp", ["nothing"], 3, [3], None, ["*"]):
        yield (
            f"quantize_exclude {exclude!r}",
            lambda p, exclude=exclude: lm.from_pretrained(p.checkpoint, quantize="int4", quantize_exclude=exclude),
            "quantize_exclude: ",
        )
    for head in ([], "INT4", torch.int8, 4, True, ""):
        yield (
            f"quantize_head {head!r}",
            lambda p, head=head: lm.from_pretrained(p.checkpoint, quantize="int4", quantize_head=head),
            "quantize_head: ",
        )
        yield (
            f"quantize_head {head!r} without quantize",
            lambda p, head=head: lm.from_pretrained(p.checkpoint, quantize_head=head),
            "quantize_head: ",
        )
    for run in (fine_tune, train_heads, train_mtp):
        for recipe in (None, {"base": "x"}, "fine-tuning", MedusaRecipe if run is train_heads else MedusaRecipe()):
            yield (
                f"{run.__name__} by {type(recipe).__name__}",
                lambda place, run=run, recipe=recipe: run(recipe, place.tmp / "out"),
                "recipe: ",
            )
    settings: Any = {"lora_rank": 4, "lora_targets": ["nothing"]}
    yield "lora_targets", lambda place: trained(place, place.tmp / "out", **settings), "lora_targets: "


def trained(place: Place, out: Any, **settings: Any) -> object:
    data = place.tmp / "data.txt"
    data.write_text("some words of a text\n" * 200)
    recipe = FineTuningRecipe(base=str(place.checkpoint), data=(str(data),), **settings)
    return fine_tune(recipe.changed({"steps": 1, "seq_len": 16, "batch_tokens": 16}), out, overwrite=True)


def file_there(place: Place) -> Path:
    (place.tmp / "file").write_text("")
    return place.tmp / "file"


def heads_alone(place: Place, form: str, base: str | None) -> Path:
    """A folder of heads, or of an adapter, with the tokenizer of their base model."""
    out = same(place.tmp / "alone", place.checkpoint)
    if form == "adapter":
        save_adapter(lm.add_lora(lm.from_pretrained(place.checkpoint), 2), out, overwrite=True)
    elif form == "mtp":
        lm.MTPModel.from_base(place.model).save_head(out, overwrite=True)
        (out / "config.json").write_text(json.dumps({**json.loads((out / "config.json").read_text()), BASE: base}))
    else:
        lm.MedusaModel.from_base(place.model, 1).export(out, form, base_model=base, overwrite=True)
    return out


@fault("argument", "folders that hold heads, or an adapter, where a model is taken")
def folders_without_a_model() -> Any:
    run = {"data": "never.txt", "steps": 1}
    openers: dict[str, Any] = {
        "from_pretrained": lambda folder, out: lm.from_pretrained(folder),
        "from_config": lambda folder, out: lm.from_config(folder),
        "verify": lambda folder, out: cli.verify.verify(ctx=cast(Any, None), path=folder),
        "plan": lambda folder, out: cli.plan.plan(folder, 1, "80GB", 1024),
        "generate": lambda folder, out: cli.models.find(folder).load(None, "cpu"),
        "fine_tune": lambda folder, out: fine_tune(FineTuningRecipe(base=folder, **run), out),
        "train_heads": lambda folder, out: train_heads(MedusaRecipe(base=folder, **run), out),
        "train_mtp": lambda folder, out: train_mtp(MTPRecipe(base=folder, **run), out),
    }
    for name, call in openers.items():
        for form, base, says in (
            ("vllm", None, "heads"),
            ("tgi", "some/base", "their base model, 'some/base',"),
            ("fasterdecoding", "some/base", "their base model, 'some/base',"),
            ("mtp", "some/base", "their base model, 'some/base',"),
            ("adapter", None, "adapter"),
        ):
            if (name, form) != ("generate", "adapter"):  # opens its base model
                yield (
                    f"{name} of {form}",
                    lambda p, call=call, form=form, base=base: call(str(heads_alone(p, form, base)), p.tmp / "out"),
                    says,
                )


@fault("argument", "folders to write that are none, or hold what is read")
def folders() -> Any:
    write: dict[str, Any] = {
        "save_pretrained": lambda model, folder: model.save_pretrained(folder),
        "save_adapter": lambda model, folder: save_adapter(lm.add_lora(lm.from_config(model.hf_config), 2), folder),
        "heads": lambda model, folder: lm.MedusaModel.from_base(model, 1).save_pretrained(folder),
        "export": lambda model, folder: lm.MedusaModel.from_base(model, 1).export(folder, "vllm"),
        "whole": lambda model, folder: lm.MedusaModel.from_base(model, 1).save_whole(folder),
        "MTP": lambda model, folder: lm.MTPModel.from_base(model).save_pretrained(folder),
        "MTP head": lambda model, folder: lm.MTPModel.from_base(model).save_head(folder),
    }
    for name, call in write.items():
        for folder in (None, 3, "", "a\0b", b"bytes", "~nobody_/x"):
            yield f"{name} to {folder!r}", lambda place, call=call, folder=folder: call(place.model, folder), "folder"
        yield f"{name} to a file", lambda place, call=call: call(place.model, file_there(place)), "is a file"
    yield "a run into None", lambda place: trained(place, None), "folder"
    yield "a run into its base", lambda place: trained(place, place.checkpoint), "base"
    yield (
        "a run into its tokenizer",
        lambda place: trained(place, same(place.tmp / "other", place.checkpoint), tokenizer=str(place.tmp / "other")),
        "tokenizer",
    )


def same(folder: Path, checkpoint: Path) -> Path:
    folder.mkdir()
    for path in checkpoint.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder
