"""Models and state dicts of transformers in memory become native, and native ones become transformers'."""

import copy
import ctypes
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_nativize import batch, make
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import BackendError, CheckpointError, ConfigError, InputError
from ligermodels.integrations import wrap


@pytest.mark.parametrize(("name", "consume"), [(name, index % 2 == 0) for index, name in enumerate(zoo.OF_EACH_LAYOUT)])
def test_a_model_in_memory_becomes_native_and_its_state_dict_goes_back(
    name: str, consume: bool, tmp_path: Path
) -> None:
    hf, ids = make(name), batch()["input_ids"]
    # With scaled weights transformers' logits of Kimi Linear are 2.4e-5 from those in float64, and ours 1.3e-6.
    tolerance = 5e-5 if name in zoo.KIMI else 1e-5
    wanted, state = hf(ids).logits.detach(), {key: x.clone() for key, x in hf.state_dict().items()}
    model = lm.from_transformers(hf, consume=consume)
    assert not model.training and (sum(p.numel() for p in hf.parameters()) == 0) == consume
    assert zoo.relative_error(model(ids).logits, wanted) < 1e-5

    found = model.hf_state_dict()
    assert found.keys() == state.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, state[key]) and tensor.is_contiguous(), key
    if not consume:  # nothing is shared
        assert not {x.data_ptr() for x in hf.parameters()} & {x.data_ptr() for x in model.parameters()}

    other = make(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model.load_hf_state_dict(other.state_dict())
    assert zoo.relative_error(model(ids).logits, other(ids).logits) < tolerance
    model.save_pretrained(tmp_path)
    assert zoo.relative_error(lm.from_pretrained(tmp_path)(ids).logits, other(ids).logits) < tolerance


def test_a_state_dict_that_does_not_fit_changes_nothing_and_all_faults_are_listed() -> None:
    hf = make("llama-3")
    model = lm.from_transformers(hf, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    state = hf.state_dict()
    before = copy.deepcopy(model.state_dict())
    state["model.layers.0.self_attn.q_proj.lora_A.weight"] = state.pop("model.layers.0.self_attn.q_proj.weight")
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"(?s)missing.*q_proj.weight.*not expected.*lora_A.*shape.*norm.weight"):
        model.load_hf_state_dict(state)
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    hf.model.layers[0].self_attn.q_proj.register_parameter("extra", nn.Parameter(torch.zeros(2)))
    with pytest.raises(CheckpointError, match=r"q_proj\.extra"):
        lm.from_transformers(hf, consume=True)
    assert all(p.numel() for p in hf.parameters())
    hf.model.norm.to("meta")  # as weights are that accelerate offloads
    with pytest.raises(CheckpointError, match=r"from_transformers: model\.norm\.weight .*on meta; .*accelerate"):
        lm.from_transformers(hf, device="cpu")


@pytest.mark.parametrize("name", sorted({*zoo.OF_EACH_KIND} - zoo.ONLY_NATIVE))
def test_a_wrapped_model_and_its_native_one_are_one_model(name: str, tmp_path: Path) -> None:
    """The same logits, tokens, parameters and gradients; what is trained in one is trained in the other."""
    model, inputs = lm.from_transformers(make(name)).eval(), batch()
    ids = inputs["input_ids"]
    wanted, prompt = model(ids).logits.detach(), {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    text = model.generate(ids[:, 6:], **prompt)
    hf = zoo.plain(wrap(model))
    assert type(hf).__name__.endswith("ForCausalLM") and {id(p) for p in hf.parameters()} == {
        id(p) for p in model.parameters()
    }
    for logits in (hf(ids).logits, model(ids).logits):
        assert zoo.relative_error(logits, wanted) < 1e-5
    assert torch.equal(model.generate(ids[:, 6:], **prompt), text)
    assert torch.equal(hf.generate(ids[:, 6:], **prompt), text)

    native_loss = model.train()(ids, labels=ids).loss
    loss = hf.train()(ids, labels=ids).loss
    if not model.config.router_aux_loss_coef:  # transformers adds it on demand
        assert_close(loss, native_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss.backward()
    optimizer.step()
    trained = hf.eval()(ids).logits
    assert not torch.allclose(trained, wanted)
    assert zoo.relative_error(model.eval()(ids).logits, trained) < 1e-5
    for export in (lambda: model.save_pretrained(tmp_path / "native"), model.hf_state_dict):
        with pytest.raises(ConfigError, match=r"export it by .* the transformers model that wrap returned"):
            export()
    hf.save_pretrained(tmp_path / "hf")
    assert zoo.relative_error(lm.from_pretrained(tmp_path / "hf")(ids).logits, trained) < 1e-5


def test_wrapping_keeps_generation_settings_and_refuses_what_transformers_does_not_know() -> None:
    hf = make("llama-3")
    hf.generation_config.update(temperature=0.3, do_sample=True)
    model = lm.from_transformers(hf)
    assert wrap(model).generation_config.temperature == 0.3
    composed = lm.CausalLM(lm.from_transformers(make("llama-3")).config)
    with pytest.raises(ConfigError, match="composed by hand"):
        wrap(composed)


def test_adapters_are_named() -> None:
    hf = make("llama-3")
    hf.peft_config = {"default": None}  # of a PEFT model, or of transformers' add_adapter
    with pytest.raises(CheckpointError, match="the model has adapters; merge them first"):
        lm.from_transformers(hf)


def test_what_is_frozen_stays_frozen() -> None:
    hf = make("llama-3")
    hf.model.embed_tokens.requires_grad_(False)
    for name in "qkv":
        hf.model.layers[1].self_attn.get_submodule(f"{name}_proj").requires_grad_(False)
    model = lm.from_transformers(hf)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"decoder.embed.weight", "decoder.blocks.1.mixer.qkv.weight"}
    hf.model.layers[1].self_attn.q_proj.requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight, .*only some require gradients"):
        lm.from_transformers(hf, consume=True)
    assert all(p.numel() for p in hf.parameters())


@pytest.mark.parametrize("name", ["llama-3", "mixtral"])
def test_wrapping_keeps_frozen_parameters_and_the_attention_backend(name: str) -> None:
    model = lm.from_transformers(make(name), attention="reference")
    model.decoder.blocks[1].requires_grad_(False)
    hf = wrap(model)
    frozen = {name for name, parameter in hf.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in hf.named_parameters() if name.startswith("model.layers.1.")}
    for config in (hf.native.config, hf.model.native.layer.config, model.decoder.config):
        assert {block.mixer.backend for block in config.blocks} == {"reference"}
    assert {layer.self_attn.native.layer.config.backend for layer in hf.model.layers} == {"reference"}


def test_wrapping_names_settings_that_transformers_does_not_have() -> None:
    """The loss of the native model has losses of its routers, or is an error."""
    fields: dict[str, Any] = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    model, ids = lm.from_transformers(make("mixtral", **fields)).train(), batch()["input_ids"]
    wanted = model(ids, labels=ids).loss
    model.activation_checkpointing = "full"
    model.decoder.blocks[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="does not get activation_checkpointing and hooks of the native model"):
        hf = wrap(model)
    assert_close(hf(ids, labels=ids).loss, wanted, rtol=1e-4, atol=0)
    for call in (lambda: model(ids, labels=ids), lambda: model.log_probs(ids, ids)):
        with pytest.raises(InputError, match="labels: losses of the routers"):
            call()
    model.config = dataclasses.replace(model.config, router_aux_loss_coef=0.0)
    assert model(ids, labels=ids).loss < wanted and model.log_probs(ids, ids).log_probs.shape == ids.shape
    model.router_z_loss_coef = 0.1
    with pytest.raises(InputError, match=r"labels: .*model.router_z_loss_coef = 0"):
        model(ids, labels=ids)


def peaks(found: Any) -> None:
    """What a child process does: send, without and with `consume`, the bytes at the peak above those before, and the
    bytes of a layer and of the model. Its allocator gives back to the system whatever is freed."""
    for option in (-3, -1):  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
        assert ctypes.CDLL(None).mallopt(option, 65536 if option == -3 else 0)
    torch.set_num_threads(1)

    def bytes_of(name: str) -> int:
        return int(Path("/proc/self/status").read_text().split(name)[1].split()[0]) * 1024

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 1000}
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
    layer = sum(p.nbytes for p in hf.model.layers[0].parameters())
    model = sum(p.nbytes for p in hf.parameters())
    warm = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**sizes, "num_hidden_layers": 1}))
    lm.from_transformers(warm, consume=True)
    for consume in (False, True):
        before = bytes_of("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5")
        native = lm.from_transformers(hf, consume=consume)
        found.send((bytes_of("VmHWM:") - before, layer, model))
        del native


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="measures memory as Linux counts it")
def test_memory_holds_one_layer_more_than_the_models(children: Any) -> None:
    receive, send = children.Pipe(duplex=False)
    process = children.Process(target=peaks, args=(send,))
    process.start()
    send.close()
    for consume in (False, True):
        above, layer, model = receive.recv()
        assert above < layer + (0 if consume else model)
        assert above > (0 if consume else model - layer)
    process.join()


def test_a_model_is_wrapped_once_and_needs_its_transformers_model_native() -> None:
    model, ids = lm.from_transformers(make("llama-3")), batch()["input_ids"]
    hf, wanted = wrap(model), model(ids).logits
    with pytest.raises(InputError, match="wrapped already"):
        wrap(model)
    lm.restore(hf)
    with pytest.raises(InputError, match="restore has undone"):
        model(ids)
    lm.nativize(hf)
    assert_close(model(ids).logits, wanted)


def test_what_changes_native_layers_is_an_error_of_a_wrapped_model() -> None:
    model, ids = lm.from_transformers(make("llama-3")), batch()["input_ids"]
    hf = wrap(model)
    calls: dict[str, Callable[[], Any]] = {
        "add_lora": lambda: lm.add_lora(model, r=2),
        "quantize": lambda: lm.quantize(model, "int4"),
        "float8": lambda: lm.float8(model),
        "parallelize": lambda: lm.parallelize(model),
        "Eagle3Model": lambda: lm.Eagle3Model.from_base(model),
        "DFlashModel": lambda: lm.DFlashModel.from_base(model),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match=f"^{name}: this model computes by the modules of the transformers model"):
            call()
    with ops.set_batch_invariant(True):
        for call in (lambda: model(ids), lambda: hf(ids), lambda: hf.generate(ids, max_new_tokens=1)):
            with pytest.raises(BackendError, match="batch_invariant: a model of transformers has no"):
                call()
    assert torch.equal(model(ids).logits, hf(ids).logits)


def test_medusa_heads_on_a_wrapped_model_decode_as_it_does() -> None:
    model, ids = lm.from_transformers(make("qwen3")), batch()["input_ids"][:, 6:12]
    wrap(model)
    medusa = lm.MedusaModel.from_base(model, num_heads=2, lm_head="shared")
    medusa(ids, labels=ids).loss.backward()
    options = {"max_new_tokens": 6, "eos_token_id": None}
    assert torch.equal(medusa.eval().generate(ids, **options), model.generate(ids, do_sample=False, **options))
