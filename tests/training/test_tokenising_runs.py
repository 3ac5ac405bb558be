"""Runs whose tokens come from other processes, from the cache, or from a stream: the same losses."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import losses, recipe_for

from ligermodels import console
from ligermodels.data.workers import Workers
from ligermodels.errors import ConfigError
from ligermodels.training import Console, MedusaRecipe, inputs, train_heads

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Data of any size is tokenised by other processes and cached. Returns the folder of the cache."""
    monkeypatch.setattr(inputs, "SMALL", 0)
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """End runs after a step, as SIGTERM does."""
    from ligermodels.training import interruption

    class Stop(interruption.AgreedStop):
        steps = 0

        def should_stop(self) -> bool:
            self.steps += 1
            return self.steps > step

    monkeypatch.setattr("ligermodels.training.run.AgreedStop", Stop)


def test_losses_depend_on_neither_processes_nor_cache(
    base: Path, data: Path, tmp_path: Path, every_size: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(base, data, steps=None, epochs=1.0)
    train_heads(recipe.changed({"dataset_num_proc": 0, "token_cache": False}), tmp_path / "plain", console=Console())
    assert not every_size.exists()
    said: list[str] = []
    train_heads(recipe.changed({"dataset_num_proc": 2}), tmp_path / "cold", console=Console(said.append))
    assert any(message.startswith("token cache: 32 documents are in") and "MiB" in message for message in said)
    train_heads(recipe.changed({"dataset_num_proc": 0}), tmp_path / "warm", console=Console(said.append))
    assert any(message.startswith("token cache: 32 of 32 documents are in") for message in said)
    expected = losses(tmp_path / "plain")
    assert losses(tmp_path / "cold") == losses(tmp_path / "warm") == expected

    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        outcome = train_heads(recipe.changed({"dataset_num_proc": 1, "token_cache": False}), tmp_path / "resumed")
    assert outcome.stopped and outcome.step < outcome.steps
    train_heads(recipe, tmp_path / "resumed", resume=True)
    assert losses(tmp_path / "resumed") == expected


def test_an_error_before_the_first_step_ends_the_processes(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the decay is longer than the run, which is known when the epoch has been counted."""
    closed, close = list[int](), Workers.close

    def noted(self: Workers) -> None:
        closed.append(len(self._processes))
        close(self)

    monkeypatch.setattr(Workers, "close", noted)
    recipe = recipe_for(base, data, steps=None, epochs=1.0, dataset_num_proc=1, schedule="wsd", decay_steps=10**6)
    with pytest.raises(ConfigError, match=r"^decay_steps: 1,000,000 is more than the"):
        train_heads(recipe.changed({"token_cache": False}), tmp_path / "out")
    assert closed == [1]


def test_a_cache_that_cannot_be_written_is_named(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGERMODELS_CACHE", str(tmp_path / "file"))
    said: list[str] = []
    assert train_heads(recipe_for(base, data, steps=2), tmp_path / "out", console=Console(said.append)).finished
    assert any(message.startswith("token cache:") and "--no-token-cache" in message for message in said)


def test_a_streamed_run_resumes_with_the_same_losses(
    base: Path, data: Path, tmp_path: Path, every_size: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(base, data, streaming=True, shuffle_buffer_size=8, steps=10)
    outcome = train_heads(recipe, tmp_path / "out")
    assert outcome.finished and outcome.evaluation is not None and not every_size.exists()
    with monkeypatch.context() as patched:
        stop_after(patched, 6)
        assert train_heads(recipe, tmp_path / "resumed").stopped
    train_heads(recipe.changed({"dataset_num_proc": 0}), tmp_path / "resumed", resume=True)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "out")
    assert losses(tmp_path / "out")[0] != losses(_run(recipe, tmp_path / "other", shuffle_buffer_size=9))[0]
    with pytest.raises(ConfigError, match="another recipe: shuffle_buffer_size"):
        train_heads(recipe.changed({"shuffle_buffer_size": 9}), tmp_path / "out", resume=True)


def _run(recipe: MedusaRecipe, out: Path, **changes: Any) -> Path:
    train_heads(recipe.changed(changes), out)
    return out


def test_settings_of_streaming(base: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="streaming: needs steps"):
        recipe_for(base, data, streaming=True, steps=None)
    with pytest.raises(ConfigError, match="shuffle_buffer_size: is for streaming"):
        recipe_for(base, data, shuffle_buffer_size=5)


def test_progress_has_lines_without_a_terminal(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before step 1, with the number of documents read."""
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    lines = [json.dumps({"text": f"Hi there {i}"}) for i in range(300)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    recipe = recipe_for(base, tmp_path / "data.jsonl", steps=None, epochs=0.1, max_bad_lines=0)
    train_heads(recipe, tmp_path / "out", console=Console(console.say, console.progress))
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("reading text: ")]
    assert "reading text: 64 of 240" in shown and shown[-1] == "reading text: 240 of 240"
