"""The loss of an evaluation: the cross entropy of each target, whose exponential is the perplexity."""

import math
from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.data.batches import Batch, count_targets, on_device
from ligermodels.errors import InputError
from ligermodels.evaluation import evaluate, evaluate_kl, perplexity


@pytest.mark.parametrize("name", ["llama-3", "mixtral"])
def test_losses_of_routers_are_no_part_of_it(name: str) -> None:
    """Of batches with padding and without a target too; as `evaluate_kl` has it."""
    experts = {"output_router_logits": True, "router_aux_loss_coef": 0.5} if name == "mixtral" else {}
    model = lm.from_config(CONFIGS[name] | experts, dtype=torch.float32)
    ids = torch.randint(3, 131, (2, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids % 3 == 0, -100)
    labels[:, -4:] = -100
    mask = torch.ones_like(ids)
    mask[:, -4:] = 0
    batches = [
        Batch({"input_ids": ids, "labels": labels}),
        Batch({"input_ids": ids, "labels": labels, "attention_mask": mask}),
        Batch({"input_ids": ids, "labels": torch.full_like(ids, -100)}),
    ]
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, :-1].flatten(0, 1)
    wanted = cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100).item()
    found = evaluate(model.train(), batches)
    assert model.training and found == pytest.approx(wanted, rel=1e-6)
    assert evaluate_kl(model, model, batches).loss == pytest.approx(wanted, rel=1e-6)
    assert perplexity(found) == pytest.approx(math.exp(wanted))
    assert evaluate(model, batches[2:]) == 0


def test_what_is_no_model_or_no_batch_is_named() -> None:
    model, ids = lm.from_config(CONFIGS["llama-3"]), torch.arange(3, 40)[None]
    batch = Batch({"input_ids": ids, "labels": ids})
    for batches, message in (
        (batch, "batches: must be a list of dicts of tensors, got 'input_ids' as a batch"),
        ([ids], "batches: must be a list of dicts of tensors, got tensor"),
        ([{**batch, "labels": [1, 2]}], r"labels: a batch has tensors alone, got \[1, 2\]"),
    ):
        for call in (partial(evaluate, model), partial(evaluate_kl, model, model), partial(count_targets, model)):
            with pytest.raises(InputError, match=message):
                call(batches)
    with pytest.raises(InputError, match="evaluate: takes a native CausalLM, got a Linear"):
        evaluate(torch.nn.Linear(2, 2), [batch])  # type: ignore[arg-type]
    other = lm.from_config({**CONFIGS["llama-3"], "vocab_size": 200})
    with pytest.raises(InputError, match="reference: has a vocabulary of 200 tokens, and the model one of"):
        evaluate_kl(model, other, [batch])
    assert on_device(batch, "cpu").keys() == batch.keys()


def test_models_that_torch_compile_wraps() -> None:
    model, ids = lm.from_config(CONFIGS["llama-3"]), torch.arange(3, 40)[None]
    batches, compiled = [Batch({"input_ids": ids, "labels": ids})], torch.compile(model, backend="eager")
    assert evaluate(compiled, batches) == pytest.approx(evaluate(model, batches))
    assert evaluate_kl(compiled, model, batches).kl == pytest.approx(0, abs=1e-6)
