"""Training batches without any label, on passes of a nativized model that run transformers' code."""

from typing import Any

import pytest
import torch
from test_nativize import TOKENS, batch, loss_and_gradients, make
from torch.testing import assert_close

import ligermodels as lm

PASSES: dict[str, dict[str, Any]] = {
    "native": {},
    "cache": {"use_cache": True},
    "hidden states": {"output_hidden_states": True},
    "mask by pair": {"attention_mask": torch.zeros(2, 1, TOKENS, TOKENS)},
    "padding between tokens": {"attention_mask": torch.ones(2, TOKENS).index_fill(1, torch.tensor([7, 8]), 0).long()},
    "router logits": {"output_router_logits": True},
    "tuple": {"return_dict": False},
    "hook": {},
}


@pytest.mark.parametrize("case", PASSES)
@pytest.mark.parametrize("name", ["llama-3", "mixtral", "gemma3_text", "qwen3_5_text"])
def test_the_loss_and_the_gradients_are_zero(name: str, case: str) -> None:
    """Of transformers' own model the loss is NaN. With labels the losses are transformers'."""
    plain, hf, inputs = make(name), lm.nativize(make(name)), batch()
    if case == "router logits" and name != "mixtral":
        pytest.skip("no router")
    if case == "hook":
        for model in (plain, hf):
            model.model.register_forward_hook(lambda *_: None)
    given = {**inputs, **PASSES[case]}
    assert_close(hf.train()(**given)[0], plain.train()(**given)[0], rtol=1e-5, atol=1e-5)
    if case == "tuple":
        return
    given["labels"] = torch.full((2, TOKENS), -100)
    for items in (None, torch.tensor(0), torch.tensor(9)):
        out, gradients = loss_and_gradients(hf, **given, num_items_in_batch=items)
        aux = getattr(out, "aux_loss", None) if case == "router logits" else None
        assert_close(out.loss.detach(), torch.zeros(()) if aux is None else hf.router_aux_loss_coef * aux.detach())
        assert gradients and all(bool(g.isfinite().all()) for g in gradients.values())
        assert aux is not None or not any(bool(g.any()) for g in gradients.values())
