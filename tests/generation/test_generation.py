"""Generation against recomputation without a cache, against transformers' warpers, and against itself with Medusa."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from zoo import CONFIGS

import ligermodels as lm
from ligermodels.errors import InputError
from ligermodels.generation import DecodingState, generate, graph, sample, sample_with_log_probs, stream
from ligermodels.generation.eval_mode import evaluating
from ligermodels.generation.generate import until_eos
from ligermodels.generation.sampling import penalise_repetition, warp
from ligermodels.layers import KVCache, LayerConfig, TreeTokens
from ligermodels.speculative.acceptance import Typical
from ligermodels.speculative.decoding import TreeStep, speculative_generate
from ligermodels.speculative.drafting import HeadsDrafter
from ligermodels.speculative.rules import Rule
from ligermodels.speculative.sampling import Sampling
from ligermodels.speculative.tree import Tree, chain, default_tree

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 13, 12, 4, 2, 3, 2
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9], [7, 9]]


@dataclass(frozen=True)
class ToyMixer(LayerConfig):
    """Keeps keys and values; what was not written must not be seen."""

    def build(self, hidden_size: int) -> nn.Module:
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        return nn.ModuleList(nn.Linear(hidden_size, size, dtype=torch.float64) for size in sizes)

    def new_state(self, num_layers: int, batch_size: int, max_length: int, **options: Any) -> KVCache:
        del options["hidden_size"]
        cache = KVCache(num_layers, batch_size, max_length, KV_HEADS, HEAD_DIM, **options)
        for layer in range(num_layers):
            for stored in cache.layer(layer):
                stored.fill_(1e30)
        return cache


class Toy(nn.Module):
    """The least that is a DecodingModel: two attention layers in fp64, grouped queries, positions added to the
    embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.qkv = nn.ModuleList(ToyMixer().build(HIDDEN) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB, dtype=torch.float64)
        self.dropout = nn.Dropout(0.5)  # in training mode nothing would agree
        self.passes: list[tuple[int, int]] = []  # shape of the ids in each call
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=1.0)

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        token_indices: Tensor | None = None,
        state: DecodingState | None = None,
        tree: TreeTokens | None = None,
        return_logits: bool = True,
        return_last_hidden_state: bool = True,
    ) -> SimpleNamespace:
        rows, length = input_ids.shape
        self.passes.append((rows, length))
        decoding = state is not None and state.cache_seqlens is not None
        assert attention_mask is None or not decoding
        start = state.cache_seqlens if decoding else torch.zeros(rows, dtype=torch.long)
        if position_ids is None:
            position_ids = start[:, None] + (torch.arange(length) if tree is None else tree.depth)
        assert position_ids.shape == (rows, length)
        total = state.max_length if decoding else length
        mask = torch.arange(total) < start[:, None, None].expand(rows, length, 1)
        own = torch.ones(length, length, dtype=torch.bool).tril() if tree is None else tree.mask
        for row, first in enumerate(start.tolist()):
            mask[row, :, first : first + length] = own
        angles = position_ids[..., None] / torch.arange(1, HIDDEN + 1).double()
        x = self.embed(input_ids) + 2 * torch.sin(3 * angles)
        for layer, projections in enumerate(self.qkv):
            q, k, v = (
                projection(x).unflatten(-1, (heads, HEAD_DIM))
                for projection, heads in zip(projections, (HEADS, KV_HEADS, KV_HEADS), strict=True)
            )
            if decoding:
                cache = state.layers[layer]
                for row, first in enumerate(start.tolist()):
                    cache.keys[row, first : first + length] = k[row]
                    cache.values[row, first : first + length] = v[row]
                k, v = (stored.clone().clamp(max=1e9) for stored in (cache.keys, cache.values))
            elif state is not None:
                state.layers[layer].fill(k, v)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=2) for t in (k, v))
            scores = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(~mask[:, None], -math.inf)
            x = self.dropout(x + torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))
        if state is not None:
            state.after(length, None if attention_mask is None else attention_mask.long().sum(1), tree)
        if token_indices is not None:
            x = x.flatten(0, 1)[None, token_indices]
        assert x.isfinite().all()
        return SimpleNamespace(last_hidden_state=x, logits=self.head(x))

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        return self(input_ids).last_hidden_state

    def new_state(self, batch_size: int, max_length: int) -> DecodingState:
        options = {"hidden_size": HIDDEN, "dtype": torch.float64, "device": torch.device("cpu")}
        return DecodingState([ToyMixer()] * LAYERS, batch_size, max_length, **options)


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
    out = generate(model, PROMPTS, max_new_tokens=23, eos_token_id=eos, pad_token_id=pad)
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


@pytest.mark.parametrize("function", [generate, stream, sample_with_log_probs])
def test_unknown_options_are_named_for_the_function_that_is_called(model: Toy, function: Any) -> None:
    message = rf"^{function.__name__}: unknown option 'temprature'; did you mean 'temperature'\?$"
    with pytest.raises(TypeError, match=message):
        function(model, [1], 2, temprature=0.5)


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


@pytest.mark.parametrize("inner_first", [False, True])
def test_contexts_of_a_model_and_of_a_model_inside_it_overlap(model: Toy, inner_first: bool) -> None:
    """As of `evaluate_heads` and of `base.generate` in two threads: eval mode lasts until the last of them ends."""
    heads = nn.ModuleList([model, nn.Linear(2, 2)]).train()
    model.qkv[0].eval()
    flags = [module.training for module in heads.modules()]
    first, last = (evaluating(each) for each in ((model, heads) if inner_first else (heads, model)))
    first.__enter__()
    last.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules()) and heads[1].training is not inner_first
    last.__exit__(None, None, None)
    assert [module.training for module in heads.modules()] == flags


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
            speculative_generate(model, HeadsDrafter(lambda hidden: hidden), tree=chain(1), **call)
        assert not model.passes


@pytest.mark.parametrize(("prompts", "new_tokens"), [(PROMPTS, 1), (PROMPTS[1:2], 2), (PROMPTS[1:2], 3), (PROMPTS, 17)])
def test_running_ahead_of_the_device_changes_nothing(
    model: Toy, prompts: list[list[int]], new_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the end is noticed a step late: the same tokens, and at most one pass more, wherever it is."""
    ends = [*range(VOCAB), [0, 3, 5], list(range(VOCAB))]
    found: list[list[Any]] = []
    propose = prophet(model, prompts, 20, perfect)
    for ahead in (False, True):
        monkeypatch.setattr(graph, "AHEAD", ("cpu", "cuda") if ahead else ())
        found.append([])
        for end in ends:
            options: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": end, "pad_token_id": 12}
            model.passes.clear()
            plain = generate(model, prompts, **options).tolist()
            passes = len(model.passes)
            out = speculative_generate(model, HeadsDrafter(propose), prompts, tree=chain(2), **options)
            assert out.sequences.tolist() == plain
            found[-1].append((plain, out.steps, out.passes, passes))
    waiting, running = found
    assert [result[:3] for result in waiting] == [result[:3] for result in running]
    more = {late[3] - now[3] for now, late in zip(waiting, running, strict=True)}
    assert more <= {0, 1} and (new_tokens < 17 or more == {0, 1})


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_repetition_penalty_is_that_of_transformers(dtype: torch.dtype) -> None:
    """In float32: in 16 bits a lowered logit would often equal another one, which then is the first of two."""
    logits = (3 * torch.randn(64, 41)).to(dtype)
    text, lengths = torch.randint(0, 41, (64, 9)), torch.arange(64) % 9 + 1
    penalised = penalise_repetition(logits, text, lengths, penalty=1.13)
    rule, rows = RepetitionPenaltyLogitsProcessor(1.13), range(len(text))
    expected = torch.cat([rule(text[row : row + 1, : lengths[row]], logits[row : row + 1].float()) for row in rows])
    assert torch.equal(penalised, expected) and penalised.dtype == torch.float32


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


@pytest.mark.parametrize("options", [{}, {"temperature": 1.7, "top_k": 4, "num_return_sequences": 2}])
def test_log_probabilities_of_samples(model: Toy, options: dict[str, Any]) -> None:
    """Of rows of unequal lengths: those of a pass over the whole row, over all tokens; 0 on padding."""
    ends = [*range(0, VOCAB, 3)]

    def run(function: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        return function(model, PROMPTS, 9, eos_token_id=ends, generator=generator, **options)

    ids, log_probs = run(sample_with_log_probs)
    assert torch.equal(ids, run(partial(generate, do_sample=True)))
    longest, count = max(map(len, PROMPTS)), options.get("num_return_sequences", 1)
    assert log_probs.shape == (len(ids), ids.shape[1] - longest) and log_probs.dtype == torch.float32
    lengths = set()
    model.eval()
    for row, (new, found) in enumerate(zip(ids[:, longest:].tolist(), log_probs, strict=True)):
        prompt, new = PROMPTS[row // count], until_eos(new, ends)
        logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1] / options.get("temperature", 1.0)
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]
        torch.testing.assert_close(found[: len(new)].double(), wanted, rtol=1e-5, atol=1e-6)
        assert not found[len(new) :].any()
        lengths.add(len(new))
    assert len(lengths) > 1
    for name in ("do_sample", "num_beams"):
        with pytest.raises(InputError, match=f"sample_with_log_probs: takes no {name}"):
            sample_with_log_probs(model, PROMPTS, 9, **{name: 1})


# -- Medusa ------------------------------------------------------------------------------------------------------------


def prophet(
    model: Toy, prompts: list[list[int]], length: int, rank_of: Callable[[int, int], int | None], num_heads: int = 3
) -> Callable[[Tensor], Tensor]:
    """Heads that know the greedy continuation: head k puts the true token at rank rank_of(place, k), None for never."""
    texts = [prompt + recomputed(model, prompt, length + num_heads + 1) for prompt in prompts]
    states = [model.hidden_states(torch.tensor([text]))[0] for text in texts]

    def propose(hidden: Tensor) -> Tensor:
        logits = torch.randn(len(hidden), num_heads, VOCAB).clamp(-5, 5)
        for row, one in zip(logits, hidden, strict=True):
            distance, place, text = min(
                (float((state - one).norm(dim=1).min()), int((state - one).norm(dim=1).argmin()), text)
                for state, text in zip(states, texts, strict=True)
            )
            assert distance < 1e-9  # a state of the accepted text, never of a rejected branch
            for k in range(num_heads):
                truth, rank = text[place + 2 + k], rank_of(place, k)
                row[k, truth] = -math.inf
                if rank is not None:
                    row[k, truth] = row[k].sort(descending=True).values[:rank].min() - 1e-6 if rank else 9.0
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
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "batch"])
def test_medusa_equals_greedy_at_every_length(
    model: Toy, tree: Tree, rank_of: Callable[[int, int], int | None], prompts: list[list[int]]
) -> None:
    propose = prophet(model, prompts, 20, rank_of)
    expected = [recomputed(model, prompt, 20) for prompt in prompts]
    for new_tokens in (1, 2, 3, 4, 7, 20):
        out = speculative_generate(
            model, HeadsDrafter(propose), prompts, tree=tree, max_new_tokens=new_tokens, pad_token_id=99
        )
        assert out.sequences.tolist() == batched(prompts, [row[:new_tokens] for row in expected], 99)
        assert out.new_tokens == new_tokens * len(prompts)


@pytest.mark.parametrize("rank_of", [silent, perfect, partly])
@pytest.mark.parametrize(("eos", "pad"), [([2, 8], None), (list(range(7)), -1)])
def test_medusa_equals_generate_in_batches_with_eos(
    model: Toy, rank_of: Callable[[int, int], int | None], eos: list[int], pad: int | None
) -> None:
    propose = prophet(model, PROMPTS, 23, rank_of)
    options: dict[str, Any] = {"max_new_tokens": 23, "eos_token_id": eos, "pad_token_id": pad}
    expected = generate(model, PROMPTS, **options)
    out = speculative_generate(model, HeadsDrafter(propose), PROMPTS, tree=TREES["bushy"], **options)
    assert out.sequences.equal(expected)
    assert out.new_tokens == sum(len(recomputed(model, prompt, 23, eos)) for prompt in PROMPTS)
    # Each row goes at its own pace: its steps are those that it takes alone, and no row waits for another.
    alone = [
        speculative_generate(model, HeadsDrafter(propose), [prompt], tree=TREES["bushy"], **options).steps
        for prompt in PROMPTS
    ]
    assert (out.steps, out.passes) == (sum(alone), max(alone))


@torch.no_grad()
def test_rows_accept_different_counts_in_one_step(model: Toy) -> None:
    """What the tests above rest on: in most steps, under `partly`, rows do not gain the same number of tokens."""
    propose = prophet(model, PROMPTS, 40, partly)
    tree = TREES["bushy"]
    state = model.new_state(4, 60 + len(tree))
    step = TreeStep(model.eval(), HeadsDrafter(propose), state, tree, 40, [])
    ids = torch.tensor(batched(PROMPTS, [[]] * 4, 0))
    rows = step.start(ids, torch.arange(7) >= 7 - torch.tensor([[len(prompt)] for prompt in PROMPTS]))
    gained = []
    while not rows.done.all():
        before = rows.count.clone()
        step(rows)
        gained.append((rows.count - before).tolist())
    for row, prompt in zip(rows.text.tolist(), PROMPTS, strict=True):
        assert row[: len(prompt) + 40] == prompt + recomputed(model, prompt, 40)
    assert sum(len(set(row)) > 1 for row in gained) > len(gained) / 2
    assert {1, 2, 3} <= {count for row in gained for count in row}


@torch.no_grad()
@pytest.mark.parametrize("name", ["greedy", "typical", "sampling", "sampling in a chain"])
def test_a_step_waits_for_nothing(name: str) -> None:
    """On the meta device no value can be looked at: a step does not wait for a GPU either, and a graph can hold it."""
    model = lm.from_config(CONFIGS["gemma2"], device="meta").eval()
    tree, vocab = chain(3) if "chain" in name else TREES["bushy"], model.config.vocab_size
    rules = {"greedy": Rule(), "typical": Rule(Typical(0.7))}
    if name not in rules:
        sampling = Sampling(
            {"temperature": 0.7, "top_k": 9, "top_p": 0.9}, 3, tree, torch.device("meta"), torch.ones_like
        )
        rules[name] = Rule(sampling, drafts=sampling.drafts)
    heads = torch.empty(model.config.hidden_size, 3 * vocab, device="meta")
    drafter = HeadsDrafter(lambda h: (h @ heads).unflatten(1, (3, vocab)))
    step = TreeStep(model, drafter, model.new_state(3, 40), tree, 9, [2, 5], rules[name])
    rows = step.start(torch.zeros(3, 7, dtype=torch.long, device="meta"), torch.ones(3, 7, dtype=bool, device="meta"))
    places = list(map(id, vars(rows).values()))
    step(rows)
    assert list(map(id, vars(rows).values())) == places


def test_medusa_takes_padded_tensors(model: Toy) -> None:
    ids = torch.tensor([[3, 1, 4, -7, -7], [-7, 7, 9, 2, 2]])
    options: dict[str, Any] = {"attention_mask": ids >= 0, "max_new_tokens": 9}
    propose = prophet(model, [[3, 1, 4], [7, 9, 2, 2]], 9, partly)
    model.train()
    out = speculative_generate(model, HeadsDrafter(propose), ids, tree=TREES["bushy"], **options)
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
    out = speculative_generate(
        model, HeadsDrafter(propose), PROMPTS[:2], tree=tree, max_new_tokens=1 + steps * per_step, pad_token_id=0
    )
    assert (out.steps, out.passes, out.tokens_per_step) == (2 * steps, steps, per_step)
    assert model.passes == [(2, 5)] + [(2, len(tree))] * steps


def test_tokens_a_step_without_a_step(model: Toy) -> None:
    out = speculative_generate(model, HeadsDrafter(lambda hidden: hidden), [1, 2], tree=chain(1), max_new_tokens=1)
    assert out.steps == 0 and math.isnan(out.tokens_per_step)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, VOCAB), "needs 3 heads"),
        ((1, 3, 2), "3 candidates"),
        ((2, VOCAB), "shape"),
        ((2, 3, VOCAB), r"shape \(1, heads"),
    ],
)
def test_proposals_too_small_for_the_tree(model: Toy, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        speculative_generate(
            model, HeadsDrafter(lambda hidden: torch.zeros(shape)), [1], tree=TREES["bushy"], max_new_tokens=5
        )


# -- typical acceptance ------------------------------------------------------------------------------------------------


def accepted(logits: list[float], token: int, temperature: float, epsilon: float, delta: float) -> tuple[bool, float]:
    """The rule, number by number: whether `token` is accepted, and its probability."""
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    p = [weight / sum(weights) for weight in weights]
    entropy = -sum(each * math.log(each) for each in p if each > 0)
    return p[token] > min(epsilon, delta * math.exp(-entropy)), p[token]


RULES = [(1.0, 0.09, 0.3), (0.2, 0.09, 0.3), (30.0, 0.09, 0.3), (3.0, 0.5, 5.0), (100.0, 0.02, 9.0), (9.0, 0.3, 0.1)]


@pytest.mark.parametrize(("temperature", "epsilon", "delta"), RULES)
def test_typical_rule_by_hand(temperature: float, epsilon: float, delta: float) -> None:
    logits = 4 * torch.randn(2, 5, VOCAB)
    logits[0, 0, ::2] = -math.inf
    logits[1, 1] = 0.0
    tokens, parent = torch.randint(VOCAB, (2, 60)), torch.randint(5, (60,))
    right, log_p = Typical(temperature, epsilon, delta).accept_mask(logits, tokens, parent)
    found = 0
    for row in range(2):
        for node in range(60):
            given = logits[row, parent[node]].double().tolist()
            wanted, p = accepted(given, int(tokens[row, node]), temperature, epsilon, delta)
            assert bool(right[row, node]) == wanted
            assert float(log_p[row, node].exp()) == pytest.approx(p, rel=1e-4, abs=1e-30)
            found += wanted
    assert 0 < found < 120


def typical_by_hand(
    model: Toy, heads: Tensor, prompt: list[int], tree: Tree, new_tokens: int, rule: tuple[float, float, float]
) -> tuple[list[int], int]:
    """The tokens and the steps that they take: every path tried by itself, without a cache."""

    def states(text: list[int]) -> Tensor:
        return model.hidden_states(torch.tensor([text]))[0, -1]

    text, steps = list(prompt), 0
    hidden = states(text)
    text.append(int(model.head(hidden).argmax()))
    while len(text) < len(prompt) + new_tokens:
        candidates = (heads @ hidden).topk(tree.width).indices.tolist() if tree.width else []
        found = [(0, 0.0, text)]
        for path in tree.paths:
            longer, likelihood = list(text), 0.0
            for head, rank in enumerate(path):
                token = candidates[head][rank]
                right, p = accepted(model.head(states(longer)).tolist(), token, *rule)
                if not right:
                    break
                longer, likelihood = [*longer, token], likelihood + math.log(p)
            else:
                found.append((len(path), likelihood, longer))
        text = max(found)[2]
        hidden = states(text)
        text.append(int(model.head(hidden).argmax()))
        steps += 1
    return text[len(prompt) : len(prompt) + new_tokens], steps


@pytest.mark.parametrize(
    ("tree", "rule"), [("bushy", rule) for rule in RULES[:4]] + [("chain", rule) for rule in RULES[4:]]
)
def test_typical_decoding_by_hand(model: Toy, tree: str, rule: tuple[float, float, float]) -> None:
    """In a batch, token by token and step by step; tokens a step are then those of the rule, too."""
    model.eval()
    heads = torch.randn(3, VOCAB, HIDDEN, dtype=torch.float64)
    by_hand = [typical_by_hand(model, heads, prompt, TREES[tree], 11, rule) for prompt in PROMPTS]
    names = ("temperature", "epsilon", "delta")
    out = speculative_generate(
        model,
        HeadsDrafter(lambda hidden: torch.einsum("kvh,bh->bkv", heads, hidden)),
        PROMPTS,
        tree=TREES[tree],
        max_new_tokens=11,
        pad_token_id=0,
        **dict(zip(names, rule, strict=True)),
    )
    assert out.sequences.tolist() == batched(PROMPTS, [tokens for tokens, _ in by_hand], 0)
    assert out.steps == sum(steps for _, steps in by_hand)
    assert out.steps < 4 * 10 or tree == "chain"  # Something was accepted.


def test_typical_is_greedy_when_cold_and_takes_all_when_hot(model: Toy) -> None:
    propose = prophet(model, PROMPTS, 20, partly)
    options: dict[str, Any] = {"tree": TREES["bushy"], "max_new_tokens": 20, "pad_token_id": 0}
    cold = speculative_generate(model, HeadsDrafter(propose), PROMPTS, temperature=1e-3, **options)
    assert cold.sequences.equal(generate(model, PROMPTS, max_new_tokens=20, pad_token_id=0))
    hot = speculative_generate(
        model, HeadsDrafter(lambda hidden: torch.randn(len(hidden), 3, VOCAB)), [1], temperature=1e9, **options
    )
    assert hot.tokens_per_step > 3  # 1 / 13 is above 0.3 / 13: four tokens in every step but, perhaps, the last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1.0, "epsilon": 0.0}, "epsilon"),
        ({"temperature": 1.0, "delta": -0.3}, "delta"),
    ],
)
def test_bad_acceptance(model: Toy, options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        speculative_generate(
            model, HeadsDrafter(lambda hidden: hidden), [1], tree=chain(1), max_new_tokens=2, **options
        )
    assert not model.passes


# -- decoding states ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_state_is_for_models_of_one_config() -> None:
    """A cache of another window would hold other keys, without an error of a shape."""
    config = {**CONFIGS["mistral-window"], "initializer_range": 0.3}
    model, ids = lm.from_config(config), torch.tensor([[3, 1, 4]])
    model(ids, state=lm.from_config(config).new_state(1, 9))  # an equal config
    for other in ({"sliding_window": 2}, {"num_hidden_layers": 1}, {"head_dim": 16}):
        with pytest.raises(InputError, match=r"^state: was made by a model with another config; make it by new_state"):
            model(ids, state=lm.from_config({**config, **other}).new_state(1, 9))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama-3.1", "mistral-window", "gemma3_text", "qwen3", "olmo2"])
def test_passes_with_a_state_are_one_pass_over_the_whole_sequence(name: str) -> None:
    """A prefill of two lengths, two tokens, a tree of which each sequence keeps another path, and one token more."""
    model = lm.from_config({**CONFIGS[name], "initializer_range": 0.3}, dtype=torch.float64).eval()
    vocab, tree, max_length = model.config.vocab_size, TREES["bushy"], 40
    tokens, prompts, nodes = (torch.randint(3, vocab, (2, n)) for n in (3, 21, len(tree)))
    lengths, kept = torch.tensor([21, 13]), tree.route[tree.depth == 3][:2]
    state = model.new_state(2, max_length)
    for _ in range(2):  # the second time after `reset`
        texts = [row[:n].tolist() for row, n in zip(prompts, lengths, strict=True)]

        def alone(texts: list[list[int]], n: int) -> Tensor:
            return torch.stack([model(torch.tensor([text])).logits[0, -n:] for text in texts])

        mask = torch.arange(21) < lengths[:, None]
        found = model(prompts, attention_mask=mask, state=state).logits
        torch.testing.assert_close(found[[0, 1], lengths - 1], alone(texts, 1)[:, 0])
        assert state.cache_seqlens.equal(lengths)
        texts = [text + row[:2].tolist() for text, row in zip(texts, tokens, strict=True)]
        torch.testing.assert_close(model(tokens[:, :2], state=state).logits, alone(texts, 2))
        assert state.cache_seqlens.equal(lengths + 2)

        found = model(nodes, state=state, tree=TreeTokens(tree.mask, tree.parent, tree.depth)).logits
        for node in range(len(tree)):
            path = tree.mask[node].nonzero()[:, 0]
            branches = [text + row[path].tolist() for text, row in zip(texts, nodes, strict=True)]
            torch.testing.assert_close(found[:, node], alone(branches, 1)[:, 0])
        assert state.cache_seqlens.equal(lengths + 2)
        state.commit(state.cache_seqlens[:, None] + kept)
        state.cache_seqlens += 4
        texts = [text + row[path].tolist() for text, row, path in zip(texts, nodes, kept, strict=True)]
        texts = [text + row[2:].tolist() for text, row in zip(texts, tokens, strict=True)]
        torch.testing.assert_close(model(tokens[:, 2:], state=state).logits, alone(texts, 1))
        state.reset()


@torch.no_grad()
def test_state_errors() -> None:
    model, ids = lm.from_config(CONFIGS["llama-3.1"]), torch.ones(2, 7, dtype=torch.long)
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(InputError, match="must be a whole number of at least 1"):
            model.new_state(*sizes)
    with pytest.raises(InputError, match=r"full: it has room for 6 tokens per sequence, and 7 more .*larger"):
        model(ids, state=model.new_state(2, 6))
    with pytest.raises(InputError, match="for 3 sequences, the inputs have 2"):
        model(ids, state=model.new_state(3, 9))
    with pytest.raises(InputError, match="padding on the right only"):
        model(ids, attention_mask=torch.tensor([[1] * 7, [0] + [1] * 6]), state=model.new_state(2, 9))
    state = model.new_state(2, 9)
    with pytest.raises(InputError, match="labels: a decoding state is for generation"):
        model(ids, labels=ids, state=state)
    model(ids, state=state)
    with pytest.raises(InputError, match="full: it has room for 9 tokens per sequence, and 3 more do not fit beside 7"):
        model(ids[:, :3], state=state)
    with pytest.raises(InputError, match="a decoding pass takes tokens without padding"):
        model(ids[:, :1], attention_mask=ids[:, :1], state=state)
