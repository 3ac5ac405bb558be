"""Native models around an engine's attention: a flat batch of parts of several requests, as vLLM computes one.

A small engine of torch's own stands in for vLLM, of which tests/serving runs the real one; it takes any width of heads.
"""

from collections import defaultdict
from collections.abc import Callable
from types import NoneType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError, InputError
from ligermodels.integrations.vllm import update_weights
from ligermodels.integrations.vllm.plan import AttentionPlan, plan_attention
from ligermodels.layers import AttentionConfig, LatentAttentionConfig
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.layers.initialization import persistent_tensors

LENGTHS = (5, 38, 17)
BATCHES = (
    [(1, 0, 9), (2, 0, 1)],
    [(0, 0, 3), (2, 1, 2), (1, 9, 37)],
    [(2, 2, 17), (1, 37, 38), (0, 3, 4)],
    [(0, 4, 5)],
)
"""Parts of the requests: (request, first token, end)."""
MAX_LENGTH = 100
NEEDS_STATES = ("GatedDeltaNet", "Mamba2", "ShortConv")


def random_model(config: dict[str, Any]) -> lm.CausalLM:
    """A model none of whose tensors has its initial value."""
    torch.manual_seed(0)
    model = lm.from_config(config, dtype="float64").eval()
    with torch.no_grad():
        for tensor in persistent_tensors(model).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.15)
    return model


class Engine:
    """Keys and values of each layer and request, and the softmax over them; `batch` are (request, tokens)."""

    def __init__(self, plans: dict[int, AttentionPlan]) -> None:
        self.plans = plans
        self.cache: defaultdict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.batch: list[tuple[int, int]] = []

    def layer(self, number: int, sinks: Tensor | None) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            plan, owner, sizes = self.plans[number], number, [count for _, count in self.batch]
            if k is None or v is None:
                assert plan.kv_from is not None and v is k is None
                owner = plan.kv_from
            else:
                assert k.shape[2:] == (plan.num_kv_heads, plan.head_dim) and v.shape[3] == plan.value_dim
                for (request, _), keys, values in zip(self.batch, k[0].split(sizes), v[0].split(sizes), strict=True):
                    self.cache[owner, request].append((keys, values))
            outs = []
            for (request, _), queries in zip(self.batch, q[0].split(sizes), strict=True):
                keys, values = (torch.cat(parts) for parts in zip(*self.cache[owner, request], strict=True))
                outs.append(softmax_attention(queries, keys, values, plan, sinks))
            return torch.cat(outs)[None]

        return attend


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, sinks: Tensor | None) -> Tensor:
    """q (T, heads, D) of the last T tokens, k and v (S, kv heads, D) of all -> (T, heads, value channels)."""
    k, v = (x.repeat_interleave(plan.num_heads // plan.num_kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * plan.scale
    if plan.softcap is not None:
        scores = plan.softcap * torch.tanh(scores / plan.softcap)
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) | (distance >= (plan.window or len(k)))
    scores = scores.masked_fill(hidden, -torch.inf)
    extra = torch.empty(plan.num_heads, len(q), 0) if sinks is None else sinks[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, extra.to(scores)], dim=-1).softmax(-1)[..., : len(k)]
    return torch.einsum("hts,shd->thd", weights, v)


def has_other_mixers(config: lm.DecoderConfig) -> bool:
    softmax = (AttentionConfig, LatentAttentionConfig, NoneType)
    return not all(isinstance(block.mixer, softmax) for block in config.blocks)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "phi3-long"])
@torch.no_grad()
def test_requests_in_parts(name: str) -> None:
    """The logits of each request, whose tokens come in parts beside those of others, are those of the request alone.
    Models with mixers that need states of their own are refused by the name of the first."""
    model = random_model(CONFIGS[name])
    if has_other_mixers(model.config):
        with pytest.raises(ConfigError, match=r"blocks\[\d+\].mixer: \w+ does not run inside vLLM"):
            plan_attention(model.config, MAX_LENGTH)
        return
    requests = [torch.randint(3, 131, (length,)) for length in LENGTHS]
    wanted = [model(ids[None]).logits[0] for ids in requests]
    engine = Engine(plan_attention(model.config, MAX_LENGTH))
    for number in engine.plans:
        mixer = cast(AttentionLayer, model.decoder.blocks[number].mixer)
        mixer.external = engine.layer(number, getattr(mixer, "sinks", None))
    found: list[list[Tensor]] = [[] for _ in requests]
    for spans in BATCHES:
        engine.batch = [(request, end - start) for request, start, end in spans]
        ids = torch.cat([requests[request][start:end] for request, start, end in spans])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        logits = model.head(model.decoder(ids[None], position_ids=positions[None]))[0]
        for (request, _), part in zip(engine.batch, logits.split([count for _, count in engine.batch]), strict=True):
            found[request].append(part)
    for each, parts in zip(wanted, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), each, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "lfm2"])
def test_other_mixers_are_refused_by_name(name: str) -> None:
    model = lm.from_config(CONFIGS[name], device="meta")
    with pytest.raises(ConfigError, match=rf"blocks\[0\].mixer: ({'|'.join(NEEDS_STATES)}) does not run inside vLLM"):
        plan_attention(model.config, MAX_LENGTH)


def test_scalings_that_move_with_the_length_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    config = lm.from_config({**CONFIGS["llama-3"], "max_position_embeddings": 64, "rope_scaling": dynamic}).config
    assert len(plan_attention(config, 64)) == 3
    with pytest.raises(ConfigError, match=r"rope: DynamicScaling .* give --max-model-len 64 or less \(it is 65\)"):
        plan_attention(config, 65)
    config = lm.from_config(CONFIGS["phi3-long"], device="meta").config
    assert len(plan_attention(config, 4)) == 3
    with pytest.raises(ConfigError, match=r"rope: LongRopeScaling .* give --max-model-len 4 or less"):
        plan_attention(config, 5)


@pytest.mark.parametrize(("unfinished", "message"), [
    (None, "engine: must be a vllm.LLM, got a SimpleNamespace"),
    (True, "engine: has unfinished requests"),
    (False, "engine: runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0"),
])  # fmt: skip
def test_engines_that_take_no_weights(unfinished: bool | None, message: str) -> None:
    parts = {} if unfinished is None else {"llm_engine": SimpleNamespace(has_unfinished_requests=lambda: unfinished)}
    with pytest.raises(InputError, match=message):
        update_weights(SimpleNamespace(**parts), lm.from_config(CONFIGS["llama-3"], device="meta"))
