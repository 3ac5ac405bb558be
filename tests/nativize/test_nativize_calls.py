"""Calls of a model that computes natively: arguments without a name; and `nativize` that fails in the middle."""

from types import MethodType
from typing import Any

import pytest
import torch
import zoo
from test_nativize import batch, make
from test_nativize_multimodal import image
from test_nativize_multimodal import make as make_multimodal

import ligermodels as lm
from ligermodels.errors import InputError


def test_arguments_without_a_name_have_the_order_of_the_class() -> None:
    """Pixels before the mask, router logits after the cache, embeddings before positions."""
    ids = batch()["input_ids"] % 120
    mask, pixels = torch.ones_like(ids), image("gemma3")
    embeddings = torch.randn(*ids.shape, make("afmoe").config.hidden_size)
    cases: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (make_multimodal("gemma3"), "", (pixels["input_ids"], pixels["pixel_values"], mask, None, None,
                                         pixels["token_type_ids"])),
        (make_multimodal("gemma3"), "model", (ids, None, mask)),
        (make("mixtral"), "", (ids, mask, None, None, None, ids, False, True)),
        (make("afmoe"), "model", (None, mask, embeddings)),
    ]  # fmt: skip
    for hf, path, args in cases:
        module: Any = hf.eval().get_submodule(path)
        wanted = module(*args)
        lm.nativize(hf)
        found = module(*args)
        for name in ("logits", "last_hidden_state", "loss"):
            if (expected := getattr(wanted, name, None)) is not None:
                assert zoo.relative_error(getattr(found, name), expected) < 1e-5, name
        assert (getattr(found, "router_logits", None) is None) == (getattr(wanted, "router_logits", None) is None)
    hf = lm.nativize(make("llama-3"))
    for args, message in (((ids, mask), "two values for the argument attention_mask"), ((None,) * 99, "got 99")):
        with pytest.raises(TypeError, match=f"LlamaForCausalLM.forward: .*{message}"):
            hf(*args, attention_mask=mask)


@pytest.mark.parametrize("path", ["model.layers.1.mlp", "lm_head"])
def test_an_error_of_nativize_leaves_the_model_as_it_was(path: str) -> None:
    hf, ids = make("qwen3"), batch()["input_ids"]
    wanted, module = hf(ids).logits, hf.get_submodule(path)
    module.forward = MethodType(type(module).forward, module)
    with pytest.raises(InputError, match="something has replaced the forward"):
        lm.nativize(hf)
    assert not any("native" in vars(each) or ("forward" in vars(each)) != (each is module) for each in hf.modules())
    assert torch.equal(hf(ids).logits, wanted)
    del module.forward
    assert zoo.relative_error(lm.nativize(hf)(ids).logits, wanted) < 1e-5
