"""Arguments of `CausalLM.forward`: each has its effect, or is an error that names it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.models.causal_lm import CausalLM

SHARED = "gemma4_text-per-layer-inputs"
"""A model whose last blocks attend to keys and values of earlier blocks, and compute only the needed tokens."""


def make(name: str, **changes: Any) -> lm.CausalLM:
    return lm.from_config({**CONFIGS[name], "initializer_range": 0.3, **changes}, dtype=torch.float64)


def draw(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(3, 100, (batch, length))


# -- token_indices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", ["llama-3.1", SHARED])
@pytest.mark.parametrize("indices", [[2, 2], [9, 5, 9, 0, 9, 5]])
def test_a_token_may_be_selected_several_times(name: str, indices: list[int], dtype: torch.dtype) -> None:
    """Few indices of 16 tokens, or many of them: the two ways in which SHARED attends."""
    for length in (8, 30):
        model, ids = make(name), draw(2, length)
        parameters = [p for p in model.parameters() if p.requires_grad]
        wanted = model(ids).logits.flatten(0, 1)[indices][None]
        found = model(ids, token_indices=torch.tensor(indices, dtype=dtype)).logits
        torch.testing.assert_close(found, wanted)
        factor = torch.randn_like(wanted)
        for one, two in zip(
            torch.autograd.grad((found * factor).sum(), parameters, allow_unused=True),
            torch.autograd.grad((wanted * factor).sum(), parameters, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", ["input_ids", "inputs_embeds"])
def test_a_pass_checks_its_mask(name: str) -> None:
    model = make("llama-3.1")
    inputs = {"input_ids": draw(), "inputs_embeds": torch.ones(2, 8, model.config.hidden_size).double()}
    with pytest.raises(InputError, match="attention_mask: must be whole numbers or bool"):
        model(**{name: inputs[name]}, attention_mask=torch.ones(2, 8, dtype=torch.complex64))


# -- a decoding state --------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(2, 12)}, r"attention_mask: must have the inputs' shape \(2, 8\)"),
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask: must have the inputs' shape"),
        ({"attention_mask": torch.ones(1, 8)}, "attention_mask: must have the inputs' shape"),
        ({"attention_mask": torch.full((2, 8), 2)}, "attention_mask: may hold only 1"),
        ({"attention_mask": torch.full((2, 8), float("nan"))}, "attention_mask: may hold only 1"),
        ({"attention_mask": torch.ones(2, 8, dtype=torch.complex64)}, "attention_mask: must be whole numbers"),
        ({"position_ids": torch.arange(8.0).expand(2, 8)}, "position_ids: must be torch.int64"),
        ({"position_ids": torch.arange(8)}, "position_ids: must have the inputs' shape"),
        ({"position_ids": [0]}, "position_ids: must have the inputs' shape"),
        ({"token_indices": torch.tensor([[0, 1]])}, "token_indices: must be of one dimension"),
        ({"token_indices": torch.tensor([16])}, r"token_indices: must lie in \[0, 16\)"),
        ({"token_indices": torch.tensor([-1])}, "token_indices: must lie in"),
        ({"token_indices": torch.tensor([1.0])}, "token_indices: must be torch.int64"),
        ({"input_ids": draw().double()}, "input_ids: must be int64"),
        ({"input_ids": draw()[..., None]}, "input_ids: must be"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 8, 3).double()}, "inputs_embeds: must be floating"),
        ({"input_ids": None, "inputs_embeds": torch.ones(2, 8, 96)}, "inputs_embeds: (are|must be floating)"),
    ],
)  # fmt: skip
def test_a_prefill_checks_its_inputs(options: dict[str, Any], message: str) -> None:
    model = make("llama-3.1")
    state = model.new_state(2, 20)
    with pytest.raises(InputError, match=message):
        model(**{"input_ids": draw(), "state": state, **options})
    model(draw(), state=state)  # it is empty still


# -- options of the loss -----------------------------------------------------------------------------------------------

LOSS_OPTIONS = (
    "token_weights", "class_weights", "token_scaling", "label_smoothing", "z_loss", "reduction", "memory_budget",
    "num_items_in_batch",
)  # fmt: skip


def test_none_stands_for_the_default() -> None:
    model, ids = make("llama-3.1"), draw()
    heads, hidden = lm.MedusaModel.from_base(model, num_heads=2), torch.randn(16, model.config.hidden_size).double()
    joint = lm.JointMedusa(heads)
    for name in LOSS_OPTIONS:
        option = {name: None}
        assert torch.equal(model(ids, labels=ids, **option).loss, model(ids, labels=ids).loss), name
        assert torch.equal(heads(ids, labels=ids, **option).loss, heads(ids, labels=ids).loss), name
        assert torch.equal(joint(ids, labels=ids, **option).loss, joint(ids, labels=ids).loss), name
        if name != "num_items_in_batch":
            found, wanted = (model.head_loss(hidden, ids.flatten(), **each).loss for each in (option, {}))
            assert torch.equal(found, wanted), name
    wanted = model.log_probs(ids, ids).log_probs
    for name in ("memory_budget", "temperature", "top_k", "top_p", "min_p", "entropy_in_loss", *LOSS_OPTIONS):
        assert torch.equal(model.log_probs(ids, ids, **{name: None}).log_probs, wanted), name
    for name, hint in (
        ("past_key_values", r"give state=model\.new_state"),
        ("output_hidden_states", "give return_hidden_states"),
        ("label", "did you mean 'labels'"),
    ):
        for called in (model, heads):
            with pytest.raises(InputError, match=f"{name}: no such argument; {hint}.*; options of the loss are"):
                called(ids, labels=ids, **{name: None})


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ({"label_smothing": 0.1}, "token_weights, .*label_smoothing, .*return_rank"),
        ({"num_items_in_batch": 3}, "reduction"),
        ({"softcap": 3.0}, "z_loss"),  # of the config
        ({"log_probs": True, "label_smoothing": 0.1}, "temperature, .*return_entropy"),
    ],
    ids=str,
)
def test_options_that_a_head_does_not_have(option: dict[str, Any], known: str) -> None:
    model, ids = make("llama-3.1"), draw()
    hidden = torch.randn(16, model.config.hidden_size).double()
    with pytest.raises(InputError, match=f"^{list(option)[-1]}: no such argument; options of the head are .*{known}"):
        model.head_loss(hidden, ids.flatten(), **option)


@pytest.mark.parametrize("reduction", ["none", "median"])
def test_a_count_of_items_divides_only_a_summed_loss(reduction: str) -> None:
    model, ids = make("llama-3.1"), draw()
    with pytest.raises(InputError, match=f"reduction: '{reduction}' does not go with num_items_in_batch"):
        model(ids, labels=ids, reduction=reduction, num_items_in_batch=7)
    wanted = model(ids, labels=ids, reduction="none").loss.sum() / 7
    for each in ("mean", "sum"):
        torch.testing.assert_close(model(ids, labels=ids, reduction=each, num_items_in_batch=7).loss, wanted)


# -- losses of the routers ---------------------------------------------------------------------------------------------


def mixture_of_unlike_layers(**changes: Any) -> lm.CausalLM:
    """The second of two layers has `changes` in its router."""
    config = make("mixtral", num_hidden_layers=2).config
    first, last = config.blocks
    router = replace(last.mlp.router, **changes)
    return CausalLM(replace(config, blocks=(first, replace(last, mlp=replace(last.mlp, router=router))))).double()


@pytest.mark.parametrize("changes", [{"num_experts": 7}, {"top_k": 1}])
def test_layers_with_different_numbers_of_experts(changes: dict[str, int]) -> None:
    model, ids = mixture_of_unlike_layers(**changes), draw()
    assert model.config.router_aux_loss_coef == model.router_z_loss_coef == 0
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(*shifted(model(ids).logits, ids)))
    assert out.aux_loss is out.router_z_loss is out.tokens_per_expert is None
    model.log_probs(ids, ids)
    model.router_z_loss_coef = 0.1
    with pytest.raises(InputError, match=r"router_z_loss_coef: .* set router_z_loss_coef to 0"):
        model(ids, labels=ids)
    assert torch.equal(model.eval()(ids, labels=ids).loss, out.loss)
    model.config = replace(model.config, router_aux_loss_coef=0.1)
    with pytest.raises(InputError, match=r"router_aux_loss_coef: .* set router_aux_loss_coef to 0"):
        model(ids, labels=ids)


def shifted(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


@pytest.mark.parametrize("training", [True, False])
def test_what_the_loss_of_a_mixture_includes(training: bool) -> None:
    model, ids = make("mixtral", output_router_logits=True, router_aux_loss_coef=0.3).train(training), draw()
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    model.router_z_loss_coef = 0.2
    losses = torch.nn.functional.cross_entropy(*shifted(model(ids).logits, labels), reduction="none")
    count = int((labels[:, 1:] >= 0).sum())
    for options, total in (
        ({}, losses.sum() / count),
        ({"reduction": "sum"}, losses.sum()),
        ({"num_items_in_batch": 50}, losses.sum() / 50),
        ({"reduction": "sum", "num_items_in_batch": 50}, losses.sum() / 50),
    ):
        out = model(ids, labels=labels, **options)
        assert (out.router_z_loss is not None) == training
        of_routers = 0.3 * out.aux_loss + (0.2 * out.router_z_loss if training else 0)
        share = count / 50 if "num_items_in_batch" in options else count if options else 1
        torch.testing.assert_close(out.loss, total + share * of_routers.double(), check_dtype=False)
    each = model(ids, labels=labels, reduction="none").loss[:, :-1].flatten()
    torch.testing.assert_close(each, losses)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-3.1", "mixtral"])
def test_results_of_a_prefill_are_zero_on_padding(name: str) -> None:
    model, ids, lengths = make(name).eval(), draw(), (8, 5)
    mask, routes = (torch.arange(8) < torch.tensor(lengths)[:, None]).long(), name == "mixtral"
    options = {"return_hidden_states": [0, 2], "return_logits": True, "return_last_hidden_state": True}
    state = model.new_state(2, 20)
    found = model(ids, attention_mask=mask, state=state, return_routing=routes, **options)
    wanted = model(ids, attention_mask=mask, return_routing=routes, **options)
    for one, two in zip(found.to_tuple(), wanted.to_tuple(), strict=True):
        torch.testing.assert_close(one, two)
    assert not found.logits[1, 5:].any() and not found.last_hidden_state[1, 5:].any()
    some = torch.tensor([7, 8 + 4])
    state = model.new_state(2, 20)
    few = model(ids, attention_mask=mask, state=state, token_indices=some, return_hidden_states=[2])
    torch.testing.assert_close(few.logits[0], wanted.logits.flatten(0, 1)[some])
    torch.testing.assert_close(few.hidden_states[0], wanted.hidden_states[1])


@pytest.mark.parametrize("value", ["no", 0, 1.0])
def test_a_result_is_requested_by_true_or_false(value: Any) -> None:
    model, ids = lm.from_config(CONFIGS["llama-3.1"]), torch.arange(3, 9)[None]
    for name in ("return_logits", "return_last_hidden_state", "return_predicted", "return_routing"):
        with pytest.raises(InputError, match=f"{name}: must be True or False, got {value!r}"):
            model(ids, labels=ids, **{name: value})
    for name in ("return_logits", "return_last_hidden_state", "return_routing", "return_log_kept_mass"):
        with pytest.raises(InputError, match=f"{name}: must be True or False, got {value!r}"):
            model.log_probs(ids, ids, **{name: value})
