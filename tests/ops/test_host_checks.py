"""Bad values on CUDA as an error on the host, where that is asked for; on the CPU they always are."""

import math
import runpy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import InputError
from ligermodels.ops.runtime import dispatch

CONFIG = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_where_values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA only if asked for, and not while a graph is captured, where nothing may wait."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    cuda: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for enabled in (False, True):
        with ops.set_host_checks(enabled):
            for capturing in (False, True):
                assert dispatch.checked_on_host(cuda) == (enabled and not capturing)
                assert dispatch.checked_on_host(torch.ones(1))
            capturing = False
            with dispatch.as_recorded():  # the pass before it, which compiles the kernels
                assert not dispatch.checked_on_host(cuda)
            with ops.set_host_checks(not enabled):
                assert dispatch.checked_on_host(cuda) != enabled
            assert dispatch.checked_on_host(cuda) == enabled
    assert not dispatch.checked_on_host(torch.ones(1, device="meta"))
    monkeypatch.setattr(ops.set_host_checks, "value", False)
    ops.set_host_checks(True)  # holds from the call on
    assert dispatch.checked_on_host(cuda) != capturing


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("1", True), ("True", True), ("0", False), ("false", False), ("Off", False), ("", False), (None, False)],
)
def test_the_environment_asks_for_them(value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGERMODELS_HOST_CHECKS", raising=False)
    if value is not None:
        monkeypatch.setenv("LIGERMODELS_HOST_CHECKS", value)
    assert runpy.run_path(dispatch.__file__)["set_host_checks"].value == wanted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bad_targets_labels_and_ids_raise(device: str) -> None:
    """The GPU stays usable."""
    target = torch.tensor([1, 9, -100], device=device)
    x, ids = torch.randn(3, 4, device=device), torch.full((1, 4), 5, device=device)
    model = lm.from_config(CONFIG, device=device)
    with ops.set_host_checks(True):
        for call in (
            lambda: ops.cross_entropy(x.repeat(1, 2), target, class_weights=torch.ones(8, device=device)),
            lambda: ops.linear_cross_entropy(x, x.new_ones(9, 4), target),
            lambda: ops.linear_log_probs(x, x.new_ones(9, 4), target),
        ):
            with pytest.raises(InputError, match=r"but target\[1\] is 9"):
                call()
        with pytest.raises(InputError, match=r"labels: must lie in \[0, 40\)"):
            model(ids, labels=ids + 40)
        with pytest.raises(InputError, match=r"input_ids: token ids must lie in \[0, 40\), but \[0, 0\] is 45"):
            model(ids + 40)
        assert model(ids, labels=ids).loss.isfinite()


def q_of(*heads: int) -> torch.Tensor:
    return torch.ones(1, *heads, 8)


ATTENTION_OPS: dict[str, Any] = {
    "attention": lambda **options: ops.attention(q_of(4, 2), q_of(4, 2), q_of(4, 2), **options),
    "decode_attention": lambda **options: ops.decode_attention(
        q_of(1, 2), q_of(4, 2), q_of(4, 2), torch.tensor([2]), **options
    ),
    "block_context_attention": lambda **options: ops.block_context_attention(
        q_of(2, 3, 2), q_of(2, 3, 2), q_of(2, 3, 2), q_of(4, 2), q_of(4, 2), torch.tensor([[1, 3]]), **options
    ),
}


@pytest.mark.parametrize("op", ATTENTION_OPS)
def test_options_of_attention_scores(op: str) -> None:
    """Numbers within their bounds, and True or False."""
    bad: dict[str, tuple[str, tuple[Any, ...]]] = {
        "softmax_scale": ("must be a finite number or None", ("0.1", True, math.nan, math.inf, torch.ones(1))),
        "window": ("must be a whole number of at least 1", (0, -1, 2.5, "2", True)),
    }
    if op == "block_context_attention":
        bad["causal"] = ("must be True or False", ("no", 1, None))
    else:
        bad["softcap"] = ("must be a number above 0", (0, -1.0, "5", True, math.nan))
    call = ATTENTION_OPS[op]
    for name, (message, values) in bad.items():
        for value in values:
            with pytest.raises(InputError, match=f"^{op}: {name}:? {message}"):
                call(**{name: value})
    for options in ({"softmax_scale": np.float32(0.5)}, {"softmax_scale": 1}, {"window": np.int64(2)}):
        assert torch.isfinite(call(**options)).all()


@pytest.mark.parametrize("bounds", [[1, 4], [0, 3, 2, 4], [], [0, 2], [0, 5]], ids=str)
@pytest.mark.parametrize("op", ["attention", "block_context_attention", "gated_delta_rule", "causal_conv"])
def test_bounds_of_documents_rise_from_0_to_the_length(op: str, bounds: list[int]) -> None:
    """An empty document is fine. Tokens of a context may follow the last document."""
    x, gates = q_of(4, 2), torch.ones(1, 4, 2)
    calls: dict[str, Any] = {
        **ATTENTION_OPS,
        "gated_delta_rule": lambda cu_seqlens: ops.gated_delta_rule(x, x, x, -gates, gates, cu_seqlens=cu_seqlens),
        "causal_conv": lambda cu_seqlens: ops.causal_conv(q_of(4), torch.ones(8, 3), cu_seqlens=cu_seqlens),
    }
    calls[op](cu_seqlens=torch.tensor([0, 2, 2, 4], dtype=torch.int32))
    if op == "block_context_attention" and bounds in ([0, 2], [0, 5]):
        return
    with pytest.raises(InputError, match=rf"^{op}: cu_seqlens must rise from 0.*; got \["):
        calls[op](cu_seqlens=torch.tensor(bounds, dtype=torch.int32))


@pytest.mark.parametrize("setting", [ops.set_host_checks, ops.set_batch_invariant])
def test_settings_are_true_or_false(setting: Any) -> None:
    before = setting.value
    with pytest.raises(InputError, match=rf"{setting.__name__}: enabled: must be True or False, got 'no'"):
        setting("no")
    assert setting.value is before
