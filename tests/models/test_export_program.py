"""torch.export: programs with a dynamic batch and length, of models with LoRA and quantised weights too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from float8_models import LLAMA
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.ops import set_backend

IDS, OTHERS = torch.randint(3, 131, (2, 16)), torch.randint(3, 131, (3, 19))


@pytest.fixture(autouse=True)
def reference() -> Any:
    torch.manual_seed(0)
    with set_backend("reference"):
        yield


def program(model: lm.CausalLM, length: Any = None) -> Any:
    """The model as a program, of any batch of up to 8 sequences; by default of 16 to 64 tokens."""
    sizes = {0: torch.export.Dim("batch", min=1, max=8)}
    if length is None:
        sizes[1] = torch.export.Dim("length", min=16, max=64)
    return torch.export.export(model, (IDS,), dynamic_shapes={"input_ids": sizes}).module()


def built(name: str, quantize: Any = None, **changes: Any) -> lm.CausalLM:
    config = {**CONFIGS.get(name, LLAMA), **changes}
    model = lm.from_config(config, dtype="float32" if quantize is None else "bfloat16")
    return (model if quantize is None else lm.quantize(model, quantize)).eval()


def adapted(model: lm.CausalLM, **options: Any) -> lm.CausalLM:
    """With LoRA whose B is not zero."""
    lm.add_lora(model, 3, **options)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.endswith("b"):
            torch.nn.init.normal_(parameter)
    return model.eval()


MODELS: dict[str, Callable[[], lm.CausalLM]] = {
    "attention and Mamba2": lambda: built("falcon_h1", num_hidden_layers=1),
    "LoRA": lambda: adapted(built("qwen2_moe", num_hidden_layers=1), target_modules=["q_proj", "experts"]),
    "QLoRA": lambda: adapted(built("qwen2_moe", "int4", num_hidden_layers=1), target_modules=["q_proj", "experts"]),
    "float8 weights": lambda: built("gemma2", "float8", num_hidden_layers=1),
    "nf4 latent attention": lambda: built("deepseek_v3-without-experts", "nf4", num_hidden_layers=1),
}


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"LoRA"}))  # QLoRA here, and LoRA below
def test_a_program_takes_other_batch_sizes_and_lengths(name: str) -> None:
    model = MODELS[name]()
    with torch.set_grad_enabled("LoRA" in name):  # its parameters require gradients
        assert torch.equal(program(model)(OTHERS).logits, model(OTHERS).logits)


def test_float8_training() -> None:
    """Is refused by name; an evaluation computes with the weights as they are stored."""
    model = lm.float8(lm.from_config({**LLAMA, "num_hidden_layers": 1}, dtype="float32")).eval()
    with pytest.raises(InputError, match=r"float8: .*torch\.export\.export under torch\.no_grad\(\)"):
        program(model)
    with torch.no_grad():
        assert torch.equal(program(model)(OTHERS).logits, model(OTHERS).logits)


def test_kimi_delta_attention_without_kernels() -> None:
    """Takes any batch, of a fixed length; else the error names the reason."""
    model = built("bailing_hybrid", num_hidden_layers=1, layer_group_size=1, layer_types=["linear_attention"])
    with pytest.raises(InputError, match=r"Kimi Delta Attention .* torch\.export needs a fixed length"):
        program(model)
    others = torch.randint(3, 131, (3, IDS.shape[1]))
    assert torch.equal(program(model, length=16)(others).logits, model(others).logits)


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["attention and Mamba2", "LoRA"])
def test_training_through_a_program_with_kernels(name: str) -> None:
    """Is an error that says what to do, not gradients of few parameters. Inference needs no `no_grad`."""
    with set_backend(None):
        model = MODELS[name]()
        exported = program(model)
        out = exported(OTHERS).logits
        torch.testing.assert_close(out, model(OTHERS).logits)
        with pytest.raises(RuntimeError, match=r"torch\.export is for inference: .* call the model itself"):
            out.sum().backward()
