"""What of Gemma 4 computes natively in transformers' model beyond the tests of every family."""

from typing import Any

import pytest
import torch
from test_nativize import batch, loss_and_gradients, make
from torch.testing import assert_close

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.integrations.decoder import HFDecoder

PER_LAYER, EXPERTS = "gemma4_text-per-layer-inputs", "gemma4_text-experts"


@pytest.mark.parametrize("padding", [False, True])
def test_embeddings_and_inputs_by_layer_in_place_of_ids(padding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Natively; without the inputs by layer, which transformers finds by a search for the embeddings, it does that."""
    hf, inputs = make(PER_LAYER).eval(), batch()
    ids, mask = inputs["input_ids"], inputs["attention_mask"] if padding else None
    embeds = hf.get_input_embeddings()(ids).detach()
    by_layer = hf.model.get_per_layer_inputs(ids, embeds).detach()
    real = inputs["attention_mask"].bool()
    wanted = hf(ids, attention_mask=mask).logits[real]
    passes: list[int] = []
    through = HFDecoder.forward
    monkeypatch.setattr(HFDecoder, "forward", lambda self, *a, **k: passes.append(1) or through(self, *a, **k))
    lm.nativize(hf)
    assert_close(hf(inputs_embeds=embeds, per_layer_inputs=by_layer, attention_mask=mask).logits[real], wanted)
    assert len(passes) == 1
    assert_close(hf(inputs_embeds=embeds, attention_mask=mask).logits[real], wanted)
    assert len(passes) == 1
    with pytest.raises(ValueError, match="per_layer_inputs"):
        hf(ids, per_layer_inputs=by_layer)
    with pytest.raises(InputError, match=r"per_layer_inputs: must be \(2, 23, 5, 26\), got \(2, 5, 23, 26\)"):
        hf(inputs_embeds=embeds, per_layer_inputs=by_layer.transpose(1, 2))


@pytest.mark.parametrize("name", [PER_LAYER, EXPERTS])
def test_gradient_checkpointing(name: str) -> None:
    """The older kind, which sees only the arguments of a layer, is refused where layers share more than these."""
    hf, inputs = make(name), batch()
    wanted, gradients = loss_and_gradients(hf, **inputs)
    lm.nativize(hf).gradient_checkpointing_enable({"use_reentrant": False})
    out, found = loss_and_gradients(hf, **inputs)
    assert_close(out.loss, wanted.loss)
    for key, gradient in gradients.items():
        assert_close(found[key], gradient, rtol=1e-3, atol=2e-5)
    hf.gradient_checkpointing_enable({"use_reentrant": True})
    if name == PER_LAYER:
        with pytest.raises(InputError, match="use_reentrant=False"):
            hf(**inputs)
    else:
        assert_close(hf(**inputs).loss, wanted.loss)


def test_past_the_last_keys_only_tokens_with_a_label_are_computed() -> None:
    hf, inputs = lm.nativize(make(PER_LAYER)).train(), batch()
    labels = inputs["labels"].masked_fill(torch.arange(inputs["labels"].shape[1]) < 12, -100)
    count = int((labels[:, 1:] != -100).sum())
    seen: dict[str, Any] = {}
    for number, layer in enumerate(hf.model.layers):
        for name in ("q_proj", "o_proj"):  # of a module that PEFT may replace; hooks would end the native pass
            module = getattr(layer.self_attn, name)
            through = module.forward
            module.forward = lambda x, at=(number, name), through=through: seen.update({at: x.shape[1]}) or through(x)
    hf(input_ids=inputs["input_ids"], labels=labels)
    first = len(hf.model.layers) - hf.config.num_kv_shared_layers
    length = labels.shape[1]
    assert [seen[i, "q_proj"] for i in range(len(hf.model.layers))] == [length] * first + [count] * 2
    assert [seen[i, "o_proj"] for i in range(first, len(hf.model.layers))] == [count] * 2


def test_a_compiled_model_is_one_graph() -> None:
    """In training; otherwise see test_nativize.py. With experts, inputs by layer, and shared keys."""
    layers = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    changes = {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 26, "vocab_size_per_layer_input": 140}
    hf, ids = lm.nativize(make(EXPERTS, **layers, **changes)), batch()["input_ids"]
    found = torch._dynamo.explain(hf.train())(ids, labels=ids)
    assert found.graph_count == 1, found.break_reasons
