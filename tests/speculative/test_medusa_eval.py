"""Scores of heads on the model's own text, what they predict of decoding other text, and the picture of it."""

import json
import math
import random
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_templates import add_bos
from runs import recipe_for
from typer.testing import CliRunner, Result
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app, plot
from ligermodels.cli.evaluation import show_scores
from ligermodels.data.batches import Batch
from ligermodels.data.documents import Documents
from ligermodels.data.packing import PackedBatches
from ligermodels.data.prompts import opening_prompts
from ligermodels.errors import BackendError, InputError
from ligermodels.speculative import benchmark as decoding
from ligermodels.speculative.acceptance import chain_length
from ligermodels.speculative.benchmark import ContinuationScores, benchmark_decoding, evaluate_continuations, fit_tree
from ligermodels.speculative.evaluation import HeadScores, evaluate_heads
from ligermodels.speculative.tree import Tree, chain, expected_tokens, grow
from ligermodels.training import train_heads
from ligermodels.training.heads import HeadsEvaluation
from ligermodels.training.metrics import Metrics, evaluation_note

PROMPTS = [[5, 9, 11], [77], list(range(30, 50)), [3, 4]]


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> lm.MedusaModel:
    """Heads that have learnt half of what the model says after two of the prompts."""
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint(folder, {**CONFIGS["llama-3.1"], "vocab_size": 307})
    base = lm.from_pretrained(folder, dtype=torch.float64)
    model = lm.MedusaModel.from_base(base, 3, 1)
    text = base.generate(PROMPTS[:2], max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    optimizer = torch.optim.Adam(model.head_parameters(), lr=3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    return model


# -- decoding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [2, 40])
def test_a_replay_of_the_same_prompts_is_lossless(medusa: lm.MedusaModel, new_tokens: int) -> None:
    own = evaluate_continuations(medusa, PROMPTS, max_new_tokens=new_tokens)
    assert own.lengths == [new_tokens] * 4
    for tree in (grow(own.scores.hits, 20), chain(3), Tree.from_paths([])):
        outcome = benchmark_decoding(medusa, PROMPTS, tree=tree, max_new_tokens=new_tokens)
        assert outcome.same == 4
        assert own.tokens_per_step(tree) == pytest.approx(outcome.tokens_per_step)
    if new_tokens == 40:
        assert outcome.tokens_per_step == 1 < own.tokens_per_step(chain(3)) < 3.9


def test_a_replay_knows_of_rows_that_end(medusa: lm.MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = medusa.base.generate(PROMPTS, max_new_tokens=40, eos_token_id=None, pad_token_id=0)[:, -40:].tolist()
    defaults = {"eos_token_id": [text[0][17], text[2][5]], "pad_token_id": 0}
    monkeypatch.setattr(medusa.base, "generation_defaults", lambda do_sample=None, given=(): defaults)
    own = evaluate_continuations(medusa, PROMPTS, max_new_tokens=40)
    ends = [next((i + 1 for i, t in enumerate(row) if t in defaults["eos_token_id"]), 40) for row in text]
    assert own.lengths == ends and len(set(ends)) > 2
    tree = grow(own.scores.hits, 20)
    out = medusa.generate(PROMPTS, 40, tree=tree, return_stats=True)
    assert out.new_tokens == sum(ends) and own.tokens_per_step(tree) == pytest.approx(out.tokens_per_step)


def test_scores_on_own_text_by_hand(medusa: lm.MedusaModel) -> None:
    """Head i at a place is scored on the token i + 2 on, if that is a new one, and not the model's first."""
    own = evaluate_continuations(medusa, PROMPTS, max_new_tokens=12)
    hits, counts = torch.zeros(3, 10), torch.zeros(3)
    for prompt, ranks in zip(PROMPTS, own.ranks, strict=True):
        text = medusa.base.generate([prompt], 12, eos_token_id=None)
        with torch.no_grad():
            logits = medusa(text).logits[:, 0]
        assert ranks.shape == (3, 13)
        for head in range(3):
            for place in range(len(prompt) - 1, text.shape[1]):
                found = int(ranks[head, place - len(prompt) + 1])
                if place + 2 + head >= text.shape[1]:
                    assert found == -1
                    continue
                order = logits[head, place].argsort(descending=True).tolist()
                assert found == order.index(int(text[0, place + 2 + head]))
            for place in range(text.shape[1] - 2 - head):
                if place + 2 + head > len(prompt):
                    counts[head] += 1
                    order = logits[head, place].argsort(descending=True).tolist()
                    rank = order.index(int(text[0, place + 2 + head]))
                    hits[head, rank : rank + 1] += 1 if rank < 10 else 0
    assert torch.equal(own.scores.counts, counts.double())
    torch.testing.assert_close(own.scores.hits, (hits / counts[:, None]).double())


def test_steps_are_walked_as_decoding_does() -> None:
    scores = HeadScores(torch.zeros(2), torch.zeros(2, 10), torch.ones(2))
    # Columns are places. From place 0, ranks 0 and 1: two accepted, on to place 3; there none; at place 4 one; the end.
    ranks = torch.tensor([[0, 0, 0, 2, 1, 0, -1], [1, 0, 0, 0, 0, -1, -1]])
    own = ContinuationScores(scores, [ranks, ranks[:, :1]], [7, 1])
    assert own.tokens_per_step(Tree.from_paths([(0,), (1,), (0, 1)])) == 6 / 3
    assert own.tokens_per_step(chain(2)) == 6 / 3  # Places 0, 2 and 5: one, two and one accepted.
    assert own.tokens_per_step(chain(1)) == 6 / 4  # Places 0, 2, 4 and 5.
    assert math.isnan(ContinuationScores(scores, [ranks[:, :1]], [1]).tokens_per_step(chain(2)))


@torch.no_grad()
def test_a_head_without_a_target_has_no_scores(
    medusa: lm.MedusaModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN, null in files, a dash in tables: neither a loss of 0, nor never right. The mean is of the other heads."""
    ids = torch.tensor([[5, 9, 11, 4]])  # heads predict 2, 3 and 4 tokens ahead
    scores = evaluate_heads(medusa, [Batch({"input_ids": ids, "labels": ids})])
    assert scores.counts.tolist() == [2, 1, 0]
    assert scores.losses.isnan().tolist() == scores.accuracy(1).isnan().tolist() == [False, False, True]
    values = HeadsEvaluation(scores).metrics()
    assert values["loss"] == pytest.approx(scores.losses[:2].mean().item())
    log = Metrics(tmp_path)
    log.write_evaluation(3, {**values, "perplexity": math.nan})
    log.close()
    entry = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert entry["validation_top1"] == [*values["top1"][:2], None] and "validation_perplexity" not in entry
    assert math.isnan(Metrics(tmp_path, after=3).evaluation["top1"][2])
    assert evaluation_note(3, values).endswith(" -") and "nan" not in evaluation_note(3, values)
    show_scores(scores)
    assert re.search(r"2 +t\+4( +-){3} *$", capsys.readouterr().out, re.MULTILINE)
    assert grow(scores.hits, 5).max_depth < 3 and chain_length([0.5, math.nan]) == 1.5


def test_a_prediction_is_of_other_prompts_and_can_fail(medusa: lm.MedusaModel) -> None:
    """Heads that know the first half by heart and nothing of the second: what the one promises the other denies."""
    known, unknown = PROMPTS[:2], PROMPTS[2:]
    tried = fit_tree(medusa, [known[0], unknown[0], known[1], unknown[1]], nodes=20, max_new_tokens=30)
    own = evaluate_continuations(medusa, known, max_new_tokens=30)
    assert tried.tree == grow(own.scores.hits, 20) and tried.predicted == own.tokens_per_step(tried.tree)
    assert tried.expected == expected_tokens(tried.tree, own.scores.hits)
    outcome = benchmark_decoding(medusa, unknown, tree=tried.tree, max_new_tokens=30)
    assert tried.benchmark.prompts == tried.benchmark.same == 2
    assert tried.benchmark.tokens_per_step == outcome.tokens_per_step
    assert tried.predicted > 1.2 * tried.benchmark.tokens_per_step
    swapped = fit_tree(medusa, [unknown[0], known[0], unknown[1], known[1]], nodes=20, max_new_tokens=30)
    assert swapped.predicted < swapped.benchmark.tokens_per_step


def test_prompts_are_continued_in_small_batches(medusa: lm.MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate_continuations(medusa, PROMPTS, max_new_tokens=9)
    monkeypatch.setattr(decoding, "BATCH_SIZE", 3)
    parts = evaluate_continuations(medusa, PROMPTS, max_new_tokens=9)
    assert parts.lengths == whole.lengths and torch.equal(parts.scores.hits, whole.scores.hits)
    assert all(torch.equal(a, b) for a, b in zip(parts.ranks, whole.ranks, strict=True))


def test_a_race_warms_up_with_its_own_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may be smaller than the default one: a vocabulary of 7 has no ten candidates."""
    base = lm.from_config({**CONFIGS["llama-3.1"], "vocab_size": 7}, dtype=torch.float64)
    medusa = lm.MedusaModel.from_base(base, 2)
    trees, generate = [], medusa.generate

    def watched(*args: Any, **options: Any) -> Any:
        trees.append(options.get("tree"))
        return generate(*args, **options)

    monkeypatch.setattr(medusa, "generate", watched)
    assert benchmark_decoding(medusa, [[1, 2], [3]], tree=chain(2), max_new_tokens=9).same == 2
    assert trees == [chain(2)] * 3


def test_nothing_to_continue(medusa: lm.MedusaModel) -> None:
    with pytest.raises(InputError, match="no prompt"):
        evaluate_continuations(medusa, [], max_new_tokens=3)
    with pytest.raises(InputError, match="two prompts or more"):
        fit_tree(medusa, PROMPTS[:1], nodes=3, max_new_tokens=3)


def test_prompts_are_what_a_model_is_asked(base: Path, tmp_path: Path) -> None:
    """Beginnings of texts; chats up to where the assistant is to speak; none where it is not; and each once."""
    ask, more = {"role": "user", "content": "Hi"}, {"role": "system", "content": "be brief"}
    answer = {"role": "assistant", "content": "one two three"}
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    lines: list[Any] = [
        {"text": "words of a text, of which the first are taken"},
        {"text": ""},
        {"messages": [ask, answer, ask, answer]},
        {"messages": [more, ask, answer]},
        {"messages": [ask, call]},
        {"messages": [ask]},
        {"text": "a"},
        {"text": "words of another, which starts with the same"},
        {"messages": [ask, {**answer, "content": "four"}]},
        {"text": "<|endoftext|>"},
        {"text": "a"},
    ]
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n")
    documents = Documents.of_checkpoint(base, [file], max_bad_lines=9, on_bad_line=lambda message: None)
    indices, tokenizer = documents.corpus.split(0, 0)[0], documents.tokenizer
    add_bos(tokenizer, "<|endoftext|>")  # Which makes a token of an empty text.

    def asked(*messages: Any) -> list[int]:
        text = documents.template.render(messages, add_generation_prompt=True)
        return tokenizer.encode_with_offsets(text)[0]

    wanted = [tokenizer.encode(lines[0]["text"])[:4], asked(ask), asked(more, ask), tokenizer.encode("a")]
    found = opening_prompts(documents, indices, 99, prompt_tokens=4)
    assert sorted(found) == sorted(wanted) and len(wanted[0]) == 4
    assert opening_prompts(documents, indices, 2, prompt_tokens=4) == found[:2]
    orders = {str(opening_prompts(documents, indices, 99, prompt_tokens=4, seed=seed)) for seed in range(9)}
    assert len(orders) > 1
    assert opening_prompts(documents, indices[[1, 3]], 9, prompt_tokens=4) == [wanted[2]]


def test_a_file_of_text_is_enough(base: Path, tmp_path: Path) -> None:
    """It is one document: its beginning and further pieces of it, from all of it, are prompts."""
    file = tmp_path / "book.txt"
    file.write_text("".join(random.Random(0).choices("words of a text ", k=3000)))
    documents = Documents.of_checkpoint(base, [file])
    ids = documents.tokenizer.encode(file.read_text())
    found = opening_prompts(documents, documents.corpus.split(0, 0)[0], 6, prompt_tokens=5)
    assert len(found) == 6 and len(set(map(tuple, found))) == 6 and found[0] == ids[:5]
    places = [next(i for i in range(len(ids)) if ids[i : i + 5] == prompt) for prompt in found]
    assert places == sorted(places) and places[-1] > 0.7 * len(ids)
    assert len(opening_prompts(documents, documents.corpus.split(0, 0)[0], 10**6, prompt_tokens=5)) > 100


# -- the picture -------------------------------------------------------------------------------------------------------


def results(heads: int, generation: bool) -> dict[str, Any]:
    rows = {k: [min(1.0, 0.1 * k / (head + 1)) for head in range(heads)] for k in range(1, 11)}
    found: dict[str, Any] = {
        "losses": [3.0] * heads,
        "accuracies": rows,
        "tree": [(0,), (1,)],
        "expected_tokens_per_step": expected_tokens(chain(1), [[0.4]]),
    }
    if generation:
        found |= {
            "own_accuracies": rows,
            "predicted_tokens_per_step": 1.3,
            "generation": {"tokens_per_step": 1.2, "speed_up": 1.1},
        }
    return found


@pytest.mark.parametrize("generation", [False, True])
def test_a_picture_is_written_whole(generation: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    path = tmp_path / "scores.png"
    path.write_bytes(b"an older one")
    seen: list[Figure] = []
    save = Figure.savefig

    def fails(figure: Figure, file: Path, **options: Any) -> None:
        seen.append(figure)
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        plot.plot_scores(path, results(3, generation))
    assert path.read_bytes() == b"an older one" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(Figure, "savefig", save)
    plot.plot_scores(path, results(12, generation))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and list(tmp_path.iterdir()) == [path]

    curves, bars = seen[0].axes
    drawn = [line for line in curves.lines if len(line.get_xdata()) == 10]
    assert len(drawn) == 3 * (2 if generation else 1)
    assert list(drawn[1].get_ydata()) == [0.1 * k / 2 for k in range(1, 11)]
    heights = [patch.get_height() for patch in bars.patches]
    assert heights == ([1.4, 1.3, 1.2] if generation else [1.4])
    assert ("1.10 times as fast" in bars.get_title()) == generation


def test_a_picture_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in (("a.jpg", ".png"), ("nowhere/a.png", "does not exist"), ("folder.png", "is a folder")):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=message):
            plot.require_plotting(tmp_path / path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=re.escape("ligermodels[plot]")):
        plot.require_plotting(tmp_path / "a.png")


# -- the commands ------------------------------------------------------------------------------------------------------


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


def test_eval_export_and_generate(medusa: lm.MedusaModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_cli import CORPUS, save_tokenizer

    base = tmp_path / "base"
    medusa.base.save_pretrained(base)
    save_tokenizer(base, 307)
    medusa.save_pretrained(tmp_path / "heads")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"text": CORPUS[at : at + 300]}) + "\n" for at in range(0, 3000, 300)) + "{}\n"
    )
    evaluate = ["medusa", "eval", base, tmp_path / "heads", "--data", tmp_path / "data.jsonl"]
    assert "data.jsonl:11" in run(*evaluate, code=1).stderr
    options = ["--seq-len", 16, "--prompts", 7, "--max-new-tokens", 9, "--batch-size", 2, "--max-bad-lines", 1]
    shown = run(*evaluate, *options, "--plot", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert "speed-up" in shown.stdout and "predicted" in shown.stdout and "data.jsonl:11" in shown.stderr

    # Batches come and go: there are many, and never more than a few at once.
    alive: list[weakref.ref[Any]] = []
    following = PackedBatches.__next__

    def watched(stream: PackedBatches) -> Any:
        assert sum(each() is not None for each in alive) <= 2
        batch = following(stream)
        alive.append(weakref.ref(batch))
        return batch

    monkeypatch.setattr(PackedBatches, "__next__", watched)
    found = json.loads(run(*evaluate, *options, "--json").stdout)
    assert len(alive) > 20
    assert (found["generation"]["prompts"], found["generation"]["same"]) == (3, 3)  # Four were predicted from.
    assert all(isinstance(path, list) for path in found["tree"]) and len(found["own_accuracies"]) == 10
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    assert "--prompts 0" in run(*evaluate, code=1).stderr
    assert "generation" not in json.loads(run(*evaluate, "--prompts", 0, "--json").stdout)

    # From any format to any other; heads of a whole checkpoint are those of its own model.
    for source, profile in (("heads", "tgi"), ("tgi", "fasterdecoding"), ("fasterdecoding", "full-hf")):
        run("medusa", "export", base, tmp_path / source, tmp_path / profile, "--profile", profile)
    assert json.loads((tmp_path / "tgi" / "config.json").read_text())["base_model_name_or_path"] == str(base)
    run("medusa", "export", tmp_path / "full-hf", tmp_path / "full-hf", tmp_path / "vllm", "--profile", "vllm")
    first, last = (tmp_path / name / "model.safetensors" for name in ("heads", "vllm"))
    assert first.read_bytes() == last.read_bytes()
    prompt = ["--prompt", "def ", "--max-new-tokens", 12]
    plain = run("generate", base, *prompt).stdout
    heads = ["generate", tmp_path / "full-hf", "--medusa", tmp_path / "full-hf", *prompt, "--json"]
    cold, hot = (json.loads(run(*heads, *more).stdout) for more in ([], ["--temperature", 1e9]))
    assert cold["completions"][0]["completion"] + "\n" == plain
    assert hot["steps"] < cold["steps"]
    refused = run(*heads, "--draft-tree", "3,2,5", code=1).stderr
    assert "--draft-tree: a DynamicTree is for EAGLE-3 and MTP heads" in refused


def test_eval_on_the_validation_split_of_a_run(base: Path, data: Path, tmp_path: Path) -> None:
    """Read as the run read it: the very scores of the run, and more of them."""
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %B %Y') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "data.jsonl").write_bytes(data.read_bytes())
    recipe, out = recipe_for(base, tmp_path / "data.jsonl", chat_template=str(template)), tmp_path / "out"
    scores = train_heads(recipe, out).evaluation.scores
    evaluate = ["medusa", "eval", base, out, "--prompts", 0, "--json"]
    found = json.loads(run(*evaluate, "--validation-of", out).stdout)
    assert found["targets"] == scores.counts.tolist()
    for k in range(1, 11):
        assert found["accuracies"][str(k)] == pytest.approx(scores.accuracy(k).tolist(), rel=1e-9)
    dated = json.loads(run(*evaluate, "--validation-of", out, "--date", "1999-01-01").stdout)
    assert dated["losses"] != found["losses"] == pytest.approx(scores.losses.tolist(), rel=1e-5)
    assert "YYYY-MM-DD" in run(*evaluate, "--validation-of", out, "--date", "soon", code=1).stderr

    assert "--validation-of" in run(*evaluate, code=2).stderr
    assert "--prompts" in run("medusa", "eval", base, out, "--data", data, "--prompts", 1, code=2).stderr
    train_heads(recipe.changed({"validation_fraction": 0, "steps": 1}), tmp_path / "all")
    assert "has no validation split" in run(*evaluate, "--validation-of", tmp_path / "all", code=1).stderr


def test_the_validation_split_of_a_run_is_known_by_content(base: Path, data: Path, tmp_path: Path) -> None:
    """Though no checkpoint is left, and wherever the data are."""
    file, moved, out = tmp_path / "data.jsonl", tmp_path / "moved.jsonl", tmp_path / "out"
    file.write_bytes(data.read_bytes())
    train_heads(recipe_for(base, file, steps=1, checkpoint_every=None), out)
    assert not (out / "checkpoints").exists()
    evaluate = ["medusa", "eval", base, out, "--prompts", 0, "--json", "--validation-of", out]
    found = json.loads(run(*evaluate).stdout)
    file.rename(moved)
    assert "data.jsonl: no such file" in run(*evaluate, code=1).stderr
    assert json.loads(run(*evaluate, "--data", moved).stdout) == found
    with moved.open("a") as lines:
        lines.write('\n{"text": "one more"}\n')
    assert "data: differs from the start of the run" in run(*evaluate, "--data", moved, code=1).stderr
    for content, words in (("[]", "not an object"), ("{}", "is damaged"), (None, "no such file")):
        (out / "content.json").unlink() if content is None else (out / "content.json").write_text(content)
        assert re.search(rf"content\.json: .*{words}", run(*evaluate, "--data", data, code=1).stderr)
