"""Models to train: ours, and transformers with its accelerators."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks.timing import measure

WITH_A_TOWER: dict[str, dict[str, Any]] = {
    "muse_glimmer_text": {
        "model_type": "muse_glimmer",
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_hidden_layers": 1,
        },
    },
}  # fmt: skip
"""Text models that transformers has only behind a vision tower -> config.json of the whole, with a small tower."""


def ours(config: dict[str, Any], folder: Path | None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Our model.

    Args:
        config: Config of the model.
        folder: Folder of a checkpoint; random weights if None.
        dtype: Dtype of the parameters.
    """
    if folder is not None:
        return lm.from_pretrained(folder, dtype=dtype, device=measure.DEVICE)
    return lm.from_config(config, dtype=dtype, device=measure.DEVICE)


def transformers(config: dict[str, Any], folder: Path | None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model of transformers.

    Args:
        config: Config of the model.
        folder: Folder of a checkpoint; random weights if None.
        dtype: Dtype of the parameters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    whole = WITH_A_TOWER.get(config["model_type"])
    auto = AutoModelForCausalLM if whole is None else AutoModelForImageTextToText

    def made(attention: str) -> Any:
        if folder is not None:
            return auto.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        sizes = AutoConfig.for_model(**(config if whole is None else {**whole, "text_config": config}))
        return auto.from_config(sizes, dtype=dtype, attn_implementation=attention)

    with torch.device(measure.DEVICE):
        try:
            # SDPA ignores Gemma 2's softcap, with hardly any effect on random weights, and is fastest there.
            model = made("sdpa")
        except ValueError:  # some versions refuse SDPA for Gemma 2
            model = made("eager")
    model.config.use_cache = False
    return model.to(measure.DEVICE)


def _liger(config: dict[str, Any], folder: Path | None) -> nn.Module:
    return _with_liger(transformers(config, folder))


def _with_liger(model: Any, **kernels: bool) -> nn.Module:
    """Apply Liger's kernels to a model of transformers, except kernels that are False."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, **kernels)
    return cast(nn.Module, model)


def _torchao(config: dict[str, Any], folder: Path | None) -> nn.Module:
    """transformers with the linear layers of the blocks in torchao's float8, with dynamic tensor-wise scales.

    torchao's own filter keeps small layers in bf16, because float8 is slower there. Each block is compiled for static
    shapes, which fuses the casts with their neighbours. Liger's linear cross entropy saves the memory of the logits.
    """
    float8 = importlib.import_module("torchao.float8")  # an optional peer
    model = transformers(config, folder)
    recipe = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    if measure.DEVICE == "cpu":
        recipe = replace(recipe, emulate=True)  # a CPU has no float8 GEMM: multiply the rounded values
    large = float8._auto_filter_for_recipe("tensorwise", filter_fqns=["lm_head"])
    float8.convert_to_float8_training(model, module_filter_fn=large, config=recipe)
    for block in model.model.layers:
        block.compile(dynamic=False)
    return _with_liger(model, **dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu"), False))


def _compiled(make: Callable[..., nn.Module], **options: Any) -> Callable[[dict[str, Any], Path | None], nn.Module]:
    def made(config: dict[str, Any], folder: Path | None) -> nn.Module:
        compiled: Any = torch.compile(make(config, folder), **options)
        return cast(nn.Module, compiled)

    return made


FLOAT8 = "ligermodels + float8"
"""Our model with the linear layers of the blocks in float8."""
TORCHAO = "transformers + torchao float8 + torch.compile"
"""transformers with the linear layers of the blocks in float8."""

PROVIDERS: dict[str, Callable[[dict[str, Any], Path | None], nn.Module]] = {
    "ligermodels": ours,
    FLOAT8: lambda config, folder: lm.float8(cast(lm.CausalLM, ours(config, folder))),
    "ligermodels + torch.compile": _compiled(ours, fullgraph=True),
    "transformers": transformers,
    "transformers + torch.compile": _compiled(transformers),
    "transformers + nativize": lambda config, folder: lm.nativize(transformers(config, folder)),
    TORCHAO: _torchao,
    "transformers + liger": _liger,
}
"""Liger is last, because it changes transformers for the whole process."""
