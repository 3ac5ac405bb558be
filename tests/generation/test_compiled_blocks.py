"""`generate` with compiled blocks gives the tokens of the model as it is."""

import shutil
from typing import Any

import pytest
import torch
from zoo import CONFIGS

import ligermodels as lm

PROMPTS = [[5, 9, 17, 3, 22, 8, 40], [7, 66, 101]]
OPTIONS: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = ["llama-3", "gemma2", "qwen3", "qwen3_5_text", "glm4_moe_lite"]


def make(name: str, device: torch.device, dtype: torch.dtype) -> lm.CausalLM:
    """Two layers, of both kinds where a family has two. All parameters are away from their initial values, so that
    wrong keys and values change tokens."""
    torch.manual_seed(0)
    config = {**CONFIGS[name], "num_hidden_layers": 2}
    if "full_attention_interval" in config:
        config["full_attention_interval"] = 2
    model = lm.from_config(config, device=device, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.kernels
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3", "qwen3_5_text", "glm4_moe_lite"])
def test_states_of_any_length(name: str) -> None:
    """With varying sizes, as after a second call. Inductor then copied a cache from the wrong place in its storage."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make(name, device, torch.float32)
    prompt = torch.tensor(PROMPTS[:1], device=device)

    @torch.no_grad()
    def logits() -> list[torch.Tensor]:
        state = model.new_state(1, 12)
        tokens = [prompt, *(torch.tensor([[11 + i]], device=device) for i in range(3))]
        return [model(each, state=state, return_logits=True).logits for each in tokens]

    wanted = logits()
    torch._dynamo.reset()
    for block in model.decoder.blocks:
        block.compile(dynamic=True)
    for ours, theirs in zip(logits(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "cuda_graph"), [*((name, True) for name in FAMILIES), ("gemma2", False), ("qwen3_5_text", False)]
)
def test_the_tokens_are_the_same(name: str, cuda_graph: bool) -> None:
    """For batches and states of several sizes, so that graphs are compiled again; kernels of Inductor may round
    otherwise, so tokens may differ only where two logits are equal but for rounding. The families take turns in which
    dtype meets the CUDA graph."""
    dtype = (torch.float32, torch.bfloat16)[(FAMILIES.index(name) + cuda_graph) % 2]
    model = make(name, torch.device("cuda"), dtype)
    calls = [(PROMPTS, 8), (PROMPTS[:1], 12), (PROMPTS, 20)]
    wanted = [model.generate(prompts, count, cuda_graph=cuda_graph, **OPTIONS) for prompts, count in calls]
    torch._dynamo.reset()
    for block in model.decoder.blocks:
        block.compile()
    for (prompts, count), tokens in zip(calls, wanted, strict=True):
        found = model.generate(prompts, count, cuda_graph=cuda_graph, **OPTIONS)
        start = tokens.shape[1] - count
        for row, (ours, theirs) in enumerate(zip(found.tolist(), tokens.tolist(), strict=True)):
            first = next((i for i in range(start, len(ours)) if ours[i] != theirs[i]), None)
            if first is None:
                continue
            prompt = [theirs[:first][-(len(prompts[row]) + first - start) :]]
            logits = model(torch.tensor(prompt, device="cuda")).logits[0, -1].float()
            gap = float(logits[theirs[first]] - logits[ours[first]])
            assert abs(gap) < (1e-3 if dtype == torch.float32 else 0.1), (prompts, first, gap)
