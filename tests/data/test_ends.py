"""Ends of texts and turns: one EOS, wherever the checkpoint names it, and a model that stops after its turn."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chat_templates import SPECIAL, save_template, template_of, tokenizer_of
from tokenizers import processors
from transformers import AutoConfig, AutoTokenizer

from ligermodels.data import corpus
from ligermodels.data.chat import ChatTemplate
from ligermodels.data.corpus import Corpus
from ligermodels.data.documents import Documents
from ligermodels.data.ends import with_end_of_turn
from ligermodels.data.records import Completion
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import InputError

USER, ASSISTANT = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}


def tokens_of(text: str, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Tokens written by hand, those with labels in brackets."""
    return [(token.strip("()"), token.startswith("(")) for token in text.split()]


def read(documents: Documents, index: int = 0) -> list[tuple[str, bool]]:
    """Tokens of a document, and whether they have labels."""
    (tokens,) = documents.read([index])
    assert tokens is not None
    names = [documents.tokenizer.backend.id_to_token(token) for token in tokens.ids]
    assert all(label in (-100, token) for token, label in zip(tokens.ids, tokens.labels, strict=True))
    return list(zip(names, [label >= 0 for label in tokens.labels], strict=True))


def data(folder: Path, *records: Any) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "data.jsonl"


def add_ends(tokenizer: Tokenizer, before: str, after: str) -> None:
    pairs = [(token, tokenizer.backend.token_to_id(token)) for token in (before, after)]
    tokenizer.backend.post_processor = processors.TemplateProcessing(f"{before} $A {after}", special_tokens=pairs)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_config", "end"),
    [
        ({"eos_token_id": 1}, None, None, 1),
        ({"eos_token_id": [2, 1]}, {"eos_token_id": 5}, None, 2),
        ({"text_config": {"eos_token_id": 3}}, {"eos_token_id": 5}, None, 3),  # Gemma 3, Qwen3.5 of transformers 5
        ({"eos_token_id": None, "text_config": {"eos_token_id": [3, 4]}}, None, None, 3),
        ({"thinker_config": {"text_config": {"eos_token_id": 3}}}, None, None, 3),
        ({"eos_token_id": -1}, {"eos_token_id": [5]}, None, 5),
        ({}, {}, {"eos_token": "<eos>"}, "<eos>"),
        ({}, None, {"eos_token": {"content": "<eos>"}}, "<eos>"),
        ({}, None, {"eos_token": None}, None),
    ],
)
def test_where_a_checkpoint_names_its_eos(
    tmp_path: Path, config: Any, generation: Any, tokenizer_config: Any, end: Any
) -> None:
    tokenizer = tokenizer_of("gemma-2", tmp_path)
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        if content is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tokens,) = Documents.of_checkpoint(tmp_path, [data(tmp_path, {"text": "Hi"})]).read([0])
    hi = tokenizer.backend.token_to_id("Hi")
    wanted = tokenizer.backend.token_to_id(end) if isinstance(end, str) else end
    assert tokens is not None and tokens.ids == [hi, *([] if wanted is None else [wanted])]


@pytest.mark.parametrize(
    ("eos", "message"), [("Hi", "'Hi'"), (999, "no token"), ("<end_of_turn>", None), ("<eos>", None)]
)
def test_an_eos_of_another_tokenizer_is_said(tmp_path: Path, eos: Any, message: str | None) -> None:
    """As in a new config, with the ids of Llama, beside the tokenizer of another model."""
    backend = tokenizer_of("gemma-2", tmp_path).backend
    token = eos if isinstance(eos, int) else backend.token_to_id(eos)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": token}))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Documents.of_checkpoint(tmp_path, [data(tmp_path, {"text": "Hi"})])
    told = [text for text in (str(each.message) for each in caught) if "eos_token_id" in text]
    assert len(told) == (message is not None)
    if message is not None:
        assert f"token {token}, in the tokenizer {message}; " in told[0]
        assert told[0].endswith(f"'<eos>': set eos_token_id to {backend.token_to_id('<eos>')}")


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_the_eos_in_configs_that_transformers_writes(tmp_path: Path, name: str) -> None:
    """Only `text_config` has it."""
    tokenizer, config = tokenizer_of("gemma-2", tmp_path), AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()).get("eos_token_id") is None
    (tokens,) = Documents.of_checkpoint(tmp_path, [data(tmp_path, {"text": "Hi"})]).read([0])
    assert tokens is not None
    assert tokens.ids == [tokenizer.backend.token_to_id("Hi"), config.get_text_config().eos_token_id]


@pytest.mark.parametrize(
    "model",
    [tokenizers.models.BPE(vocab={"C": 0, "G": 1}, merges=[]), tokenizers.models.WordLevel(vocab={"C": 0, "G": 1})],
    ids=["BPE", "WordLevel"],
)
def test_ends_of_a_tokenizer_without_most_letters(tmp_path: Path, model: Any) -> None:
    """Such as of DNA; neither has a token for unknown letters."""
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    add_ends(tokenizer, "<s>", "</s>")
    documents = Documents(Corpus([data(tmp_path, {"text": "G"})]), tokenizer, eos_token_id=3)
    assert [tokens.ids for tokens in documents.read([0]) if tokens] == [[2, 1, 3]]
    if isinstance(model, tokenizers.models.WordLevel):  # BPE leaves other letters out
        for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
            with pytest.raises(InputError, match=rf"the tokenizer in {tmp_path} cannot encode it: .*Missing \[UNK\]"):
                encode("T")
    with pytest.raises(InputError, match="texts: must be a list of texts, got a str; encode takes a single text"):
        tokenizer.encode_all("GC")


@pytest.mark.parametrize("adds", [False, True], ids=["plain", "adds both ends"])
def test_one_eos_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adds: bool) -> None:
    """Never in mid-text, and not twice if the tokenizer adds it, or the text has it."""
    monkeypatch.setattr(corpus, "PIECE", 12)
    tokenizer = tokenizer_of("gemma-2", tmp_path)
    if adds:
        add_ends(tokenizer, "<bos>", "<eos>")
    (tmp_path / "long.txt").write_text("Hi there!\nHello, you?\nI am")
    texts = [{"text": "Hi"}, {"text": "Hi<eos>"}, {"text": "<bos>Hi"}, {"text": "Hi<end_of_turn>"}]
    files = [data(tmp_path, *texts), tmp_path / "long.txt"]
    ends = [tokenizer.backend.token_to_id(token) for token in ("<eos>", "<end_of_turn>")]
    documents = Documents(Corpus(files), tokenizer, eos_token_id=ends, on_bad_line=str)
    assert len(documents) == 7
    found = [[name for name, _ in read(documents, i)] for i in range(7)]
    start = ["<bos>"] if adds else []
    assert found[:3] == [[*start, "Hi", "<eos>"], [*start, "Hi", "<eos>"], ["<bos>", "Hi", "<eos>"]]
    assert found[3] == [*start, "Hi", "<end_of_turn>", *(["<eos>"] if adds else [])]
    long = [token for piece in found[4:] for token in piece]
    assert long.count("<eos>") == 1 and long[-1] == "<eos>" and long.count("<bos>") == len(start)
    # As transformers encodes a text with this tokenizer.
    if adds:
        tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
        save_template("gemma-2", tmp_path)
        (tokens,) = documents.read([0])
        assert tokens is not None and tokens.ids == AutoTokenizer.from_pretrained(tmp_path)("Hi")["input_ids"]


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (Completion("Hi", " there"), "<bos> Hi (▁there) (<eos>)"),
        (Completion("Hi ", "there"), "<bos> Hi (▁there) (<eos>)"),  # a token of both parts
        (Completion("Hi", " there", is_finished=False), "<bos> Hi (▁there)"),
        (Completion("<bos>Hi", " there<eos>"), "<bos> Hi (▁there) (<eos>)"),
    ],
)
def test_a_prompt_and_its_completion(tmp_path: Path, record: Completion, wanted: str) -> None:
    tokenizer = tokenizer_of("gemma-2", tmp_path)
    add_ends(tokenizer, "<bos>", "<eos>")
    cut = {} if record.is_finished else {"finish_reason": "length"}
    line = {"prompt": record.prompt, "completion": record.completion, **cut}
    documents = Documents(Corpus([data(tmp_path, line)]), tokenizer, eos_token_id=tokenizer.encode("Hi")[-1])
    assert read(documents) == tokens_of(wanted, tokenizer)


PROMPT = "<bos> <start_of_turn> user \n Hi ▁there <end_of_turn> \n <start_of_turn> model \n"


@pytest.mark.parametrize(
    ("turns", "wanted"),
    [
        ([{}], "(Hello) (<end_of_turn>)"),
        ([{"finish_reason": "stop"}], "(Hello) (<end_of_turn>)"),
        ([{"finish_reason": "length"}], "(Hello) <end_of_turn>"),
        ([{"weight": 0}, {}], "Hello <end_of_turn> NEXT (Hello) (<end_of_turn>)"),
        ([{}, {"train": False}], "(Hello) (<end_of_turn>) NEXT Hello <end_of_turn>"),
        ([{"weight": 0}, {"finish_reason": "length"}], "Hello <end_of_turn> NEXT (Hello) <end_of_turn>"),
    ],
)
@pytest.mark.parametrize("marks", [False, True], ids=["located", "marked"])
def test_turns_that_are_not_trained_on(tmp_path: Path, turns: list[Any], wanted: str, marks: bool) -> None:
    template, tokenizer = template_of("gemma-2"), tokenizer_of("gemma-2", tmp_path)
    if marks:
        said = "message['content'] | trim + '<end_of_turn>\n' }}"
        said_marked = (
            "'' }}{% generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}"
        )
        head = "{{ '<start_of_turn>' + role + '\n' + "
        assert head + said in template.source
        source = template.source.replace(
            head + said, "{% if role == 'model' %}" + head + said_marked + "{% else %}" + head + said + "{% endif %}"
        )
        template = type(template)(source, template.tokens)
    line = {"messages": [turn for fields in turns for turn in (USER, {**ASSISTANT, **fields})]}
    documents = Documents(Corpus([data(tmp_path, line)]), tokenizer, lambda: template)
    text = f"{PROMPT} {wanted.replace('NEXT', '§ ' + PROMPT.removeprefix('<bos> '))} §".replace("\n", "§")
    assert read(documents) == [(name.replace("§", "\n"), own) for name, own in tokens_of(text, tokenizer)]


def test_a_cut_turn_is_the_last_one(tmp_path: Path) -> None:
    line = {"messages": [USER, {**ASSISTANT, "finish_reason": "length"}, USER, ASSISTANT]}
    documents = Documents(Corpus([data(tmp_path, line)]), tokenizer_of("gemma-2", tmp_path))
    with pytest.raises(InputError, match='"finish_reason" is "length" in a turn that is not the last'):
        documents.read([0])


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("gemma-2", {"tools": [{"name": "f"}]}, 'gemma-2: does not write the "tools" of the chat'),
        ("qwen2.5", {"tools": [{"name": "f"}]}, None),
        ("qwen2.5", {"documents": [{"text": "a"}]}, 'qwen2.5: does not write the "documents"'),
        ("gemma-2", {"system": "Be brief"}, None),
    ],
)
def test_what_the_template_does_not_write_is_named(tmp_path: Path, name: str, fields: Any, words: str | None) -> None:
    line = {"messages": [USER, ASSISTANT], **fields}
    documents = Documents(Corpus([data(tmp_path, line)]), tokenizer_of(name, tmp_path), lambda: template_of(name))
    if words:
        with pytest.raises(InputError, match=rf"data\.jsonl:1: {words}"):
            documents.read([0])
    else:
        names = [token for token, _ in read(documents)]
        assert ("brief" in "".join(names)) == ("system" in fields) and ("tool" in "".join(names)) == ("tools" in fields)


def test_variables_of_a_record_are_shown(tmp_path: Path) -> None:
    turns = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate("{{ mood }} {% for d in documents %}{{ d.text }}{% endfor %}" + turns)
    fields = {"documents": [{"text": "You are fine"}], "chat_template_kwargs": {"mood": "Hello"}}
    line = {"messages": [USER, ASSISTANT], **fields}
    documents = Documents(Corpus([data(tmp_path, line)]), tokenizer_of("qwen2.5", tmp_path), lambda: template)
    tokens = read(documents)
    assert [token for token, _ in tokens][:4] == ["Hello", "ĠYou", "Ġare", "Ġfine"]
    assert [token for token, own in tokens if own] == ["ĠHello", "<|im_end|>"]


def test_unused_fields_are_named_once(tmp_path: Path) -> None:
    said: list[str] = []
    lines = [{"text": "Hi", "id": 1}, {"text": "Hi", "id": 2, "source": "a", "n": 0}, {"text": "Hi", "source": "b"}]
    tokenizer = tokenizer_of("gemma-2", tmp_path)
    documents = Documents(Corpus([data(tmp_path, *lines)]), tokenizer, on_bad_line=said.append)
    documents.read(range(3))
    place = f"{tmp_path}/data.jsonl"
    assert said == [
        f"{place}:1: has fields that are not used: id",
        f"{place}:2: has fields that are not used: source, n",
    ]


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "mistral", "qwen2.5"])
def test_the_end_of_a_turn_is_an_eos(tmp_path: Path, name: str) -> None:
    tokenizer, template = tokenizer_of(name, tmp_path), template_of(name)
    ends = {"llama-3": "<|eot_id|>", "gemma-2": "<end_of_turn>", "mistral": "</s>", "qwen2.5": "<|im_end|>"}
    end, text_end = (tokenizer.backend.token_to_id(token) for token in (ends[name], SPECIAL[name][0]))
    options = {"temperature": 0.6, "do_sample": True}
    for generation, config, wanted in (
        ({**options, "eos_token_id": text_end}, {}, {**options, "eos_token_id": [text_end, end]}),
        ({"eos_token_id": [text_end, end]}, {}, None),
        (options, {"eos_token_id": text_end}, {**options, "eos_token_id": [text_end, end]}),
        (None, {"eos_token_id": end}, None),
        (None, {"pad_token_id": 0, "top_p": 0.9}, {"pad_token_id": 0, "top_p": 0.9, "eos_token_id": [end]}),
    ):
        found = with_end_of_turn(generation, config, template, tokenizer)
        assert found == (generation if wanted is None else wanted)
    silent = type(template)("{% for message in messages %}{{ message.content }} {% endfor %}")
    assert with_end_of_turn(None, {}, silent, tokenizer) is None
