"""lm-eval while a model is trained: lm-eval's own results on the exported model; the steps are as without it."""

import json
import random
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import equal_heads, losses
from test_callbacks import Recorder, recipe_of
from test_run_console import Output

import ligermodels as lm
from ligermodels.errors import BackendError, ConfigError
from ligermodels.training import FineTuningRecipe, fine_tune
from ligermodels.training.checkpoints import Checkpoints
from ligermodels.training.preview import dry_run

pytest.importorskip("lm_eval", reason="needs ligermodels[integrations]")
pytestmark = [
    pytest.mark.usefixtures("one_thread", "offline"),
    pytest.mark.filterwarnings("ignore"),  # of lm_eval and datasets
]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No look at the hub; a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    yield


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with the tasks tiny_choice, tiny_text (perplexity) and tiny_answer (generation)."""
    folder, words = tmp_path / "tasks", ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    folder.mkdir()
    rows = [{"q": " ".join(words[i : i + 3]), "choices": [" one", " eight", " four two"], "a": i % 3} for i in range(5)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{a}}"}
    answer = {"output_type": "generate_until", "doc_to_target": "{{q}}", "generation_kwargs": {"max_gen_toks": 5}}
    answer["generation_kwargs"] |= {"until": ["\n"], "do_sample": False, "temperature": 0.0}
    text = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}"}
    for name, fields, metrics in (
        ("tiny_choice", choice, ["acc", "acc_norm"]),
        ("tiny_answer", answer, ["exact_match"]),
        ("tiny_text", text, ["word_perplexity"]),
    ):
        metric_list = [{"metric": metric} for metric in metrics]
        task = {"task": name, **common, **fields, "metric_list": metric_list}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def recipe(base: Path, data: Path, tasks: Path, **changes: Any) -> FineTuningRecipe:
    settings = {
        "lm_eval": "tiny_choice,tiny_answer",
        "lm_eval_every": 4,
        "lm_eval_batch_size": 2,
        "lm_eval_include_path": str(tasks),
        "steps": 10,
    }
    return recipe_of(base, data, **(settings | changes))


def results(out: Path) -> dict[int, dict[str, float]]:
    """Step -> metrics of lm-eval."""
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {entry.pop("step"): entry for entry in entries if any(name.startswith("lm_eval/") for name in entry)}


def lm_evals(folder: Path, tasks: Path, names: list[str]) -> dict[str, Any]:
    """Results of lm-eval itself on a model of transformers."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    harness = HFLM(pretrained=model, tokenizer=str(folder), batch_size=2, device="cpu")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, bootstrap_iters=0)
    return found


@pytest.mark.parametrize("change", [{}, {"lora_rank": 2, "lora_dropout": 0.2}], ids=["full", "lora"])
def test_steps_are_those_without_it(
    base: Path, data: Path, tasks: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Bit for bit, with dropout too; python's generator stays; results of the last step are lm-eval's."""
    output = Output()
    with_it = recipe(base, data, tasks, **change)
    random.seed(5)
    fine_tune(with_it, tmp_path / "out", console=output.console)
    drawn = random.random()
    random.seed(5)
    plain = with_it.changed({"lm_eval": ()})
    assert plain.lm_eval_every is None
    fine_tune(plain, tmp_path / "plain")
    assert random.random() == drawn
    assert losses(tmp_path / "out") == losses(tmp_path / "plain")
    assert equal_heads(tmp_path / "out", tmp_path / "plain")
    found = results(tmp_path / "out")
    assert list(found) == [4, 8, 10]
    names = {"lm_eval/tiny_choice/acc", "lm_eval/tiny_choice/acc_norm", "lm_eval/tiny_answer/exact_match"}
    assert all(values.keys() == names for values in found.values())
    said = [message for message in output.said if message.startswith("step 8: lm-eval")]
    assert said[0].endswith(f"tiny_choice/acc_norm {found[8]['lm_eval/tiny_choice/acc_norm']:.4f}") or "acc " in said[0]
    if not change:
        wanted = lm_evals(tmp_path / "out", tasks, ["tiny_choice", "tiny_answer"])["results"]
        assert found[10] == {name: wanted[name.split("/")[1]][f"{name.split('/')[2]},none"] for name in names}


def test_answers_are_lm_evals(base: Path, data: Path, tasks: Path, tmp_path: Path) -> None:
    """Each log-likelihood, perplexity and text, of the same checkpoint in transformers; the model stays in training."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from ligermodels.integrations.lm_eval import NativeHFLM

    fine_tune(recipe_of(base, data, steps=8), tmp_path / "out")
    names = ["tiny_choice", "tiny_answer", "tiny_text"]
    model = lm.from_pretrained(tmp_path / "out", dtype=torch.float32).train()
    harness = NativeHFLM(model, str(tmp_path / "out"), batch_size=2)
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(harness, tasks=names, task_manager=manager, bootstrap_iters=0)
    wanted = lm_evals(tmp_path / "out", tasks, names)
    assert all(module.training for module in model.modules())
    for name in ("tiny_choice", "tiny_answer"):
        for one, other in zip(found["samples"][name], wanted["samples"][name], strict=True):
            if name == "tiny_answer":
                assert one["resps"] == other["resps"] and one["resps"][0][0]
            else:
                pairs = zip(one["filtered_resps"], other["filtered_resps"], strict=True)
                assert all(mine[0] == pytest.approx(theirs[0], rel=1e-5) for mine, theirs in pairs)
    perplexities = [run["results"]["tiny_text"]["word_perplexity,none"] for run in (found, wanted)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)


def test_a_task_may_name_the_token_that_ends_its_answers(base: Path) -> None:
    from lm_eval.api.instance import Instance

    from ligermodels.integrations.lm_eval import NativeHFLM

    model = lm.from_pretrained(base, dtype=torch.float32)
    harness, text = NativeHFLM(model, str(base)), "one two three"
    prompt = torch.tensor([harness.tok_encode(text)])
    first = int(model.generate(prompt, 1, do_sample=False)[0, -1])
    found = []
    for own in ({}, {"eos_token_id": first}):
        options: dict[str, Any] = {"until": [], "max_gen_toks": 4, **own}
        found += harness.generate_until([Instance("generate_until", {}, (text, options), 0)])
    assert len(found[1]) < len(found[0])


def test_the_result_is_evaluated(base: Path, data: Path, tasks: Path, tmp_path: Path) -> None:
    """Without a period at the end only; after a callback has ended the run too; a resumed run does not repeat it."""
    at_end = recipe(base, data, tasks, lm_eval_every=None, lm_eval="tiny_choice", lm_eval_limit=2)
    fine_tune(at_end, tmp_path / "out", callbacks=[Recorder(stop_at=3)])
    assert list(results(tmp_path / "out")) == [3]
    fine_tune(at_end, tmp_path / "out", resume=True)
    assert list(results(tmp_path / "out")) == [3, 10]
    before = (tmp_path / "out" / "metrics.jsonl").read_text()
    fine_tune(at_end, tmp_path / "out", resume=True)
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("lost", [True, False])
def test_a_resumed_run_completes_it(base: Path, data: Path, tasks: Path, tmp_path: Path, lost: bool) -> None:
    """If the run was killed before the tasks of its last checkpoint were evaluated; and only then."""
    often = recipe(base, data, tasks, checkpoint_every=4, keep_checkpoints=9, lm_eval="tiny_choice")
    fine_tune(often, tmp_path / "out")
    wanted = results(tmp_path / "out")
    for step in Checkpoints(tmp_path / "out" / "checkpoints").steps():
        if step > 4:
            shutil.rmtree(tmp_path / "out" / "checkpoints" / f"step-{step}")
    path = tmp_path / "out" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if not (lost and "lm_eval" in line)]
    path.write_text("".join(f"{line}\n" for line in kept))
    fine_tune(often, tmp_path / "out", resume=True)
    assert results(tmp_path / "out") == wanted
    assert sum("lm_eval" in line for line in path.read_text().splitlines()) == 3


def test_wrong_settings_are_named(
    base: Path, data: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    # Without lm-eval's own tasks, which take seconds to read.
    monkeypatch.setattr("ligermodels.integrations.lm_eval.TaskManager", partial(TaskManager, include_defaults=False))
    wrong = recipe(base, data, tasks, lm_eval="tiny_answer,tiny_choise")
    for run in (lambda: fine_tune(wrong, tmp_path / "out"), lambda: dry_run(wrong)):
        with pytest.raises(ConfigError, match=r"lm_eval: lm-eval has no task 'tiny_choise'"):
            run()
    with pytest.raises(ConfigError, match=r"lm_eval_limit: is for tasks of lm-eval; give lm_eval too"):
        recipe_of(base, data, lm_eval_limit=3)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(BackendError, match=r"lm_eval: .* is not installed; pip install 'lm_eval\[hf\]'"):
        fine_tune(recipe(base, data, tasks), tmp_path / "out")
    assert not (tmp_path / "out").exists()
