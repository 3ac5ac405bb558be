"""The harness for ops that have no gradient; see op_harness for how it judges."""

from collections.abc import Sequence

import torch
from op_harness import Op, assert_as_good, copies, run


def check_forward(op: Op, plain: Op, inputs: Sequence[torch.Tensor]) -> None:
    """op against plain: outputs, equal bits in a second run on a GPU, and inputs left alone; those may hold NaN."""
    before = copies(inputs)
    truth, _ = run(plain, copies(inputs, torch.float64), ())
    eager, _ = run(plain, copies(inputs), ())
    ours, _ = run(op, inputs, ())
    again, _ = run(op, inputs, ()) if inputs[0].is_cuda else (ours, ())
    for i, results in enumerate(zip(ours, eager, truth, strict=True)):
        assert ours[i].dtype == eager[i].dtype and ours[i].is_contiguous()
        assert_as_good(f"output {i}", *results)
    for one, two in zip(ours, again, strict=True):
        assert torch.equal(one, two), "a second run gave other bits"
    for x, untouched in zip(inputs, before, strict=True):
        assert torch.equal(x.nan_to_num(7), untouched.nan_to_num(7)), "the op changed its input"
