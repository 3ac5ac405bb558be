"""Mixtures: weights are shares of documents, the same for a seed, and a stream resumes in them."""

import json
from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_templates import tokenizer_of

from ligermodels.data.batches import Batch
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.orders import Mixture
from ligermodels.data.packing import PackedBatches
from ligermodels.errors import ConfigError, InputError
from ligermodels.training import FineTuningRecipe
from ligermodels.training.inputs import mixture_summary, packed, split


@pytest.mark.parametrize(
    ("sizes", "weights", "counts"),
    [
        ((300, 700), (3, 1), (300, 100)),
        ((300, 700), (0.3, 0.7), (300, 700)),
        ((10, 1000, 50), (0.5, 0.25, 0.25), (10, 5, 5)),
        ((1000, 10), (1, 0.0001), (1000, 1)),
        ((7,), (0.1,), (7,)),
    ],
)
def test_weights_are_shares_of_documents(
    sizes: tuple[int, ...], weights: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    bounds = np.cumsum([0, *sizes])
    sources = [np.arange(a, b) for a, b in pairwise(bounds)]
    mixture, used = Mixture(sources, weights), Counter[int]()
    for number in range(12):
        epoch = mixture.epoch(number, seed=3)
        assert tuple(
            int(np.isin(epoch, source).sum()) for source in sources
        ) == counts and mixture.num_documents == sum(counts)
        assert np.array_equal(epoch, Mixture(sources, weights).epoch(number, seed=3))
        used.update(epoch.tolist())
    for source, count in zip(sources, counts, strict=True):
        times = [used[int(index)] for index in source]
        assert sum(times) == 12 * count and max(times) - min(times) <= 1
    if sum(counts) > 20:
        assert not np.array_equal(mixture.epoch(0, seed=3), mixture.epoch(0, seed=4))
        assert not np.array_equal(mixture.epoch(0, seed=3), mixture.epoch(1, seed=3))


def test_a_source_without_documents_is_named() -> None:
    with pytest.raises(ConfigError, match="source 2 of data has no document"):
        Mixture([np.arange(3), np.arange(0)], [1, 1])


@pytest.mark.parametrize("weights", [[0, 1], [1, -1], [1, float("nan")], [1, float("inf")], ["1", 1]], ids=str)
def test_weights_in_python_are_positive_numbers(weights: list[float]) -> None:
    bad = next(number for number, weight in enumerate(weights) if weight != 1)
    with pytest.raises(InputError, match=rf"weights\[{bad}\]: must be a number above 0, got"):
        Mixture([np.arange(3), np.arange(3, 9)], weights)


def test_there_is_a_weight_for_each_source(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in files:
        file.write_text("Hi")
    for weights in ([], [1], [1, 1, 1]):
        with pytest.raises(InputError, match=f"weights: give one for each source; got {len(weights)} for 2 sources"):
            Mixture.of(Corpus(files), np.arange(2), weights)
    with pytest.raises(InputError, match="got 0 for 0 sources"):
        Mixture([], [])


def ids_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [batch["input_ids"][0].tolist() for batch in batches]


@pytest.fixture
def recipe(tmp_path: Path) -> FineTuningRecipe:
    (tmp_path / "many").mkdir()
    for name, count, text in (("a", 6, "Hi there"), ("many/b", 10, "Hello there"), ("many/c", 10, "Hello there")):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({'text': text})}\n" * count)
    data = (str(tmp_path / "a.jsonl"), str(tmp_path / "many"))
    return FineTuningRecipe(data=data, data_weights="3,1", seq_len=8, batch_tokens=8)


def test_a_recipe_with_weights(tmp_path: Path, recipe: FineTuningRecipe) -> None:
    tokenizer = tokenizer_of("qwen2.5", tmp_path)
    documents = Documents(Corpus(recipe.data), tokenizer)
    short, long = (len(tokenizer.encode(text)) for text in ("Hi there", "Hello there"))
    recipe = recipe.changed({"validation_fraction": 0})
    mixture, _ = split(recipe, documents)
    assert recipe.data_weights == (3.0, 1.0) and isinstance(mixture, Mixture) and mixture.num_documents == 8
    epoch = mixture.epoch(2, seed=5).tolist()
    assert list(mixture.documents(5, 2, 3)) == [
        (index, number + 1) for number, index in enumerate(epoch) if number >= 3
    ]
    assert mixture_summary(recipe, documents, mixture) == (
        f"data_weights: an epoch has of {tmp_path}/a.jsonl 6 of 6 documents, 72% of the bytes; of {tmp_path}/many 2 of "
        "20 documents, 28% of the bytes"
    )

    def stream() -> PackedBatches:
        return packed(recipe, documents, mixture, batch_size=1, seed=5, epochs=6)

    whole = list(stream())
    assert stream().num_documents == 8
    assert sum(batch["input_ids"].numel() for batch in whole) == 6 * (6 * short + 2 * long)
    for place in (0, 1, 5, 7):
        first, second = stream(), stream()
        for _ in islice(first, place):
            pass
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [batch["input_ids"].tolist() for batch in second] == [
            batch["input_ids"].tolist() for batch in whole[place:]
        ]
    unweighted = packed(recipe, documents, mixture, batch_size=1, seed=None, epochs=1)
    assert torch.cat([batch["input_ids"] for batch in unweighted], 1).numel() == 6 * short + 20 * long


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "data_weights.*must have a weight for each value of data"),
        ("1,2,3", "must have a weight for each"),
        ([1.0, 0], "must be positive numbers, got 1.0, 0.0"),
        ("1,x", "must be numbers, got '1,x'"),
        ([1, {}], "data_weights"),
    ],
)
def test_weights_that_are_none(weights: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTuningRecipe(data=("a", "b"), data_weights=weights)
