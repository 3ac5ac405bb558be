"""Generation of a native model with a static cache; transformers compiles the forward into one graph."""

from typing import Any

import pytest
import torch
from test_nativize import make
from torch import Tensor
from transformers import CompileConfig, StaticCache

import ligermodels as lm

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5_text", "qwen3_5_moe_text")]


def prompts(device: str) -> list[dict[str, Tensor]]:
    """Two batches of one shape, the second with padding on the left."""
    torch.manual_seed(0)
    ids = torch.randint(3, 131, (2, 2, 9), device=device)
    masks = torch.ones_like(ids)
    masks[1, 0, :4] = 0
    return [{"input_ids": each, "attention_mask": mask} for each, mask in zip(ids, masks, strict=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["qwen3_next", *SLOW])
def test_a_forward_of_generate_compiles_into_one_graph(name: str, device: str) -> None:
    """Once, for several calls of `generate`, with the tokens and scores of the eager model and its dynamic cache.

    With the conditions of transformers' `test_generate_compile_model_forward_fullgraph`: a graph break, a dynamic shape
    or a second compilation is an error.
    """
    hf = lm.nativize(make(name, "sdpa").to(device).eval())
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="eager" if device == "cpu" else "inductor")
    compile_config._compile_all_devices = True  # type: ignore[attr-defined]  # on the CPU too
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "compile_config": compile_config}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    torch.compiler.reset()
    with torch.compiler.set_stance("force_eager"):
        wanted = [hf.generate(**prompt, **options) for prompt in prompts(device)]
    assert not hasattr(hf, "_compiled_call")
    for number, prompt in enumerate(prompts(device)):
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = hf.generate(**prompt, cache_implementation="static", **options)
        assert isinstance(found.past_key_values, StaticCache) and hasattr(hf, "_compiled_call")
        assert torch.equal(found.sequences, wanted[number].sequences)
        torch.testing.assert_close(found.scores, wanted[number].scores, rtol=1e-4, atol=1e-5)
