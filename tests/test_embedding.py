"""The embedding's gradient: rows that are added to the head's gradient, or to zeros, without a wait for the device."""

import pytest
import torch
from torch import Tensor
from zoo import CONFIGS

import ligermodels as lm
from ligermodels import ops
from ligermodels.layers import Embedding, embedding

TIED = {"llama-3.1": False, "gemma2": True}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where layers take the way of the kernels; on the CPU the ops themselves do not."""
    monkeypatch.setattr(ops, "use_kernels", lambda *_: True)
    return str(request.param)


def make(name: str, device: str, dtype: torch.dtype = torch.float32) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config({**CONFIGS[name], "tie_word_embeddings": TIED[name]}, dtype=dtype, device=device)


def tokens(device: str | torch.device) -> Tensor:
    ids = torch.randint(3, 100, (2, 21), device=device)
    ids[:, 5:15] = 7  # padding, say
    return ids


def as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ligermodels.layers.embedding.shared", "ligermodels.model.shared"):
        monkeypatch.setattr(module, lambda weight: (weight, weight))


def gradients(model: lm.CausalLM, uses: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for _ in range(2):  # the second adds to the first
        ids = tokens(model.device)
        if uses == "hidden states":
            model.hidden_states(ids).square().sum().backward()
        elif uses == "head":
            embeds = torch.randn(*ids.shape, model.config.hidden_size, device=model.device)
            model(inputs_embeds=embeds, labels=ids).loss.backward()
        elif uses == "logits":
            model(ids).logits.logsumexp(-1).sum().backward()
        else:
            model(ids, labels=ids, return_logits=uses == "loss and logits").loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("uses", ["loss", "loss and logits", "logits", "hidden states", "head"])
@pytest.mark.parametrize("name", TIED)
def test_gradients(device: str, name: str, uses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gradients(make(name, device), uses)
    as_torch_does(monkeypatch)
    wanted = gradients(make(name, device), uses)
    assert found.keys() == wanted.keys() and ("embed.weight" in found) == (TIED[name] or uses != "head")
    for parameter, gradient in wanted.items():
        assert found[parameter].layout == torch.strided
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


def test_no_second_matrix(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied weight's gradient is the head's, to which rows were added."""
    added, add_rows = [], ops.add_rows
    monkeypatch.setattr(ops, "add_rows", lambda x, *rows: (added.append(x.data_ptr()), add_rows(x, *rows)))
    model, ids = make("gemma2", device), tokens(device)
    model(ids, labels=ids).loss.backward()
    assert added == [model.embed.weight.grad.data_ptr()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", TIED)
def test_the_backward_pass_waits_for_nothing(name: str) -> None:
    model, ids = make(name, "cuda", torch.bfloat16), tokens("cuda")
    for _ in range(2):  # kernels are compiled in the first
        loss = model(ids, labels=ids).loss
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_gradients_of_gradients(device: str) -> None:
    weight = torch.nn.Parameter(torch.randn(5, 3, device=device))
    by_rows, whole = embedding.shared(weight)
    assert by_rows is not weight
    ids = torch.tensor([1, 1, 4], device=device)
    x = torch.nn.functional.embedding(ids, by_rows, sparse=True)
    (gradient,) = torch.autograd.grad((x**3).sum() + (whole**3).sum(), weight, create_graph=True)
    count = torch.tensor([0, 2, 0, 0, 1], device=device)[:, None]
    torch.testing.assert_close(gradient, 3 * weight.square() * (1 + count))
    (second,) = torch.autograd.grad(gradient.sum(), weight)
    torch.testing.assert_close(second, 6 * weight * (1 + count))


def test_options_of_torch_keep_their_meaning(device: str) -> None:
    layer = Embedding(9, 4).to(device)
    layer.padding_idx = 2
    layer(torch.tensor([[2, 3], [2, 3]], device=device)).sum().backward()
    assert layer.weight.grad.sum(1).tolist() == [0, 0, 0, 8, 0, 0, 0, 0, 0]
    layer.requires_grad_(False)
    assert not layer(torch.tensor([1], device=device)).requires_grad
