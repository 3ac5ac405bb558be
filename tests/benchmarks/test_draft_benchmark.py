"""The benchmark of a training step of draft heads: the loss of the plain peers is ours, and a record has its times."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benching import SIZES, without_a_device
from torch import Tensor

import ligermodels as lm
from benchmarks.cases import draft, draft_peers, roofline
from benchmarks.cases.models import CONFIGS


def masked(sees: Any, batch: Any, queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask of all queries and keys, in place of flex attention's, which has no gradient on a CPU."""
    index = torch.arange
    return torch.stack([sees(torch.tensor(0), torch.tensor(0), query, index(keys)) for query in index(queries)])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(draft_peers, "mask_of", masked)
    monkeypatch.setattr(draft_peers, "attend", attend)
    for name in ("llama-3-8b", "qwen3-8b"):
        monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], **SIZES, "num_hidden_layers": 6})


CASES = {
    "eagle3": replace(draft.CASES["eagle3"], batch=2, length=20, draft_tokens=50, options={"num_steps": 3}),
    "dspark": replace(
        draft.CASES["dspark"], length=30, options={"block_size": 4, "num_layers": 2, "num_anchors": 9, "markov_rank": 8}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_peer_has_our_loss_and_gradients(case: draft.Case) -> None:
    torch.manual_seed(0)
    base = lm.from_config(CONFIGS[case.model], dtype=torch.float32)
    model, ids = draft.head_of(case, base), torch.randint(128, (case.batch, case.length))
    plain: Any = (
        draft_peers.PlainEagle3(model, *ids.shape) if case.kind == "eagle3" else draft_peers.PlainDSpark(model, ids)
    )
    ours, theirs = model(ids, labels=ids).loss, plain(ids)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    ours.backward()
    theirs.backward()
    pairs = {"norm.weight": model.head.norm.weight, "hidden_norm.weight": model.head.hidden_norm.weight}
    for name, parameter in pairs.items():
        name = name if name in plain.weights else f"layers.0.{name}"
        torch.testing.assert_close(plain.weights[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("provider", ["ligermodels graph target bf16", "torch target bf16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_record_has_times_and_the_share_of_the_lower_bound(case: draft.Case, provider: str) -> None:
    record = draft.record_of(case, provider, {"floor_ms": 1.0})
    assert "failed" not in record, record["failed"]
    assert record["of_floor"] == pytest.approx(1 / record["step_ms"])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_lower_bound_has_the_products_of_a_step(case: draft.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "fastest_attention", lambda case, backward=True: lambda: None)
    monkeypatch.setattr(draft, "fastest_attention", lambda case, backward=True: lambda: None)
    assert draft.roofline(case, draft.IN_BF16) > 0
