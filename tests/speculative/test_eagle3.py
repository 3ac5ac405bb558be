"""EAGLE-3 against a float64 reference of a few lines over the tensors of an exported head; drafting; files."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from named_exports import export_named
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CONFIGS, MIXTURES, OF_EACH_KIND

import ligermodels as lm
from ligermodels import ops
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError
from ligermodels.speculative import draft_projection
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.load import load_multi_head
from ligermodels.speculative.step_drafter import TreeDrafter
from ligermodels.speculative.tree import DynamicTree, Tree, chain

ALL = {**CONFIGS, **MIXTURES}
TARGET: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SOFTCAPPED = {**TARGET, "model_type": "gemma2", "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 6,
              "sliding_window": 32, "attn_logit_softcapping": 50.0}  # fmt: skip
EVERY_THIRD = torch.arange(1, 61, 3)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def target(config: dict[str, Any] = TARGET, dtype: str = "float64") -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.2)
    return model


def stirred(base: lm.CausalLM, steps: int = 3, **options: Any) -> lm.Eagle3Model:
    """A head with random norms too, so that no factor of 1 hides an error."""
    model, draw = lm.Eagle3Model.from_base(base, steps, **options), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter) * 0.2)
    return model


def tensors_of(model: lm.Eagle3Model, folder: Path) -> dict[str, Tensor]:
    model.export(folder, base_model="some/target", overwrite=True)
    return load_file(folder / "model.safetensors")


# -- formulas ----------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def reference(w: dict[str, Tensor], states: Tensor, ids: Tensor, steps: int, **flags: bool) -> list[Tensor]:
    """The logits of each step, (T, V_d), of one document; states (T, 3 H). Facts: arXiv 2503.01840, and the mask of
    training-time test over the keys of all steps, one step after another."""
    length = len(ids)
    if flags.get("fc_norm"):
        parts = states.chunk(3, dim=-1)
        states = torch.cat([norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
    if flags.get("norm_before_fc"):
        states = norm(states, w["input_norm.weight"])
    z, found = states @ w["fc.weight"].T, []
    keys, values = torch.empty(0, 4, 6, dtype=z.dtype), torch.empty(0, 4, 6, dtype=z.dtype)
    index = torch.arange(length)
    for step in range(steps):
        e = F.pad(w["embed_tokens.weight"][ids][step + 1 :], (0, 0, 0, min(step + 1, length)))
        normed = norm(z, w["layers.0.hidden_norm.weight"])
        u = torch.cat([norm(e, w["layers.0.input_layernorm.weight"]), normed], dim=-1)
        q, k, v = ((u @ w[f"layers.0.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, 6)) for part in "qkv")
        if "layers.0.self_attn.q_norm.weight" in w:
            q, k = (norm(x, w[f"layers.0.self_attn.{part}_norm.weight"]) for x, part in ((q, "q"), (k, "k")))
        q, k = (rotate(x, index + step) for x in (q, k))
        keys = torch.cat([keys, k.repeat_interleave(2, dim=1)])
        values = torch.cat([values, v.repeat_interleave(2, dim=1)])
        n = torch.arange(len(keys))
        allowed = (n <= index[:, None]) | (n % length == index[:, None])
        scores = torch.einsum("thd,shd->hts", q, keys) * 6**-0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, values).flatten(1) @ w["layers.0.self_attn.o_proj.weight"].T
        m = (normed if flags.get("norm_before_residual") else z) + mixed
        y = norm(m, w["layers.0.post_attention_layernorm.weight"])
        gate, up, down = (w[f"layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        z = m + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
        result = norm(z, w["norm.weight"])
        found.append(result @ w["lm_head.weight"].T)
        z = result if flags.get("norm_output") else z
    return found


def ids_of(length: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("flags", [
    {}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("layer", ["llama", "qwen3"])
def test_every_step_is_that_of_the_formulas(layer: Any, flags: dict[str, bool], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Logits, with and without neighbours in a packed row; and the loss, its gradient, acceptance and agreement."""
    base, steps = target(SOFTCAPPED), 3
    model = stirred(base, steps, layer=layer, vocabulary=DraftVocabulary(EVERY_THIRD, 61), **flags)
    w, lengths = tensors_of(model, tmp_path), [9, 1, 2, 12]
    for tensor in w.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    texts = [ids_of(length)[0] for length in lengths]
    found, losses = [], torch.zeros(steps, dtype=torch.float64)
    counts, alphas, agreed = (torch.zeros(steps, sum(lengths)) for _ in range(3))  # at the tokens before the targets
    for start, text in zip(itertools.accumulate([0, *lengths]), texts, strict=False):
        states, _ = lm.capture(base, text[None], model.config.boundaries)
        logits = reference(w, states[0], text, steps, **flags)
        found.append(torch.stack(logits))
        everything = base(text[None]).logits[0]  # acceptance is by the model's distribution over all its tokens
        truth, all_log_p = everything[:, EVERY_THIRD], everything.log_softmax(-1)
        for step in range(steps):
            last = len(text) - 2 - step
            if last <= 0:
                continue
            log_q, log_p = logits[step][:last].log_softmax(-1), truth[1 + step : 1 + step + last].log_softmax(-1)
            losses[step] += (log_p.exp() * (log_p - log_q)).sum()
            ahead = all_log_p[1 + step : 1 + step + last]
            at = slice(start + 1 + step, start + 1 + step + last)
            alphas[step, at] = torch.minimum(ahead[:, EVERY_THIRD], log_q).exp().sum(-1).float().detach()
            agreed[step, at] = (ahead.argmax(-1) == EVERY_THIRD[log_q.argmax(-1)]).float()
            counts[step, at] = 1
    packed, bounds = torch.cat(texts)[None], torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    alone = model(texts[-1][None]).logits[:, 0]
    torch.testing.assert_close(alone, found[-1])
    together = model(packed, cu_seqlens=bounds).logits[:, 0]
    for step in range(steps):  # where the next tokens are in the document
        for start, text, truth in zip(bounds.tolist()[:-1], texts, found, strict=True):
            inside = max(len(text) - 1 - step, 0)
            torch.testing.assert_close(together[step, start : start + inside], truth[step, :inside])

    whole = model(packed, labels=packed, cu_seqlens=bounds)
    monkeypatch.setattr(draft_projection, "COMPARED", 3)  # of 24 tokens
    out, mean = model(packed, labels=packed, cu_seqlens=bounds), losses / counts.sum(1)
    with torch.no_grad():
        scored = model(packed, labels=packed, cu_seqlens=bounds)
    torch.testing.assert_close(out.head_losses, mean.detach())
    torch.testing.assert_close(out.loss, (mean * 0.8 ** torch.arange(steps)).sum())
    for each, every in ((whole, 1), (scored, 1), (out, 8)):  # in training at each eighth token of the row
        trials = counts[:, ::every].sum(1)
        torch.testing.assert_close(each.acceptance.float(), alphas[:, ::every].sum(1) / trials)
        torch.testing.assert_close(each.agreement.float(), agreed[:, ::every].sum(1) / trials)
        assert each.counts.tolist() == counts.sum(1).tolist()
        assert all(number.tolist() == trials.tolist() for _, number in each.accepted().values())
    assert out.ranks is None
    names = [
        "fc.weight",
        "layers.0.hidden_norm.weight",
        "lm_head.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
    ]
    wanted = torch.autograd.grad((mean * 0.8 ** torch.arange(steps)).sum(), [w[name] for name in names])
    out.loss.backward()
    head = model.head
    ours = [
        head.reader.fc.weight,
        head.hidden_norm.weight,
        model.lm_head.weight,
        head.mlp.down.weight,
        head.norm.weight,
    ]
    for name, parameter, gradient in zip(names, ours, wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=name)
    assert all(parameter.grad is None for parameter in base.parameters())


def test_padding_masked_labels_and_normalisers() -> None:
    """A padded batch is its rows alone; labels of -100 count in no step; micro-batches add up; sums are sums."""
    model, steps = stirred(target(), lm_head="shared"), 3
    short, long = ids_of(7), ids_of(11)[:, :]
    labels_short, labels_long = short.clone(), long.clone()
    labels_long[:, :6] = -100
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    padded = torch.cat([F.pad(short, (4, 0)), long]), torch.cat([F.pad(labels_short, (4, 0), value=-100), labels_long])
    out = model(padded[0], labels=padded[1], attention_mask=mask)
    alone = [model(short, labels=labels_short, reduction="sum"), model(long, labels=labels_long, reduction="sum")]
    items = model.num_targets(padded[1], attention_mask=mask)
    assert items.tolist() == [5 + 5, 4 + 5, 3 + 5] == out.counts.tolist()
    torch.testing.assert_close(out.head_losses, (alone[0].head_losses + alone[1].head_losses) / items)
    parts = [model(x, labels=y, num_items_in_batch=items).loss for x, y in ((short, labels_short), (long, labels_long))]
    torch.testing.assert_close(out.loss, sum(parts))
    assert model(short, labels=torch.full_like(short, -100)).loss == 0
    with torch.no_grad():
        scored = model(long, labels=labels_long)
        logits = model(long).logits[:, 0]
    for step in range(steps):
        for t in range(5, 11 - 2 - step):
            better = (logits[step, t] > logits[step, t, long[0, t + 2 + step]]).sum()
            assert scored.ranks[step, 0, t] == better
    torch.testing.assert_close(scored.loss, model(long, labels=labels_long).loss)
    with pytest.raises(InputError, match="reduction"):
        model(short, labels=short, reduction="none")
    for option in ({"label_smoothing": 0.1}, {"class_weights": torch.ones(61)}, {"temperature": 2.0}):
        with pytest.raises(InputError, match=f"{next(iter(option))}: is no option of this loss"):
            model(short, labels=short, **option)
    weights = torch.rand(1, 11, dtype=torch.float64).masked_fill(labels_long == -100, float("nan"))
    weighted, plain = model(long, labels=labels_long, token_weights=weights), model(long, labels=labels_long)
    assert not torch.equal(weighted.head_losses, plain.head_losses)
    torch.testing.assert_close(
        model(long, labels=labels_long, token_weights=torch.full_like(weights, 3.0)).head_losses, plain.head_losses
    )


@pytest.mark.gpu
@pytest.mark.parametrize("layer", ["llama", "qwen3"])
def test_kernels_train_as_torch_does(layer: Any) -> None:
    """The loss, its numbers and the gradients of packed documents, and the tokens of a step of decoding."""
    bounds = torch.tensor([0, 9, 10, 24], dtype=torch.int32, device=DEVICE)
    ids, found = ids_of(24).to(DEVICE), []
    base = target(SOFTCAPPED, "float32")
    model = stirred(base, layer=layer, vocabulary=DraftVocabulary(EVERY_THIRD, 61)).to(DEVICE)
    for backend in ("reference", "triton"):
        with ops.set_backend(backend):
            out = model(ids, labels=ids, cu_seqlens=bounds)
            gradients = torch.autograd.grad(out.loss, list(model.head_parameters()))
            tokens = model.generate(ids[:, :5], 4, cuda_graph=False)
        found.append([out.loss.detach(), out.head_losses, out.acceptance, out.agreement, tokens, *gradients])
    for ours, truth in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-3, atol=1e-5 * max(1, truth.abs().max().item()))


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_a_pass_takes_the_rows_of_the_lm_head_once(lm_head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps, logits and ranks share one copy of the rows for a reduced vocabulary."""
    model, taken = stirred(target(), 3, lm_head=lm_head, vocabulary=DraftVocabulary(EVERY_THIRD, 61)), []
    rows = DraftVocabulary.rows
    monkeypatch.setattr(DraftVocabulary, "rows", lambda self, x: rows(self, x if x is None else taken.append(x) or x))
    ids = ids_of(12)
    for grads in (True, False):
        with torch.set_grad_enabled(grads):
            model(ids, labels=ids)
        assert len(taken) == 1
        taken.clear()
    model(ids)
    assert len(taken) == (lm_head == "shared")


def test_ranks_beyond_a_reduced_vocabulary() -> None:
    model = stirred(target(), 1, vocabulary=DraftVocabulary(EVERY_THIRD, 61))
    ids = ids_of(12)
    with torch.no_grad():
        ranks, logits = model(ids, labels=ids).ranks[0, 0], model(ids).logits[0, 0]
    for t in range(10):
        place = (ids[0, t + 2] == EVERY_THIRD).nonzero()
        wanted = (logits[t] > logits[t, place[0, 0]]).sum() if len(place) else len(EVERY_THIRD)
        assert ranks[t] == wanted


# -- drafting ----------------------------------------------------------------------------------------------------------


KINDS = OF_EACH_KIND[::2]
"""The others are in `test_dspark.py`."""


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_are_those_of_plain_decoding(name: str) -> None:
    """For many kinds of layers, batches of unequal prompts; a chain, a tree and a dynamic tree in turn."""
    base = target(ALL[name], "float32")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 6, 7]]
    options: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0, "repetition_penalty": 1.0}
    plain = base.generate(prompts, do_sample=False, **options)
    model = stirred(base, 3, norm_before_residual=True)
    trees = (None, Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]), DynamicTree(3, 2, 6))
    assert torch.equal(model.generate(prompts, tree=trees[KINDS.index(name) % 3], **options), plain)


@pytest.mark.parametrize("vocabulary", [None, DraftVocabulary(EVERY_THIRD, 61)], ids=["whole", "reduced"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_drafts_are_those_of_the_formulas(vocabulary: Any, lm_head: Any, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Every draft: the first token from the text's true states, the others from the head's own results."""
    base = target()
    model = stirred(base, 3, vocabulary=vocabulary, lm_head=lm_head, norm_output=True)
    w = tensors_of(model, tmp_path)
    drafter_class, drafted = type(model.drafter(model.default_tree())), []
    draft = drafter_class.draft

    def recorded(self: Any, sequences: Any) -> Tensor:
        found = draft(self, sequences)
        text = sequences.text[0, : int(sequences.cache_seqlens[0]) + 1]
        drafted.append((text.clone(), found[0, :, 0].clone()))
        return found

    monkeypatch.setattr(drafter_class, "draft", recorded)
    out = model.generate([[3, 1, 4, 1, 5]], max_new_tokens=14, return_stats=True)
    assert len(drafted) == out.passes > 3
    tokens = torch.arange(61) if vocabulary is None else vocabulary.tokens
    for text, found in drafted:
        states, _ = lm.capture(base, text[None, :-1], model.config.boundaries)
        wanted = list[int]()
        for step in range(3):  # the draft continues the text: its k-th token is that of step k at the last position
            ids = torch.cat([text, torch.tensor(wanted, dtype=torch.long)])
            padded = F.pad(states[0], (0, 0, 0, len(ids) - len(states[0])))
            logits = reference(w, padded, ids, step + 1, norm_output=True)[step][len(text) - 2]
            wanted.append(int(tokens[logits.argmax()]))
        assert found.tolist() == wanted


@pytest.mark.parametrize("vocabulary", [None, DraftVocabulary(EVERY_THIRD, 61)], ids=["whole", "reduced"])
def test_a_tree_grows_by_the_formulas(vocabulary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch: at each level the 2 best paths continue, by 2 tokens each; the 5 best paths of all are the tree."""
    base = target()
    model = stirred(base, 3, vocabulary=vocabulary)
    w, draft, drafted = tensors_of(model, tmp_path), TreeDrafter.draft, []

    def recorded(self: Any, sequences: Any) -> Tensor:
        best = draft(self, sequences)
        layout, found = self.layout, list[set[tuple[int, ...]]]()
        for row, end in enumerate(sequences.cache_seqlens.tolist()):
            tokens, paths = best[row].flatten().tolist(), [()]
            for node in range(1, len(layout.rank[row])):
                depth, rank = int(layout.paths.depth[row, node]), int(layout.rank[row, node])
                paths.append((*paths[layout.paths.parent[row, node]], tokens[(depth - 1) * 4 + rank]))
                assert len(paths[-1]) == depth
            found.append(set(paths[1:]))
            if not sequences.done[row]:
                drafted.append((sequences.text[row, : end + 1].clone(), found[-1]))
        return best

    monkeypatch.setattr(TreeDrafter, "draft", recorded)
    model.generate([[3, 1, 4, 1, 5], [7]], max_new_tokens=6, tree=DynamicTree(3, 2, 5), pad_token_id=0)
    assert len(drafted) > 5
    tokens = torch.arange(61) if vocabulary is None else vocabulary.tokens
    for text, found in drafted:
        states, _ = lm.capture(base, text[None, :-1], model.config.boundaries)
        paths: dict[tuple[int, ...], float] = {}
        beam: dict[tuple[int, ...], float] = {(): 0.0}
        for step in range(3):
            level = dict[tuple[int, ...], float]()
            for path, score in beam.items():
                ids = torch.cat([text, torch.tensor(path, dtype=torch.long)])
                padded = F.pad(states[0], (0, 0, 0, len(ids) - len(states[0])))
                log_q = reference(w, padded, ids, step + 1)[step][len(text) - 2].log_softmax(-1).topk(2)
                for value, index in zip(log_q.values.tolist(), log_q.indices, strict=True):
                    level[(*path, int(tokens[index]))] = score + value
            beam = dict(sorted(level.items(), key=lambda item: -item[1])[:2])
            paths |= level
        assert found == set(sorted(paths, key=lambda path: -paths[path])[:5])


def test_a_trained_head_proposes_more_than_two_tokens_a_step() -> None:
    """On a target that knows a text: a few steps of training, and acceptance in `generate` as in the metrics."""
    torch.manual_seed(0)
    base = lm.from_config({**TARGET, "hidden_size": 48, "head_dim": 12, "num_hidden_layers": 3}, dtype="float32")
    text = torch.randint(0, 61, (1, 48), generator=torch.Generator().manual_seed(3)).repeat(1, 2)[:, :60]
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        base(text, labels=text).loss.backward()
        optimizer.step()
    model = lm.Eagle3Model.from_base(base.eval(), 4)
    optimizer = torch.optim.AdamW(model.head_parameters(), lr=3e-3)
    for step in range(80):
        optimizer.zero_grad()
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        if step in (15, 25, 79):  # a tree is at least as good as its chain, and better while the head errs
            trees = chain(4), DynamicTree(4, 4, 24)
            counts = [model.generate(text[:, :8], 40, tree=tree, return_stats=True).tokens_per_step for tree in trees]
            assert counts[1] >= counts[0] * (1.1 if step < 79 else 1.0), (step, counts)
    out = model(text, labels=text)
    decoded = model.generate(text[:, :8], max_new_tokens=40, return_stats=True)
    assert torch.equal(decoded.sequences, base.generate(text[:, :8], max_new_tokens=40, do_sample=False))
    expected = 1 + out.agreement.cumprod(0).sum()
    assert decoded.tokens_per_step > 2 and abs(decoded.tokens_per_step - expected) < 0.15 * expected


# -- files -------------------------------------------------------------------------------------------------------------


def test_config_json_of_both_forms(tmp_path: Path) -> None:
    """The fields that servers read, written out by hand; and the names of the tensors."""
    vocabulary = DraftVocabulary(torch.tensor([2, 3, 60]), 61)
    model = stirred(target(dtype="float32"), 3, boundaries=(0, 2, 4), vocabulary=vocabulary, norm_output=True)
    model.export(tmp_path / "a", base_model="some/target")
    model.export(tmp_path / "b", "specforge")
    a, b = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert a["architectures"] == ["Eagle3Speculator"] and a["speculators_model_type"] == "eagle3"
    assert a["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4] == b["eagle_aux_hidden_state_layer_ids"]
    assert b["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [-1, 1, 3], "use_aux_hidden_state": True}
    assert b["architectures"] == ["LlamaForCausalLMEagle3"] and b["num_hidden_layers"] == 1
    for each in (a, b):
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        assert [each[flag] for flag in flags] == [False, False, False, True]
        assert each["draft_vocab_size"] == 3 and each["target_hidden_size"] == 24 and each["dtype"] == "float32"
    assert a["transformer_layer_config"]["model_type"] == "llama"
    methods = a["speculators_config"]
    assert methods["proposal_methods"][0]["speculative_tokens"] == 3
    assert methods["verifier"] == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    tensors = {name: load_file(tmp_path / name / "model.safetensors") for name in "ab"}
    assert tensors["a"]["d2t"].tolist() == [2, 2, 58] and tensors["a"]["t2d"].nonzero().flatten().tolist() == [2, 3, 60]
    assert {name.replace("midlayer.", "layers.0.") for name in tensors["b"]} == tensors["a"].keys() - {
        "embed_tokens.weight"
    }
    assert tensors["a"]["fc.weight"].shape == (24, 72) and tensors["a"]["lm_head.weight"].shape == (3, 24)
    assert tensors["a"]["layers.0.self_attn.q_proj.weight"].shape == (24, 48)


@pytest.mark.parametrize("profile", ["speculators", "specforge"])
@pytest.mark.parametrize("lm_head", ["own", "shared"])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_head_comes_back(profile: Any, lm_head: Any, reduced: bool, tmp_path: Path) -> None:
    base = target(SOFTCAPPED, "bfloat16")  # with scaled embeddings
    vocabulary = DraftVocabulary(EVERY_THIRD, 61) if reduced else None
    model = stirred(base, vocabulary=vocabulary, lm_head=lm_head, fc_norm=True)
    export_named(model, tmp_path, profile, "x")
    again = lm.Eagle3Model.from_pretrained(base, tmp_path, num_steps=3)
    assert again.config == model.config and again.embed is None
    assert torch.equal(again(ids_of(9)).logits, model(ids_of(9)).logits)
    export_named(again, tmp_path / "again", profile, "x")
    first, second = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_head_of_deepspec(tmp_path: Path) -> None:
    """Ids of five layers, without vocabulary tables; what its heads do not have is refused by name."""
    base = target({**TARGET, "num_hidden_layers": 7}, "float32")
    model = stirred(base, 4, layer="qwen3", boundaries=(1, 2, 4, 6, 7), lm_head="shared", decay=0.7)
    model.export(tmp_path, "deepspec", base_model="some/target")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert config["architectures"] == ["Qwen3Eagle3Model"] and config["target_layer_ids"] == [0, 1, 3, 5, 6]
    assert (config["num_target_layers"], config["num_hidden_layers"], config["ttt_length"]) == (7, 1, 4)
    assert config["target_model_name_or_path"] == "some/target" and config["step_loss_decay"] == 0.7
    theirs = {
        "embed_tokens", "fc", "norm", "lm_head", *(f"layers.0.{name}" for name in (
            "input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
            "mlp.down_proj", *(f"self_attn.{part}" for part in (
                "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")))),
    }  # fmt: skip
    assert tensors.keys() == {f"{name}.weight" for name in theirs}
    again = lm.Eagle3Model.from_pretrained(base, tmp_path)
    assert again.config == model.config and (again.num_heads, again.decay) == (4, 0.7)
    assert torch.equal(again(ids_of(9)).logits, model(ids_of(9)).logits)

    few, five = DraftVocabulary(EVERY_THIRD, 61), (1, 2, 4, 6, 7)
    for options, message in (
        ({"layer": "llama", "boundaries": five}, "layer: kind 'llama'"), ({}, "3 boundaries, but five"),
        ({"boundaries": (0, 2, 4, 6, 7)}, "boundary 0"), ({"boundaries": five, "vocabulary": few}, "draft_vocab_size"),
        ({"boundaries": five, "fc_norm": True}, "fc_norm"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"profile 'deepspec': DeepSpec does not implement {message}"):
            stirred(base, **{"layer": "qwen3", **options}).export(tmp_path / "c", "deepspec", base_model="x")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6, 7]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(ConfigWarning, match="different layers, as boundaries: target_layer_ids .1, 2, 4, 6, 7., eagle"):
        lm.Eagle3Model.from_pretrained(base, tmp_path)


def test_other_forms_of_published_heads(tmp_path: Path) -> None:
    """A head of SafeAILab's in pytorch_model.bin, without layers in its config, with a model's architecture; SGLang's
    names; an embedding of its own; and no lm_head."""
    base = target(dtype="float32")
    model = stirred(base, fc_norm=True, boundaries=(1, 2, 3), lm_head="shared")
    model.export(tmp_path, "specforge")
    path, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = {name: x for name, x in load_file(path).items() if name not in ("lm_head.weight", "d2t", "t2d")}
    tensors = {name.replace("fc_norm.0", "aux_norm_low").replace("fc_norm.1", "aux_norm_mid")
               .replace("fc_norm.2", "aux_norm_high"): x for name, x in tensors.items()}  # fmt: skip
    for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "target_hidden_size", "norm_before_residual"):
        del config[name]
    config["architectures"] = ["LlamaForCausalLM"]
    own = torch.randn(61, 24)
    torch.save(tensors | {"embed_tokens.weight": own}, tmp_path / "pytorch_model.bin")
    path.unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = lm.Eagle3Model.from_pretrained(base, tmp_path, num_steps=3)
    assert isinstance(load_multi_head(base, tmp_path), lm.Eagle3Model)
    assert again.config.boundaries == (1, 2, 3) and again.lm_head is None and torch.equal(again.embed.weight, own)
    assert not any(parameter is again.embed.weight for parameter in again.head_parameters())
    assert not torch.equal(again(ids_of(9)).logits, model(ids_of(9)).logits)
    with pytest.raises(InputError, match="'specforge': holds no embedding of the head's own"):
        again.export(tmp_path / "lost", "specforge")
    again.export(tmp_path / "kept", base_model="x")
    assert torch.equal(lm.Eagle3Model.from_pretrained(base, tmp_path / "kept").embed.weight, own)
    again.embed = None
    torch.testing.assert_close(again(ids_of(9)).logits, model(ids_of(9)).logits)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    base = target(dtype="float32")
    model = stirred(base, vocabulary=DraftVocabulary(EVERY_THIRD, 61))
    model.export(tmp_path, base_model="x")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")

    def load(changes: dict[str, Any] | None = None, **replaced: Any) -> lm.Eagle3Model:
        changed = {name: value for name, value in (config | (changes or {})).items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        kept = {name: x for name, x in (tensors | replaced).items() if x is not None}
        save_file(kept, tmp_path / "model.safetensors")
        return lm.Eagle3Model.from_pretrained(base, tmp_path)

    layer = config["transformer_layer_config"]
    for error, changes, message in (
        (ConfigError, {"speculators_model_type": "dflash"}, "must be 'eagle3'"),
        (
            ConfigError,
            {"transformer_layer_config": {**layer, "model_type": "gemma"}},
            "one of llama, qwen3, got 'gemma'",
        ),
        (ConfigError, {"transformer_layer_config": {**layer, "num_hidden_layers": 2}}, "heads of one layer"),
        (ConfigError, {"norm_before_fc": True, "fc_norm": True}, "excludes fc_norm"),
        (ConfigError, {"eagle_aux_hidden_state_layer_ids": "2"}, "list of whole numbers"),
        (
            ConfigError,
            {"speculators_model_type": ..., "architectures": ["LlamaForCausalLM"], "draft_vocab_size": ...},
            "names no EAGLE-3 head",
        ),
        (CheckpointError, {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "the model has 4 layers"),
        (CheckpointError, {"target_hidden_size": 32}, "target_hidden_size: of the head is 32"),
        (CheckpointError, {"draft_vocab_size": 21}, "draft_vocab_size: of the head is 21"),
        (CheckpointError, {"fc_norm": True}, "fc_norm.0.weight"),
    ):
        with pytest.raises(error, match=message):
            load(changes)
    for replaced, message in (
        ({"d2t": EVERY_THIRD}, "d2t: holds offsets"),  # ids in place of offsets
        ({"t2d": torch.ones(61, dtype=torch.bool)}, "t2d: marks other tokens"),
        ({"norm.weight": None}, "norm.weight"),
        ({"fc.weight": torch.zeros(24, 48)}, "fc.weight"),
        ({"embed_tokens.weight": torch.zeros(60, 24)}, "embed_tokens.weight has the shape"),
        ({"midlayer.hidden_norm.weight": torch.zeros(24)}, "two tensors"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(**replaced)
    with pytest.warns(ConfigWarning, match="norm_before_residual is missing"):
        assert load({"norm_before_residual": ...}).config.norm_before_residual
    assert not load().config.norm_before_residual and not any(p.requires_grad for p in base.parameters())

    for options, message in (
        ({"lm_head": "tied"}, "lm_head"), ({"num_steps": 0}, "num_steps"), ({"boundaries": [3, 9]}, "at most 4"),
        ({"vocabulary": DraftVocabulary.whole(60)}, "draft_vocab_size|vocab_size"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            lm.Eagle3Model.from_base(base, **options)
    with pytest.raises(InputError, match="profile: must be one of speculators, specforge, deepspec"):
        model.export(tmp_path / "c", "vllm")
    with pytest.raises(InputError, match="give its folder or hub id"):
        model.export(tmp_path / "c")
    for flag, layer_kind in (("norm_before_residual", "llama"), ("norm_before_fc", "llama"), ("norm_output", "qwen3")):
        other = lm.Eagle3Model.from_base(base, layer=layer_kind, **{flag: True})
        with pytest.raises(InputError, match="SGLang does not implement"):
            other.export(tmp_path / "c", "specforge")
    for bias in ("attention_bias", "mlp_bias"):  # SGLang leaves their tensors out
        other = lm.Eagle3Model.from_base(base, layer={**model.config.layer, bias: True})
        with pytest.raises(InputError, match=f"SGLang does not implement {bias}"):
            other.export(tmp_path / "c", "specforge")
    assert not (tmp_path / "c").exists()


@torch.no_grad()
def test_a_memory_budget_is_of_the_ranks_too() -> None:
    model, ids, budgets = stirred(target(), 2), ids_of(9), list[Any]()
    model.lm_head.register_forward_pre_hook(
        lambda module, args, options: budgets.append(options["memory_budget"]), with_kwargs=True
    )
    wanted = model(ids, labels=ids)
    assert torch.equal(model(ids, labels=ids, memory_budget=1000).ranks, wanted.ranks)
    assert budgets == [2**30] * 2 + [1000] * 2


def test_the_counted_vocabulary() -> None:
    """The most frequent trained tokens, ties to the lowest id, ascending, with d2t as offsets."""
    labels = [torch.tensor([[5, 5, -100, 9, 9, 2]]), torch.tensor([7, 5, 2])]
    vocabulary = DraftVocabulary.counted(labels, 4, 12)
    assert vocabulary.tokens.tolist() == [2, 5, 7, 9] and vocabulary.tables()["d2t"].tolist() == [2, 4, 5, 6]
    assert DraftVocabulary.counted(labels, 3, 12).tokens.tolist() == [2, 5, 9]
    assert DraftVocabulary.counted(labels, 6, 12).tokens.tolist() == [0, 1, 2, 5, 7, 9]
    assert vocabulary.ids(torch.tensor([[0, 3]])).tolist() == [[2, 9]]
    for tokens in (
        torch.tensor([3, 2]),
        torch.tensor([2, 2]),
        torch.tensor([0, 12]),
        torch.tensor([-1]),
        torch.empty(0),
    ):
        with pytest.raises(InputError, match="draft tokens"):
            DraftVocabulary(tokens.long() if tokens.numel() else tokens, 12)
    with pytest.raises(InputError, match="labels"):
        DraftVocabulary.counted([torch.tensor([12])], 4, 12)
    with pytest.raises(InputError, match="draft_vocab_size"):
        DraftVocabulary.counted(labels, 13, 12)


@pytest.mark.parametrize("tied", [False, True])
def test_other_draft_tokens_for_a_new_head(tied: bool, tmp_path: Path) -> None:
    base, chosen = target({**TARGET, "tie_word_embeddings": tied}), DraftVocabulary(EVERY_THIRD, 61)
    model = lm.Eagle3Model.from_base(base, 2, vocabulary=DraftVocabulary(torch.arange(20), 61))
    model.choose(chosen)
    assert torch.equal(model.lm_head.weight, base.head.weight[EVERY_THIRD])
    model.save_pretrained(tmp_path)
    again = lm.Eagle3Model.from_pretrained(base, tmp_path)
    assert again.num_heads == 2 and torch.equal(again.vocabulary.tokens, EVERY_THIRD)
    with pytest.raises(InputError, match="vocabulary: must have 20 of 61 tokens, has 19 of 61"):
        model.choose(DraftVocabulary(torch.arange(19), 61))


@pytest.mark.parametrize("model_class", [lm.Eagle3Model, lm.DFlashModel, lm.DSparkModel])
def test_arguments_of_another_kind_are_refused_by_name(model_class: Any) -> None:
    base = target()
    for name, value, message in (
        ("boundaries", 2, "must be a list of numbers of blocks"), ("boundaries", "1", "must be a list of numbers"),
        ("boundaries", [1.5], "must be a whole number"), ("vocabulary", [1, 2], "must be a DraftVocabulary"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"{name}: {message}"):
            model_class.from_base(base, **{name: value})
    if model_class is not lm.Eagle3Model:
        with pytest.raises(InputError, match=f"{model_class.kind} heads have no probabilities"):
            model_class.from_base(base).drafter(DynamicTree())
