"""Scores of heads on the model's own text, what they predict of decoding, and the picture of it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels.cli import app, plot
from ligermodels.errors import BackendError, InputError
from ligermodels.generation import Tree, chain, expected_tokens, grow
from ligermodels.training import evaluate_own_text, race
from ligermodels.training.evaluation import HeadScores, OwnText

PROMPTS = [[5, 9, 11], [77], list(range(30, 50)), [3, 4]]


@pytest.fixture(scope="module")
def medusa(tmp_path_factory: pytest.TempPathFactory) -> lm.MedusaModel:
    """Heads that have learnt half of what the model says after two of the prompts."""
    folder = tmp_path_factory.mktemp("base")
    make_checkpoint(folder, {**CONFIGS["llama-3.1"], "vocab_size": 307})
    base = lm.from_pretrained(folder, dtype=torch.float64)
    model = lm.MedusaModel.from_base(base, 3, 1)
    text = base.generate(PROMPTS[:2], max_new_tokens=40, eos_token_ids=None, pad_token_id=0)
    optimizer = torch.optim.Adam(model.head_parameters(), lr=3e-3)
    for _ in range(25):
        optimizer.zero_grad()
        model(text, labels=text).loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("new_tokens", [2, 9, 40])
def test_prediction_is_what_decoding_then_yields(medusa: lm.MedusaModel, new_tokens: int) -> None:
    own = evaluate_own_text(medusa, PROMPTS, max_new_tokens=new_tokens)
    assert own.lengths == [new_tokens] * 4
    for tree in (grow(own.scores.hits, 20), chain(3), Tree.from_paths([])):
        outcome = race(medusa, PROMPTS, tree=tree, max_new_tokens=new_tokens)
        assert outcome.same == 4
        assert own.tokens_per_step(tree) == pytest.approx(outcome.tokens_per_step)
    if new_tokens == 40:
        assert outcome.tokens_per_step == 1 < own.tokens_per_step(chain(3)) < 3.9


def test_prediction_knows_of_rows_that_end(medusa: lm.MedusaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = medusa.base.generate(PROMPTS, max_new_tokens=40, eos_token_ids=None, pad_token_id=0)[:, -40:].tolist()
    defaults = {"eos_token_ids": [text[0][17], text[2][5]], "pad_token_id": 0}
    monkeypatch.setattr(medusa.base, "generation_defaults", lambda: defaults)
    own = evaluate_own_text(medusa, PROMPTS, max_new_tokens=40)
    ends = [next((i + 1 for i, t in enumerate(row) if t in defaults["eos_token_ids"]), 40) for row in text]
    assert own.lengths == ends and len(set(ends)) > 2
    tree = grow(own.scores.hits, 20)
    out = medusa.generate(PROMPTS, 40, tree=tree, return_stats=True)
    assert out.new_tokens == sum(ends) and own.tokens_per_step(tree) == pytest.approx(out.tokens_per_step)


def test_scores_on_own_text_by_hand(medusa: lm.MedusaModel) -> None:
    """Head i at a place is scored on the token i + 2 on, if that is a new one, and not the model's first."""
    own = evaluate_own_text(medusa, PROMPTS, max_new_tokens=12)
    hits, counts = torch.zeros(3, 10), torch.zeros(3)
    for prompt, ranks in zip(PROMPTS, own.ranks, strict=True):
        text = medusa.base.generate([prompt], 12, eos_token_ids=None)
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
    own = OwnText(scores, [ranks, ranks[:, :1]], [7, 1])
    assert own.tokens_per_step(Tree.from_paths([(0,), (1,), (0, 1)])) == 6 / 3
    assert own.tokens_per_step(chain(2)) == 6 / 3  # Places 0, 2 and 5: one, two and one accepted.
    assert own.tokens_per_step(chain(1)) == 6 / 4  # Places 0, 2, 4 and 5.
    assert math.isnan(OwnText(scores, [ranks[:, :1]], [1]).tokens_per_step(chain(2)))


def test_nothing_to_continue(medusa: lm.MedusaModel) -> None:
    with pytest.raises(InputError, match="no prompt"):
        evaluate_own_text(medusa, [], max_new_tokens=3)


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
    for path, message in (("a.jpg", ".png"), ("nowhere/a.png", "not there"), ("folder.png", "is a folder")):
        (tmp_path / "folder.png").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=message):
            plot.require_plotting(tmp_path / path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=re.escape("ligermodels[plot]")):
        plot.require_plotting(tmp_path / "a.png")


# -- the commands ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result


def test_eval_export_and_generate(medusa: lm.MedusaModel, tmp_path: Path) -> None:
    from test_cli import CORPUS, save_tokenizer

    base = tmp_path / "base"
    medusa.base.save_pretrained(base)
    save_tokenizer(base, 307)
    medusa.save_pretrained(tmp_path / "heads")
    (tmp_path / "data.txt").write_text(CORPUS[:3000])
    options = ["--data", tmp_path / "data.txt", "--length", 64, "--prompts", 3, "--max-new-tokens", 9]
    shown = run("medusa", "eval", base, tmp_path / "heads", *options, "--plot", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert "speed-up" in shown.stdout and "predicted" in shown.stdout
    found = json.loads(run("medusa", "eval", base, tmp_path / "heads", *options, "--json").stdout)
    assert found["predicted_tokens_per_step"] == pytest.approx(found["generation"]["tokens_per_step"])
    assert all(isinstance(path, list) for path in found["tree"]) and len(found["own_accuracies"]) == 10

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
