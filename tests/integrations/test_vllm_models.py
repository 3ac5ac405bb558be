"""Native models around an engine's attention and states: a flat batch of parts of several requests, as in vLLM.

A small engine of torch's own stands in for vLLM, of which tests/serving runs the real one; it takes any width of heads.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from two_ranks import in_ranks
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import ConfigError
from ligermodels.integrations.vllm.plan import AttentionPlan, StatePlan, plan_mixers
from ligermodels.layers import LayerConfig
from ligermodels.layers.external_attention import AttentionLayer
from ligermodels.layers.external_states import RecurrentLayer, RequestStates, rows_of_requests, run_requests
from ligermodels.layers.initialization import persistent_tensors
from ligermodels.layers.sharding import local
from ligermodels.parallel.tensor import tensor_parallel

LENGTHS = (5, 38, 17)
BATCHES = (
    [(1, 0, 9), (2, 0, 1)],
    [(0, 0, 3), (2, 1, 3), (1, 9, 37)],
    [(2, 3, 17), (1, 37, 38), (0, 3, 4)],
    [(0, 4, 5)],
)
"""Parts of the requests: (request, first token, end)."""
MAX_LENGTH = 100


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
    """Keys and values of each layer and request, the softmax over them, and recurrent states in slots; `batch` are
    (request, first token, end)."""

    def __init__(self, model: lm.CausalLM, plans: dict[str, AttentionPlan | StatePlan]) -> None:
        self.cache: defaultdict[tuple[str, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self.batch: list[tuple[int, int, int]] = []
        for name, plan in plans.items():
            mixer = cast(AttentionLayer | RecurrentLayer, model.decoder.get_submodule(name))
            attention = isinstance(plan, AttentionPlan)
            mixer.external = self.attention(name, plan, mixer) if attention else self.states(cast(StatePlan, plan))

    @property
    def sizes(self) -> list[int]:
        return [end - start for _, start, end in self.batch]

    def attention(self, name: str, plan: AttentionPlan, mixer: torch.nn.Module) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
            owner = name
            if k is None or v is None:
                assert plan.kv_from is not None and v is k is None
                owner = plan.kv_from
            else:
                assert k.shape[2:] == (plan.num_kv_heads, plan.head_dim) and v.shape[3] == plan.value_dim
                parts = zip(self.batch, k[0].split(self.sizes), v[0].split(self.sizes), strict=True)
                for (request, *_), keys, values in parts:
                    self.cache[owner, request].append((keys, values))
            outs = []
            for (request, *_), queries in zip(self.batch, q[0].split(self.sizes), strict=True):
                keys, values = (torch.cat(parts) for parts in zip(*self.cache[owner, request], strict=True))
                sinks = local(mixer, getattr(mixer, "sinks", None))
                outs.append(softmax_attention(queries, keys, values, plan, sinks))
            return torch.cat(outs)[None]

        return attend

    def states(self, plan: StatePlan) -> Callable[..., Tensor]:
        """States in slots that hold NaN at first."""
        shapes = zip(plan.shapes, plan.dtypes, strict=True)
        tensors = [torch.full((9, *shape), torch.nan, dtype=dtype) for shape, dtype in shapes]

        def run(layer: torch.nn.Module, x: Tensor) -> Tensor:
            bounds = [0, *accumulate(self.sizes)]
            slots = torch.tensor([(4, 7, 1)[request] for request, *_ in self.batch])
            continues = torch.tensor([start > 0 for _, start, _ in self.batch])
            rows = rows_of_requests(bounds)
            batches = [RequestStates(r, *(x[r.requests] for x in (slots, slots, continues))) for r in rows]
            return run_requests(layer, x, batches, tensors, plan.make_state)

        return run


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


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "phi3-long"])
def test_requests_in_parts(name: str) -> None:
    """The logits of each request, whose tokens come in parts beside those of others, are those of the request alone."""
    model = random_model(CONFIGS[name])
    check_requests(model, model, plan_mixers(model.config, MAX_LENGTH, torch.float64))


@torch.no_grad()
def check_requests(model: lm.CausalLM, plain: lm.CausalLM, plans: dict[str, AttentionPlan | StatePlan]) -> None:
    """`plain`: the model whose logits are wanted, without an engine."""
    requests = [torch.randint(3, 131, (length,)) for length in LENGTHS]
    wanted = [plain(ids[None]).logits[0] for ids in requests]
    engine = Engine(model, plans)
    found: list[list[Tensor]] = [[] for _ in requests]
    for spans in BATCHES:
        engine.batch = spans
        ids = torch.cat([requests[request][start:end] for request, start, end in spans])
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        logits = model.head(model.decoder(ids[None], position_ids=positions[None]))[0]
        for (request, *_), part in zip(engine.batch, logits.split(engine.sizes), strict=True):
            found[request].append(part)
    for each, parts in zip(wanted, found, strict=True):
        torch.testing.assert_close(torch.cat(parts), each, atol=1e-9, rtol=1e-9)


EVEN = {"gemma2": {"num_key_value_heads": 2}, "bamba": {"mamba_n_groups": 2}}
EVEN["gemma4_text-per-layer-inputs"] = {"num_key_value_heads": 2, "num_global_key_value_heads": 2}
DIVIDED = (*EVEN, "gpt_oss", "deepseek_v3", "qwen3_next", "lfm2")


def divided_requests(rank: int, folder: Path, mesh: DeviceMesh) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    for name in DIVIDED:
        config = {**CONFIGS[name], **EVEN.get(name, {})}
        config |= {field: size + size % 2 for field, size in config.items() if field.endswith("intermediate_size")}
        plain, model = random_model(config), random_model(config)
        tensor_parallel(model, mesh, sequence_parallel=False)
        blocks = tuple(block.tensor_shard(2) for block in model.config.blocks)
        check_requests(model, plain, plan_mixers(replace(model.config, blocks=blocks), MAX_LENGTH, torch.float64))


def test_requests_in_parts_on_ranks(tmp_path: Path) -> None:
    """The same under tensor parallelism, in a process group that is there and has not all ranks."""
    in_ranks(3, divided_requests, tmp_path)


def test_rows_of_requests() -> None:
    """Requests share rows with requests of up to twice their tokens; requests without new tokens have no row."""
    rows = rows_of_requests([0, 1, 4, 4, 5, 7])
    assert [each.requests.tolist() for each in rows] == [[0, 3], [1, 4]]
    assert [each.tokens.tolist() for each in rows] == [[[0], [4]], [[1, 2, 3], [5, 6, -1]]]
    assert rows[0].seq_lens is None and rows[1].seq_lens is not None and rows[1].seq_lens.tolist() == [3, 2]


def test_other_mixers_are_refused_by_name() -> None:
    config = lm.from_config(CONFIGS["llama-3"], device="meta").config
    block = replace(config.blocks[1], mixer=Unknown())
    config = replace(config, blocks=(config.blocks[0], block))
    with pytest.raises(ConfigError, match=r"blocks.1.mixer: Unknown does not run inside vLLM"):
        plan_mixers(config, MAX_LENGTH, torch.float32)


class Unknown(LayerConfig):
    """Another mixer."""

    def build(self, hidden_size: int) -> torch.nn.Module:
        return torch.nn.Identity()


def test_scalings_that_move_with_the_length_are_refused() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    config = lm.from_config({**CONFIGS["llama-3"], "max_position_embeddings": 64, "rope_scaling": dynamic}).config
    assert len(plan_mixers(config, 64, torch.float32)) == len(config.blocks)
    with pytest.raises(ConfigError, match=r"rope: DynamicScaling .* give --max-model-len 64 or less \(it is 65\)"):
        plan_mixers(config, 65, torch.float32)
    config = lm.from_config(CONFIGS["phi3-long"], device="meta").config
    assert len(plan_mixers(config, 4, torch.float32)) == len(config.blocks)
    with pytest.raises(ConfigError, match=r"rope: LongRopeScaling .* give --max-model-len 4 or less"):
        plan_mixers(config, 5, torch.float32)
