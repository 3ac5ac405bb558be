"""DFlash and DSpark against a float64 reference over the tensors of an exported head; drafting; files."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from zoo import CONFIGS, EACH_FAMILY, MIXTURES

import ligermodels as lm
from ligermodels.errors import CheckpointError, ConfigError, ConfigWarning, InputError
from ligermodels.speculative.block_anchors import sample_blocks
from ligermodels.speculative.block_draft import BlockDraftModel, default_layer_ids
from ligermodels.speculative.draft_vocabulary import DraftVocabulary
from ligermodels.speculative.tree import Tree

ALL = {**CONFIGS, **MIXTURES}
TARGET: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SOFTCAPPED = {**TARGET, "model_type": "gemma2", "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 6,
              "sliding_window": 32, "attn_logit_softcapping": 50.0}  # fmt: skip
EVERY_THIRD = torch.arange(1, 61, 3)
BLOCK = 4
VARIANTS: dict[str, tuple[type[BlockDraftModel], dict[str, Any]]] = {
    "dflash": (lm.DFlashModel, {}),
    "dflash-dpace": (lm.DFlashModel, {"dpace_alpha": 0.3}),
    "bare": (lm.DSparkModel, {"markov_rank": 0, "confidence": False, "gamma": None}),
    "vanilla": (lm.DSparkModel, {"markov_rank": 5}),
    "gated": (lm.DSparkModel, {"markov_rank": 5, "markov_head_type": "gated", "confidence_with_markov": False}),
    "rnn": (lm.DSparkModel, {"markov_rank": 5, "markov_head_type": "rnn", "divergence": "forward_kl"}),
}


def target(config: dict[str, Any] = TARGET, dtype: str = "float64") -> lm.CausalLM:
    torch.manual_seed(0)
    model = lm.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.2)
    return model


def stirred(kind: str, base: lm.CausalLM, **options: Any) -> Any:
    """A head with random norms too, so that no factor of 1 hides an error."""
    model_class, own = VARIANTS[kind]
    size = BLOCK + (model_class is lm.DFlashModel)
    model = model_class.from_base(base, size, **{"num_layers": 2, **own, **options})
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.head_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(parameter) * 0.2)
    return model


def tensors_of(model: Any, folder: Path) -> dict[str, Tensor]:
    model.export(folder, base_model="some/target", overwrite=True)
    return load_file(folder / "model.safetensors")


def ids_of(length: int, batch: int = 1) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


# -- formulas ----------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def reference_hidden(w: dict[str, Tensor], states: Tensor, token: int, anchor: int, size: int, mask: int) -> Tensor:
    """(size, H): the slots of one block after a document's states (T, n H), of which it sees those before the anchor.
    Facts: arXiv 2602.06036."""
    c = norm(states[:anchor] @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][[token] + [mask] * (size - 1)]
    where = torch.arange(anchor + size)
    for layer in itertools.takewhile(lambda p: f"{p}.input_layernorm.weight" in w, (f"layers.{i}" for i in range(9))):
        h = norm(x, w[f"{layer}.input_layernorm.weight"])
        source = torch.cat([c, h])
        q, k, v = (
            (inputs @ w[f"{layer}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, 6))
            for part, inputs in (("q", h), ("k", source), ("v", source))
        )
        q = rotate(norm(q, w[f"{layer}.self_attn.q_norm.weight"]), where[anchor:])
        k = rotate(norm(k, w[f"{layer}.self_attn.k_norm.weight"]), where)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        weights = (torch.einsum("thd,shd->hts", q, k) * 6**-0.5).softmax(-1)
        x = x + torch.einsum("hts,shd->thd", weights, v).flatten(1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        y = norm(x, w[f"{layer}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        x = x + (F.silu(y @ gate.T) * (y @ up.T)) @ down.T
    return norm(x, w["norm.weight"])


def reference(w: dict[str, Tensor], hidden: Tensor, before: Tensor | list[int]) -> tuple[Tensor, Tensor | None]:
    """Logits (K, V_d) and confidence logits (K,) of slots with hidden states (K, H) after the tokens `before` (K,)."""
    logits, confidence = hidden @ w["lm_head.weight"].T, None
    state = torch.zeros(5, dtype=hidden.dtype)
    found = []
    for slot, token in enumerate(before):
        if "markov_head.markov_w1.weight" not in w:
            break
        e = code = w["markov_head.markov_w1.weight"][token]
        if "markov_head.gate_proj.weight" in w:
            z = torch.cat([hidden[slot], e])
            code = (w["markov_head.gate_proj.weight"] @ z + w["markov_head.gate_proj.bias"]).sigmoid() * e
        if "markov_head.joint_proj.weight" in w:
            z = torch.cat([state, e, hidden[slot]])
            f, u, o = (w["markov_head.joint_proj.weight"] @ z + w["markov_head.joint_proj.bias"]).chunk(3)
            state, code = f.sigmoid() * state + (1 - f.sigmoid()) * u.tanh(), o.tanh()
        found.append(logits[slot] + w["markov_head.markov_w2.weight"] @ code)
    if "confidence_head.proj.weight" in w:
        features = hidden
        if w["confidence_head.proj.weight"].shape[1] > hidden.shape[1]:
            features = torch.cat([hidden, w["markov_head.markov_w1.weight"][torch.as_tensor(before)]], dim=-1)
        confidence = features @ w["confidence_head.proj.weight"][0] + w["confidence_head.proj.bias"]
    return (torch.stack(found) if found else logits), confidence


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", VARIANTS)
def test_blocks_are_those_of_the_formulas(kind: str, reduced: bool, tmp_path: Path) -> None:
    """Logits, with and without neighbours in a packed row; and the loss, its gradients, acceptance and agreement."""
    base = target(SOFTCAPPED)
    vocabulary = DraftVocabulary(EVERY_THIRD, 61) if reduced else None
    model = stirred(kind, base, vocabulary=vocabulary)
    options, tokens = model.training_options, torch.arange(61) if vocabulary is None else EVERY_THIRD
    dflash, mask = isinstance(model, lm.DFlashModel), 60
    w, lengths = tensors_of(model, tmp_path), [9, 1, 2, 12]
    for tensor in w.values():
        if tensor.is_floating_point():
            tensor.requires_grad_()
    texts = [ids_of(length)[0] + i for i, length in enumerate(lengths)]
    texts = [text % 61 for text in texts]
    labels = [text.clone() for text in texts]
    labels[3][[2, 8]] = -100
    terms, found, kept = [], [], []
    for text, label in zip(texts, labels, strict=True):
        states, _ = lm.capture(base, text[None], model.config.boundaries)
        truth = base(text[None]).logits[0][:, tokens].log_softmax(-1)
        for a in range(len(text)):
            hidden = reference_hidden(w, states[0], int(text[a]), a, BLOCK + dflash, mask)[int(dflash) :]
            before = text[[min(a + k, len(text) - 1) for k in range(BLOCK)]]
            logits, confidence = reference(w, hidden, before)
            found.append(logits)
            kept.append(torch.arange(BLOCK) + a < len(text) - 1)
            ahead = label[a + 1 : a + 1 + BLOCK].tolist()
            supervised = range(next((k for k, token in enumerate(ahead) if token < 0), len(ahead)))
            if label[a] < 0 or not supervised:
                continue
            log_q, q_right, rows = logits.log_softmax(-1), [], []
            for k in supervised:
                p, place = truth[a + k], (tokens == text[a + 1 + k]).nonzero()
                ce = -log_q[k, place[0, 0]] if len(place) else torch.zeros((), dtype=torch.float64)
                q_right.append(ce.detach().neg().exp() if len(place) else torch.zeros(()))
                l1 = (log_q[k].exp() - p.exp()).abs().sum()
                alpha = 1 - (log_q[k].detach().exp() - p.exp()).abs().sum() / 2
                distance = (p.exp() * (p - log_q[k])).sum() if options.divergence == "forward_kl" else l1
                value = options.ce_weight * ce + options.divergence_weight * distance
                extra = torch.zeros(())
                if confidence is not None:
                    extra = F.binary_cross_entropy_with_logits(confidence[k], alpha)
                agrees = float(log_q[k].argmax() == p.argmax())
                rows.append((value, extra, alpha, agrees))
            weights = [math.exp(-k / options.gamma) if options.gamma else 1.0 for k in supervised]
            if options.dpace_alpha is not None:
                u = [0.7 * float(q) + 0.3 for q in q_right]
                weights = [sum(math.prod(u[: i + 1]) for i in range(j, len(u))) for j in range(len(u))]
            terms.append([(weight, *row) for weight, row in zip(weights, rows, strict=True)])

    packed, bounds = torch.cat(texts)[None], torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    together = model(packed, cu_seqlens=bounds).logits[:, 0].transpose(0, 1)
    for a, (logits, inside) in enumerate(zip(found, kept, strict=True)):
        torch.testing.assert_close(together[a][inside], logits[inside])
    torch.testing.assert_close(model(texts[0][None]).logits[:, 0, 3], found[3])

    flat = [term for block in terms for term in block]
    whole = len(flat) if options.dpace_alpha is not None else sum(term[0] for term in flat)
    loss = sum(weight * (value + options.confidence_weight * extra) for weight, value, extra, *_ in flat) / whole
    out = model(packed, labels=torch.cat(labels)[None], cu_seqlens=bounds)
    torch.testing.assert_close(out.loss, loss)
    slots = [[block[k] for block in terms if len(block) > k] for k in range(BLOCK)]
    assert out.counts.tolist() == [len(slot) for slot in slots]
    means = torch.stack([torch.stack([row[1] for row in slot]).mean() for slot in slots])
    torch.testing.assert_close(out.head_losses.detach(), means.detach())
    for name, place in (("acceptance", 3), ("agreement", 4)):  # given that the slots before are accepted
        reached = [[math.prod(float(row[place]) for row in block[:k]) for block in terms if len(block) > k]
                   for k in range(BLOCK)]  # fmt: skip
        shares = [sum(r * float(row[place]) for r, row in zip(reach, slot, strict=True)) / max(sum(reach), 1e-9)
                  for reach, slot in zip(reached, slots, strict=True)]  # fmt: skip
        torch.testing.assert_close(getattr(out, name).double(), torch.tensor(shares, dtype=torch.float64))
    native = {name: p for name, p in model.head.named_parameters()}
    pairs = {"fc.weight": "fc.weight", "norm.weight": "norm.weight", "layers.1.mlp.down_proj.weight":
             "layers.1.mlp.down.weight", "layers.0.self_attn.k_norm.weight": "layers.0.mixer.k_norm.weight",
             "layers.0.self_attn.q_proj.weight": "layers.0.mixer.q.weight", "hidden_norm.weight": "hidden_norm.weight",
             "markov_head.markov_w1.weight": "markov.w1.weight", "markov_head.markov_w2.weight": "markov.w2.weight",
             "markov_head.joint_proj.bias": "markov.joint.bias", "markov_head.gate_proj.weight": "markov.gate.weight",
             "confidence_head.proj.weight": "confidence.proj.weight"}  # fmt: skip
    names = [name for name in pairs if name in w]
    wanted = torch.autograd.grad(loss, [w[name] for name in names])
    out.loss.backward()
    for name, gradient in zip(names, wanted, strict=True):
        torch.testing.assert_close(native[pairs[name]].grad, gradient, msg=name)
    assert all(parameter.grad is None for parameter in base.parameters())
    assert all(parameter.grad is not None for parameter in model.head_parameters())
    small = model(packed, labels=torch.cat(labels)[None], cu_seqlens=bounds, memory_budget=1)
    torch.testing.assert_close(small.loss, out.loss)


def test_the_network_is_that_of_transformers(tmp_path: Path) -> None:
    """Our slots, from the cache and in training, against transformers' DFlash assistant with the same weights."""
    assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    config_class = pytest.importorskip("transformers").MuseGlimmerAssistantConfig
    base = target()
    model = stirred("dflash", base)
    w = tensors_of(model, tmp_path)
    shape = {name: TARGET[name] for name in TARGET if name not in ("model_type", "num_hidden_layers", "rms_norm_eps")}
    config = config_class(
        **shape, num_hidden_layers=2, rms_norm_eps=1e-5, block_size=BLOCK + 1, mask_token_id=60,
        target_layer_ids=[boundary - 1 for boundary in model.config.boundaries],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, layer_types=["full_attention"] * 2,
        attn_implementation="eager",
    )  # fmt: skip
    theirs = assistant.MuseGlimmerAssistantModel(config).double().eval()
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    missing = theirs.load_state_dict({names.get(name, name): x for name, x in w.items()}, strict=False)
    assert not missing.missing_keys and set(missing.unexpected_keys) == {"embed_tokens.weight", "lm_head.weight"}
    text, anchor = ids_of(12)[0], 7
    states, _ = lm.capture(base, text[None], model.config.boundaries)
    slots = w["embed_tokens.weight"][[int(text[anchor])] + [60] * BLOCK]
    out = theirs(
        noise_embeds=slots[None],
        context_hidden_states=states[:, :anchor],
        position_ids=torch.arange(anchor + BLOCK + 1)[None],
        use_cache=False,
    )
    wanted = out.last_hidden_state[0, 1:] @ w["lm_head.weight"].T
    torch.testing.assert_close(model(text[None]).logits[:, 0, anchor], wanted, rtol=1e-5, atol=1e-6)  # fp32 rotations


def test_anchors() -> None:
    """Without replacement, ascending, among tokens that are supervised together with the next one; the same each time;
    other ones with another seed or text."""
    labels = ids_of(40)[0]
    labels[[3, 4, 20]] = -100
    following = torch.stack([F.pad(labels[k:], (0, k), value=-100) for k in (1, 2, 3)])
    allowed = {t for t in range(39) if labels[t] >= 0 and labels[t + 1] >= 0}
    blocks = sample_blocks(labels, following, 10, seed=0)
    chosen = blocks.anchors.tolist()
    assert len(set(chosen)) == 10 and chosen == sorted(chosen) and set(chosen) <= allowed
    for anchor, row in zip(chosen, blocks.targets.tolist(), strict=True):
        ahead = [*labels[anchor + 1 : anchor + 4].tolist(), -100, -100, -100][:3]
        end = ahead.index(-100) if -100 in ahead else 3
        assert row == ahead[:end] + [-100] * (3 - end)
    assert torch.equal(sample_blocks(labels, following, 10, seed=0).anchors, blocks.anchors)
    assert not torch.equal(sample_blocks(labels, following, 10, seed=1).anchors, blocks.anchors)
    every = sample_blocks(labels, following, 99, seed=0)
    found = (every.targets[:, 0] >= 0).sum()
    assert len(every.anchors) == 40 and set(every.anchors[:found].tolist()) == allowed and found == len(allowed)
    often = torch.bincount(torch.cat([sample_blocks(labels, following, 10, seed).anchors for seed in range(700)]))
    assert (often[list(allowed)] / 700 - 10 / len(allowed)).abs().max() < 0.08


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_padding_masked_labels_and_normalisers(kind: str) -> None:
    """A padded batch is its rows alone; micro-batches add up; sums are sums; the options of the loss."""
    model = stirred(kind, target())
    short, long = ids_of(7), ids_of(11)
    labels_short, labels_long = short.clone(), long.clone()
    labels_long[:, :4] = -100
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :4] = 0
    padded = torch.cat([F.pad(short, (4, 0)), long]), torch.cat([F.pad(labels_short, (4, 0), value=-100), labels_long])
    out = model(padded[0], labels=padded[1], attention_mask=mask)
    alone = [model(short, labels=labels_short, reduction="sum"), model(long, labels=labels_long, reduction="sum")]
    items = model.num_targets(padded[1], attention_mask=mask)
    assert items.tolist() == [6 + 6, 5 + 5, 4 + 4, 3 + 3] == out.counts.tolist()
    torch.testing.assert_close(out.head_losses, (alone[0].head_losses + alone[1].head_losses) / items)
    parts = [model(x, labels=y, num_items_in_batch=items).loss for x, y in ((short, labels_short), (long, labels_long))]
    torch.testing.assert_close(out.loss, sum(parts))
    weights = sum(items * torch.tensor(model.loss_weights()))
    torch.testing.assert_close(out.loss, (alone[0].loss + alone[1].loss) / weights)
    none = model(short, labels=torch.full_like(short, -100))
    assert none.loss == 0 and none.counts.tolist() == [0] * BLOCK
    none.loss.backward()
    torch.testing.assert_close(model(short, labels=short, position_ids=torch.arange(7)[None]).loss,
                               model(short, labels=short).loss)  # fmt: skip
    by_rows = model(torch.cat([short, short]), labels=torch.cat([short, short]))
    torch.testing.assert_close(by_rows.loss, model(short, labels=short).loss)
    embeds = model.base.decoder.embed(short)
    torch.testing.assert_close(model(inputs_embeds=embeds, labels=short).loss, model(short, labels=short).loss)
    with torch.no_grad():
        scored, logits = model(long, labels=labels_long), model(long).logits[:, 0]
        rows = model.num_targets(labels_long)
    assert scored.ranks.shape == (BLOCK, 1, 11) and (scored.ranks >= 0).sum((1, 2)).tolist() == rows.tolist()
    better = (logits[1, 5] > logits[1, 5, long[0, 7]]).sum()
    assert scored.ranks[1, 0, 1] == better  # the second anchor is token 5
    token_weights = torch.rand(1, 11, dtype=torch.float64)
    weighted = model(long, labels=labels_long, token_weights=token_weights)
    assert not torch.equal(weighted.head_losses, scored.head_losses)
    same = model(long, labels=labels_long, token_weights=torch.full_like(token_weights, 3.0))
    torch.testing.assert_close(same.loss, model(long, labels=labels_long).loss)
    for options, message in (
        ({"reduction": "none"}, "reduction"), ({"label_smoothing": 0.1}, "label_smoothing: is no option"),
        ({"num_items_in_batch": torch.ones(2)}, "must be 1 or 4 numbers"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            model(short, labels=short, **options)


# -- drafting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_greedy_tokens_are_those_of_plain_decoding(name: str) -> None:
    """For every family, batches of unequal prompts, chains and trees."""
    base = target(ALL[name], "float32")
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [5, 6, 7]]
    options: dict[str, Any] = {"max_new_tokens": 10, "pad_token_id": 0, "repetition_penalty": 1.0}
    plain = base.generate(prompts, do_sample=False, **options)
    for kind, tree in (("rnn", None), ("dflash", Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)]))):
        assert torch.equal(stirred(kind, base).generate(prompts, tree=tree, **options), plain), kind


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn"])
def test_drafts_are_those_of_the_formulas(kind: str, reduced: bool, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Every draft, from a cache of the true states before the last verified token."""
    base = target()
    model = stirred(kind, base, vocabulary=DraftVocabulary(EVERY_THIRD, 61) if reduced else None)
    w, drafted = tensors_of(model, tmp_path), []
    drafter_class = type(model.drafter(model.default_tree()))
    draft = drafter_class.draft

    def recorded(self: Any, sequences: Any) -> Tensor:
        found = draft(self, sequences)
        for b, text in enumerate(sequences.text):
            if not sequences.done[b]:
                drafted.append((text[: int(sequences.cache_seqlens[b]) + 1].clone(), found[b, :, 0].clone()))
        return found

    monkeypatch.setattr(drafter_class, "draft", recorded)
    model.generate([[3, 1, 4, 1, 5], [8, 2]], max_new_tokens=9, pad_token_id=0)
    assert len(drafted) > 6
    tokens, first = EVERY_THIRD if reduced else torch.arange(61), int(kind == "dflash")
    for text, found in drafted:
        states, _ = lm.capture(base, text[None], model.config.boundaries)
        anchor = len(text) - 1
        hidden = reference_hidden(w, states[0], int(text[-1]), anchor, BLOCK + first, 60)[first:]
        wanted = list[int]()
        for slot in range(BLOCK):
            before = [int(text[-1]), *wanted]
            logits, _ = reference({k: x for k, x in w.items() if "confidence" not in k}, hidden[: slot + 1], before)
            wanted.append(int(tokens[logits[slot].argmax()]))
        assert found.tolist() == wanted


@pytest.mark.parametrize("kind", ["dflash", "vanilla"])
def test_a_trained_head_proposes_more_than_two_tokens_a_step(kind: str) -> None:
    """On a target that knows a text: a few steps of training, and acceptance in `generate` as in the metrics."""
    torch.manual_seed(0)
    base = lm.from_config({**TARGET, "hidden_size": 48, "head_dim": 12, "num_hidden_layers": 3}, dtype="float32")
    text = torch.randint(0, 60, (1, 48), generator=torch.Generator().manual_seed(3)).repeat(1, 2)[:, :60]
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        base(text, labels=text).loss.backward()
        optimizer.step()
    model_class, _ = VARIANTS[kind]
    model = model_class.from_base(base.eval(), BLOCK + (kind == "dflash"), num_layers=1)
    optimizer = torch.optim.AdamW(model.head_parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    out = model(text, labels=text)
    decoded = model.generate(text[:, :8], max_new_tokens=40, return_stats=True)
    assert torch.equal(decoded.sequences, base.generate(text[:, :8], max_new_tokens=40, do_sample=False))
    expected = 1 + out.agreement.cumprod(0).sum()
    assert decoded.tokens_per_step > 2 and abs(decoded.tokens_per_step - expected) < 0.15 * expected
