"""Bad values of tensors and arguments, as the faults of files in bad_calls.py."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bad_calls import HUGE, Place, a_loop, config_of, fault

import ligermodels as lm
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.generation import sampling
from ligermodels.speculative.head_files import TorchFile

IDS = torch.tensor([[3, 4, 5, 6]])

# -- tensors -----------------------------------------------------------------------------------------------------------


def saved(make: Callable[[], Any]) -> Callable[[Place], object]:
    def call(place: Place) -> object:
        path = place.tmp / "medusa_lm_head.pt"
        torch.save(make(), path)
        return lm.MedusaModel.from_pretrained(place.model, place.tmp)

    return call


def pickled(data: bytes, name: str = "medusa_lm_head.pt") -> Callable[[Place], object]:
    def call(place: Place) -> object:
        (place.tmp / name).write_bytes(data)
        return TorchFile(place.tmp / name)

    return call


def legacy(body: bytes) -> bytes:
    """The older format of torch.save: magic number, protocol version, system, and then what is stored."""
    head = b"".join(pickle.dumps(each, protocol=2) for each in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    return head + body


W = torch.zeros(4, 4)


@fault(
    "tensor",
    ".pt heads: pickles that torch's unpickler trips over, wrong keys, sparse, meta or quantized tensors",
    "medusa_lm_head.pt",
)
def heads_files() -> Any:
    yield "a list", saved(lambda: [W])
    yield "number as key", saved(lambda: {0: W, "0.0.linear.weight": W})
    yield "None as key", saved(lambda: {None: W})
    yield "text as value", saved(lambda: {"0.0.linear.weight": "x"})
    yield "sparse", saved(lambda: {"0.0.linear.weight": W.to_sparse()})
    yield "sparse rows", saved(lambda: {"0.0.linear.weight": W.to_sparse_csr()})
    yield "meta", saved(lambda: {"0.0.linear.weight": W.to("meta")})
    yield (
        "quantized",
        saved(lambda: {"0.0.linear.weight": torch.quantize_per_tensor(torch.zeros(4, 4), 1.0, 0, torch.qint8)}),
    )
    yield "code", saved(lambda: {"0.0.linear.weight": os.system})
    yield "surrogate", saved(lambda: {"\ud800": W}), "no Medusa heads"
    for name, body in {
        "empty": b"",
        "text": b"hello",
        "stack": b"\x80\x020.",
        "memo": b"\x80\x02h\x07.",
        "reduce": b"\x80\x02}}R.",
        "tuple": b"\x80\x02\x86.",
        "append": b"\x80\x02K\x01K\x02a.",
        "set items": b"\x80\x02K\x01(K\x01K\x02u.",
        "mark": b"\x80\x02t.",
        "unhashable": b"\x80\x02}]K\x01s.",
        "build": b"\x80\x02}K\x01b.",
        "global": b"\x80\x02ctorch\nnothing\n.",
        "persistent": b"\x80\x02K\x01Q.",
        "long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "unicode": b"\x80\x02X\xff\xff\xff\x7f.",
        "rebuild": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x01K\x02K\x03K\x04K\x05}tR.",
        "rebuild nothing": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    }.items():
        yield f"pickle: {name}", pickled(body)
        yield f"older pickle: {name}", pickled(legacy(body))
    good = io.BytesIO()
    torch.save({"0.0.linear.weight": W}, good)
    for cut in (1, 50, 200, 400, 700):
        yield f"cut after {cut} bytes", pickled(good.getvalue()[:cut])


def embeds(place: Place, length: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, length, place.model.config.hidden_size, dtype=dtype)


@fault("tensor", "labels, embeddings, ids and masks of another dtype, kind or length")
def forwards() -> Any:
    for name, options, word in (
        ("labels of uint8", {"labels": IDS.to(torch.uint8)}, "labels"),
        ("labels of bool", {"labels": IDS > 3}, "labels"),
        ("labels of floats", {"labels": IDS.float()}, "labels"),
        ("labels as a list", {"labels": IDS.tolist()}, "labels"),
        ("labels of int16", {"labels": IDS.short()}, "labels"),
        ("labels in numpy", {"labels": IDS.numpy()}, "labels"),
        ("labels of uint16", {"labels": IDS.to(torch.uint16)}, "labels"),
        ("labels of complex", {"labels": IDS.to(torch.complex64)}, "labels"),
        ("positions of floats", {"position_ids": IDS.float()}, "position_ids"),
        ("positions as a list", {"position_ids": [0, 1, 2, 3]}, "position_ids"),
        ("positions of bool", {"position_ids": IDS > 3}, "position_ids"),
        ("positions of uint8", {"position_ids": IDS.to(torch.uint8)}, "position_ids"),
        ("bounds as a list", {"cu_seqlens": [0, 4]}, "cu_seqlens"),
        ("bounds of floats", {"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens"),
        ("mask of 2", {"attention_mask": IDS}, "attention_mask"),
        ("mask as a list", {"attention_mask": [[1, 1, 1, 1]]}, "attention_mask"),
        ("mask of complex", {"attention_mask": torch.ones(1, 4, dtype=torch.complex64)}, "attention_mask"),
        ("mask of NaN", {"attention_mask": torch.full((1, 4), float("nan"))}, "attention_mask"),
        ("indices of floats", {"token_indices": torch.tensor([0.0])}, "token_indices"),
        ("indices beyond", {"token_indices": torch.tensor([99])}, "token_indices"),
        ("indices below", {"token_indices": torch.tensor([-9])}, "token_indices"),
        ("indices as a list", {"token_indices": [0]}, "token_indices"),
        ("indices of two dimensions", {"token_indices": torch.tensor([[0, 1]])}, "token_indices"),
        ("count of 0", {"labels": IDS, "num_items_in_batch": 0}, "num_items_in_batch"),
        ("count as text", {"labels": IDS, "num_items_in_batch": "4"}, "num_items_in_batch"),
        ("count of NaN", {"labels": IDS, "num_items_in_batch": float("nan")}, "num_items_in_batch"),
        ("weights in numpy", {"labels": IDS, "token_weights": np.ones((1, 4))}, "token_weights"),
        ("state of no kind", {"state": 3}, "state"),
    ):
        yield name, lambda place, options=options: place.model(IDS, **options), word
        if "labels" in options and "state" not in options:
            yield (
                f"heads: {name}",
                lambda place, options=options: lm.MedusaModel.from_base(place.model, 2)(IDS, **options),
                word,
            )
    for name, ids in {
        "numpy": IDS.numpy(),
        "list": [[3, 4]],
        "uint8": IDS.to(torch.uint8),
        "bool": IDS > 3,
        "int16": IDS.short(),
        "float": IDS.float(),
        "complex": IDS.to(torch.complex64),
        "no token": IDS[:, :0],
        "one axis": IDS[0],
        "three axes": IDS[None],
        "none": torch.tensor(3),
        "meta": IDS.to("meta"),
        "sparse": IDS.to_sparse(),
        "far": IDS + 2**62,
        "negative": IDS - 2**62,
        "text": "hello",
        "quantized": torch.quantize_per_tensor(torch.zeros(1, 4), 1.0, 0, torch.qint8),
    }.items():
        yield f"ids: {name}", lambda place, ids=ids: place.model(ids), "input_ids"
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64):
        yield (
            f"embeddings of {dtype}",
            lambda place, dtype=dtype: place.model(inputs_embeds=embeds(place, dtype=dtype)),
            "inputs_embeds",
        )
    yield "embeddings of no token", lambda place: place.model(inputs_embeds=embeds(place, 0)), "inputs_embeds"
    yield (
        "embeddings of no token with labels",
        lambda place: place.model(inputs_embeds=embeds(place, 0), labels=IDS[:, :0]),
        "inputs_embeds",
    )
    yield "embeddings of two axes", lambda place: place.model(inputs_embeds=embeds(place)[0]), "inputs_embeds"
    yield "embeddings in numpy", lambda place: place.model(inputs_embeds=embeds(place).numpy()), "inputs_embeds"
    yield "embeddings as a list", lambda place: place.model(inputs_embeds=embeds(place).tolist()), "inputs_embeds"


# -- arguments ---------------------------------------------------------------------------------------------------------


@fault("argument", "token ids beyond int64, arrays of numpy, generators, texts, as prompts", "")
def prompts() -> Any:
    for name, ids in {
        "beyond int64": [[3, HUGE]],
        "below int64": [3, -HUGE],
        "generator": (each for each in [3, 4]),
        "generators": [(each for each in [3])],
        "text": "hello",
        "texts": ["hello"],
        "bytes": b"abc",
        "floats": [3.0],
        "none": None,
        "number": 3,
        "dict": {3: 4},
        "set": {3},
        "numpy of floats": np.ones((1, 3)),
        "numpy of objects": np.array([[3, None]], dtype=object),
        "numpy beyond": np.array([2**63], dtype=np.uint64),
        "tensor of uint64": torch.tensor([2**63], dtype=torch.uint64),
        "sparse": IDS.to_sparse(),
        "meta": IDS.to("meta"),
        "bools": [True, False],
        "nested": [[[3]]],
        "ragged tensors": [IDS[0], IDS],
        "loop": a_loop(),
    }.items():
        yield name, lambda place, ids=ids: place.model.generate(ids, max_new_tokens=2), "input_ids"
        yield (
            f"heads: {name}",
            lambda place, ids=ids: lm.MedusaModel.from_base(place.model, 2).generate(ids, max_new_tokens=2),
            "input_ids",
        )


BAD_NUMBERS: dict[str, Any] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "below 0": -1,
    "beyond int64": HUGE,
    "digits": 10**5000,
    "text": "1",
    "list": [1],
    "bool": True,
    "complex": 1j,
    "numpy": np.array([1, 2]),
    "tensor": torch.ones(2),
    "bytes": b"1",
}


@fault("argument", "numbers: NaN, infinity, below 0, beyond int64, of other types")
def numbers() -> Any:
    for name, value in BAD_NUMBERS.items():
        for option in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "max_new_tokens",
            "max_length",
            "num_return_sequences",
            "do_sample",
            "pad_token_id",
            "eos_token_id",
        ):
            fine = (
                (option in ("top_k", "temperature", "repetition_penalty") and name == "beyond int64")
                or (option == "top_k" and name == "digits")
                or (option == "do_sample" and value is True)
                or (option == "eos_token_id" and name == "list")
                or (option in ("pad_token_id", "eos_token_id") and name == "below 0")
            )
            if not fine:
                yield (
                    f"{option}: {name}",
                    lambda place, option=option, value=value: place.model.generate(
                        IDS, **{"do_sample": True, "max_new_tokens": 2, option: value}
                    ),
                    option,
                )
        for option in ("num_heads", "num_layers", "decay"):
            if (option, name) == ("decay", "beyond int64"):
                continue  # a number
            yield (
                f"{option} of heads: {name}",
                lambda place, option=option, value=value: lm.MedusaModel.from_base(place.model, **{option: value}),
                option,
            )
        for option in ("r", "lora_alpha", "lora_dropout"):
            if (option, name) == ("lora_alpha", "beyond int64"):
                continue  # a number
            yield (
                f"{option}: {name}",
                lambda place, option=option, value=value: lm.add_lora(
                    lm.from_config(config_of(place)), **{option: value}
                ),
                option,
            )
        for which, sizes in (("batch_size", (value, 4)), ("max_length", (4, value))):
            yield f"{which}: {name}", lambda place, sizes=sizes: place.model.new_state(*sizes), which
    yield "lm_head", lambda place: lm.MedusaModel.from_base(place.model, lm_head=["own"]), "lm_head"


@fault("argument", "NaN weights when sampling", "NaN")
def not_a_number() -> Any:
    def call(place: Place) -> object:
        model = lm.from_config(config_of(place))
        torch.nn.init.constant_(model.head.weight, float("nan"))
        return model.generate(IDS, do_sample=True, max_new_tokens=2)

    yield "NaN weights", call
    yield "NaN logits", lambda place: sampling.sample(torch.full((1, 4), float("nan")))
    yield "infinite logits", lambda place: sampling.sample(torch.full((1, 4), float("inf")))


@fault("argument", "integer and bool dtypes; devices that are not there")
def dtypes_and_devices() -> Any:
    for dtype in (
        torch.int8,
        torch.int64,
        torch.bool,
        torch.uint8,
        torch.complex64,
        torch.qint8,
        "int64",
        "bool",
        "Tensor",
        7,
        [1],
        {},
        torch.float8_e4m3fn,
    ):
        yield f"dtype {dtype}", lambda place, dtype=dtype: lm.from_pretrained(place.checkpoint, dtype=dtype), "dtype"
        yield (
            f"dtype {dtype} of a config",
            lambda place, dtype=dtype: lm.from_config(place.checkpoint, dtype=dtype),
            "dtype",
        )
    for device in (
        "cuda:99",
        "mps",
        "xpu:3",
        "hpu",
        "vulkan",
        "cpu:77777777777777777",
        "privateuseone",
        99,
        2**70,
        -1,
        1.5,
        [0],
        {},
        {"": [0]},
        {1: 2},
        "\ud800",
        "a\0",
    ):
        yield (
            f"device {device}",
            lambda place, device=device: lm.from_pretrained(
                place.checkpoint, **{"device_map" if isinstance(device, dict) else "device": device}
            ),
            "device",
        )
        yield (
            f"device {device} of a config",
            lambda place, device=device: lm.from_config(
                place.checkpoint, **{"device_map" if isinstance(device, dict) else "device": device}
            ),
            "device",
        )
    for name in ([], {}, 7, None, b"x", ""):
        yield f"name {name!r}", lambda place, name=name: lm.from_pretrained(name), ""
    for attention in ([], 7, "none", None):
        yield (
            f"attention {attention!r}",
            lambda place, attention=attention: lm.from_pretrained(place.checkpoint, attention=attention),
            "attention",
        )


@fault("argument", "text that is no Unicode")
def texts() -> Any:
    for name, text in {"surrogate": "a\ud800", "bytes": b"a", "number": 3, "none": None}.items():
        yield f"encode {name}", lambda place, text=text: Tokenizer(place.checkpoint).encode(text), "text"
        yield (
            f"offsets of {name}",
            lambda place, text=text: Tokenizer(place.checkpoint).encode_with_offsets(text),
            "text",
        )
    for ids in ([-1], [HUGE], ["x"], [1.5], None, 3):
        yield f"decode {ids}", lambda place, ids=ids: Tokenizer(place.checkpoint).decode(ids), "token ids"


@fault("argument", "models, caches and heads too large for the memory", "bytes")
def absurd_sizes() -> Any:
    for sizes in (
        {"hidden_size": 2**28, "num_attention_heads": 8},
        {"vocab_size": 2**31 - 1, "hidden_size": 2**16 - 4},
        {"intermediate_size": 2**31 - 1, "hidden_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 1000},
    ):
        yield f"from_config of {sizes}", lambda place, sizes=sizes: lm.from_config({**config_of(place), **sizes})
    yield "max_new_tokens", lambda place: place.model.generate(IDS, max_new_tokens=10**9 - 1)
    yield (
        "num_return_sequences",
        lambda place: place.model.generate(IDS, do_sample=True, pad_token_id=0, num_return_sequences=10**9 - 1),
    )
    yield "Medusa heads", lambda place: lm.MedusaModel.from_base(place.model, num_heads=10**9), "num_heads"
    yield "LoRA", lambda place: lm.add_lora(lm.from_config(config_of(place)), r=10**9), "r: "
