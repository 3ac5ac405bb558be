"""The command line: results, exit codes, errors of one line, and output that other programs can read."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result
from zoo import LLAMA as BASE
from zoo import make_checkpoint

import ligermodels as lm
from ligermodels import ops, pretrained
from ligermodels.cli import app
from ligermodels.console import progress, show_table
from ligermodels.data.tokenizer import Tokenizer
from ligermodels.errors import LigerModelsError
from ligermodels.generation.text_stream import TextStream
from ligermodels.speculative.decoding import TreeStep

CORPUS = Path(__file__).read_text()
CONFIG = {**BASE, "vocab_size": 307, "hidden_size": 48, "num_hidden_layers": 2, "rope_theta": 777.0}
SPECIAL = ["<pad>", "<bos>", "<eos>"]


def run(*arguments: object, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), input=input)


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("cli") / "model"
    make_checkpoint(folder, CONFIG)
    save_tokenizer(folder, CONFIG["vocab_size"])
    return folder


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "broken"))


def ok(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def test_info_counts_what_the_checkpoint_holds(checkpoint: Path, broken: Path) -> None:
    found = json.loads(ok(run("info", checkpoint, "--json")).stdout)
    tensors = load_file(checkpoint / "model.safetensors")
    model = lm.from_pretrained(checkpoint)
    size = sum(tensor.nbytes for tensor in tensors.values())
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in model.new_state(1, 1).layers)
    assert found == {
        "checkpoint": str(checkpoint),
        "model_type": "llama",
        "layers": 2,
        "hidden_size": 48,
        "mlp_size": 97,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 14,
        "vocab_size": 307,
        "context": 128,
        "rope_type": "default",
        "rope_theta": 777.0,
        "tied_embeddings": False,
        "dtype": "float32",
        "attention": "sdpa",
        "parameters": size // 4,
        "embedding_parameters": 307 * 48,
        "weights_bytes": size,
        "kv_cache_bytes_per_token": cache,
        "full_context_bytes": size + 128 * cache,
        "adamw_bytes": 4 * size,
        "tensors": len(tensors),
        "stored_dtypes": ["float32"],
    }
    assert json.loads(ok(run("info", checkpoint, "--check", "--json")).stdout) == {
        **found,
        "files_as_written": 0,  # transformers wrote it
        "files_without_digest": 1,
    }
    again = broken.parent / "again"
    model.save_pretrained(again)
    shown = ok(run("info", again, "--check")).stdout
    assert re.search(r"files as written +1\n", shown) and re.search(r"files without digest +0\n", shown)
    sharded = broken.parent / "sharded"
    model.save_pretrained(sharded, max_shard_size=f"{size // 2}")
    shown = ok(run("info", sharded, "--check")).stdout
    assert re.search(r"files as written +3\n", shown) and re.search(r"files without digest +0\n", shown)
    with (sharded / "model-00002-of-00003.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    damaged = run("info", sharded, "--check")
    assert damaged.exit_code == 1 and "1 of 3 weight files" in damaged.stderr and "00002-of-00003" in damaged.stderr
    (broken / "model.safetensors").unlink()  # A config is enough to know what a model would be.
    shown = ok(run("info", broken)).stdout
    assert f"{size // 4:,}" in shown and "tensors" not in shown


def test_verify_tells_where_models_part(checkpoint: Path, broken: Path) -> None:
    agreed = ok(run("verify", checkpoint, "--tokens", 9, "--text", __file__)).stdout
    assert "Match: 9 tokens" in agreed and "decoder.blocks.1.mlp " in agreed
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    differs = run("verify", checkpoint, "--reference", broken)
    assert differs.exit_code == 1
    assert "First mismatch: decoder.blocks.1.mlp:" in differs.stdout
    found = run("verify", checkpoint, "--reference", broken, "--json")
    assert (
        json.loads(found.stdout)["errors"]["decoder.blocks.1.mlp"]
        > 1e-4
        > json.loads(found.stdout)["errors"]["decoder.blocks.0"]
    )
    assert (found.exit_code, json.loads(found.stdout)["first_difference"]) == (1, "decoder.blocks.1.mlp")
    ok(run("verify", checkpoint, "--reference", broken, "--tolerance", 1e3))


def test_generate_gives_the_models_tokens(checkpoint: Path) -> None:
    model, tokenizer = lm.from_pretrained(checkpoint), Tokenizer(checkpoint)
    prompts = ["def test_", "é", "import json\nimport"]
    options = ["--max-new-tokens", 17]
    wanted = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        new = model.generate([ids], max_new_tokens=17)[0].tolist()
        wanted.append(tokenizer.decode(new)[len(prompt) :])
        alone = ok(run("generate", checkpoint, *options, input=prompt + "\n"))
        assert alone.stdout == wanted[-1] + "\n"  # Streamed, token by token.
        assert "tokens/s" in alone.stderr
    many = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    found = json.loads(ok(run("generate", checkpoint, *options, *many, "--json")).stdout)
    assert [each["completion"] for each in found["completions"]] == wanted
    assert found["new_tokens"] == sum(each["new_tokens"] for each in found["completions"]) <= 3 * 17

    sampled = [
        ok(
            run("generate", checkpoint, *options, "--prompt", "a", "--sample", "--temperature", 2, "--seed", seed)
        ).stdout
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_batch_invariant_is_passed_on(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes, forward = [], lm.CausalLM.forward

    def recorded(model: lm.CausalLM, *args: Any, **options: Any) -> Any:
        modes.append(ops.set_batch_invariant.value)
        return forward(model, *args, **options)

    monkeypatch.setattr(lm.CausalLM, "forward", recorded)
    arguments = ["generate", checkpoint, "--max-new-tokens", 3, "--prompt", "a", "--prompt", "def test_"]
    usual = ok(run(*arguments)).stdout
    assert modes and not any(modes)
    modes.clear()
    assert ok(run(*arguments, "--batch-invariant")).stdout == usual
    assert modes and all(modes)


def test_export_casts_and_shards(checkpoint: Path, tmp_path: Path) -> None:
    ok(run("export", checkpoint, tmp_path / "out", "--dtype", "bfloat16", "--max-shard-size", "60KB"))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    again, model = lm.from_pretrained(tmp_path / "out"), lm.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    for (name, found), wanted in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, wanted), name


def test_medusa_from_training_to_generation(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": part}) + "\n" for part in CORPUS.split("\n\n\n")))
    heads = tmp_path / "heads"
    setting = ["--num-heads", 3, "--lm-head", "shared", "--seq-len", 50, "--batch-tokens", 200]
    setting += ["--validation-fraction", 0.2]
    trained = ok(
        run("medusa", "train", checkpoint, "--data", data, "--out", heads, *setting, "--steps", 12, "--lr", 0.02)
    )
    losses = [float(loss) for loss in re.findall(r"training: \d+ of 12, loss ([\d.]+)", trained.stderr)]
    assert len(losses) == 12 and sum(losses[6:]) < sum(losses[:6])
    assert [line.split()[:2] for line in trained.stdout.splitlines()[1:]] == [["0", "t+2"], ["1", "t+3"], ["2", "t+4"]]
    weights = load_file(heads / "model.safetensors")
    assert all(tensor.any() for tensor in weights.values()), "ResBlocks start at zero: some were not trained"

    found = json.loads(
        ok(run("medusa", "eval", checkpoint, heads, "--data", data, "--max-new-tokens", 9, "--json")).stdout
    )
    accuracies = torch.tensor([found["accuracies"][str(k)] for k in range(1, 11)])
    assert accuracies.shape == (10, 3) and (accuracies.diff(dim=0) >= 0).all() and accuracies[-1].min() > 0
    outcome = found["generation"]
    assert outcome["same"] == outcome["prompts"] >= 4
    assert 1 < found["expected_tokens_per_step"] < 4 and 1 <= outcome["tokens_per_step"] <= 4

    prompt = ["--prompt", "def ", "--max-new-tokens", 11]
    fast = ok(run("generate", checkpoint, "--medusa", heads, *prompt))
    assert fast.stdout == ok(run("generate", checkpoint, *prompt)).stdout
    assert "tokens per step" in fast.stderr
    with monkeypatch.context() as broken:  # Ctrl-C in a step: the text of those before has been shown, and stays
        steps, take = [], TreeStep.__call__

        def interrupted(*arguments: Any) -> None:
            steps.append(1)
            if len(steps) == 3:
                raise KeyboardInterrupt
            take(*arguments)

        broken.setattr(TreeStep, "__call__", interrupted)
        result = run("generate", checkpoint, "--medusa", heads, *prompt)
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    shown = result.stdout.removesuffix("\n")
    assert shown and result.stdout.endswith("\n") and len(shown) < len(fast.stdout) and fast.stdout.startswith(shown)

    ok(run("export", checkpoint, tmp_path / "whole", "--heads", heads))
    shown = ok(run("info", tmp_path / "whole", "--json"))
    assert json.loads(shown.stdout)["medusa_heads"]["heads"] == 3 and not shown.stderr  # no field is unknown

    ok(run("medusa", "export", checkpoint, heads, tmp_path / "vllm", "--profile", "vllm"))
    exported = load_file(tmp_path / "vllm" / "model.safetensors")
    head = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    assert all(torch.equal(exported[f"lm_heads.{i}.weight"], head) for i in range(3))


def test_demo_is_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    import ligermodels.demo

    calls: list[tuple[Path, str]] = []
    monkeypatch.setattr(ligermodels.demo, "run_demo", lambda folder, sizes: calls.append((folder, sizes.device)))
    ok(run("demo", "--out", "here"))
    ok(run("demo", "--size", "gpu"))
    assert calls == [(Path("here"), "cpu"), (Path("demo-output"), "cuda")]


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def without(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).unlink()


def with_content(file: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(content)


def lose_a_shard(folder: Path) -> None:
    lm.from_pretrained(folder).save_pretrained(folder, max_shard_size="60KB", overwrite=True)
    (folder / "model-00002-of-00006.safetensors").unlink()


def lose_two_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")


def begin(*files: str) -> Callable[[Path], object]:
    """What a command leaves that was stopped."""

    def left(folder: Path) -> None:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text("{}")

    return left


GENERATE = ["generate", "{folder}", "--prompt", "x"]
TRAIN = ["medusa", "train", "{folder}", "--out", "{folder}/heads", "--data"]
WRONG: dict[str, tuple[Callable[[Path], object] | None, list[str], str]] = {
    "no folder": (None, ["info", "{folder}/nowhere"], "nowhere"),
    "missing shard": (lose_a_shard, ["info", "{folder}"], "model-00002-of"),
    "missing tensors": (lose_two_tensors, ["export", "{folder}", "{folder}/out"], "lm_head.weight"),
    "model_type": (with_content("config.json", '{"model_type": "gpt5"}'), ["info", "{folder}"], "'gpt5'"),
    "not JSON": (with_content("config.json", "{"), GENERATE, "config.json: not JSON"),
    "no config": (without("config.json"), ["info", "{folder}"], "config.json"),
    "no weights": (without("model.safetensors"), ["verify", "{folder}"], "model.safetensors"),
    "no tokenizer": (without("tokenizer.json"), GENERATE, "tokenizer.json: no such file"),
    "bad tokenizer": (with_content("tokenizer.json", "{}"), GENERATE, "tokenizer.json: not a tokenizer"),
    "output in use": (None, ["export", "{folder}", "{folder}"], "not an empty folder"),
    "output of training in use": (
        None,
        ["medusa", "train", "{folder}", "--out", "{folder}", "--data", "x"],
        "--overwrite",
    ),
    "training begun": (begin("heads/checkpoints/step-3/run.json"), [*TRAIN, "x"], "--resume continues"),
    "data begun": (
        begin(".own.jsonl.progress", ".own.jsonl.partial"),
        ["medusa", "self-distillation-data", "{folder}", "--data", "x", "--out", "{folder}/own.jsonl"],
        "--resume continues",
    ),
    "empty prompt": (None, ["generate", "{folder}", "--prompt", "x", "--prompt", ""], "prompt 2 is empty"),
    "empty input": (None, ["generate", "{folder}"], "prompt 1 is empty"),
    "top-p": (None, [*GENERATE, "--sample", "--top-p", "7"], "top_p"),
    "shard size": (None, ["export", "{folder}", "{folder}/out", "--max-shard-size", "big"], "max_shard_size"),
    "no data": (None, [*TRAIN, "{folder}/nothing.txt"], "nothing.txt"),
    "data not text": (
        None,
        [*TRAIN, "{folder}/model.safetensors"],
        "has the suffix '.safetensors', which is of no known kind",
    ),
    "text not text": (None, ["verify", "{folder}", "--text", "{folder}/model.safetensors"], "not UTF-8"),
    "one document": (
        lambda folder: (folder / "one.jsonl").write_text('{"text": "a"}'),
        [*TRAIN, "{folder}/one.jsonl"],
        "--validation-fraction 0",
    ),
    "no heads": (None, [*GENERATE, "--medusa", "{folder}"], "and no MTP head for this model"),
    "backend": (None, [*GENERATE, "--attention", "fastest"], "'fastest'"),
    "tolerance": (None, ["verify", "{folder}", "--tolerance", "nan"], "--tolerance: must be a number"),
    "layers in float8": (None, ["verify", "{folder}", "--float8", "--float8-exclude", "x"], "--float8-exclude: 'x'"),
    "quantised layers": (
        None,
        [*GENERATE, "--quantize", "int4", "--quantize-exclude", "x"],
        "--quantize-exclude: 'x' matches no layer",
    ),
    "rank": (
        None,
        [
            "plan",
            "{folder}",
            "--gpus",
            "1",
            "--memory",
            "9GB",
            "--tokens",
            "8",
            "--seq-len",
            "8",
            "--lora-rank",
            "99999",
        ],
        "--lora-rank: must be at most",
    ),
    "format": (None, ["medusa", "export", "{folder}", "{folder}/heads", "{folder}/out", "--profile", "vlm"], ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_line_and_exit_code_1(broken: Path, case: str) -> None:
    breaking, arguments, words = WRONG[case]
    if breaking:
        breaking(broken)
    before = sorted(broken.rglob("*"))
    result = run(*(argument.format(folder=broken) for argument in arguments))
    assert result.exit_code == 1, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.stderr.splitlines()[-1:] == errors and words in errors[0]
    assert "Traceback" not in result.output and result.stdout == ""
    assert sorted(broken.rglob("*")) == before, "something was left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate {model} --prompt x --heads {here}/none", "none"),
        ("chat {model} --heads {here}/none", "none"),
        ("chat {model} --adapter {here}/none", "none"),
        ("export {model} {model}", "--overwrite"),
        ("export {model} {here}/out --heads {here}/none", "none"),
        ("verify {model} --reference {here}/none", "none"),
        ("verify {model} --text {here}/none", "none"),
        ("medusa eval {model} {here}/none --data {here}/text.txt", "none"),
        ("medusa eval {model} {model} --data {here}/none", "none"),
        ("medusa eval {model} {model} --data {here}/text.txt --plot {here}/none/plot.png", "none"),
        ("medusa export {model} {here}/none {here}/out", "none"),
        ("medusa train {model} --data {here}/text.txt --out {here}/out --start-from {here}/none", "none"),
        ("medusa train {model} --data {here}/text.txt --out {here}/text.txt", "text.txt"),
        ("train {model} --data {here}/text.txt --out {here}/out --chat-template {here}/none", "none"),
        ("train {here}/none --data {here}/text.txt --out {here}/out", "none"),
        ("train {model} --data {here}/none --out {here}/out", "none"),
        ("train {model} --recipe {here}/none.yaml --out {here}/out", "none.yaml"),
        ("mtp export {model} {here}/none {here}/out", "none"),
        ("medusa self-distillation-data {model} --data {here}/text.txt --out {here}/none/own.jsonl", "none"),
    ],
)
def test_paths_are_checked_before_work_begins(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("weights have been read")

    monkeypatch.setattr(pretrained, "reading", work)
    (tmp_path / "text.txt").write_text(CORPUS)
    result = run(*arguments.format(model=checkpoint, here=tmp_path).split())
    assert result.exit_code == 1, (result.output, result.exception)
    assert result.stderr.count("error: ") == 1 and words in result.stderr.splitlines()[-1] and result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("generate", "PATH"),
        ("genrate", "genrate"),
        ("--verbose info x", "--verbose"),
        ("medusa trian", "trian"),
        ("generate x --prompt a --dtype int3", "float32"),
        ("generate x --prompt a --device gpu", "gpu"),
        ("generate x --prompt a --max-new-tokens 0", "max-new-tokens"),
        ("generate x --prompt a --greedy --temperature 2", "--sample"),
        ("generate x --prompt a --draft-tree 3,2,5", "--heads"),
        ("medusa train x --out y", "--data"),
        ("medusa train x --out y --data z --lm-head mine", "shared"),
        ("train M --data a.txt b.txt --out o", "argument(s) (b.txt); give --data for each file, or quote a pattern"),
        ("info M b.txt", "argument(s) (b.txt) (see"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: str, words: str) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert re.fullmatch(r"error: .* \(see `\S.* --help`\)", line) and words in line


@pytest.mark.parametrize("size", [2**61, None])
def test_want_of_memory_is_one_line(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, size: int | None) -> None:
    def take(*arguments: object, **options: object) -> None:
        if size is None:
            raise MemoryError
        torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(lm.CausalLM, "forward", take)
    result = run("generate", checkpoint, "--prompt", "x")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith(
        f"error: out of memory{'' if size is None else f' for {size:,} bytes'}: "
    )


def test_debug_lets_the_error_through(broken: Path) -> None:
    (broken / "config.json").unlink()
    assert isinstance(run("--debug", "info", broken).exception, LigerModelsError)
    with_environment = CliRunner().invoke(app, ["info", str(broken)], env={"LIGERMODELS_DEBUG": "1"})
    assert isinstance(with_environment.exception, LigerModelsError)


def test_interrupted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lm.CausalLM, "forward", interrupted)
    result = run("generate", checkpoint, "--prompt", "x")
    assert (result.exit_code, result.output.strip()) == (130, "interrupted")


def test_verify_without_transformers_names_the_extra(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("verify", checkpoint)
    assert result.exit_code == 1 and "pip install 'ligermodels[verify]'" in result.stderr


# -- as a process ------------------------------------------------------------------------------------------------------


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLORTERM")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ligermodels", *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def test_a_process_off_a_terminal(checkpoint: Path, tmp_path: Path) -> None:
    """Without control characters; and without torch where it is not needed, which takes seconds to import."""
    code = "import sys, ligermodels.cli; assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    process = start("export", checkpoint, tmp_path / "out")
    assert process.communicate() == ("", f"wrote {tmp_path / 'out'}\n")
    assert process.returncode == 0


def test_completion_in_a_shell() -> None:
    """What the script that `--install-completion` installs calls; without torch, as that would take seconds."""
    environment = {**os.environ, "_LIGERMODELS_COMPLETE": "complete_bash", "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, "-m", "ligermodels"]
    for words, at, wanted in (
        ("ligermodels ge", 1, "generate"),
        ("ligermodels medusa train --warm", 3, "--warmup-steps"),
    ):
        environment |= {"COMP_WORDS": words, "COMP_CWORD": str(at)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [wanted], done.stderr[-500:]
        assert " torch\n" not in done.stderr and " typer\n" in done.stderr
    # typer finds out the shell by the parent process, which need not be one here.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    show = [*command, "--show-completion", "bash"]
    shown = subprocess.run(show, env=environment, capture_output=True, text=True, check=True).stdout
    assert "_LIGERMODELS_COMPLETE=complete_bash" in shown and "complete -o default" in shown


def test_a_repository_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = run("info", "nobody/nothing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"error: .*nobody/nothing.*\n", result.stderr)


def test_the_reader_goes_away(checkpoint: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = start("info", checkpoint, stdout=writer)
    os.close(writer)
    assert process.communicate()[1] == ""
    assert process.returncode == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines_of(screen: io.StringIO) -> list[str]:
    return [re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", line).replace("\r", "") for line in screen.getvalue().splitlines()]


def test_80_columns_elide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither step nor time of a progress bar, nor a number or a word of a table."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen, note = Terminal(), "loss 6.2530, 11,588 tokens/s, head accuracy 10% 11% 33% 22% 11% 50%, 112.4 GiB"
    monkeypatch.setattr(sys, "stderr", screen)
    for title in ("training", f"loading {'a-long-path/' * 12}"):
        screen.truncate(screen.seek(0))
        with progress(title) as update:
            update(12345, 100000, note)
        shown = lines_of(screen)
        assert max(map(len, shown[1:])) <= 80 and "…" not in screen.getvalue()
        assert any("12345/100000" in line and "-:--:--" in line for line in shown)
        assert (
            note in " ".join(line.strip() for line in shown)
            and "".join(shown).count("a-long-path/") >= len(title) // 13
        )

    columns, row = ["head", "token", "loss", *(f"top-{k}" for k in range(1, 11))], [f"{i}00.{i}%" for i in range(10)]
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    show_table(columns, [("0", "t+2", "6.253", *row), ("1", "t+3", "6.253", *row)], numbers=range(2, 13))
    shown = lines_of(screen)
    assert max(map(len, shown)) <= 80
    words = [word for line in shown for word in line.split()]
    for cell, count in {**dict.fromkeys(columns[1:], 1), **dict.fromkeys(row, 2), "t+3": 1}.items():
        assert words.count(cell) == count, cell
    assert words.count("head") == words.count("1") == 2  # each part has the first column
    screen.truncate(screen.seek(0))
    show_table(["", ""], [("x" * 100, "y" * 100)])
    assert max(map(len, lines_of(screen))) <= 80 and screen.getvalue().count("x") == screen.getvalue().count("y") == 100


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for screen, wanted in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", screen)
        with progress("loading [x]", in_bytes=True) as update:
            update(3000, 6000)
        assert ("loading [x]" in screen.getvalue() and "\x1b[" in screen.getvalue()) == wanted
        assert bool(screen.getvalue()) == wanted


def test_text_of_tokens_that_split_characters(checkpoint: Path) -> None:
    """Every byte of such a character is a token of its own here, and none may come out alone."""
    tokenizer, text = Tokenizer(checkpoint), "naïve 汉字 👩‍💻 end"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, ids[:3])
    pieces = [stream.push(token) for token in ids[3:]]
    assert "".join(pieces) == text[len(tokenizer.decode(ids[:3])) :]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces) and "" in pieces
    cut = tokenizer.continuation(ids, tokenizer.encode("汉")[1:-1])
    assert cut.endswith("\N{REPLACEMENT CHARACTER}")  # It ends within a character, and that shows.


def test_progress_off_a_terminal_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each note, and one every LINE_SECONDS without a note; no carriage return."""
    screen, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress("reading") as update:
        for done, seconds in ((1, 0), (1000, 9), (2000, 11), (2500, 15), (3000, 22)):
            now[0] = float(seconds)
            update(done, 4000)
        update(4000, 4000, "loss 1")
    assert screen.getvalue() == "reading: 2,000 of 4,000\nreading: 3,000 of 4,000\nreading: 4,000 of 4,000, loss 1\n"
