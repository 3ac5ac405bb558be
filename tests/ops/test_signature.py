"""The declaration of the tensors of an op."""

from typing import Any

import pytest
import torch

from ligermodels.errors import InputError
from ligermodels.ops.runtime.checks import MOST_ACCEPTED, Signature

NORM = Signature(x="... N+", residual="... N =x ?", weight="N ?")
HEADS = Signature(q="B T Hq D", slots="B int32 int64", mask="T T bool ?")
X, Q = torch.ones(2, 5, 3), torch.ones(1, 4, 2, 8)
SLOTS = torch.zeros(1, dtype=torch.int64)


def test_tensors_that_fit() -> None:
    weight, half = torch.ones(3, dtype=torch.float16), X.half()
    assert NORM.check("norm", X, None, weight) == (X, None, weight)
    assert NORM.check("norm", half[0, 0], half[1, 1], None)[1].shape == (3,)
    assert HEADS.check("heads", Q, SLOTS, torch.ones(4, 4, dtype=torch.bool), D=8)[0] is Q


@pytest.mark.parametrize(
    ("signature", "tensors", "sizes", "message"),
    [
        (NORM, (X.long(), None, None), {}, r"op: x must be floating of shape \(..., N\); got torch.int64 \(2, 5, 3\)"),
        (NORM, (X[..., :0], None, None), {}, r"op: needs N > 0; got tensors of shape \(2, 5, 0\)"),
        (NORM, (X, X[0], None), {}, r"residual must be torch.float32 of shape \(2, 5, 3\) on cpu; got .* \(5, 3\)"),
        (NORM, (X, X.half(), None), {}, r"residual must be torch.float32 .* got torch.float16"),
        (NORM, (X, None, X[0]), {}, r"weight must be floating of shape \(3\) on cpu; got .* \(5, 3\)"),
        (NORM, (X, None, torch.ones(3, device="meta")), {}, r"weight must be .* on cpu; got .* on meta"),
        (NORM, (None, None, None), {}, "op: x must be a tensor, got NoneType"),
        (HEADS, (Q[0], SLOTS, None), {}, r"q must be floating of shape \(B, T, Hq, D\)"),
        (HEADS, (Q, SLOTS, None), {"D": 6}, r"q must be floating of shape \(B, T, Hq, 6\)"),
        (HEADS, (Q, SLOTS.float(), None), {}, r"slots must be torch.int32 or torch.int64 of shape \(1\)"),
        (HEADS, (Q, SLOTS, torch.ones(4, 3, dtype=torch.bool)), {}, r"mask must be torch.bool of shape \(4, 4\)"),
    ],
)
def test_tensors_that_do_not_fit(signature: Signature, tensors: Any, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        signature.check("op", *tensors, **sizes)


def test_equal_letters_of_one_tensor() -> None:
    """Sizes that no other tensor gives."""
    square = Signature(x="N N")
    square.check("op", torch.ones(3, 3))
    with pytest.raises(InputError, match=r"op: x must be of shape \('N', 'N'\), equal letters for equal sizes"):
        square.check("op", torch.ones(3, 4))


def test_accepted_tensors_make_no_others_accepted() -> None:
    """A signature remembers which shapes, dtypes and devices it has accepted, a limited number of them."""
    signature = Signature(x="B N", y="N ?")
    x, y = torch.ones(2, 3), torch.ones(3)
    for _ in range(2):
        assert signature.check("op", x, y, B=2) == (x, y)
        for tensors, sizes in (((x, y), {"B": 4}), ((x, y[:2]), {"B": 2}), ((x.long(), y), {"B": 2}), ((x,), {"B": 2})):
            with pytest.raises((InputError, ValueError)):
                signature.check("op", *tensors, **sizes)
        with pytest.raises(InputError, match=r"y must be .* on cpu; got .* on meta"):
            signature.check("op", x, y.to("meta"), B=2)
    for size in range(1, 2 * MOST_ACCEPTED):
        signature.check("op", torch.ones(2, size), None)
        assert len(signature._accepted) <= MOST_ACCEPTED
