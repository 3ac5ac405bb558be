"""Medusa heads: loss and gradients against plain torch, shifts, document bounds, files, and lossless tree decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from zoo import BASE, CONFIGS, LLAMA, PHI_LONGROPE, make_checkpoint, relative_error

import ligermodels as lm
from ligermodels.errors import CheckpointError, InputError
from ligermodels.layers import packing
from ligermodels.speculative.decoding import speculative_generate
from ligermodels.speculative.drafting import HeadsDrafter
from ligermodels.speculative.joint import JointMedusa, frozen_copy
from ligermodels.speculative.tree import chain, default_tree


@pytest.fixture(scope="module", params=["llama-3.1", "llama-3.2"], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> lm.CausalLM:
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint(folder, CONFIGS[request.param])
    return lm.from_pretrained(folder)


def tokens(batch: int = 2, length: int = 33) -> torch.Tensor:
    return torch.randint(3, BASE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def stir(model: lm.MedusaModel) -> lm.MedusaModel:
    """Heads away from their start, where all heads agree."""
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@torch.no_grad()
def hidden_states(model: lm.CausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, return_last_hidden_state=True).last_hidden_state


def plain_loss(
    model: lm.MedusaModel, hidden: torch.Tensor, labels: torch.Tensor, ends: list[int]
) -> list[torch.Tensor]:
    """Each head's loss the plain way: all logits, targets gathered one by one. `ends[t]` is where t's document ends."""
    losses = []
    for i, head in enumerate(model.heads):
        x = hidden
        for block in head.layers:
            x = x + F.silu(x @ block.linear.weight.T + block.linear.bias)
        projection = model.base.head.weight if head.lm_head is None else head.lm_head.weight
        logits = (x @ projection.T).log_softmax(-1)
        picked = [
            -logits[b, t, labels[b, t + 2 + i]]
            for b in range(labels.shape[0])
            for t in range(labels.shape[1])
            if t + 2 + i < ends[t] and labels[b, t + 2 + i] != -100
        ]
        losses.append(torch.stack(picked).mean())
    return losses


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize(("heads", "layers"), [(1, 2), (3, 1)])
def test_frozen_backbone_one_step_moves_every_head_parameter(
    base: lm.CausalLM, lm_head: str, heads: int, layers: int
) -> None:
    model = lm.MedusaModel.from_base(base, heads, layers, lm_head)
    ids, labels = tokens(), tokens()
    labels[0, :9] = -100
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = plain_loss(model, hidden_states(base, ids), labels, [33] * 33)
    wanted = sum(0.8**i * loss for i, loss in enumerate(losses))
    gradients = torch.autograd.grad(wanted, list(model.head_parameters()))

    optimizer = torch.optim.SGD(model.head_parameters(), lr=0.1)
    output = model(ids, labels=labels)
    output.loss.backward()
    assert relative_error(output.loss, wanted) < 1e-5
    assert relative_error(output.head_losses, torch.stack(losses).detach()) < 1e-5
    for parameter, gradient in zip(model.head_parameters(), gradients, strict=True):
        assert relative_error(parameter.grad, gradient) < 1e-5
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    expected = {f"heads.{name}" for name, _ in model.heads.named_parameters()}
    assert moved == expected
    # Each layer of each head is its own module: FasterDecoding repeats one.
    assert len(expected) == heads * (2 * layers + (lm_head == "own"))
    assert all(p.grad is None for p in base.parameters())


def test_at_step_zero_each_head_is_the_lm_head_scored_further_ahead(base: lm.CausalLM) -> None:
    model = lm.MedusaModel.from_base(base, num_heads=4, num_layers=2)
    ids = tokens()
    with torch.no_grad():
        logits = base(ids).logits
        output = model(ids, labels=ids)
        for i in range(4):
            ahead = 2 + i
            wanted = F.cross_entropy(logits[:, :-ahead].flatten(0, 1), ids[:, ahead:].flatten())
            assert relative_error(output.head_losses[i], wanted) < 1e-5
            top = logits[:, :-ahead].topk(5, dim=-1).indices == ids[:, ahead:, None]
            assert output.accuracy[1][i] == top[..., 0].float().mean()
            assert output.accuracy[5][i] == top.any(-1).float().mean()
            assert output.counts[i] == ids[:, ahead:].numel()


@pytest.mark.parametrize("how", ["cu_seqlens", "position_ids"])
def test_targets_do_not_cross_documents(base: lm.CausalLM, how: str) -> None:
    model = stir(lm.MedusaModel.from_base(base, num_heads=3))
    lengths = [11, 2, 20]
    ids = tokens(1, sum(lengths))
    ends = [end for end, n in zip([11, 13, 33], lengths, strict=True) for _ in range(n)]
    if how == "cu_seqlens":
        packed = {"cu_seqlens": torch.tensor([0, 11, 13, 33], dtype=torch.int32)}
    else:
        packed = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    output = model(ids, labels=ids, **packed)
    # Documents do not attend to one another either: hidden states come from each alone.
    apart = torch.cat([hidden_states(base, part) for part in ids.split(lengths, dim=1)], dim=1)
    wanted = plain_loss(model, apart, ids, ends)
    assert relative_error(output.head_losses, torch.stack(wanted).detach()) < 1e-5


def test_one_number_of_items_for_each_head_or_for_all(base: lm.CausalLM) -> None:
    model, ids = lm.MedusaModel.from_base(base, num_heads=3), tokens(2, 9)
    summed = model(ids, labels=ids, reduction="sum").head_losses
    for given in (7, torch.tensor([7]), torch.tensor([5, 6, 7])):
        found = model(ids, labels=ids, num_items_in_batch=given).head_losses
        torch.testing.assert_close(found, summed / torch.as_tensor(given))
    for wrong in (torch.tensor([5, 6]), torch.tensor([5, 6, 7, 8])):
        with pytest.raises(InputError, match="num_items_in_batch: must be 1 or 3 numbers"):
            model(ids, labels=ids, num_items_in_batch=wrong)
    with pytest.raises(InputError, match="num_items_in_batch: must be 1 or 4 numbers"):
        lm.JointMedusa(model)(ids, labels=ids, num_items_in_batch=torch.tensor([5, 6, 7]))


def test_positions_that_restart_are_looked_at_once(base: lm.CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    bounds_of = packing.bounds_of
    monkeypatch.setattr(packing, "bounds_of", lambda ids: calls.append(1) or bounds_of(ids))
    model, ids = lm.MedusaModel.from_base(base, num_heads=2), tokens(2, 9)
    restarting = torch.arange(9).remainder(5).expand(2, 9)
    for trained in (model, lm.JointMedusa(model, frozen_copy(base))):
        calls.clear()
        trained(ids, labels=ids, position_ids=restarting)
        assert len(calls) == 1


def test_nothing_to_predict_gives_zero_and_no_nan(base: lm.CausalLM) -> None:
    model = lm.MedusaModel.from_base(base, num_heads=3)
    ids = tokens(1, 3)  # Heads 1 and 2 have no target at all.
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.counts.tolist() == [1, 0, 0]
    assert output.head_losses[1:].tolist() == [0.0, 0.0]
    assert all(torch.isfinite(p.grad).all() for p in model.head_parameters())


@pytest.mark.parametrize("joint", [False, True])
def test_weights_of_tokens_are_those_of_the_labels(base: lm.CausalLM, joint: bool) -> None:
    """A weight of 0 is as good as no label, for each head and for the base model."""
    medusa = stir(lm.MedusaModel.from_base(base, num_heads=3))
    model = JointMedusa(medusa) if joint else medusa
    ids = tokens()
    kept = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    wanted = model(ids, labels=ids.masked_fill(~kept, -100))
    found = model(ids, labels=ids, token_weights=kept.float())
    assert relative_error(found.loss, wanted.loss) < 1e-5
    assert relative_error(found.head_losses, wanted.head_losses) < 1e-5
    if joint:
        assert relative_error(found.base_loss, wanted.base_loss) < 1e-5


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_heads_survive_saving(base: lm.CausalLM, lm_head: str, tmp_path: Path) -> None:
    model = stir(lm.MedusaModel.from_base(base, 3, 2, lm_head))
    if lm_head == "shared":
        assert not any(p is base.head.weight for p in model.head_parameters())
    model.save_pretrained(tmp_path / "heads")
    again = lm.MedusaModel.from_pretrained(base, tmp_path / "heads")
    assert again.shape == model.shape and again.lm_head == lm_head
    for ours, theirs in zip(model.head_parameters(), again.head_parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("decay", [-0.1, float("nan"), float("inf"), "0.8"])
def test_a_bad_decay_is_refused(base: lm.CausalLM, decay: Any) -> None:
    with pytest.raises(InputError, match="decay: must be a number of at least 0"):
        lm.MedusaModel.from_base(base, decay=decay)


def test_bad_heads_are_refused(base: lm.CausalLM, tmp_path: Path) -> None:
    model = stir(lm.MedusaModel.from_base(base, 2, 1, "shared"))
    model.save_pretrained(tmp_path / "heads")
    other = lm.from_config(base.hf_config)
    with pytest.raises(CheckpointError, match="another"):
        lm.MedusaModel.from_pretrained(other, tmp_path / "heads")
    small = lm.from_config({**base.hf_config, "vocab_size": 100})
    with pytest.raises(CheckpointError, match=r"lm_heads\.0\.weight"):
        lm.MedusaModel.from_pretrained(small, tmp_path / "heads")
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(CheckpointError, match="no Medusa heads"):
        lm.MedusaModel.from_pretrained(base, tmp_path / "base")
    with pytest.raises(InputError, match="num_heads"):
        lm.MedusaModel.from_base(base, 0)


def test_tree_decoding_gives_the_tokens_of_plain_decoding(base: lm.CausalLM) -> None:
    is_tied = base.head.weight is base.decoder.embed.weight
    model = lm.MedusaModel.from_base(base, 3, 1, "shared" if is_tied else "own")
    prompts = [[5, 9, 11], [77], list(range(30, 50))]
    # Heads trained to echo the base's own text, so that several tokens a step are accepted.
    text = base.generate(prompts, max_new_tokens=40, eos_token_id=None)
    optimizer = torch.optim.Adam(model.head_parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    for options in ({"eos_token_id": None}, {"eos_token_id": text[0, -5:].tolist()}):
        plain = base.generate(prompts, max_new_tokens=40, pad_token_id=0, **options)
        out = model.generate(prompts, max_new_tokens=40, pad_token_id=0, return_stats=True, **options)
        assert torch.equal(out.sequences, plain)
        assert out.tokens_per_step > 1.2
    assert torch.equal(model.generate(prompts, max_new_tokens=40, pad_token_id=0, **options), plain)


@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_proposals_are_those_of_each_head(lm_head: str, batch: int) -> None:
    """Of the heads asked for and no other; a shared lm_head is read once."""
    base = lm.from_config({**LLAMA, "hidden_size": 64})
    model = stir(lm.MedusaModel.from_base(base, 4, 2, lm_head))
    hidden = torch.randn(batch, 64)
    called: list[int] = []
    base.head.register_forward_hook(lambda *_: called.append(-1))
    for i, head in enumerate(model.heads):
        head.register_forward_hook(lambda *_, i=i: called.append(i))
    for count in (None, 1, 3, 9):
        called.clear()
        found = model.propose(hidden, count)
        heads = list(model.heads)[:count]
        assert called == [*range(len(heads)), *([-1] if lm_head == "shared" else [])]
        wanted = torch.stack([head(hidden) for head in heads], dim=1)
        assert torch.equal(found, base.head(wanted) if lm_head == "shared" else wanted)
    with pytest.raises(InputError, match="num_heads"):
        model.propose(hidden, 0)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_decoding_reads_no_head_that_the_tree_does_not_use(base: lm.CausalLM, depth: int) -> None:
    model, called = lm.MedusaModel.from_base(base, 5), set[int]()
    for i, head in enumerate(model.heads):
        head.lm_head.register_forward_hook(lambda *_, i=i: called.add(i))
    model.generate([[5, 9, 11]], 6, tree=chain(depth), eos_token_id=None)
    assert called == set(range(max(1, depth)))
    with pytest.raises(InputError, match="the tree needs 6 heads"):
        model.generate([[5, 9, 11]], 6, tree=chain(6))


# -- decoding in batches, over the kinds of attention and position that a cache could get wrong ------------------------

LIMIT = 20
"""Tokens in the original context of the rotary embeddings whose frequencies follow the length."""

KINDS: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("mistral-window", "gemma2", "gemma3_text", "qwen3_moe")},
    "longrope": {**BASE, **PHI_LONGROPE, "sliding_window": 9, "original_max_position_embeddings": LIMIT},
    "dynamic": {**LLAMA, "max_position_embeddings": LIMIT, "rope_scaling": {"type": "dynamic", "factor": 3.0}},
}
PROMPTS = [list(range(40, 45)), list(range(60, 83)), [7], list(range(20, 40)), list(range(9, 28))]
NEW = 33


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name, model, oracle, and what plain decoding makes of each prompt by itself: past windows, and for ropes whose
    frequencies follow the length past LIMIT."""
    folder = tmp_path_factory.mktemp("kind")
    oracle = make_checkpoint(folder, KINDS[request.param])
    model = lm.from_pretrained(folder, dtype=torch.float64)
    new = NEW if request.param in ("longrope", "dynamic") else 17
    alone = [model.generate([prompt], new, eos_token_id=None)[0].tolist() for prompt in PROMPTS]
    return request.param, model, oracle.double(), alone


def half_right(
    model: lm.CausalLM, texts: list[list[int]], wrong: float = 1 / 3
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Three heads that know these texts by their states, and say the right token but in this share of places."""
    states = torch.cat([hidden_states(model, torch.tensor([text], device=model.device))[0] for text in texts])
    ahead = torch.cat([F.pad(torch.tensor(text), (0, 4), value=3).unfold(0, 5, 1)[:, 2:] for text in texts])
    lies = torch.rand(ahead.shape, generator=torch.Generator().manual_seed(3)) < wrong
    told = F.one_hot(torch.where(lies, 5, ahead), model.config.vocab_size).to(states)
    return lambda hidden: told[torch.cdist(hidden, states).argmin(dim=1)]


@pytest.mark.parametrize("batch", [1, 5])
def test_batches_decode_as_each_row_alone(kind: Any, batch: int) -> None:
    name, model, _, alone = kind
    with torch.no_grad():
        propose = half_right(model, alone)
    tree, new = default_tree(3, 12), len(alone[0]) - len(PROMPTS[0])
    for first in (0, 3) if batch == 1 and name in ("gemma2", "longrope") else (0,):
        prompts, wanted = PROMPTS[first : first + batch], [row[-new:] for row in alone[first : first + batch]]
        endings = ([], [wanted[0][11], wanted[-1][6]])
        several = endings if name in ("gemma2", "longrope") else endings[1:]
        for eos in several if batch > 1 else endings[first // 3 :][:1]:
            ends = [next((i + 1 for i, token in enumerate(row) if token in eos), new) for row in wanted]
            rows = [row[:end] + [0] * (max(ends) - end) for row, end in zip(wanted, ends, strict=True)]
            options: dict[str, Any] = {"max_new_tokens": new, "eos_token_id": eos, "pad_token_id": 0}
            if batch > 1:
                assert model.generate(prompts, **options)[:, -max(ends) :].tolist() == rows
            gained: list[list[list[int]]] = []
            out = speculative_generate(
                model, HeadsDrafter(propose), prompts, tree=tree, **options, on_tokens=gained.append
            )
            assert out.sequences[:, -max(ends) :].tolist() == rows
            assert out.new_tokens == sum(ends)
            # As they come: one of each row from the prefill, then those of each step.
            streamed = [[token for step in gained for token in step[i]] for i in range(batch)]
            assert streamed == [row[:end] for row, end in zip(rows, ends, strict=True)]
            assert len(gained) == out.passes + 1 and [len(row) for row in gained[0]] == [1] * batch
            # Past its original context a dynamic rope gives each token frequencies of its own: one token a step.
            assert out.tokens_per_step >= (1.0 if name == "dynamic" else 1.3) or eos


def without_cache(oracle: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(oracle(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids


@torch.no_grad()
def test_each_row_alone_is_what_transformers_gives(kind: Any) -> None:
    """Across the switch of longrope: as transformers' generation, which starts over there, and as without a cache."""
    name, _, oracle, alone = kind
    for prompt, wanted in zip(PROMPTS[:3], alone, strict=False):
        oracle(torch.tensor([[7]]))  # A dynamic rope remembers the longest text until it meets a short one.
        new = len(wanted) - len(prompt)
        found = oracle.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None)
        assert found[0].tolist() == wanted
        if name == "longrope":
            assert without_cache(oracle, prompt) == wanted


# -- by CUDA graphs ----------------------------------------------------------------------------------------------------


def decoded(model: lm.CausalLM, texts: list[list[int]], cuda_graph: bool) -> dict[str, Any]:
    """Tokens, steps and passes: by typical acceptance; with an end inside of what a step accepts; and by both."""
    new = [text[-NEW:] for text in texts]
    ends = {"eos_token_id": [row[6] for row in new]}
    cases: dict[str, tuple[float, dict[str, Any]]] = {
        "typical": (1 / 3, {"temperature": 1.0, "eos_token_id": []}),
        "end": (0.0, ends),
        "typical, end": (1 / 3, {"temperature": 1.0, **ends}),
    }
    found = {}
    for case, (wrong, options) in cases.items():
        propose, tree = half_right(model, texts, wrong), default_tree(3, 12) if wrong else chain(3)
        options |= {"max_new_tokens": NEW, "pad_token_id": 0, "cuda_graph": cuda_graph}
        out = speculative_generate(model, HeadsDrafter(propose), PROMPTS[: len(texts)], tree=tree, **options)
        found[case] = (out.sequences[:, -NEW:].tolist(), out.steps, out.new_tokens, out.passes)
    tokens, steps, *_ = found["typical"]
    # Some of what is not greedy is accepted, and some is not.
    assert tokens != new
    assert 1.5 < (NEW - 1) * len(texts) / steps < 3.9
    # Where all is right four tokens are gained a step: the first row ends before the last of them.
    assert new[0].index(new[0][6]) % 4 in (1, 2, 3) and found["end"][2] < NEW * len(texts)
    return found


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.kernels
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("name", ["mistral-window", "qwen3_moe", "longrope"])
def test_by_graphs_as_without_and_as_on_the_cpu(name: str, batch: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, KINDS[name])
    host, device = (lm.from_pretrained(tmp_path, dtype=torch.float32, device=each) for each in ("cpu", "cuda"))
    texts = [host.generate([prompt], NEW, eos_token_id=None)[0].tolist() for prompt in PROMPTS[:batch]]
    wanted = decoded(host, texts, False)
    assert decoded(device, texts, False) == wanted
    assert decoded(device, texts, True) == wanted
