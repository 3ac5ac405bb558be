"""The parameters that Muon orthogonalises, and the rows of each of their matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.convert.mappings import WeightMapping
from ligermodels.layers import Block, LMHead

Rows = tuple[Tensor, ...]
"""Row indices of each matrix in a parameter (rows, columns), or in each of the stacked (n, rows, columns)."""


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, Rows]:
    """The weights of a model that Muon orthogonalises: hidden matrices.

    These are the weights of linear layers, the stacked weights of experts, and A and B of LoRA. Left to AdamW are
    embeddings, language-model heads, routers, convolutions, and everything with a single row or column.

    Newton-Schulz sees the matrices of the usual layout of Hugging Face's checkpoints: `q_proj`, `k_proj` and `v_proj`
    of a fused q/k/v weight one by one, `gate_proj` and `up_proj` of a fused gate/up weight, and each expert's.

    Args:
        model: a native model, or one that contains it; make it sharded before.

    Returns:
        Parameter that requires a gradient -> row indices of its matrices.
    """
    return {p: rows for p, rows in _matrices(model) if p.requires_grad and min(p.shape[-2:]) > 1}


def _matrices(model: nn.Module) -> Iterator[tuple[nn.Parameter, Rows]]:
    mappings = _mappings(model)
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            is_linear = key == "weight" and isinstance(module, nn.Linear) and not isinstance(module, LMHead)
            is_stacked = parameter.ndim == 3 and parameter.shape[-2] > 1
            if (of_parts := getattr(module, "matrix_rows", None)) is not None:
                parts = of_parts(key)
                yield parameter, torch.arange(sum(parts)).split(parts)
            elif is_linear or is_stacked:
                yield parameter, _rows(parameter, mappings.get(f"{name}.{key}"))


def _mappings(model: nn.Module) -> dict[str, WeightMapping]:
    """Name of a parameter -> its mapping in the usual layout, for each block in `model`."""
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    return {
        mapping.target: mapping
        for name, block in blocks.items()
        for mapping in block.config.weight_mappings(block.hidden_size, name, "block", {})
    }


def _rows(parameter: nn.Parameter, mapping: WeightMapping | None) -> Rows:
    """The rows of each matrix; all rows together if no mapping divides the rows."""
    *stack, rows, _ = parameter.shape
    every = torch.arange(rows)
    if mapping is None:
        return (every,)
    numbers: Any = torch.arange(int(torch.tensor(stack).prod()) * rows if stack else rows)
    parts: dict[str, list[Tensor]] = {}
    try:
        count = 0
        for view in mapping.views:
            if count == rows:  # the first of a stack is complete
                break
            seen = view.view(numbers.view(*stack, rows, 1) if stack else numbers).flatten()
            seen = seen[seen < rows]
            count += len(seen)
            parts.setdefault(view.source, []).append(seen)
    except (IndexError, RuntimeError):  # views of columns
        return (every,)
    matrices = [torch.cat(part).sort().values for part in parts.values()]
    matrices = [part for part in matrices if len(part)]
    is_division = torch.equal(torch.cat(matrices).sort().values, every)
    return tuple(matrices) if is_division else (every,)
