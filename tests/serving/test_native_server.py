"""The server of docs/serving.md with native models inside vLLM."""

import json
import os
import re
import shlex
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import tokenizers
from engine_process import PYTHON, needs_vllm
from hub_server import serving
from native_checkpoints import NEW, PROMPTS, ours, random_checkpoint, servable

pytestmark = needs_vllm


@pytest.mark.parametrize(("name", "start", "model"), [
    ("qwen3", r"python -m vllm\.entrypoints\.openai\.api_server --model MODEL ", "owner/of-hub"),
    ("olmo_hybrid", r"vllm serve MODEL (?=.*\n.*Hybrid)", "MODEL"),
])  # fmt: skip
def test_the_command_of_the_page(name: str, start: str, model: str, tmp_path: Path) -> None:
    """The server of docs/serving.md, in several processes that load the class as a plugin, answers concurrent requests;
    the second time from its prefix cache if it has one. The model is a hub id or a folder."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (options,) = re.findall(rf"^{start}(.*\n.*)$", page, re.MULTILINE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    wanted = ours(random_checkpoint(tmp_path / "MODEL", servable(name)))
    save_tokenizer(tmp_path / "MODEL")
    arguments = [
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        *shlex.split(options.replace("\\\n", " ")),
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    files = {path.name: path.read_bytes() for path in (tmp_path / "MODEL").iterdir()}
    with serving({"owner/of-hub": files}) as hub, (tmp_path / "log").open("w") as log, subprocess.Popen(
        [str(PYTHON), "-m", *arguments],
        cwd=tmp_path, stdout=log, stderr=log,
        env={**environment, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"},
    ) as server:  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                for _ in range(2):
                    assert list(threads.map(partial(completion, port), PROMPTS)) == wanted["tokens"]
        finally:
            server.terminate()
    assert (f"{model}/model.safetensors" in hub.served) == (model in hub.repos)


def completion(port: int, prompt: list[int]) -> list[int]:
    """The tokens of one greedy request."""
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; the end of its log if it stops before."""
    for _ in range(900):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"no answer from {url}: {log.read_text()[-3000:]}")


def save_tokenizer(folder: Path) -> None:
    """A word for each token."""
    words = {f"t{token}": token for token in range(131)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
