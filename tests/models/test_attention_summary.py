"""The line about attention that `train` and `info` show."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo

import ligermodels as lm
from ligermodels.models.attention_summary import attention_summary
from ligermodels.ops.attention import flash_attention, varlen


def summary(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], attention: str = "auto", **changes: Any
) -> str:
    """For a GPU of this capability, without flash-attn."""
    monkeypatch.setattr(varlen, "MISSING", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=capability[0]))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for backend in flash_attention.INSTALLED:
        monkeypatch.setitem(flash_attention.INSTALLED, backend, False)
    config = lm.from_config(zoo.CONFIGS[name] | changes, device="meta", attention=attention).config
    return attention_summary(config, torch.device("cuda"), torch.bfloat16, 64)


@pytest.mark.kernels
def test_backends_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    faster = "flash-attn-4 is not installed and would be faster (pip install 'ligermodels[flash-attn]')"
    assert summary(monkeypatch, "llama-3", (9, 0), head_dim=128) == f"triton; {faster}"
    assert summary(monkeypatch, "llama-3", (8, 0), head_dim=128) == "varlen"
    assert summary(monkeypatch, "llama-3", (7, 5), head_dim=128) == "triton"
    assert summary(monkeypatch, "gpt_oss", (9, 0)) == "triton"
    assert summary(monkeypatch, "llama-3", (9, 0), "triton", head_dim=128) == "triton"  # named: no hint
    gemma4 = summary(monkeypatch, "gemma4_text", (8, 0), global_head_dim=512)
    assert gemma4 == "varlen (5 of 7 layers), triton (2 of 7 layers)"


def test_backends_on_a_cpu() -> None:
    for name, expected in {"llama-3": "sdpa", "gemma2": "reference", "qwen3_next": "sdpa"}.items():
        config = lm.from_config(zoo.CONFIGS[name], device="meta").config
        assert attention_summary(config, torch.device("cpu"), torch.float32) == expected


def test_rows_that_are_longer_than_chunks() -> None:
    config = lm.from_config(zoo.CONFIGS["llama4_text"] | {"attention_chunk_size": 128}, device="meta").config
    assert attention_summary(config, torch.device("cpu"), torch.float32, 128) == "sdpa"
    found = attention_summary(config, torch.device("cpu"), torch.float32)
    assert found.startswith("unknown for rows of 8192 tokens: chunk (attention_chunk_size)")
