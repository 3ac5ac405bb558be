"""Bad values on CUDA as an error on the host, where that is asked for; on the CPU they always are."""

import runpy
from types import SimpleNamespace
from typing import Any

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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    cuda: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    for enabled in (False, True):
        with ops.set_host_checks(enabled):
            for capturing in (False, True):
                assert dispatch.checked_on_host(cuda) == (enabled and not capturing)
                assert dispatch.checked_on_host(torch.ones(1))
            with ops.set_host_checks(not enabled):
                capturing = False
                assert dispatch.checked_on_host(cuda) != enabled
            assert dispatch.checked_on_host(cuda) == enabled
    assert not dispatch.checked_on_host(torch.ones(1, device="meta"))
    monkeypatch.setattr(ops.set_host_checks, "value", False)
    ops.set_host_checks(True)  # holds from the call on
    assert dispatch.checked_on_host(cuda) != capturing


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("0", False), ("", False), (None, False)])
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
            with pytest.raises(InputError, match=r"target\[1\] is 9, .* 1 such"):
                call()
        with pytest.raises(InputError, match=r"labels: must lie in \[0, 40\)"):
            model(ids, labels=ids + 40)
        with pytest.raises(InputError, match=r"input_ids: token ids must lie in \[0, 40\), but \[0, 0\] is 45"):
            model(ids + 40)
        assert model(ids, labels=ids).loss.isfinite()
