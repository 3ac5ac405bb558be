"""Whole models on a GPU, on the natively compiled kernels, against transformers on the CPU."""

import copy
from pathlib import Path

import pytest
import torch
from zoo import BASE, CONFIGS, gradients_of, make_checkpoint, relative_error, stored_as

import ligermodels as lm
from ligermodels.data.batches import Batch
from ligermodels.evaluation import evaluate
from ligermodels.generation.graph import Graphed
from ligermodels.training import FusedAdamW, train

pytestmark = [pytest.mark.gpu, pytest.mark.kernels]


INDUCTOR = ["llama-3.1", "glm4_moe_lite", "gemma4_text-experts", "gpt_oss", "phi3-long", "olmo2", "mixtral"]
INDUCTOR += ["qwen3_5_text-other-sizes", "nemotron_h"]
"""Every kind of layer in one of them: Inductor writes the kernels beside ours. Others are traced into one graph."""


def tokens(batch: int = 3, length: int = 41) -> torch.Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_family(config: str, compiled: bool, tmp_path: Path) -> None:
    """Errors against fp64 stay within those of transformers in the same place: some of these tiny models amplify."""
    oracle = make_checkpoint(tmp_path / "model", CONFIGS[config])
    exact = copy.deepcopy(oracle).double()
    oracle.cuda()
    model = lm.from_pretrained(tmp_path / "model", device="cuda")
    torch.compiler.reset()  # The limit of recompilations counts those of the other cases too.
    backend = "inductor" if config in INDUCTOR else "eager"
    step = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
    ids = tokens()
    if compiled and CONFIGS[config].get("hidden_size_per_layer_input"):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="gradient of embed_tokens_per_layer"):
            step(ids.cuda(), labels=ids.cuda())
        return
    results: list[dict[str, torch.Tensor]] = []
    for side in (exact, oracle, step):
        at = ids if side is exact else ids.cuda()
        loss = side(at, labels=at).loss
        loss.backward()
        with torch.no_grad():
            found = {"loss": loss.detach(), "logits": side(at).logits}
        if side is step:
            found |= stored_as(oracle, gradients_of(model))
        else:
            found |= {name: p.grad for name, p in side.named_parameters() if p.grad is not None}
        results.append({name: tensor.cpu() for name, tensor in found.items()})
    wanted, theirs, ours = results
    assert ours.keys() == wanted.keys()
    for name, truth in wanted.items():
        limit = 4 * relative_error(theirs[name], truth) + 1e-5
        assert relative_error(ours[name], truth) < limit, (name, limit)


def test_batches_on_the_gpu_train_as_those_on_the_cpu(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", CONFIGS["llama-3.1"])
    found = []
    for device in ("cpu", "cuda"):
        model = lm.from_pretrained(tmp_path / "model", device="cuda")
        batch = Batch({"input_ids": tokens().to(device), "labels": tokens().to(device)})
        train(model, [batch, batch], steps=2, optimizer=FusedAdamW(model.parameters(), lr=1e-3))
        found.append(evaluate(model, [batch]))
    assert found[0] == found[1]


def test_bf16_is_no_worse_than_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = make_checkpoint(tmp_path / "model", CONFIGS["llama-3.1"])
    exact = oracle.double()(tokens()).logits
    model = lm.from_pretrained(tmp_path / "model", dtype=torch.bfloat16, device="cuda")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).cuda()
    with torch.no_grad():
        error = (model(tokens().cuda()).logits.cpu() - exact).norm()
        assert error <= 1.1 * (theirs(tokens().cuda()).logits.cpu() - exact).norm()


def test_packing_generation_and_medusa(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "model", CONFIGS["llama-3.1"])
    model = lm.from_pretrained(tmp_path / "model", device="cuda")
    ids = tokens(1, 41).cuda()
    bounds = torch.tensor([0, 13, 14, 41], dtype=torch.int32, device="cuda")
    together = model(ids, cu_seqlens=bounds).logits
    apart = torch.cat([model(part).logits for part in ids.split([13, 1, 27], dim=1)], dim=1)
    assert relative_error(together, apart) < 1e-5

    prompts = [[5, 9, 11], [77], list(range(30, 50))]
    plain = model.generate(prompts, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    wanted = oracle.generate(torch.tensor([prompts[2]]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert torch.equal(plain[2].cpu(), wanted[0])
    medusa = lm.MedusaModel.from_base(model, 3)
    optimizer = torch.optim.Adam(medusa.head_parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        medusa(plain, labels=plain).loss.backward()
        optimizer.step()
    out = medusa.generate(prompts, max_new_tokens=40, eos_token_id=None, pad_token_id=0, return_stats=True)
    assert torch.equal(out.sequences, plain)
    assert out.tokens_per_step > 1.2


@pytest.mark.parametrize("config", CONFIGS)
def test_generation_by_graphs(config: str, tmp_path: Path) -> None:
    """Plain and tree decoding replayed as CUDA graphs: the tokens of the CPU, rows of several lengths, one sliding."""
    make_checkpoint(tmp_path / "model", CONFIGS[config])
    prompts = [[5, 9, 11], [77], list(range(30, 50))]
    options = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for device in ("cpu", "cuda"):
        model = lm.from_pretrained(tmp_path / "model", dtype=torch.float32, device=device)
        torch.manual_seed(0)
        medusa = lm.MedusaModel.from_base(model, 3)
        found += [model.generate(prompts, **options).cpu(), medusa.generate(prompts, **options).cpu()]
    assert all(torch.equal(found[0], other) for other in found[1:])
    found = [
        model.generate(prompts, **options, cuda_graph=False),
        medusa.generate(prompts, **options, cuda_graph=False),
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_recording_a_graph_leaves_cached_memory_where_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    device, emptied = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    total = torch.zeros(4, device=device)
    for free, expected in ((2**50, 0), (0, 1)):
        torch.empty(2**20, device=device)  # cached once it is gone
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 2**50))
        step = Graphed(lambda: total.add_(1).sum(), device)
        assert [float(step()) for _ in range(3)] == [float(total[0]) * 4 - back for back in (8, 4, 0)]
        assert len(emptied) == expected
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_an_optimizer_beside_the_backward_pass_is_in_nobodys_way() -> None:
    """Large enough for updates, gradients and their memory to meet: the very bits of updates afterwards."""
    config = BASE | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "model_type": "llama"}
    ids = torch.randint(32000, (2, 1024), device="cuda")
    ends = []
    for inside in (False, True):
        torch.manual_seed(0)
        # The backward passes of other backends may add up in another order each time.
        model = lm.from_config(config, dtype=torch.bfloat16, device="cuda", attention="reference")
        optimizer = FusedAdamW(model.parameters(), lr=1e-3)
        if inside:
            optimizer.step_in_backward()
        for _ in range(4):
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
