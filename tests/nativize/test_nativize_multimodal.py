"""Multimodal models of transformers whose language model computes natively."""

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import zoo
from test_nativize import batch, loss_and_gradients, positions
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.integrations.decoder import HFDecoder

NAMES = sorted(zoo.MULTIMODAL.keys() - {"llama4", "mistral3-mistral4", "qwen2_5_omni", "qwen3_omni_moe"})
THINKERS = {
    "qwen2_5_omni_thinker": Qwen2_5OmniThinkerForConditionalGeneration._from_config,
    "qwen3_omni_moe_thinker": Qwen3OmniMoeThinkerForConditionalGeneration._from_config,
}
WHOLLY_BY_CLASS = {"gemma3", "gemma4_unified"}
"""These let tokens of an image see those that follow."""


def make(name: str) -> PreTrainedModel:
    """A random model, all parameters away from their initial values."""
    fields = copy.deepcopy(zoo.MULTIMODAL[name])
    if name.startswith("mistral3"):  # large enough for two tokens
        fields["vision_config"]["image_size"] = 56
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(1)
    kind = THINKERS.get(name, AutoModelForImageTextToText.from_config)
    hf = kind(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in zoo.plain(hf).parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return hf


def image(name: str) -> dict[str, Tensor]:
    """An image for the second of two sequences, and what says where its features go."""
    torch.manual_seed(2)
    grid, square = torch.tensor([[1, 4, 4]]), torch.randn(1, 3, 28, 28)
    if name.startswith(("qwen", "muse")):
        inputs, count = {"pixel_values": torch.randn(16, 24), "image_grid_thw": grid}, 4
    elif name.startswith("mistral3"):
        inputs, count = {"pixel_values": square.repeat(1, 1, 1, 2), "image_sizes": torch.tensor([[28, 56]])}, 2
    elif name == "gemma3":
        inputs, count = {"pixel_values": square}, 4
    else:
        side, size = (2, 432) if name == "gemma4_unified" else (6, 48)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))[None]
        inputs, count = {"pixel_values": torch.rand(1, side * side, size), "image_position_ids": places}, 4
    config = zoo.MULTIMODAL[name]
    ids = batch()["input_ids"] % 120
    kinds = torch.zeros_like(ids)
    ids[1, 5 : 5 + count], kinds[1, 5 : 5 + count] = config.get("image_token_id", config.get("image_token_index")), 1
    if not name.startswith(("mistral3", "muse")) and "omni" not in name:
        inputs["token_type_ids" if name == "gemma3" else "mm_token_type_ids"] = kinds
    return {"input_ids": ids, **inputs}


@pytest.mark.parametrize("name", NAMES)
def test_a_native_multimodal_model_gives_the_numbers_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of text and of images, losses and every gradient, those of towers too; and logits and generated tokens."""
    hf, inputs = make(name), batch()
    inputs["input_ids"] %= 120
    if not hasattr(hf.model, "language_model"):
        pytest.skip("in this release of transformers the thinker does the work of the model around a language model")
    pixels = image(name)
    cases: dict[str, Any] = {
        "text": {**inputs, "attention_mask": None},
        "padding": inputs,
        "documents": {**inputs, "attention_mask": None, "position_ids": positions(), "use_cache": False},
        "image": {**inputs, "attention_mask": None, **pixels},
        "image and padding": {**inputs, **pixels},
    }
    if name.startswith("qwen"):  # those of the text come before the grid
        cases["documents"]["position_ids"] = positions()[None].expand(4, -1, -1)
    if "qwen3_5" in name:  # transformers carries states on
        del cases["documents"]
    wanted = {case: loss_and_gradients(hf, **given) for case, given in cases.items()}
    hf.eval()
    prompt: Any = {**pixels, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    text, logits = hf.generate(**prompt), hf(**pixels, labels=inputs["labels"]).logits.detach()

    passes: list[int] = []
    through = HFDecoder.forward
    monkeypatch.setattr(HFDecoder, "forward", lambda self, *a, **k: passes.append(1) or through(self, *a, **k))
    assert lm.nativize(hf) is hf
    by_length = hf.get_decoder().native.rope_by_length
    for case, given in cases.items():
        passes.clear()
        out, gradients = loss_and_gradients(hf, **given)
        by_class = ("image" in case and name in WHOLLY_BY_CLASS) or ("padding" in case and by_length)
        assert len(passes) == (not by_class), case
        assert out.logits is None
        assert_close(out.loss, wanted[case][0].loss, rtol=1e-5, atol=1e-6, msg=case)
        assert gradients.keys() == wanted[case][1].keys()
        for key, gradient in gradients.items():
            assert_close(gradient, wanted[case][1][key], rtol=1e-3, atol=3e-5)
    hf.eval()
    passes.clear()
    assert zoo.relative_error(hf(**pixels, labels=inputs["labels"]).logits, logits) < 1e-5
    assert len(passes) == (name not in WHOLLY_BY_CLASS)
    assert torch.equal(hf.generate(**prompt), text)

    lm.restore(hf)
    assert not any({"native", "forward"} & vars(module).keys() for module in hf.modules())
    assert torch.equal(hf(**pixels, labels=inputs["labels"]).logits, logits)


def test_an_image_whose_tokens_are_padding_leaves_its_features_to_no_other() -> None:
    hf, one = make("qwen3_vl").eval(), image("qwen3_vl")
    ids, kinds = one["input_ids"].clone(), one["mm_token_type_ids"].clone()
    at = kinds[1].nonzero().squeeze(1)
    ids[0, at], kinds[0, at] = ids[1, at], 1
    mask = torch.ones_like(ids)
    mask[0, : at[-1] + 1] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds}
    for name in ("pixel_values", "image_grid_thw"):
        inputs[name] = torch.cat([one[name], one[name].flip(0) if name == "pixel_values" else one[name]])
    wanted = hf(**inputs).logits
    found = lm.nativize(hf)(**inputs).logits
    real = mask.bool()
    assert zoo.relative_error(found[real], wanted[real]) < 1e-5


def test_the_signature_stays_that_of_the_class() -> None:
    """By it the Trainer keeps columns of pixels, and `generate` checks its arguments."""
    hf = make("qwen3_vl")
    names = list(inspect.signature(hf.forward).parameters)
    twin = pickle.loads(pickle.dumps(lm.nativize(hf)))
    assert list(inspect.signature(hf.forward).parameters) == list(inspect.signature(twin.forward).parameters) == names


def test_the_cache_of_a_pass_that_kept_none_is_an_error_when_given_back() -> None:
    hf, ids = lm.nativize(make("qwen2_vl")).eval(), batch()["input_ids"] % 120
    found = hf(ids[:, :5])
    with pytest.raises(AttributeError, match="use_cache=True"):
        hf(ids[:, 5:6], past_key_values=found.past_key_values)
    assert hf(ids[:, :5], use_cache=True).past_key_values.get_seq_length() == 5


def test_what_is_around_a_multimodal_model_is_refused_before_anything_changes() -> None:
    hf = make("qwen2_vl")
    with pytest.raises(InputError, match="Qwen2VLModel does not have its backbone and head where"):
        lm.nativize(hf.model)
    with pytest.raises(ConfigError, match="'qwen2_vl_text' is not implemented"):
        lm.nativize(hf.model.language_model)
    assert not any({"native", "forward"} & vars(module).keys() for module in hf.modules())
