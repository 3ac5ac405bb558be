"""Generation against recomputation without a cache, against transformers' warpers, and against itself with Medusa."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ligermodels.errors import InputError
from ligermodels.generation import KVCache, Tree, chain, default_tree, generate, medusa_generate, sample
from ligermodels.generation.sampling import warp

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 13, 12, 4, 2, 3, 2
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [7, 9]]


class Toy(nn.Module):
    """The least that is a Decoder: two attention layers in fp64, grouped queries, positions added to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.qkv = nn.ModuleList(
            nn.ModuleList(nn.Linear(HIDDEN, size, dtype=torch.float64) for size in sizes) for _ in range(LAYERS)
        )
        self.head = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)  # in training mode nothing would agree
        self.passes: list[tuple[int, int]] = []  # shape of the ids in each call
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=1.0)

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        rows, length = input_ids.shape
        self.passes.append((rows, length))
        start = 0 if cache is None else cache.length
        total = start + length
        if position_ids is None:
            position_ids = torch.arange(start, total).expand(rows, length)
        assert position_ids.shape == (rows, length)
        if mask is None:
            mask = torch.ones(total, total, dtype=torch.bool).tril()[start:].expand(rows, length, total)
        assert mask.dtype == torch.bool and mask.shape == (rows, length, total)
        angles = position_ids[..., None] / torch.arange(1, HIDDEN + 1).double()
        x = self.embed(input_ids) + 2 * torch.sin(3 * angles)
        for layer, projections in enumerate(self.qkv):
            q, k, v = (
                projection(x).unflatten(-1, (heads, HEAD_DIM))
                for projection, heads in zip(projections, (HEADS, KV_HEADS, KV_HEADS), strict=True)
            )
            if cache is not None:
                k, v = cache.update(layer, k, v)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
            scores = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(~mask[:, None], -math.inf)
            x = self.dropout(x + torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))
        if cache is not None:
            cache.advance(length)
        assert x.isfinite().all()
        return x

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        cache = KVCache([(KV_HEADS, HEAD_DIM)] * LAYERS, batch_size, max_length, dtype=torch.float64)
        for stored in cache.layers:
            stored.fill_(math.nan)  # what was not written must not be read
        return cache


@pytest.fixture
def model() -> Toy:
    return Toy()


def recomputed(model: Toy, prompt: list[int], new_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """Greedy continuation of one prompt, without cache, mask or padding."""
    model.eval()
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(model.head(model.hidden_states(torch.tensor([ids]))[0, -1]).argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


def batched(prompts: list[list[int]], continuations: list[list[int]], pad: int) -> list[list[int]]:
    """What generate returns for them."""
    left, right = max(map(len, prompts)), max(map(len, continuations))
    return [
        [pad] * (left - len(prompt)) + prompt + new + [pad] * (right - len(new))
        for prompt, new in zip(prompts, continuations, strict=True)
    ]


# -- plain generation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [1, 2, 17])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[2:3], [[4, 4], [0, 12]]], ids=["padded", "one", "equal"])
def test_batch_equals_recomputed_rows(model: Toy, prompts: list[list[int]], new_tokens: int) -> None:
    expected = [recomputed(model, prompt, new_tokens) for prompt in prompts]
    assert new_tokens < 17 or len({tuple(row) for row in expected}) == len(prompts)  # not all the same rut
    model.passes.clear()
    out = generate(model, prompts, max_new_tokens=new_tokens, pad_token_id=99)
    assert out.tolist() == batched(prompts, expected, 99)
    batch = len(prompts)
    assert model.passes == [(batch, max(map(len, prompts)))] + [(batch, 1)] * (new_tokens - 1)


@pytest.mark.parametrize(
    ("eos", "pad"), [(5, None), ([5], 0), ([2, 8], None), ([8, 2], -1), ([0, 1, 2, 3, 4, 5, 6], None), ([], 0)]
)
def test_rows_end_at_eos(model: Toy, eos: int | list[int], pad: int | None) -> None:
    stops = [eos] if isinstance(eos, int) else eos
    expected = [recomputed(model, prompt, 23, stops) for prompt in PROMPTS]
    out = generate(model, PROMPTS, max_new_tokens=23, eos_token_ids=eos, pad_token_id=pad)
    assert out.tolist() == batched(PROMPTS, expected, stops[0] if pad is None else pad)


def test_eos_cases_are_real(model: Toy) -> None:
    """The rows above end at different places, one of them at once, and some not at all."""
    lengths = {len(recomputed(model, prompt, 23, (eos,))) for prompt in PROMPTS for eos in range(VOCAB)}
    assert {1, 23} < lengths and len(lengths) > 5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_on_any_side(model: Toy, dtype: torch.dtype) -> None:
    ids = torch.tensor([[-100, -100, 3, 1, 4], [7, 9, -100, -100, -100], [2, -100, 6, -100, 5]])
    mask = (ids >= 0).to(dtype)
    kept = ids.clone()
    out = generate(model, ids, attention_mask=mask, max_new_tokens=6)
    prompts = [[3, 1, 4], [7, 9], [2, 6, 5]]
    assert out.tolist() == batched(
        [[-100] * 2 + prompts[0], *prompts[1:]], [recomputed(model, p, 6) for p in prompts], -100
    )
    assert ids.equal(kept)


@pytest.mark.parametrize("form", [[3, 1, 4], [[3, 1, 4]], torch.tensor([3, 1, 4]), torch.tensor([[3, 1, 4]]).int()])
def test_forms_of_one_prompt(model: Toy, form: Any) -> None:
    out = generate(model, form, max_new_tokens=4)
    assert out.dtype == torch.int64
    assert out.tolist() == [[3, 1, 4, *recomputed(model, [3, 1, 4], 4)]]


def test_on_token_streams_and_stops(model: Toy) -> None:
    seen: list[list[int]] = []

    def on_token(tokens: Tensor) -> bool:
        seen.append(tokens.tolist())
        return len(seen) == 5

    out = generate(model, PROMPTS, max_new_tokens=20, pad_token_id=0, on_token=on_token)
    assert out.shape[1] == max(map(len, PROMPTS)) + 5
    assert out[:, -5:].T.tolist() == seen


@pytest.mark.parametrize("fails", [False, True])
def test_training_flags_come_back(model: Toy, fails: bool) -> None:
    model.train()
    model.qkv[0].eval()  # a frozen part may be in eval mode while the rest trains
    flags = [module.training for module in model.modules()]

    def on_token(tokens: Tensor) -> None:
        assert not any(module.training for module in model.modules())
        if fails:
            raise KeyboardInterrupt

    try:
        out = generate(model, [1], max_new_tokens=3, on_token=on_token)
    except KeyboardInterrupt:
        assert fails
    else:
        assert not fails and not out.is_inference()
    assert [module.training for module in model.modules()] == flags


BAD_CALLS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[1], []]}, "prompt 1 is empty"),
    ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "empty"),
    ({"input_ids": torch.ones(1, 1, 1, dtype=torch.long)}, "shape"),
    ({"input_ids": torch.ones(1, 2)}, "integers"),
    ({"input_ids": "text"}, "list of ids"),
    ({"input_ids": [[1], [2, 13]], "pad_token_id": 0}, r"token id 13 \(prompt 1, token 1\).*vocabulary of 13"),
    ({"input_ids": [[1, 2], [-1]], "pad_token_id": 0}, r"token id -1 \(prompt 1, token 0\)"),
    ({"input_ids": [[1], [2, 3]]}, "pad_token_id"),
    ({"attention_mask": torch.ones(1, 3)}, r"attention_mask has shape \(1, 3\)"),
    ({"attention_mask": torch.tensor([[1, 2], [1, 1]])}, "only 1"),
    ({"attention_mask": torch.tensor([[1, 1], [0, 0]])}, "prompt 1 is empty"),
    ({"input_ids": [1], "attention_mask": torch.ones(1, 1)}, "lists of ids need none"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
]
BAD_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.0}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": math.nan}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
]


@pytest.mark.parametrize(
    ("options", "message"), BAD_CALLS + [({"do_sample": True} | options, message) for options, message in BAD_SAMPLING]
)
def test_bad_calls(model: Toy, options: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"input_ids": torch.ones(2, 2, dtype=torch.long), "max_new_tokens": 3} | options
    with pytest.raises(InputError, match=message):
        generate(model, **call)
    assert not model.passes
    if "do_sample" not in call:
        with pytest.raises(InputError, match=message):
            medusa_generate(model, lambda hidden: hidden, tree=chain(1), **call)
        assert not model.passes


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 0.0, 1e-4, 0.6, 0.95, 1.0])
@pytest.mark.parametrize("min_p", [None, 0.07])
def test_warp_equals_transformers(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    logits = 3 * torch.randn(5, 41)
    logits[0, :9] = logits[0].max()  # ties
    logits[1, 3] = 1e4
    logits[2, ::2] = -math.inf
    given = logits.clone()
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None and top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p is not None:
        expected = MinPLogitsWarper(min_p)(None, expected)
    warped = warp(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(warped, expected, rtol=0, atol=0)
    assert logits.equal(given)
    assert warp(logits.bfloat16(), temperature=temperature).dtype == torch.float32


def test_sample_draws_from_the_warped_distribution() -> None:
    logits = 2 * torch.randn(1, 9)
    options = {"temperature": 1.3, "top_k": 6, "top_p": 0.9}
    draws = 40_000
    tokens = sample(logits.expand(draws, 9), **options, generator=torch.Generator().manual_seed(1))
    assert tokens.shape == (draws,)
    p = warp(logits, **options).softmax(-1)[0].double()
    frequency = tokens.bincount(minlength=9) / draws
    assert (p == 0).any() and (frequency[p == 0] == 0).all()
    assert ((frequency - p).abs() <= 4.5 * (p * (1 - p) / draws).sqrt()).all()


def test_sampled_generation(model: Toy) -> None:
    """The generator decides, and nothing else; top_k = 1 is greedy."""

    def run(seed: int, **options: Any) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        out = generate(
            model, PROMPTS, max_new_tokens=12, pad_token_id=0, do_sample=True, generator=generator, **options
        )
        return out.tolist()

    assert run(1, temperature=3.0) == run(1, temperature=3.0) != run(2, temperature=3.0)
    assert run(1, top_k=1) == generate(model, PROMPTS, max_new_tokens=12, pad_token_id=0).tolist()


# -- Medusa ------------------------------------------------------------------------------------------------------------


def prophet(
    model: Toy, prompts: list[list[int]], length: int, rank_of: Callable[[int, int], int | None], num_heads: int = 3
) -> Callable[[Tensor], Tensor]:
    """Heads that know the greedy continuation: head k puts the true token at rank rank_of(place, k), None for never."""
    texts = [prompt + recomputed(model, prompt, length + num_heads + 1) for prompt in prompts]
    states = [model.hidden_states(torch.tensor([text]))[0] for text in texts]

    def propose(hidden: Tensor) -> Tensor:
        assert hidden.shape == (1, HIDDEN)
        distance, place, text = min(
            (float((state - hidden).norm(dim=1).min()), int((state - hidden).norm(dim=1).argmin()), text)
            for state, text in zip(states, texts, strict=True)
        )
        assert distance < 1e-9  # a state of the accepted text, never of a rejected branch
        logits = torch.randn(1, num_heads, VOCAB).clamp(-5, 5)
        for k in range(num_heads):
            truth, rank = text[place + 2 + k], rank_of(place, k)
            logits[0, k, truth] = -math.inf
            if rank is not None:
                logits[0, k, truth] = logits[0, k].sort(descending=True).values[:rank].min() - 1e-6 if rank else 9.0
        return logits

    return propose


def silent(place: int, k: int) -> int | None:
    return None


def perfect(place: int, k: int) -> int | None:
    return 0


def partly(place: int, k: int) -> int | None:
    return (None, 0, 1, 0, 2, 0)[(5 * place + 3 * k + place // 3) % 6]


TREES = {
    "root": Tree.from_paths([]),
    "chain": chain(3),
    "short": chain(1),
    "bushy": Tree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 2), (1, 0, 0), (2, 2, 1), (0, 1, 2)]),
    "default": default_tree(3, nodes=40),
}


@pytest.mark.parametrize("rank_of", [silent, perfect, partly])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_medusa_equals_greedy_at_every_length(
    model: Toy, tree: Tree, rank_of: Callable[[int, int], int | None]
) -> None:
    for prompt in (PROMPTS[0], PROMPTS[1]):
        propose = prophet(model, [prompt], 20, rank_of)
        expected = recomputed(model, prompt, 20)
        for new_tokens in (*range(1, 9), 20):
            out = medusa_generate(model, propose, [prompt], tree=tree, max_new_tokens=new_tokens)
            assert out.sequences.tolist() == [prompt + expected[:new_tokens]]
            assert out.new_tokens == new_tokens


@pytest.mark.parametrize("rank_of", [silent, perfect, partly])
@pytest.mark.parametrize("eos", [[5], [2, 8], [11], list(range(7))])
@pytest.mark.parametrize("pad", [None, -1])
def test_medusa_equals_generate_in_batches_with_eos(
    model: Toy, rank_of: Callable[[int, int], int | None], eos: list[int], pad: int | None
) -> None:
    propose = prophet(model, PROMPTS, 23, rank_of)
    options: dict[str, Any] = {"max_new_tokens": 23, "eos_token_ids": eos, "pad_token_id": pad}
    expected = generate(model, PROMPTS, **options)
    out = medusa_generate(model, propose, PROMPTS, tree=TREES["bushy"], **options)
    assert out.sequences.equal(expected)
    assert out.new_tokens == sum(len(recomputed(model, prompt, 23, eos)) for prompt in PROMPTS)


def test_medusa_takes_padded_tensors(model: Toy) -> None:
    ids = torch.tensor([[3, 1, 4, -7, -7], [-7, 7, 9, 2, 2]])
    options: dict[str, Any] = {"attention_mask": ids >= 0, "max_new_tokens": 9}
    propose = prophet(model, [[3, 1, 4], [7, 9, 2, 2]], 9, partly)
    model.train()
    out = medusa_generate(model, propose, ids, tree=TREES["bushy"], **options)
    assert model.training and model.qkv.training
    assert out.sequences.equal(generate(model, ids, **options))


@pytest.mark.parametrize(
    ("tree", "rank_of", "per_step"),
    [
        (chain(3), perfect, 4),
        (chain(2), perfect, 3),
        (TREES["bushy"], perfect, 3),  # its all-top-1 path is two deep
        (TREES["root"], perfect, 1),
        (chain(3), silent, 1),
        (chain(3), lambda place, k: 0 if k < 2 else 1, 3),
        (TREES["bushy"], lambda place, k: (2, 2, 1)[k], 4),
        (TREES["bushy"], lambda place, k: (2, 2, 0)[k], 3),
        (TREES["bushy"], lambda place, k: (1, 2, 0)[k], 2),
    ],
)
def test_tokens_a_step(model: Toy, tree: Tree, rank_of: Callable[[int, int], int | None], per_step: int) -> None:
    """Each step accepts exactly the right path of the tree, and the prefill's token is not counted."""
    steps = 5
    propose = prophet(model, PROMPTS[:2], 1 + steps * per_step, rank_of)
    model.passes.clear()
    out = medusa_generate(model, propose, PROMPTS[:2], tree=tree, max_new_tokens=1 + steps * per_step, pad_token_id=0)
    assert (out.steps, out.tokens_per_step) == (2 * steps, per_step)
    for row in range(2):
        prefill, *decoding = model.passes[row * (steps + 1) : (row + 1) * (steps + 1)]
        assert prefill == (1, len(PROMPTS[row])) and decoding == [(1, len(tree))] * steps


def test_tokens_a_step_without_a_step(model: Toy) -> None:
    out = medusa_generate(model, lambda hidden: hidden, [1, 2], tree=chain(1), max_new_tokens=1)
    assert out.steps == 0 and math.isnan(out.tokens_per_step)


@pytest.mark.parametrize(
    ("shape", "message"), [((1, 2, VOCAB), "needs 3 heads"), ((1, 3, 2), "3 candidates"), ((2, VOCAB), "shape")]
)
def test_proposals_too_small_for_the_tree(model: Toy, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        medusa_generate(model, lambda hidden: torch.zeros(shape), [1], tree=TREES["bushy"], max_new_tokens=5)


# -- cache -------------------------------------------------------------------------------------------------------------


def filled(batch: int, slots: int, count: int) -> tuple[KVCache, list[tuple[Tensor, Tensor]]]:
    """A cache of two unlike layers with `count` slots written, in two goes, and what was written."""
    sizes = [(2, 3), (1, 5)]
    cache = KVCache(sizes, batch, slots)
    written = [(torch.randn(batch, count, *size), torch.randn(batch, count, *size)) for size in sizes]
    for part in (slice(0, 2), slice(2, count)):
        for layer, (k, v) in enumerate(written):
            keys, values = cache.update(layer, k[:, part], v[:, part])
            assert keys.equal(k[:, : part.stop]) and values.equal(v[:, : part.stop])
        cache.advance(part.stop - part.start)
    return cache, written


@pytest.mark.parametrize("indices", [[], [0], [0, 1, 2], [0, 2, 3], [3], [0, 1, 3], [2, 0, 1], [3, 3]])
@pytest.mark.parametrize("start", [0, 3])
def test_cache_keeps_accepted_slots(start: int, indices: list[int]) -> None:
    cache, written = filled(2, 9, 7)
    cache.keep(start, indices)
    assert cache.length == start + len(indices)
    slots = [*range(start), *(start + index for index in indices)]
    for layer, (k, v) in enumerate(written):
        keys, values = cache.update(layer, k[:, :1], v[:, :1])  # what comes next follows what was kept
        assert keys.equal(k[:, [*slots, 0]]) and values.equal(v[:, [*slots, 0]])


def test_cache_errors() -> None:
    cache, written = filled(2, 8, 7)
    k, v = written[0]
    with pytest.raises(InputError, match=r"7 slots are filled and 2 more are needed.*made for 8"):
        cache.update(0, k[:, :2], v[:, :2])
    with pytest.raises(InputError, match="full"):
        cache.advance(2)
    for bad_k, bad_v, name in ((k[:1, :1], v[:, :1], "k"), (k[:, :1], v[:, :1, :1], "v")):
        with pytest.raises(InputError, match=f"{name} of layer 0 has shape"):
            cache.update(0, bad_k, bad_v)
    for start, indices in ((8, []), (-1, [0]), (3, [4]), (3, [-1])):
        with pytest.raises(InputError, match="cannot keep"):
            cache.keep(start, indices)
    with pytest.raises(InputError, match="the cache has 8"):
        cache.keep(6, [0, 0, 0])
    assert cache.length == 7
    for heads, batch, slots in (([], 1, 1), ([(1, 1)], 0, 1), ([(1, 1)], 1, 0)):
        with pytest.raises(InputError, match="needs layers, rows and slots"):
            KVCache(heads, batch, slots)
