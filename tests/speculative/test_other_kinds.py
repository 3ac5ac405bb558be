"""Draft heads that are loaded with the class, or by the command, of another kind: one message, before any work."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from zoo import CONFIGS, make_checkpoint

import ligermodels as lm
from ligermodels import training
from ligermodels.cli import app, options
from ligermodels.errors import CheckpointError, ConfigError, InputError
from ligermodels.models.extra_heads import HEADS
from ligermodels.models.vocabulary import grow_vocabulary
from ligermodels.speculative.block_drafter import BlockDrafter

OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2, "num_layers": 1}, "mtp": {}, "eagle3": {"num_steps": 2},
    "dflash": {"block_size": 3, "num_layers": 1}, "dspark": {"block_size": 3, "num_layers": 1, "markov_rank": 4},
}  # fmt: skip
RECIPES = {"medusa": "Medusa", "mtp": "MTP", "eagle3": "Eagle", "dflash": "DFlash", "dspark": "DSpark"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, and heads of each kind."""
    path = tmp_path_factory.mktemp("kinds")
    make_checkpoint(path / "base", {**CONFIGS["llama-3.1"], "vocab_size": 307})
    base = lm.from_pretrained(path / "base", dtype=torch.float32)
    for kind, sizes in OPTIONS.items():
        model = getattr(lm, HEADS[kind][1]).from_base(base, **sizes)
        (model.save_head if kind == "mtp" else model.export)(
            path / kind, **({} if kind in ("medusa", "mtp") else {"base_model": "b"})
        )
    return path


def message(folder: Path, held: str, wanted: str) -> str:
    heads, model_class, command = HEADS[held]
    return re.escape(
        f"{folder / held}: holds {heads}, not {HEADS[wanted][0]}: load it with {model_class}.from_pretrained; on the "
        f"command line, use `ligermodels {command}`"
    )


@pytest.mark.parametrize("wanted", HEADS)
def test_heads_of_another_kind(folder: Path, wanted: str, tmp_path: Path) -> None:
    base = lm.from_pretrained(folder / "base", dtype=torch.float32)
    model_class, recipe_class = getattr(lm, HEADS[wanted][1]), getattr(training, f"{RECIPES[wanted]}Recipe")
    model_class.from_pretrained(base, folder / wanted)
    for held in HEADS:
        if held != wanted:
            with pytest.raises(ConfigError, match=f"^{message(folder, held, wanted)}$"):
                model_class.from_pretrained(base, folder / held)
    held = {**dict(zip(HEADS, [*HEADS][1:], strict=False)), "dspark": "medusa"}[wanted]
    words, command = message(folder, held, wanted), HEADS[wanted][2]
    heads, model, data = (str(folder / name) for name in (held, "base", "none.jsonl"))  # no data is read
    calls = [
        ["export", model, heads, str(tmp_path / "out")],
        ["eval", model, heads, "--data", data, "--device", "cpu"],
        ["train", model, "--start-from", heads, "--data", data, "--out", str(tmp_path / "out")],
    ]
    for call in calls:
        result = CliRunner().invoke(app, [command, *call])
        error = " ".join((str(result.exception) + result.output).split())
        assert result.exit_code and re.search(words, error), (call, error)
    recipe = recipe_class(base=model, data=data, start_from=heads, steps=1)
    with pytest.raises(ConfigError, match=f"^{words}$"):
        getattr(training, "train_heads" if wanted == "medusa" else f"train_{command}")(recipe, tmp_path / "run")
    assert not any(tmp_path.iterdir())


def test_a_model_of_heads_is_no_model(folder: Path) -> None:
    for kind, (heads, model_class, _) in HEADS.items():
        assert json.loads((folder / kind / "config.json").read_text())
        with pytest.raises(ConfigError, match=f"describes {heads}, without a model: .*{model_class}.from_pretrained"):
            lm.from_pretrained(folder / kind)


def test_the_confidence_threshold_is_for_dspark_heads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate`, `chat` and `eval` have the flag; other heads refuse it by name."""
    base, asked = str(folder / "base"), list[float]()
    init = BlockDrafter.__init__

    def recorded(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        asked.append(self.threshold)

    monkeypatch.setattr(BlockDrafter, "__init__", recorded)
    model = lm.from_pretrained(base, dtype=torch.float32)
    for kind in HEADS:
        found = None
        try:
            loaded = options.load_heads(model, str(folder / kind), confidence_threshold=0.3)
        except InputError as error:
            found = str(error)
        if kind == "dspark":
            assert loaded.confidence_threshold == 0.3 and asked == [0.3]
        else:
            assert found is not None and found.startswith("--confidence-threshold: "), (kind, found)
    for command, more in (("generate", ["--prompt", "a"]), ("chat", []), ("dspark eval", [str(folder / "dspark")])):
        flags = ["--confidence-threshold", "1.5" if command == "dspark eval" else "0.5", *more]
        words = "less than or equal to 1" if command == "dspark eval" else "needs --heads"
        result = CliRunner().invoke(app, [*command.split(), base, *flags])
        assert result.exit_code == 2 and words in " ".join(result.output.replace("│", " ").split()), result.output


MISSPELLED: dict[Any, dict[str, tuple[str, str]]] = {
    lm.MedusaModel: {"from_base": ("num_head", "num_heads"), "from_pretrained": ("own_lm_head", "own_lm_heads"),
                     "export": ("profil", "profile")},
    lm.MTPModel: {"from_base": ("num_step", "num_steps"), "from_pretrained": ("num_step", "num_steps"),
                  "save_pretrained": ("overwite", "overwrite")},
    lm.Eagle3Model: {"from_base": ("norm_befor_fc", "norm_before_fc"), "from_pretrained": ("num_step", "num_steps"),
                     "export": ("base_modl", "base_model")},
    lm.DFlashModel: {"from_base": ("gama", "gamma"), "from_pretrained": ("num_anchor", "num_anchors"),
                     "export": ("profil", "profile")},
    lm.DSparkModel: {"from_base": ("markov_ranks", "markov_rank"), "from_pretrained": ("ce_wieght", "ce_weight"),
                     "export": ("overwite", "overwrite")},
}  # fmt: skip
"""Class -> method -> an option that it does not have, and the nearest one that it has."""


@pytest.mark.parametrize("model_class", MISSPELLED, ids=lambda each: each.__name__)
def test_a_misspelled_option_is_no_fault_of_the_files(model_class: Any, tmp_path: Path) -> None:
    """The message names the nearest option; no file is read, none is written, and the model stays trainable."""
    base = lm.from_config(CONFIGS["llama-3.1"], dtype="float32").eval()
    for method, (name, nearest) in MISSPELLED[model_class].items():
        new = method.startswith("from_")
        call = getattr(model_class if new else model_class.from_base(base), method)
        args = {"from_base": [base], "from_pretrained": [base, tmp_path / "missing"]}.get(method, [tmp_path / "out"])
        base.requires_grad_()
        with pytest.raises(TypeError, match=f"{method}: unknown option '{name}'; did you mean '{nearest}'"):
            call(*args, **{name: 3})
        assert all(parameter.requires_grad for parameter in base.parameters())
    assert not list(tmp_path.iterdir())
    bad = {"divergence": "l3"} if model_class in (lm.DFlashModel, lm.DSparkModel) else {"decay": "much"}
    with pytest.raises(InputError, match=f"{next(iter(bad))}: must be"):
        model_class.from_pretrained(base, tmp_path / "missing", **bad)


def test_a_misspelled_option_of_generate() -> None:
    base = lm.from_config(CONFIGS["llama-3.1"], dtype="float32").eval()
    heads = lm.Eagle3Model.from_base(base, 2)
    for generate, name, nearest in (
        (base.generate, "drafts", "draft"), (base.generate, "max_new_token", "max_new_tokens"),
        (heads.generate, "treee", "tree"), (heads.generate, "epsilo", "epsilon"), (heads.generate, "top_pp", "top_p"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"generate: unknown option '{name}'; did you mean '{nearest}'"):
            generate([[1, 2]], **{name: 1})
    with pytest.raises(TypeError, match="unknown option 'temprature'; did you mean 'temperature'"):
        base.generate([[1, 2]], draft=heads, temprature=1.0)


@pytest.mark.parametrize("command", ["medusa", "mtp", "eagle", "dflash", "dspark"])
def test_a_misspelled_flag(command: str) -> None:
    for flag, nearest in (("export", "--overwrite"), ("eval", "--max-new-tokens"), ("train", "--learning-rate")):
        result = CliRunner().invoke(app, [command, flag, "a", "b", "c", nearest[:-1]])
        assert result.exit_code == 2 and nearest[:-1] in result.output and nearest in result.output


@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_a_base_whose_vocabulary_grows(folder: Path, kind: str, tmp_path: Path) -> None:
    """Heads with sizes of the vocabulary name it before they compute or are written; MTP heads have none."""
    base = lm.from_pretrained(folder / "base", dtype=torch.float32)
    heads = getattr(lm, HEADS[kind][1]).from_pretrained(base, folder / kind)
    grow_vocabulary(base, 310)
    ids = torch.arange(280, 310)[None]
    calls = [
        lambda: heads(ids, labels=ids).loss,
        lambda: heads.generate([[309, 5]], max_new_tokens=3),
        lambda: heads.save_pretrained(tmp_path / "heads"),
    ]
    for call in calls:
        if kind == "mtp":
            call()
            continue
        with pytest.raises(InputError, match=r"base: has 310 tokens, and the .* heads were made when it had 307; load"):
            call()
    assert (tmp_path / "heads").exists() == (kind == "mtp")


def test_heads_in_the_checkpoint_of_a_base_whose_vocabulary_grows(folder: Path, tmp_path: Path) -> None:
    base = lm.from_pretrained(folder / "base", dtype=torch.float32)
    lm.MedusaModel.from_pretrained(base, folder / "medusa", own_lm_heads=True).save_whole(tmp_path / "whole")
    base = lm.from_pretrained(tmp_path / "whole")
    grow_vocabulary(base, 310)
    with pytest.raises(
        CheckpointError, match=r"medusa_head.* does not fit .* 310 instead of 307; .*keep='without-head"
    ):
        base.save_pretrained(tmp_path / "out")
    base.save_pretrained(tmp_path / "out", keep="without-heads")
    assert lm.from_pretrained(tmp_path / "out").config.vocab_size == 310
