"""Per-token log-probabilities and entropies of a model, against the logits of transformers'."""

from typing import Any

import pytest
import torch
from test_nativize import make
from torch import Tensor
from torch.testing import assert_close
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import ligermodels as lm
from ligermodels import losses
from ligermodels.errors import InputError


def inputs() -> dict[str, Tensor]:
    """A batch padded on both sides, half of whose labels are ignored."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 100, (3, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, 8:] = 0, 0
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.4), -100)
    labels[0, 3] = -100  # it would be predicted from padding
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def wanted(hf: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(B, T) each, from all the logits."""
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = hf(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions).logits
    log_p = torch.log_softmax(logits[:, :-1].double(), -1)
    labels = batch["labels"][:, 1:]
    valid = torch.nn.functional.pad(labels != -100, (0, 1))
    found = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    both = [torch.where(valid, torch.nn.functional.pad(x, (0, 1)), 0.0) for x in found]
    return both[0], both[1]


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("name", ["llama-3", "gemma2", "granite", "qwen3"])  # softcap, scaled logits, tied weights
def test_log_probs_and_entropies_and_any_gradient_of_them(name: str, frozen: bool) -> None:
    hf, batch = make(name), inputs()
    model = lm.from_transformers(hf).train()
    theirs, ours = hf.get_input_embeddings().weight, model.decoder.embed.weight
    tied = ours is model.head.weight
    if frozen and not tied:
        hf.lm_head.requires_grad_(False)
        model.head.requires_grad_(False)
    out = model.log_probs(**batch, return_entropy=True, entropy_in_loss=frozen)
    assert out.loss is None and out.logits is None
    log_probs, entropy = wanted(hf, batch)
    assert_close(out.log_probs.double(), log_probs, rtol=1e-4, atol=1e-4)
    assert_close(out.entropy.double(), entropy, rtol=1e-4, atol=1e-4)
    factor = torch.randn(2, *log_probs.shape, generator=torch.Generator().manual_seed(1))
    for use_entropy in (False, True):
        (wanted_gradient,) = torch.autograd.grad(
            (log_probs * factor[0] + (entropy * factor[1] if use_entropy else 0)).sum(), theirs, retain_graph=True
        )
        (gradient,) = torch.autograd.grad(
            (out.log_probs * factor[0] + (out.entropy * factor[1] if use_entropy else 0)).sum(), ours, retain_graph=True
        )
        assert (gradient - wanted_gradient).norm() < 1e-4 * wanted_gradient.norm()


def test_log_probs_of_a_sampler() -> None:
    """With which transformers' warpers would draw the labels of a padded batch, a temperature for each label."""
    hf, batch = make("gemma2"), inputs()
    model = lm.from_transformers(hf)
    temperature = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(2)) + 0.3
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = hf(batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions).logits.double()
    x = logits[:, :-1] / temperature[:, 1:, None]
    kept = x.flatten(0, 1)
    for warper in (TopKLogitsWarper(60), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)):
        kept = warper(None, kept)
    kept, labels = kept.view(x.shape), batch["labels"][:, 1:]
    valid = labels != -100
    wanted = kept.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    options = {"temperature": temperature, "top_k": 60, "top_p": 0.9, "min_p": 0.05}
    out = model.log_probs(**batch, **options, return_log_kept_mass=True)
    assert_close(out.log_probs[:, :-1].double(), wanted.where(valid, 0.0), rtol=1e-4, atol=1e-4)
    mass = (kept.logsumexp(-1) - x.logsumexp(-1)).where(valid, 0.0)
    assert_close(out.log_kept_mass[:, :-1].double(), mass, rtol=1e-4, atol=1e-4)
    assert wanted[valid].isneginf().any() and wanted[valid].isfinite().any() and not out.log_kept_mass.requires_grad
    ours, theirs = model.decoder.embed.weight, hf.get_input_embeddings().weight
    for log_probs, weight in ((out.log_probs, ours), (wanted.where(valid, 0.0), theirs)):
        log_probs.where(log_probs.isfinite(), 0.0).sum().backward()
        assert weight.grad.isfinite().all()
    assert (ours.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm()


def test_they_are_the_loss_and_an_objective_trains_the_model() -> None:
    hf, batch = make("llama-3"), inputs()
    model = lm.from_transformers(hf)
    log_probs = model.log_probs(**batch).log_probs
    assert_close(-log_probs, model(**batch, reduction="none").loss)
    assert_close(-log_probs.sum() / model.num_targets(batch["labels"]), model(**batch).loss)

    pair = {name: x[[0, 1, 2, 2]] for name, x in batch.items()}  # the third is rejected twice
    mask = torch.nn.functional.pad(pair["labels"][:, 1:] != -100, (0, 1))
    with torch.no_grad():
        reference = model.log_probs(**pair).log_probs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        result = losses.dpo_loss(model.log_probs(**pair).log_probs, reference, mask, beta=1.0)
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(result.loss))
    assert found[0] == pytest.approx(0.6931, abs=1e-4) and found[2] < found[1] < found[0]


@pytest.mark.parametrize("packed", [False, True])
def test_predicted_tokens_and_the_z_loss_beside_the_loss(packed: bool) -> None:
    """Of a padded batch, half of whose labels are ignored: of transformers' logits; and beside log-probabilities."""
    hf, batch = make("gemma2"), inputs()
    model = lm.from_transformers(hf)
    if packed:
        batch = {"input_ids": batch["input_ids"][2:], "labels": batch["labels"][2:]}
    mask = batch.get("attention_mask", torch.ones_like(batch["labels"]))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = hf(batch["input_ids"], attention_mask=mask, position_ids=positions).logits.double()
    valid = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
    predicted = logits.argmax(-1).masked_fill(~valid, -1)
    z_losses = torch.where(valid, 0.1 * logits.logsumexp(-1).square(), 0.0)
    plain = model(**batch, reduction="none").loss
    asked = {"z_loss": 0.1, "return_z_loss": True, "return_predicted": True}
    for options, z_loss, loss in (
        ({}, z_losses.sum() / valid.sum(), plain.sum() / valid.sum()),
        ({"reduction": "sum"}, z_losses.sum(), plain.sum()),
        ({"num_items_in_batch": 7}, z_losses.sum() / 7, plain.sum() / 7),
        ({"reduction": "none"}, z_losses, plain),
    ):
        out = model(**batch, **asked, **options)
        assert torch.equal(out.predicted, predicted)
        assert_close(out.z_loss.double(), z_loss, rtol=1e-4, atol=1e-5)
        assert_close(out.loss - out.z_loss, loss, rtol=1e-4, atol=1e-5)
        assert out.loss.requires_grad and not out.z_loss.requires_grad
    out = model.log_probs(**batch, return_predicted=True)
    assert torch.equal(out.predicted, predicted) and out.entropy is None and out.z_loss is None
    assert model(**batch).predicted is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": None}, "^labels: log-probabilities are of labels"),
        ({"return_z_loss": True}, "return_z_loss: is an option of the loss"),
        ({"labels": None, "return_predicted": True}, "return_predicted: is of a loss, which needs labels"),
        ({"class_weights": torch.ones(9)}, "class_weights: is an option of the loss"),
        ({"label_smoothing": 0.1}, "label_smoothing: is an option of the loss"),
        ({"num_items_in_batch": 3}, "num_items_in_batch: is an option of the loss"),
        ({"typical_p": 0.5}, "typical_p: no such argument; options of log-probabilities: .*top_p"),
        ({"temperature": torch.ones(3)}, r"temperature: must be a number or of the shape of labels, \(3, 11\)"),
        ({"temperature": torch.ones(3, 11).long()}, r"of the shape of labels, \(3, 11\), floating.*; got torch.int64"),
        ({"return_log_probs": False, "top_p": 0.5}, "top_p: no such argument"),
        ({"entropy_in_loss": True}, "entropy_in_loss goes with return_entropy"),
        ({"return_log_probs": False, "entropy_in_loss": True}, "entropy_in_loss: no such argument"),
        ({"return_log_probs": False, "return_entropy": True}, "return_entropy: goes with return_log_probs"),
    ],
)
def test_what_does_not_go_together_is_an_error(arguments: dict[str, Any], message: str) -> None:
    model = lm.from_transformers(make("llama-3"))
    with pytest.raises(InputError, match=message):
        model(**{**inputs(), "return_log_probs": True, **arguments})
    with pytest.raises(InputError, match="return_z_loss: is of a loss, which needs labels"):
        model(last_hidden_state=torch.zeros(1, 2, model.config.hidden_size), return_z_loss=True)
    with pytest.raises(InputError, match="return_log_probs: is of labels, not of last_hidden_state"):
        model(last_hidden_state=torch.zeros(1, 2, model.config.hidden_size), return_log_probs=True)


@pytest.mark.parametrize("few", [False, True], ids=["all labels", "few labels"])
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_the_temperature_of_a_label_is_named_by_its_place(bad: float, few: bool) -> None:
    """Of the batch, which is padded: row 2 is the first with a bad one at a label. Others may be anything."""
    model, batch = lm.from_transformers(make("llama-3")), inputs()
    if few:
        batch["labels"][:, :-4] = -100
    temperature = torch.ones(batch["labels"].shape)
    temperature[:, 0] = bad
    temperature[(batch["labels"] == -100) | (batch["attention_mask"] == 0)] = bad
    fine = model.log_probs(**batch, temperature=temperature).log_probs
    assert torch.equal(fine, model.log_probs(**batch).log_probs)
    row, column = [i.tolist() for i in ((batch["labels"] != -100) & (batch["attention_mask"] == 1)).nonzero()][-1]
    temperature[row, column] = bad
    with pytest.raises(InputError, match=rf"^temperature: .*finite, but temperature\[{row}, {column}\] is {bad}"):
        model.log_probs(**batch, temperature=temperature)


def test_keywords_that_methods_replace() -> None:
    model, batch = lm.from_transformers(make("llama-3")), inputs()
    with pytest.warns(DeprecationWarning, match=r"return_log_probs=True\) is now model.log_probs") as record:
        old = model(**batch, return_log_probs=True, return_entropy=True)
    assert record[0].filename == __file__
    new = model.log_probs(**batch, return_entropy=True)
    assert torch.equal(old.log_probs, new.log_probs) and torch.equal(old.entropy, new.entropy)
    hidden, targets = torch.randn(1, 3, model.config.hidden_size), torch.tensor([[4, -100, 6]])
    with pytest.warns(DeprecationWarning, match=r"model.logits\(hidden\) or model.head_loss"):
        assert torch.equal(model(last_hidden_state=hidden).logits, model.logits(hidden))
        old = model(last_hidden_state=hidden, targets=targets, return_z_loss=True, z_loss=0.1)
    result = model.head_loss(hidden, targets, return_z_loss=True, z_loss=0.1)
    assert torch.equal(old.loss, result.loss) and torch.equal(old.z_loss, result.z_loss) and result.ranks is None
