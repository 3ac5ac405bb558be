"""Models whose parameters are sharded: FSDP2 by block and tensor parallelism, on two processes with gloo."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from two_ranks import WORLD, by_first_rank, in_two_ranks, own_parts
from zoo import BASE, GEMMA, GEMMA4, GPT_OSS, LATENT, MIXTURES, SANDWICH
from zoo import CONFIGS as ZOO

import ligermodels as lm
from ligermodels.layers import Block, ForwardContext
from ligermodels.speculative.joint import JointMedusa

TWO_LAYERS = {**BASE, "num_hidden_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**TWO_LAYERS, "model_type": "llama"},
    "gemma2": {**SANDWICH, "model_type": "gemma2", "head_dim": 14},
    "mixtral": {**TWO_LAYERS, "model_type": "mixtral", "num_local_experts": 5, "output_router_logits": True},
    "qwen2_moe": MIXTURES["qwen2_moe"],
    "glm4_moe": MIXTURES["glm4_moe"],
    "gpt_oss": GPT_OSS,
    "gemma4_text": GEMMA4["gemma4_text-per-layer-inputs"],
    "deepseek_v3": LATENT["deepseek_v3"],
    "muse_glimmer_text": ZOO["muse_glimmer_text"],
}
"""Untied; tied, with post-norms; mixtures of experts, also with a gated shared one, with selection biases and with
sinks; keys and values of one block in others, and inputs of each layer; latent attention; norms without weights. Sizes
that two ranks do not divide."""


def build(name: str) -> lm.CausalLM:
    torch.manual_seed(0)
    return lm.from_config(CONFIGS[name])


def shard(model: nn.Module, base: lm.CausalLM) -> None:
    """As PyTorch's documentation does it: each block, then the rest."""
    for block in base.decoder.blocks:
        fully_shard(block)
    fully_shard(model)


def draw(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 131, (2, 13), generator=generator)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.5, -100)


def gathered(model: nn.Module, what: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor | None]:
    def whole(x: Tensor | None) -> Tensor | None:
        return x.full_tensor() if isinstance(x, DTensor) else x

    return {name: whole(what(p)) for name, p in model.named_parameters()}


def check_gradients(sharded: nn.Module, plain: nn.Module, loss: Callable[[nn.Module, int], Tensor]) -> None:
    """FSDP averages the ranks' gradients: those of the mean of the ranks' losses."""
    loss(sharded, dist.get_rank()).backward()
    by_first_rank(plain, lambda plain: torch.stack([loss(plain, rank) for rank in range(WORLD)]))
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    found = {name: p.grad for name, p in sharded.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            own = own_parts(found[name], gradient)
            torch.testing.assert_close(*own, rtol=2e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def of_model(model: nn.Module, rank: int, **options: Any) -> Tensor:
    ids, labels = draw(rank)
    return model(ids, labels=labels, **options).loss


def of_log_probs(model: nn.Module, rank: int) -> Tensor:
    """Without a bearing on the load-balancing loss, which it leaves out."""
    ids, labels = draw(rank)
    out = model.log_probs(ids, labels, return_entropy=True)
    return (out.log_probs.sin() + 0.1 * out.entropy).sum() / labels.numel()


def train_generate_save(rank: int, folder: Path, mesh: DeviceMesh, name: str) -> None:
    plain, model = build(name), build(name)
    shard(model, model)
    ids = draw(rank)[0]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    check_gradients(model, plain, of_model)
    # The ranks' prompts differ, and so does when they end.
    eos = int(plain.generate(draw(0)[0][:1], max_new_tokens=4, eos_token_id=[], do_sample=False)[0, -2])
    options = {"max_new_tokens": 9, "eos_token_id": [eos], "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    if name not in ("llama", "gemma2", "qwen2_moe"):  # blocks of mixtral, gemma4_text and deepseek_v3, or simpler ones
        model.activation_checkpointing = "selective"
        model.zero_grad(), plain.zero_grad()
        check_gradients(model, plain, of_model)
    if name in ("llama", "gemma2", "mixtral"):  # untied, tied, with the loss of routers
        model.zero_grad(), plain.zero_grad()
        check_gradients(model, plain, of_log_probs)
    model.save_pretrained(folder / "out", max_shard_size=20_000)
    dist.barrier()
    if rank:
        return
    theirs = AutoModelForCausalLM.from_pretrained(folder / "out", attn_implementation="eager")
    if hasattr(theirs.config, "_experts_implementation"):
        theirs.set_experts_implementation("eager")  # its default needs aligned sizes
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


def medusa(rank: int, folder: Path, mesh: DeviceMesh, name: str, lm_head: str, how: str) -> None:
    def make(sharded: bool) -> lm.MedusaModel:
        base = build(name)
        if sharded:
            shard(base, base)
        found = lm.MedusaModel.from_base(base, num_heads=2, lm_head=lm_head)
        torch.manual_seed(1)
        for parameter in found.heads.parameters():
            nn.init.normal_(parameter, std=0.05)
        return found

    plain, model = make(False), make(how == "base")
    if how == "heads":
        for head in model.heads:
            fully_shard(head)
    elif how == "all":
        shard(model.base, model.base)
        fully_shard(model)
    check_gradients(model, plain, of_model) if how == "all" else of_model(model, rank).backward()
    ids = draw(rank)[0]
    options = {"max_new_tokens": 8, "eos_token_id": [7], "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    plain.zero_grad(), model.zero_grad()
    references = []
    for sharded in (how == "all", False):
        references.append(build(name).requires_grad_(False))
        with torch.no_grad():
            for parameter in references[-1].parameters():
                parameter.mul_(1.1)
        if sharded:
            shard(references[-1], references[-1])
    for several in ((None, None), references):
        joint, whole = (JointMedusa(each, other) for each, other in zip((model, plain), several, strict=True))
        plain.zero_grad(), model.zero_grad()
        if how == "all":
            check_gradients(joint, whole, partial(of_model, heads_loss_weight=0.3))
        else:
            of_model(joint, rank, heads_loss_weight=0.3).backward()
    model.export(folder / "heads", profile="full-hf")
    dist.barrier()
    again = lm.MedusaModel.from_pretrained(lm.from_pretrained(folder / "heads"), folder / "heads")
    assert torch.equal(again.generate(ids, **options), plain.generate(ids, **options))


def mtp(rank: int, folder: Path, mesh: DeviceMesh, name: str, how: str) -> None:
    def make(sharded: bool) -> lm.MTPModel:
        base = build(name)
        if sharded:
            shard(base, base)
        torch.manual_seed(1)
        return lm.MTPModel.from_base(base, num_steps=2)

    plain, model = make(False), make(how == "base")
    if how == "all":
        shard(model.base, model.base)
        fully_shard(model.head)
        fully_shard(model)
    check_gradients(model, plain, of_model) if how == "all" else of_model(model, rank).backward()
    ids = draw(rank)[0]
    options = {"max_new_tokens": 8, "eos_token_id": [7], "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    model.save_pretrained(folder / "out")
    dist.barrier()
    again = lm.MTPModel.from_pretrained(folder / "out", num_steps=2)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), plain.state_dict().values(), strict=True))


def one_after_another(
    rank: int, folder: Path, mesh: DeviceMesh, work: Callable[..., None], cases: list[tuple[str, ...]]
) -> None:
    """In the same two processes: their first pass takes longer than the others together."""
    for case in cases:
        try:
            (folder / "-".join(case)).mkdir(exist_ok=True)
            work(rank, folder / "-".join(case), mesh, *case)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise


def test_fsdp2_mtp(tmp_path: Path) -> None:
    in_two_ranks(one_after_another, tmp_path, mtp, [("llama", "all"), ("gemma2", "base"), ("glm4_moe", "all")])


@pytest.mark.parametrize("names", [list(CONFIGS)[::2], list(CONFIGS)[1::2]], ids=", ".join)
def test_fsdp2_trains_generates_and_saves(names: list[str], tmp_path: Path) -> None:
    in_two_ranks(one_after_another, tmp_path, train_generate_save, [(name,) for name in names])


def test_fsdp2_medusa(tmp_path: Path) -> None:
    cases = [
        ("llama", "own", "all"),
        ("gemma2", "shared", "all"),
        ("llama", "shared", "base"),
        ("gemma2", "own", "base"),
        ("llama", "own", "heads"),
    ]
    in_two_ranks(one_after_another, tmp_path, medusa, cases)


def tensor_parallel(rank: int, folder: Path, mesh: DeviceMesh, name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    config = model.config
    tables = {rope.config: rope(torch.arange(13)[None], torch.float32) for rope in model.decoder.ropes}
    context = ForwardContext(tables)
    block = model.decoder.blocks[0]
    assert isinstance(block, Block)
    sharded = parallelize_module(
        copy.deepcopy(block),
        mesh,
        {
            "mixer.qkv": ColwiseParallel(),
            "mixer.o": RowwiseParallel(),
            "mlp.gate_up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        },
    )
    x = torch.randn(2, 13, config.hidden_size, generator=torch.Generator().manual_seed(2))
    found, wanted = sharded(x, context).hidden, block(x, context).hidden
    torch.testing.assert_close(found, wanted)
    (found * x).sum().backward()
    (wanted * x).sum().backward()
    for key, gradient in gathered(sharded, lambda p: p.grad).items():
        torch.testing.assert_close(
            gradient, dict(block.named_parameters())[key].grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=key: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ["llama", "gemma2-wide"])
def test_a_plain_shard_of_fused_weights_is_tensor_parallel(name: str, tmp_path: Path) -> None:
    in_two_ranks(tensor_parallel, tmp_path, name)


CONFIGS["gemma2-wide"] = {**GEMMA, "model_type": "gemma2", "num_key_value_heads": 2, "intermediate_size": 98}
CONFIGS["llama"]["intermediate_size"] = 98
