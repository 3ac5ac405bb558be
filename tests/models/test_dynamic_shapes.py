"""One graph for all sizes: `torch.compile(model, dynamic=True)`."""

import torch
from zoo import CONFIGS

import ligermodels as lm


def test_training_with_windows_and_softcaps() -> None:
    """Numbers of the model, such as the scale of its scores, are symbols then."""
    torch.manual_seed(0)
    model = lm.from_config({**CONFIGS["gemma2"], "num_hidden_layers": 2})
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for shape in ((2, 12), (3, 21)):
        ids = torch.randint(3, 100, shape)
        with torch._dynamo.config.patch(error_on_recompile=shape[0] == 3):
            torch.testing.assert_close(compiled(ids, labels=ids).loss, model(ids, labels=ids).loss)
