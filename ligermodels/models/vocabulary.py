"""Rows for new tokens in a model: its embedding, LM head, and configs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ligermodels.errors import InputError
from ligermodels.layers.quantized import weight_codes
from ligermodels.models.families import composed
from ligermodels.models.untie import EMBEDDING, HEAD

if TYPE_CHECKING:
    from ligermodels.models.causal_lm import CausalLM

HEAD_BIAS = "head.bias"
SIZE = "vocab_size"


def token_parameters(model: CausalLM) -> dict[str, Tensor]:
    """The parameters with a row for each token, by native name; a tied weight has both its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: parameters[name] for name in (EMBEDDING, HEAD, HEAD_BIAS) if name in parameters}


def grow_vocabulary(model: CausalLM, size: int) -> None:
    """Give a model a larger vocabulary, in place, in its config and export spec too. The new rows are zero.

    Args:
        model: a model that is not sharded, with a plain embedding and head.
        size: number of tokens, at least the present number.

    Raises InputError, before a change, if the head is quantised.
    """
    if weight_codes(model.head) is not None:
        raise InputError(
            f"vocab_size: the adapter has {size:,} tokens and the quantised LM head {model.config.vocab_size:,}; load "
            "the model without a format of its head, load the adapter, and then quantise by lm.quantize(model, kind, "
            "head=kind)"
        )
    made: dict[int, nn.Parameter] = {}  # a tied weight stays one
    for name, old in token_parameters(model).items():
        if id(old) not in made:
            rows = old.new_zeros(size - len(old), *old.shape[1:])
            made[id(old)] = nn.Parameter(torch.cat([old.detach(), rows]), requires_grad=old.requires_grad)
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, made[id(old)])
    padding_idx = model.config.padding_idx
    if model.export_spec is not None:
        spec = model.export_spec  # the config of a whole checkpoint takes changed fields when it is written
        model.export_spec = replace(spec, hf_config={**spec.hf_config, SIZE: size})
        # A pad token that had no row may have one now, and a negative id counts from the new end.
        padding_idx = composed(model.export_spec.hf_config).padding_idx
    embed = model.decoder.embed
    embed.num_embeddings, embed.padding_idx, model.head.out_features = size, padding_idx, size
    model.config = model.decoder.config = replace(model.config, vocab_size=size, padding_idx=padding_idx)
