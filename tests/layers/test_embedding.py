"""The embedding's gradient, tied to the head or not, and its options."""

from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.layers import Embedding

TIED = {"llama-3.1": False, "gemma2": True}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.kernels])])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(name: str, device: str, dtype: torch.dtype = torch.float32) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config({**CONFIGS[name], "tie_word_embeddings": TIED[name]}, dtype=dtype, device=device)


def tokens(device: str | torch.device) -> Tensor:
    ids = torch.randint(3, 100, (2, 21), device=device)
    ids[:, 5:15] = 7  # many times
    return ids


@pytest.mark.parametrize("uses", ["loss", "loss and logits", "logits", "hidden states", "head"])
@pytest.mark.parametrize("name", TIED)
def test_gradients_are_those_of_inputs_and_head(device: str, name: str, uses: str) -> None:
    """Of two passes added up: of the inputs, row by row, and, where the weight is tied, of the head."""
    model = make(name, device)
    embed, head = model.decoder.embed, model.head
    wanted = torch.zeros_like(embed.weight)
    for _ in range(2):
        ids = tokens(device)
        embeds = embed(ids).detach()
        outer = torch.randn_like(embeds) if uses == "head" else embeds.requires_grad_()

        def call(ids: Tensor = ids, **inputs: Tensor) -> Tensor:
            if uses == "hidden states":
                return model(**inputs, return_last_hidden_state=True).last_hidden_state.square().sum()
            if uses == "logits":
                return model(**inputs).logits.logsumexp(-1).sum()
            return model(**inputs, labels=ids, return_logits=uses == "loss and logits").loss

        operands = [outer] * (uses != "head") + [head.weight] * (uses != "hidden states")
        found = torch.autograd.grad(call(inputs_embeds=outer), operands)
        if TIED[name] and uses != "hidden states":
            wanted += found[-1]
        if uses != "head":
            scale = 1.0 if embed.scale is None else torch.tensor(embed.scale)
            wanted.index_add_(0, ids.flatten(), found[0].flatten(0, 1) * scale)
        call(**({"inputs_embeds": outer.detach()} if uses == "head" else {"input_ids": ids})).backward()
    if uses == "head" and not TIED[name]:
        assert embed.weight.grad is None
    else:
        assert embed.weight.grad.layout == torch.strided
        torch.testing.assert_close(embed.weight.grad, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.parametrize("pad_token_id", [None, 7])
def test_padding_token_gets_no_gradient_from_the_inputs(pad_token_id: int | None) -> None:
    """As in transformers: torch's `padding_idx`."""
    model = lm.from_config({**CONFIGS["llama-3.1"], "pad_token_id": pad_token_id}, dtype=torch.float32)
    ids = tokens("cpu")
    model(ids, labels=ids).loss.backward()
    assert model.decoder.embed.weight.grad[7].any() == (pad_token_id is None)
    assert model.decoder.embed.weight.grad[ids[0, 0]].any() and model.head.weight.grad[7].any()
    assert model.decoder.embed.weight[7].any() == (pad_token_id is None)  # and begins as zero


@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("name", TIED)
def test_the_backward_pass_does_not_synchronise(name: str) -> None:
    model, ids = make(name, "cuda", torch.bfloat16), tokens("cuda")
    for _ in range(2):  # kernels are compiled in the first
        loss = model(ids, labels=ids).loss
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "option", [{}, {"padding_idx": 2}, {"max_norm": 0.1}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_options_of_torch_keep_their_meaning(device: str, option: dict[str, Any]) -> None:
    ours, theirs = Embedding(9, 4), torch.nn.Embedding(9, 4)
    theirs.load_state_dict(ours.state_dict())
    for layer in (ours, theirs):
        layer.to(device)
        for name, value in option.items():
            setattr(layer, name, value)
        layer(torch.tensor([[2, 3], [2, 5]], device=device)).square().sum().backward()
    found, wanted = ours.weight.grad, theirs.weight.grad
    assert found.layout == wanted.layout
    torch.testing.assert_close(found.to_dense(), wanted.to_dense())


def test_scale_is_rounded_to_the_dtype_of_the_weight() -> None:
    """As Gemma's is: sqrt(3072) is 55.4256, in bfloat16 55.5."""
    layer = Embedding(9, 4, scale=55.4256).bfloat16()
    assert torch.equal(layer(torch.tensor([3])), layer.weight[3:4] * 55.5)
