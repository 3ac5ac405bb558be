"""What state dicts of draft heads hold, and weights of tokens that the heads' means refuse."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_eagle3 import ids_of, target
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from two_ranks import in_two_ranks

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.speculative.draft_vocabulary import DraftVocabulary

HEADS: list[Any] = [lm.Eagle3Model, lm.DFlashModel, lm.DSparkModel]
IDS = ids_of(12)


@pytest.fixture(scope="module")
def base() -> lm.CausalLM:
    return target()


def of_tokens(heads: Any, base: lm.CausalLM, tokens: list[int] | None) -> Any:
    size = base.config.vocab_size
    return heads.from_base(base, vocabulary=None if tokens is None else DraftVocabulary(torch.tensor(tokens), size))


@pytest.mark.parametrize("heads", HEADS)
def test_a_state_dict_has_the_draft_tokens(heads: Any, base: lm.CausalLM) -> None:
    """The weights for other tokens have the same shapes, and propose other tokens."""
    model, other = of_tokens(heads, base, [1, 4, 5, 9]), of_tokens(heads, base, [0, 4, 6, 9])
    state = model.state_dict()
    with torch.no_grad():
        wanted = model(IDS, labels=IDS).loss
        assert not torch.equal(other(IDS, labels=IDS).loss, wanted)
        other.load_state_dict(state)
        assert torch.equal(other(IDS, labels=IDS).loss, wanted)
    assert other.vocabulary.tokens.tolist() == [1, 4, 5, 9]
    state.pop("vocabulary.tokens")
    with pytest.raises(RuntimeError, match=r"Missing key.*vocabulary\.tokens"):
        other.load_state_dict(state)


@pytest.mark.parametrize("heads", HEADS)
def test_a_state_dict_for_other_numbers_of_draft_tokens_is_refused(heads: Any, base: lm.CausalLM) -> None:
    model, fewer, whole = (of_tokens(heads, base, tokens) for tokens in ([1, 4, 5, 9], [1, 4, 5], None))
    with pytest.raises(RuntimeError, match=r"size mismatch for vocabulary\.tokens"):
        fewer.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*vocabulary\.tokens"):
        whole.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*vocabulary\.tokens"):
        model.load_state_dict(whole.state_dict())
    assert "vocabulary.tokens" not in whole.state_dict()
    whole.load_state_dict(whole.state_dict())


@pytest.mark.parametrize("bad", [torch.tensor([5, 4, 1, 9]), torch.tensor([1, 4, 5, 99]), torch.tensor([1.0, 4, 5, 9])])
def test_a_state_dict_with_other_values_than_tokens_is_refused(base: lm.CausalLM, bad: torch.Tensor) -> None:
    """Such as a state dict whose tensors were all cast to bfloat16, which rounds ids."""
    model = of_tokens(lm.Eagle3Model, base, [0, 4, 6, 9])
    with pytest.raises(RuntimeError, match=r"vocabulary\.tokens: draft tokens: must "):
        model.load_state_dict({**model.state_dict(), "vocabulary.tokens": bad})


@pytest.mark.parametrize("heads", HEADS)
def test_checkpoints_that_are_loaded_in_place_change_one_head(heads: Any, base: lm.CausalLM, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` writes into the tensors of a state dict."""
    model, vocabulary = of_tokens(heads, base, [1, 4, 5, 9]), DraftVocabulary(torch.tensor([0, 4, 6, 9]), 61)
    first, second = (heads.from_base(base, vocabulary=vocabulary) for _ in range(2))
    dcp.save({"model": model}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"model": first}, checkpoint_id=tmp_path, no_dist=True)
    assert first.vocabulary.tokens.tolist() == [1, 4, 5, 9]
    assert second.vocabulary.tokens.tolist() == vocabulary.tokens.tolist() == [0, 4, 6, 9]


@pytest.mark.parametrize("heads", HEADS)
def test_moves_keep_the_draft_tokens(heads: Any) -> None:
    model = of_tokens(heads, target(), [1, 4, 5, 9])
    model.to("meta").to_empty(device="cpu").half()
    assert model.vocabulary.tokens.tolist() == copy.deepcopy(model).vocabulary.tokens.tolist() == [1, 4, 5, 9]


def _from_rank_0(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    """FSDP2's way to load a checkpoint: rank 0 has read it, and the other ranks receive their shards."""
    model, other = (of_tokens(lm.Eagle3Model, target(), tokens) for tokens in ([1, 4, 5, 9], [0, 4, 6, 9]))
    fully_shard(other, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, model.state_dict() if rank == 0 else {}, options=options)
    assert other.vocabulary.tokens.tolist() == [1, 4, 5, 9]
    full = get_model_state_dict(other, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert rank or full["vocabulary.tokens"].tolist() == [1, 4, 5, 9]


def test_all_ranks_receive_the_draft_tokens(tmp_path: Path) -> None:
    in_two_ranks(_from_rank_0, tmp_path)


@pytest.mark.parametrize("heads", HEADS)
def test_parameters_that_the_loss_does_not_train_are_named(heads: Any) -> None:
    model = heads.from_base(target(), vocabulary=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS, labels=IDS).loss.backward()
    lm.add_lora(model.base, r=2)  # as requires_grad_(True) of the whole model
    with pytest.warns(UserWarning, match=f"^{model.kind}: parameters of the base model require gradients") as caught:
        model(IDS, labels=IDS).loss.backward()
    assert caught[0].filename == __file__
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(IDS, labels=IDS)


@pytest.mark.parametrize("heads", [*HEADS, lm.MTPModel, lm.MedusaModel])
def test_heads_on_a_frozen_adapter_learn_without_its_dropout(heads: Any) -> None:
    """From the states that the model has in use."""
    adapted = lm.add_lora(target(), r=2, lora_dropout=0.5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model = heads.from_base(adapted)
    assert torch.equal(model.train()(IDS, labels=IDS).loss, model.eval()(IDS, labels=IDS).loss)
    adapted.requires_grad_()
    assert not torch.equal(model.train()(IDS, labels=IDS).head_losses, model.eval()(IDS, labels=IDS).head_losses)


@pytest.mark.parametrize("heads", [*HEADS, lm.MTPModel, lm.MedusaModel])
def test_a_mean_of_heads_by_negative_weights_is_refused(heads: Any, base: lm.CausalLM) -> None:
    model = heads.from_base(base)
    weights = torch.linspace(-1, 1, IDS.numel()).view_as(IDS)
    with pytest.raises(InputError, match='token_weights: must not be negative with the reduction "mean"'):
        model(IDS, labels=IDS, token_weights=weights)
    total = model(IDS, labels=IDS, token_weights=weights, reduction="sum").loss
    assert total.isfinite()
    if heads in (lm.Eagle3Model, lm.MTPModel, lm.MedusaModel):
        torch.testing.assert_close(model(IDS, labels=IDS, token_weights=weights, num_items_in_batch=4).loss, total / 4)


@pytest.mark.parametrize("heads", [*HEADS, lm.MedusaModel])
def test_a_folder_in_place_of_the_base_model_is_named(heads: Any) -> None:
    with pytest.raises(InputError, match="base: takes a native CausalLM, got a str"):
        heads.from_pretrained("base/", "head/")
