"""Arguments and outputs as users of transformers write them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from zoo import CONFIGS, MULTIMODAL, auto_class, make_checkpoint

import ligermodels as lm
from ligermodels.cli import describe
from ligermodels.convert import placement
from ligermodels.errors import ConfigWarning, InputError
from ligermodels.speculative.joint import JointMedusa

LLAMA = {**CONFIGS["llama-3"], "torch_dtype": "float16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, LLAMA)
    return folder


@pytest.fixture(params=["from_pretrained", "from_config", "from_transformers"])
def load(request: pytest.FixtureRequest, folder: Path) -> Any:
    if request.param == "from_transformers":
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
        return lambda **options: lm.from_transformers(hf, **options)
    return lambda **options: getattr(lm, request.param)(folder, **options)


# -- dtype and device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3", "qwen3_vl"])
def test_the_dtype_of_a_checkpoint_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Of its config, of the language model's config in it, or of the stored tensors, in this order."""
    config = {**CONFIGS, **MULTIMODAL}[name]
    make_checkpoint(tmp_path, config, dtype=torch.bfloat16)
    forms = [config, {**config, "dtype": "float16"}]
    if "text_config" in config:
        forms.append({**config, "text_config": {**config["text_config"], "dtype": "bfloat16"}})
    for form in forms:
        (tmp_path / "config.json").write_text(json.dumps(form))
        theirs = auto_class(AutoConfig.from_pretrained(tmp_path)).from_pretrained(tmp_path)
        model = lm.from_pretrained(tmp_path)
        assert {p.dtype for p in model.parameters()} == {theirs.dtype}
        assert describe.checkpoint_facts(tmp_path)["dtype"] == str(theirs.dtype).removeprefix("torch.")
    assert lm.from_config(forms[-1]).dtype == (torch.bfloat16 if "text_config" in config else torch.float16)
    assert lm.from_config(config).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float16),
        ({"dtype": "auto"}, torch.float16),
        ({"torch_dtype": "auto"}, torch.float16),
        ({"dtype": None, "torch_dtype": None}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "torch.float64"}, torch.float64),
        ({"dtype": torch.float32}, torch.float32),
        ({"torch_dtype": "float32"}, torch.float32),
        ({"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": torch.bfloat16}, torch.bfloat16),
    ],
)
def test_dtypes(load: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = load(**options)
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bf16"}, r"dtype: 'bf16' is not one of bfloat16, float16, float32, float64.*'auto'"),
        ({"torch_dtype": "int8"}, r"torch_dtype: 'int8' is not one of bfloat16"),
        ({"dtype": torch.int8}, r"dtype: torch\.int8 is not one of"),
        ({"dtype": "nn"}, "dtype: 'nn' is not one of"),
        ({"dtype": 16}, "dtype: 16 is not one of"),
        ({"dtype": ""}, "dtype: '' is not one of"),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype is float32 and torch_dtype.* bfloat16: give one"),
        ({"dtype": "auto", "torch_dtype": "bfloat16"}, "dtype is auto and torch_dtype.* bfloat16: give one"),
    ],
)
def test_bad_dtypes(load: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(**options)


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"device": torch.device("cpu")}, "cpu"),
        ({"device_map": "cpu"}, "cpu"),
        ({"device_map": {"": "cpu"}}, "cpu"),
        ({"device_map": {"": torch.device("cpu")}, "device": "cpu"}, "cpu"),
        ({"device_map": "auto"}, "cpu"),
        ({"device_map": {"": "auto"}}, "cpu"),
    ],
)
def test_devices(load: Any, options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load(**options).device.type == device


@pytest.mark.parametrize("options", [{"device": "meta"}, {"device_map": "meta"}, {"device_map": {"": "meta"}}])
def test_a_device_that_is_not_the_default(options: dict[str, Any]) -> None:
    assert lm.from_config(LLAMA, **options).device.type == "meta"


@pytest.mark.parametrize(
    ("options", "device"),
    [
        ({"device_map": "auto"}, "cuda:1"),
        ({"device_map": "cuda"}, "cuda"),
        ({"device_map": 0}, "cuda:0"),
        ({"device_map": {"": 2}}, "cuda:2"),
        ({"device": 3}, "cuda:3"),
        ({"device": "cuda:1", "device_map": "auto"}, "cuda:1"),
    ],
)
def test_cuda_devices(options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    found = placement.resolve_device(options.get("device"), options.get("device_map"))
    assert found == torch.device(device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": {"": 0, "lm_head": 1}}, r"device_map: has entries of submodules.*ParallelPlan"),
        ({"device_map": {"model.layers.0": "cpu", "model.layers.1": "cpu"}}, r"'model\.layers\.0'.*ParallelPlan"),
        ({"device_map": {}}, "device_map"),
        ({"device_map": "balanced"}, r"device_map: 'balanced' is not .*'cuda'.*'auto'.*ParallelPlan"),
        ({"device_map": "sequential"}, "device_map: 'sequential'.*ParallelPlan"),
        ({"device_map": "gpu"}, "device_map: 'gpu' is not .*'cpu', 'cuda'"),
        ({"device_map": {"": "gpu"}}, "device_map: 'gpu' is not .*'cpu', 'cuda'"),
        ({"device": "gpu"}, "device: 'gpu' is not .*'cpu', 'cuda'"),
        ({"device": "auto"}, "device: 'auto' is not"),
        ({"device_map": True}, "device_map: True is not"),
        ({"device_map": -1}, "device_map: -1 is not"),
        ({"device_map": "cpu", "device": "meta"}, "device is meta and device_map cpu: give one"),
    ],
)
def test_bad_devices(load: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(**options)


# -- outputs -----------------------------------------------------------------------------------------------------------


OUTPUTS = [
    "logits", "loss", "loss, logits", "states", "medusa logits", "medusa loss", "joint", "empty"
]  # fmt: skip


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    torch.manual_seed(0)
    model = lm.from_config({**LLAMA, "torch_dtype": "float32"})
    medusa = lm.MedusaModel.from_base(model, num_heads=2)
    ids = torch.randint(3, 131, (2, 9))
    return {
        "logits": model(ids),
        "loss": model(ids, labels=ids),
        "loss, logits": model(ids, labels=ids, return_logits=True),
        "states": model(ids, return_last_hidden_state=True, labels=ids, return_logits=True),
        "medusa logits": medusa(ids),
        "medusa loss": medusa(ids, labels=ids),
        "joint": JointMedusa(medusa)(ids, labels=ids),
        "empty": lm.CausalLMOutput(),
    }


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_indexed_as_those_of_transformers(outputs: dict[str, Any], name: str) -> None:
    out = outputs[name]
    fields = [(f.name, getattr(out, f.name)) for f in dataclasses.fields(out) if getattr(out, f.name) is not None]
    assert (name == "empty") == (not fields)
    assert list(out.keys()) == list(out) == [key for key, _ in fields] == [key for key, _ in out.items()]
    assert len(out) == len(fields) and all(a is b for a, b in zip(out.values(), out.to_tuple(), strict=True))
    for place, (key, value) in enumerate(fields):
        assert out[key] is out[place] is out[place - len(fields)] is out.to_tuple()[place] is out.get(key) is value
        assert key in out and dict(out)[key] is value
    assert out[:2] == out.to_tuple()[:2]
    for wrong in (len(fields), -len(fields) - 1):
        with pytest.raises(IndexError):
            out[wrong]
    for wrong_key in ("no_such", "ranks" if out.ranks is None else "base", "padded"):
        assert wrong_key not in out and out.get(wrong_key, 7) == 7
        with pytest.raises(KeyError, match=wrong_key):
            out[wrong_key]


def test_an_output_beside_that_of_transformers() -> None:
    loss, logits = torch.ones(()), torch.zeros(1, 2, 3)
    theirs = CausalLMOutputWithPast(loss=loss, logits=logits)
    ours = lm.CausalLMOutput(loss=loss, logits=logits)
    for use in (
        lambda out: out["loss"], lambda out: out[1], lambda out: out[:2], lambda out: out.to_tuple(), len, list,
        lambda out: list(out.keys()), lambda out: list(out.items()), lambda out: "logits" in out,
        lambda out: "attentions" in out, lambda out: out.get("attentions"), bool,
    ):  # fmt: skip
        assert repr(use(ours)) == repr(use(theirs))
    first, second = ours[:2]
    assert first is loss and second is logits
    ours["loss"] = logits
    assert ours.loss is logits and ours[0] is logits
    with pytest.raises(KeyError, match="no_such"):
        ours["no_such"] = loss


def test_outputs_in_export_and_compile() -> None:
    model = lm.from_config({**LLAMA, "torch_dtype": "float32"}, attention="reference")
    ids = torch.randint(3, 131, (2, 9))
    wanted = model(ids).logits

    class Indexed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> Any:
            out = self.model(ids)
            return out["logits"] + 0 * out[0] + len(out) - 1, out

    first, out = torch.compile(Indexed(), backend="eager", fullgraph=True)(ids)
    torch.testing.assert_close(first, wanted)
    assert isinstance(out, lm.CausalLMOutput)
    torch.testing.assert_close(out["logits"], wanted)
    exported = torch.export.export(model, (ids,)).module()(ids)
    assert isinstance(exported, lm.CausalLMOutput)
    torch.testing.assert_close(exported[0], wanted)


# -- what a model shows ------------------------------------------------------------------------------------------------


def test_repr_shows_sizes() -> None:
    shown = repr(lm.from_config(CONFIGS["qwen3"]))
    for part in (
        "vocab_size=131, hidden_size=60, num_layers=2", "RMSNorm(60, eps=1e-05)", "Embedding(131, 60",
        "group_size=3, head_dim=14, qk_norm over each head", "LMHead(in_features=60, out_features=131, bias=False)",
    ):  # fmt: skip
        assert part in shown.replace("(\n  vocab", "(vocab")
    assert "scale=" in repr(lm.from_config(CONFIGS["gemma"]).decoder.embed)


def test_warnings_of_a_checkpoint_name_the_line_of_the_call(tmp_path: Path) -> None:
    """Also those from within the contexts that read files."""
    make_checkpoint(tmp_path, LLAMA)  # with a head of its own
    changes = {"tie_word_embeddings": True, "colour": "red", "architectures": ["GemmaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    for load, count in ((lm.from_pretrained, 3), (lm.from_config, 2)):
        with pytest.warns(ConfigWarning) as caught:
            load(tmp_path)
        assert [each.filename for each in caught] == [__file__] * count
