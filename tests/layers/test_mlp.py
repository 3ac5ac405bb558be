"""The gated MLP against transformers'."""

import copy

import pytest
import torch
from transformers import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP

from ligermodels.integrations.mlp import mlp_forward
from ligermodels.integrations.modules import Native, set_forward
from ligermodels.layers import GatedMLP, MLPConfig


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("multipliers", [(1.0, 1.0), (0.63, 1.0), (1.0, 2.7), (0.63, 0.11)])
def test_multipliers_of_gate_and_down(multipliers: tuple[float, float], bias: bool) -> None:
    """Falcon-H1's: output and gradients, of the native module and of transformers' in place."""
    theirs = FalconH1MLP(
        FalconH1Config(hidden_size=12, intermediate_size=22, mlp_bias=bias, mlp_multipliers=list(multipliers))
    )
    config = MLPConfig(22, bias=bias, gate_multiplier=multipliers[0], down_multiplier=multipliers[1])
    ours = GatedMLP(12, config)
    with torch.no_grad():
        for kind in ("weight", "bias") if bias else ("weight",):
            pairs = [getattr(theirs.get_submodule(name), kind) for name in ("gate_proj", "up_proj")]
            getattr(ours.gate_up, kind).copy_(torch.stack(pairs, 1).flatten(0, 1))
            getattr(ours.down, kind).copy_(getattr(theirs.down_proj, kind))
    x = torch.randn(3, 5, 12, requires_grad=True)
    wanted = theirs(x)
    expected = torch.autograd.grad(wanted.square().sum(), [x, theirs.down_proj.weight])
    in_place = copy.deepcopy(theirs)
    set_forward(
        in_place, mlp_forward, Native(config, {f"mlp.{name}": f"{name}_proj" for name in ("gate", "up", "down")})
    )
    for module, down in ((ours, ours.down), (in_place, in_place.down_proj)):
        found = module(x)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        gradients = torch.autograd.grad(found.square().sum(), [x, down.weight])
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)
