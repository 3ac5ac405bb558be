"""Models to train: ours, and transformers' with what may make it faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import ligermodels as lm
from benchmarks import measure


def ours(config: dict[str, Any], folder: Path | None, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Of a config, or of a checkpoint in a folder."""
    if folder is not None:
        return lm.from_pretrained(folder, dtype=dtype, device=measure.DEVICE)
    return lm.from_config(config, dtype=dtype, device=measure.DEVICE)


def transformers(config: dict[str, Any], folder: Path | None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Of a config, or of a checkpoint in a folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def made(attention: str) -> Any:
        if folder is not None:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        sizes = AutoConfig.for_model(**config)
        return AutoModelForCausalLM.from_config(sizes, dtype=dtype, attn_implementation=attention)

    with torch.device(measure.DEVICE):
        try:
            # It leaves out Gemma 2's softcap of the scores, which random weights hardly notice, and is fastest there.
            model = made("sdpa")
        except ValueError:  # So some versions refuse it to Gemma 2.
            model = made("eager")
    model.config.use_cache = False
    return model.to(measure.DEVICE)


def _liger(config: dict[str, Any], folder: Path | None) -> nn.Module:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    model = transformers(config, folder)
    _apply_liger_kernel_to_instance(model=model)
    return model


def _compiled(make: Callable[..., nn.Module], **options: Any) -> Callable[[dict[str, Any], Path | None], nn.Module]:
    def made(config: dict[str, Any], folder: Path | None) -> nn.Module:
        compiled: Any = torch.compile(make(config, folder), **options)
        return cast(nn.Module, compiled)

    return made


FLOAT8 = "ligermodels + float8"
"""Ours with the linear layers of the blocks in float8."""

PROVIDERS: dict[str, Callable[[dict[str, Any], Path | None], nn.Module]] = {
    "ligermodels": ours,
    FLOAT8: lambda config, folder: lm.float8(cast(lm.CausalLM, ours(config, folder))),
    "ligermodels + torch.compile": _compiled(ours, fullgraph=True),
    "transformers": transformers,
    "transformers + torch.compile": _compiled(transformers),
    "transformers + nativize": lambda config, folder: lm.nativize(transformers(config, folder)),
    "transformers + liger": _liger,
}
"""Liger comes last: it changes transformers for the whole process."""
