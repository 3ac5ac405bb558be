"""Text of tokens that arrive one by one: characters of several tokens, byte fallback, stop strings."""

import re
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from zoo_parts import BASE

import ligermodels as lm
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.generation.host import Stopping
from ligermodels.generation.prompts import prepare_prompts
from ligermodels.generation.text_stream import TextStream

WORDS = ["▁", "▁a", "▁stop", "s", "t", "o", "p", "a", "漢", "▁the", "!"]
BAD = "\N{REPLACEMENT CHARACTER}"
STOPS = ["stop", "\n", "👩‍💻", "語", "字 a", "é", "a t", "🙂\n", "the"]
TEXTS = ["a 漢字語あ the", "a 👩‍💻👩‍💻stop the", "👍 a", "字字字字字字 a", "a  a\n\nthe 🙂\nstop\n", "naïve é!", " a"]


def byte_fallback() -> tokenizers.Tokenizer:
    """As of Llama 2, Mistral and Gemma: pieces with ▁ for spaces; bytes for characters that are no piece."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("<unk>", *WORDS, *"▁sth", "▁s", "▁st", "▁sto", "▁t", "▁th", "h", "e", "<s>"):
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "a"), ("▁", "s"), ("▁s", "t"), ("▁st", "o"), ("▁sto", "p"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    """As of Llama 3 and Qwen; one token is a letter and the first byte of a character, and one ends inside a word."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "Ġ"), ("aĠ", "ð"), ("s", "t")]
    vocab = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="module", params=[byte_fallback, byte_level])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    request.param().save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_from_any_token_on(tokenizer: Tokenizer, text: str) -> None:
    """Also from inside a character. The pieces are those of `tokenizers.DecodeStream` where it can be asked."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for start in range(len(ids)):
        stream = TextStream(tokenizer, ids[:start])
        pieces = [stream.push(token) for token in ids[start:]]
        whole = next(end for end in range(start, -1, -1) if not tokenizer.decode(ids[:end]).endswith(BAD))
        assert "".join(pieces) == text[len(tokenizer.decode(ids[:whole])) :] and stream.flush() == ""
        assert tokenizer.continuation(ids[:start], ids[start:]) == "".join(pieces)
        if whole == start:
            oracle = decoders.DecodeStream(ids[:start], skip_special_tokens=True)
            assert pieces == [oracle.step(tokenizer.backend, token) or "" for token in ids[start:]]


def test_bytes_that_are_no_character_leave_the_text_around_them(tokenizer: Tokenizer) -> None:
    """Byte fallback decodes a run of bytes with one bad byte to U+FFFD throughout, characters before it included."""
    before, bad, word = (tokenizer.encode(text) for text in ("a 字", "字", "the"))
    stream = TextStream(tokenizer, [])
    pieces = [stream.push(token) for token in [*before, bad[-1], *word]]
    assert "".join(pieces) == f"a 字{BAD}{tokenizer.decode([bad[-1], *word])[1:]}" and pieces[len(before)] == ""
    stream.push(bad[-1])
    assert stream.flush() == BAD


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_string_ends_with_the_token_that_completes_it(tokenizer: Tokenizer, text: str) -> None:
    """Whatever characters are before it, and wherever the prompt ends; shown by decoding the whole text."""
    ids = tokenizer.encode(text)
    # Characters that are complete after each number of tokens.
    lengths = [0, *(len(tokenizer.decode(ids[:end]).rstrip(BAD)) for end in range(1, len(ids) + 1))]
    lengths = [max(lengths[: end + 1]) for end in range(len(lengths))]
    for start in range(1, len(ids)):
        for stop in STOPS:
            prompts = prepare_prompts([ids[:start]], None, None, [], 300)
            stopping, done = Stopping(None, [stop, "#"], tokenizer, prompts), torch.tensor([False])
            ended = [bool(stopping(torch.tensor([ids[:end]]), done)) for end in range(start + 1, len(ids) + 1)]
            ends = [match.end() for match in re.finditer(re.escape(stop), text) if match.end() > lengths[start]]
            first = next((end - start for end in range(len(lengths)) if ends and lengths[end] >= ends[0]), None)
            assert (ended.index(True) + 1 if True in ended else None) == first, (start, stop)


def test_generate_stops_at_text_behind_an_emoji(tokenizer: Tokenizer) -> None:
    """A window of the last tokens would begin inside the emoji, and the line break in its run of bytes be lost."""
    model = lm.from_config({**BASE, "model_type": "llama", "vocab_size": 300}).eval()
    ids = tokenizer.encode("a 👍\na a a")
    said = iter(ids[1:])

    def say(tokens: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor(next(said)), 1e4)

    out = model.generate([ids[:1]], 12, stop_strings="\n", tokenizer=tokenizer, logits_processor=[say])
    assert tokenizer.decode(out[0].tolist()) == "a 👍\n"
