"""Many parameters in one launch: the bits of a launch for each."""

from functools import partial

import pytest
import torch
from conftest import Where
from torch import Tensor

from ligermodels.errors import InputError
from ligermodels.ops.optimizer import foreach_adamw
from ligermodels.ops.optimizer.adamw import adamw_step
from ligermodels.ops.optimizer.blockwise import Blockwise, num_blocks
from ligermodels.ops.optimizer.foreach_adamw import AdamWUpdate, foreach_adamw_step
from ligermodels.ops.optimizer.rounding import BLOCK, Shard
from ligermodels.ops.runtime.dispatch import use_kernels
from ligermodels.training.fused_adamw import FusedAdamW

NUMBERS = {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PROGRAM = BLOCK * foreach_adamw.BLOCKS
SHAPES = [(7,), (), (0, 4), (3, 16), (PROGRAM + 16,), (2, PROGRAM - 1), (BLOCK,), (5, 33)]


def updates_of(where: Where, seeds: tuple[int, ...] | None) -> list[AdamWUpdate]:
    """Of all shapes, of other dtypes, at odd addresses, with strides, in 8 bits, and of shards of one and more rows."""

    def four(shape: tuple[int, ...], dtype: torch.dtype = where.dtype) -> list[Tensor]:
        return [torch.rand(shape, device=where.device).add(0.5).to(dtype) for _ in range(4)]

    found = [AdamWUpdate(*four(shape), step, seeds) for step, shape in enumerate(SHAPES, 1)]
    found += [AdamWUpdate(*four((40,), torch.float32), 3, seeds), AdamWUpdate(*four((9, 3), torch.float64), 3, None)]
    found += [AdamWUpdate(*(x[1:] for x in four((50,))), 2, seeds)]
    strided = four((6, 10))
    found += [AdamWUpdate(strided[0], four((10, 6))[0].T, *strided[2:], 2, seeds)]
    parameter, gradient = four((4, 300))[:2]
    codes = [torch.randint(100, (4, 300), dtype=torch.uint8, device=where.device) for _ in range(2)]
    scales = [torch.rand(4, num_blocks(300), device=where.device) for _ in range(2)]
    found += [AdamWUpdate(parameter, gradient, *map(Blockwise, codes, scales), 4, seeds)]
    for starts, sizes in (((5, 0), (2, 12)), ((0, 4), (9, 5)), ((3, 0), (1, 12))):
        found += [AdamWUpdate(*four(sizes), 5, seeds, Shard((9, 12), starts))]
    return found


def copied(update: AdamWUpdate) -> AdamWUpdate:
    def copy(x: Tensor | Blockwise) -> Tensor | Blockwise:
        return Blockwise(*(part.clone() for part in x)) if isinstance(x, Blockwise) else x.clone()

    odd = update.parameter.storage_offset() == 1
    tensors = [torch.cat([x[:1], x])[1:] if odd else copy(x) for x in update[:4]]
    return AdamWUpdate(*tensors, *update[4:])


@pytest.mark.parametrize("seeds", [None, (7, 1)], ids=["nearest", "stochastic"])
def test_bits_are_those_of_single_launches(
    where: Where, seeds: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    together = updates_of(where, seeds)
    alone = [copied(update) for update in together]
    for *tensors, step, rounding_seeds, shard in alone:
        adamw_step(*tensors, step=step, rounding_seeds=rounding_seeds, shard=shard, **NUMBERS)
    launches: list[int] = []
    launch = foreach_adamw._launch
    monkeypatch.setattr(foreach_adamw, "_launch", lambda rows, *rest: launches.append(len(rows)) or launch(rows, *rest))
    versions = [update.parameter._version for update in together]
    foreach_adamw_step(together, **NUMBERS)
    for one, other, version in zip(together, alone, versions, strict=True):
        assert one.parameter._version > version or not one.parameter.numel()
        for found, wanted in zip(one[:4], other[:4], strict=True):
            pairs = zip(found, wanted, strict=True) if isinstance(found, Blockwise) else [(found, wanted)]
            assert all(torch.equal(a, b) for a, b in pairs), tuple(one.parameter.shape)
    on_kernels = where.dtype != torch.float64 and use_kernels(together[0].parameter)
    assert max(launches, default=0) >= 4 * on_kernels and sum(launches) <= len(together) - 4 * on_kernels


def test_one_that_does_not_fit_is_named() -> None:
    tensors = [torch.zeros(4, 4) for _ in range(4)]
    wrong = AdamWUpdate(tensors[0], torch.zeros(4), *tensors[2:], 1)
    with pytest.raises(InputError, match=r"gradient must be floating of shape \(4, 4\)"):
        foreach_adamw_step([AdamWUpdate(*tensors, 1), wrong], **NUMBERS)


def test_parameters_that_repeat(where: Where) -> None:
    """They are updated one after another, as torch's AdamW does without `foreach`; it warns of them."""
    start, gradient = torch.randn(2, 37, device=where.device).to(where.dtype)
    found = []
    for make in (FusedAdamW, partial(torch.optim.AdamW, foreach=False)):
        parameters = [torch.nn.Parameter(x.clone()) for x in (start, gradient)]
        for parameter in parameters:
            parameter.grad = gradient.clone()
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = make([parameters[0], *parameters], **NUMBERS)
        optimizer.step()
        found.append([x.detach() for x in parameters])
        assert [int(optimizer.state[x]["step"]) for x in parameters] == [2, 1]
    unit = 4 * torch.finfo(where.dtype).eps
    torch.testing.assert_close(*found, rtol=unit, atol=unit)


def test_under_another_default_device(where: Where) -> None:
    """Tables and counts are made on the host all the same."""
    start, gradient = torch.randn(2, 37, device=where.device).to(where.dtype)
    found = []
    for default in ("cpu", "meta"):
        parameters = [torch.nn.Parameter(start.clone()) for _ in range(2)]
        for parameter in parameters:
            parameter.grad = gradient.clone()
        with torch.device(default):
            FusedAdamW(parameters, **NUMBERS).step()
        found.append(torch.stack([parameter.detach() for parameter in parameters]))
    assert torch.equal(*found) and not torch.equal(found[0][0], start)


def test_a_step_that_fails_is_not_counted() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = FusedAdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    optimizer.state[parameters[1]]["exp_avg"] = torch.zeros(5)
    with pytest.raises(InputError, match="exp_avg must be floating"):
        optimizer.step()
    assert [int(optimizer.state[x]["step"]) for x in parameters] == [1, 1]


def test_a_subclass_with_the_method_of_before() -> None:
    with pytest.raises(TypeError, match="update_parameters instead"):

        class Mine(FusedAdamW):
            def update_parameter(self, parameter: Tensor, group: dict, index: int) -> None:
                """Not called."""
