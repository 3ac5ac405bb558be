"""The embedding's gradient: rows that are added to the head's gradient, or to zeros, without a wait for the device."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import CONFIGS

import ligermodels as lm
from ligermodels import ops
from ligermodels.layers import Embedding, LMHead

linear_cross_entropy = importlib.import_module("ligermodels.ops.linear_cross_entropy")  # the op has its name
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
    monkeypatch.setattr(Embedding, "shared", lambda self: (None, None))


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
    heads: list[int] = []
    monkeypatch.setattr(
        linear_cross_entropy, "scale_", lambda x, factor: (heads.append(x.data_ptr()), x.mul_(factor))
    )  # called with each gradient that the loss hands out
    model, ids = make("gemma2", device), tokens(device)
    model(ids, labels=ids).loss.backward()
    assert len(heads) == 3 and model.embed.weight.grad.data_ptr() in heads


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
    layer = Embedding(5, 3).to(device)
    by_rows, whole = layer.shared()
    assert by_rows is not None and whole is not None
    x = layer(torch.tensor([1, 1, 4], device=device), by_rows)
    (gradient,) = torch.autograd.grad((x**3).sum() + (whole**3).sum(), layer.weight, create_graph=True)
    count = torch.tensor([0, 2, 0, 0, 1], device=device)[:, None]
    torch.testing.assert_close(gradient, 3 * layer.weight.square() * (1 + count))
    (second,) = torch.autograd.grad(gradient.sum(), layer.weight)
    torch.testing.assert_close(second, 6 * layer.weight * (1 + count))


@pytest.mark.parametrize(
    "option", [{}, {"padding_idx": 2}, {"max_norm": 0.1}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_options_of_torch_keep_their_meaning(device: str, option: dict[str, Any]) -> None:
    torch.manual_seed(0)
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


def test_who_gets_the_weight_of_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not train it, is no parameter, or is being compiled."""
    layer = Embedding(9, 4).to(device)
    assert layer.shared()[0] is not None
    with torch.no_grad():
        assert layer.shared() == (None, None)
    with monkeypatch.context() as within:
        within.setattr(torch.compiler, "is_compiling", lambda: True)
        assert layer.shared() == (None, None)
    layer.requires_grad_(False)
    assert layer.shared() == (None, None)
    weight = layer.weight.detach().clone().requires_grad_()  # as where modules are called with other tensors
    del layer.weight
    layer.weight = weight
    assert layer.shared() == (None, None)


def test_modules_of_others_are_called_as_they_were(device: str) -> None:
    """In the embedding's or head's place, or with hooks."""
    model, ids = make("gemma2", device), tokens(device)

    class Other(LMHead):
        def forward(self, hidden: Tensor, targets: Tensor | None = None, **options: Any) -> Any:
            assert "weight" not in options
            return super().forward(hidden, targets, **options)

    model.head.__class__ = Other
    model(ids, labels=ids).loss.backward()
    model.head.__class__ = LMHead
    seen = []
    model.embed.register_forward_pre_hook(lambda _, args, kwargs: seen.append((len(args), kwargs)), with_kwargs=True)
    model(ids, labels=ids).loss.backward()
    assert seen == [(1, {})]
