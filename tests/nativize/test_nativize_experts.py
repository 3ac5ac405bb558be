"""The implementation of experts that a user chooses on a model that computes natively."""

import copy
import pickle
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import zoo
from test_nativize import batch, make
from torch.testing import assert_close
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import ligermodels as lm
from ligermodels.integrations import mlp

SIZES = ("num_experts", "num_local_experts", "n_routed_experts")
MIXTURES = sorted(
    name
    for name in zoo.CONFIGS.keys() - zoo.ONLY_NATIVE
    if any(zoo.CONFIGS[name].get(size) for size in SIZES) and not name.endswith("without-experts")
)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_chosen_implementation_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers' own test of mixtures; until one is chosen, experts are native."""
    native = Mock(wraps=mlp.mix_experts)
    monkeypatch.setattr(mlp, "mix_experts", native)
    hf = lm.nativize(make(name)).eval()
    inputs: dict[str, Any] = {key: value for key, value in batch().items() if key != "labels"}
    # torch's grouped product needs other sizes than the zoo's.
    spies = {key: Mock(wraps=ALL_EXPERTS_FUNCTIONS["batched_mm"]) for key in ("batched_mm", "grouped_mm")}

    def run() -> tuple[torch.Tensor, list[bool]]:
        for spy in (native, *spies.values()):
            spy.reset_mock()
        with torch.no_grad(), patch.dict(ALL_EXPERTS_FUNCTIONS._global_mapping, spies):
            logits = hf(**inputs).logits
        return logits, [spy.called for spy in (native, *spies.values())]

    wanted, called = run()
    assert called == [True, False, False]
    for chosen in ("batched_mm", "eager", "grouped_mm"):
        hf.set_experts_implementation(chosen)
        logits, called = run()
        assert (
            called == [False, chosen == "batched_mm", chosen == "grouped_mm"]
            and hf.config._experts_implementation == chosen
        )
        assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    lm.nativize(lm.restore(hf))
    assert run()[1] == [True, False, False]


def test_a_copy_keeps_native_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = lm.nativize(make(MIXTURES[0]))
    for other in (copy.deepcopy(hf), pickle.loads(pickle.dumps(hf))):
        native = Mock(wraps=mlp.mix_experts)
        monkeypatch.setattr(mlp, "mix_experts", native)
        other(**batch())
        assert native.called and "_experts_implementation_internal" not in other.config.to_dict()
