"""Native models inside vLLM 0.32 on the CPU: its tokens and log-probabilities are ours, in float32.

`make test-serving` makes the environment and runs this; or LIGERMODELS_VLLM_PYTHON names the Python of one in which
this package is installed too.
"""

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
from typing import Any

import pytest
import tokenizers
import torch
from zoo import CONFIGS, EACH_FAMILY

import ligermodels as lm
from ligermodels.integrations.vllm import HYBRID_ARCHITECTURE
from ligermodels.integrations.vllm.plan import StatePlan, plan_mixers
from ligermodels.layers.initialization import persistent_tensors

PYTHON = os.environ.get("LIGERMODELS_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="LIGERMODELS_VLLM_PYTHON names no interpreter")

LENGTHS, NEW = (70, 5, 41, 23), 12
PROMPTS = [torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
HEAD_DIM = 32
"""vLLM's attention on the CPU has no odd widths of heads; tests/integrations/test_vllm_models.py has them."""
LATENT = {"qk_rope_head_dim": 10, "qk_nope_head_dim": HEAD_DIM - 10, "v_head_dim": 18}
WIDE_VALUES = {"deepseek_v3-without-experts": {"v_head_dim": 2 * HEAD_DIM}}
UNKNOWN = {"internlm3", "iquestcoder", "lfm3", "bailing_hybrid"}
"""vLLM reads config.json by transformers, which does not have these types."""
OPTIONS = {"gemma4_text-keys-as-values", "gemma4_text-per-layer-inputs", "gemma4_text-experts", "mistral4-groups"}
OPTIONS |= {"phi3-short", "ministral3-window", "glm4_moe-qk-norm", "deepseek_v3-without-experts"}
OPTIONS |= {"falcon_h1-norms-and-biases", "nemotron_h-latent-experts-and-biases", "lfm2-biases"}
FACTORS = {"short_factor": [1 + 0.03 * i for i in range(16)], "long_factor": [1.5 + 0.4 * i for i in range(16)]}


def servable(name: str) -> dict[str, Any]:
    """A config of the zoo with heads of widths that vLLM has, in attention alone."""
    config = {field: value for field, value in CONFIGS[name].items() if not field.startswith("_x")}
    config |= {"head_dim": HEAD_DIM, "hidden_size": HEAD_DIM * config["num_attention_heads"]}
    if "qk_rope_head_dim" in config:
        config |= {**LATENT, **WIDE_VALUES.get(name, {})}
        del config["head_dim"]
    config |= {name: config["hidden_size"] for name in ("block_dim", "conv_dim", "conv_dim_out") if name in config}
    if "mamba_expand" in config:
        config["mamba_d_head"] = "auto"
    if "global_head_dim" in config:
        config["global_head_dim"] = 2 * HEAD_DIM
    if "short_factor" in (config.get("rope_scaling") or {}):
        config["rope_scaling"] = {**config["rope_scaling"], **FACTORS}
    return config


def has_states(name: str) -> bool:
    """Whether some mixers of a config are recurrent."""
    plans = plan_mixers(lm.from_config(servable(name), device="meta").config, 128, torch.float32)
    return any(isinstance(plan, StatePlan) for plan in plans.values())


NAMES = sorted({*EACH_FAMILY, *OPTIONS} - UNKNOWN) if PYTHON else []
HYBRIDS = set(filter(has_states, NAMES))
HYBRID = {"hf_overrides": {"architectures": [HYBRID_ARCHITECTURE]}, "enable_prefix_caching": False}


def random_checkpoint(folder: Path, config: dict[str, Any], seed: int = 0) -> lm.CausalLM:
    """A checkpoint none of whose tensors has its initial value, and its model."""
    torch.manual_seed(seed)
    model = lm.from_config(config, dtype="float32").eval()
    with torch.no_grad():
        for tensor in persistent_tensors(model).values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.15)
    model.save_pretrained(folder)
    return model


def ours(model: lm.CausalLM, prompts: list[list[int]] = PROMPTS) -> dict[str, list[Any]]:
    """Greedy tokens after prompts, and their log-probabilities by one forward pass over all tokens."""
    found: dict[str, list[Any]] = {"tokens": [], "log_probs": []}
    for prompt in prompts:
        ids = model.generate([prompt], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        with torch.no_grad():
            log_probs = model.log_probs(ids, ids).log_probs
        assert log_probs is not None
        found["tokens"].append(ids[0, len(prompt) :].tolist())
        found["log_probs"].append(log_probs[0, len(prompt) - 1 : -1].tolist())
    return found


def served(asked: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What vLLM answers for each model, in one process beside the workers of tensor parallelism; what it logs is the
    last answer's "log"."""
    file = folder / "asked.json"
    file.write_text(json.dumps([{"prompts": PROMPTS, "max_tokens": NEW, "options": {}, **each} for each in asked]))
    command = [str(PYTHON), str(Path(__file__).with_name("serve_native.py")), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    answers[-1]["log"] = done.stdout + done.stderr
    return answers


def assert_equal(theirs: dict[str, Any], wanted: dict[str, list[Any]]) -> None:
    assert "error" not in theirs, theirs["error"]
    assert theirs["tokens"] == wanted["tokens"]
    different = {tuple(tokens) for tokens in wanted["tokens"]}
    assert len(different) == len(PROMPTS)  # a model that repeats one shows little
    torch.testing.assert_close(torch.tensor(theirs["log_probs"]), torch.tensor(wanted["log_probs"]), atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]:
    """What vLLM and this package generate for each config."""
    folder = tmp_path_factory.mktemp("native")
    wanted = [ours(random_checkpoint(folder / name, servable(name))) for name in NAMES]
    asked = [{"model": str(folder / name), "options": HYBRID if name in HYBRIDS else {}} for name in NAMES]
    halves = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    with ThreadPoolExecutor(len(halves)) as threads:
        found = [answer for half in threads.map(served, halves, (folder, folder / NAMES[0])) for answer in half]
    return dict(zip(NAMES, zip(found, wanted, strict=True), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_tokens_and_log_probs(name: str, answers: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]]) -> None:
    """Four requests at once, with prefills in parts of 32 tokens."""
    assert_equal(*answers[name])


CACHING: dict[str, Any] = {"enable_prefix_caching": True}
FIRST, OTHER = (torch.randint(3, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 40))
BEGUN = [FIRST, FIRST[:50] + OTHER[:20], FIRST[:33], FIRST[:64] + OTHER[20:]]
"""Prompts that begin alike."""


def test_states_of_prefixes(tmp_path: Path) -> None:
    """Recurrent states from vLLM's prefix cache: of a block of the prompt itself, and of a longer or other prompt."""
    blocks = {"qwen3_next": 32, "bamba": 64, "lfm2": 32}  # vLLM's, for attention to have pages as large as states
    models = {name: random_checkpoint(tmp_path / name, servable(name)) for name in blocks}
    options = {**HYBRID, **CACHING, "max_num_batched_tokens": 64}
    asked = {"prompts": BEGUN, "options": options, "steps": [None, None]}
    found = iter(served([{"model": str(tmp_path / name), **asked} for name in blocks], tmp_path))
    for name, block in blocks.items():
        wanted, first, second = ours(models[name], BEGUN), next(found), next(found)
        assert_equal(first, wanted)
        assert_equal(second, wanted)
        assert second["cached"] == [len(prompt) // block * block for prompt in BEGUN]


@pytest.mark.parametrize(
    ("name", "options", "apart"), [("qwen3_next", {**HYBRID, **CACHING}, False), ("qwen3_moe", CACHING, True)]
)
def test_updates(name: str, options: dict[str, Any], apart: bool, tmp_path: Path) -> None:
    """New weights in a running engine, in this process or another, from a model and by vLLM's own reload; nothing is
    left over."""
    config = {**servable(name), "tie_word_embeddings": True}
    old, new = (random_checkpoint(tmp_path / f"{seed}", config, seed) for seed in range(2))
    asked = {"model": str(tmp_path / "0"), "options": options, "apart": apart}
    update, back = ["update_weights", str(tmp_path / "1")], ["update_weights", str(tmp_path / "0")]
    steps = [None, update, ["reload_weights", str(tmp_path / "0")], update, back, update]
    found = served([{**asked, "steps": steps}], tmp_path)
    by_old, by_new = ours(old), ours(new)
    assert by_old["tokens"] != by_new["tokens"]
    for theirs, each in zip(found, [by_old, by_new] * 3, strict=True):
        assert_equal(theirs, each)
    used = [theirs["resources"] for theirs in found[-3:]]
    assert used[0] == used[1] == used[2] and used[0][1] == 0


EVEN: dict[str, dict[str, Any]] = {"gemma2": {"num_key_value_heads": 2}}
DIVIDED = ("gemma2", "gpt_oss", "deepseek_v3", "qwen3_next")
"""Windows, softcaps and a tied head; experts and sinks; latent attention; recurrent mixers. Each engine takes long to
start; tests/integrations/test_vllm_models.py has more of them."""
RANKS = {"tensor_parallel_size": 2}


def divisible(name: str) -> dict[str, Any]:
    """A servable config with sizes that two ranks divide."""
    config = {**servable(name), **EVEN.get(name, {})}
    return config | {field: size + size % 2 for field, size in config.items() if field.endswith("intermediate_size")}


def test_tensor_parallel(tmp_path: Path) -> None:
    """Two workers, each with its half of the heads and channels; new weights, from a model and by vLLM's own reload, by
    way of the engine's own process; and a refusal."""
    configs = {name: divisible(name) for name in DIVIDED}
    configs["qwen3"] = {**divisible("qwen3"), "num_key_value_heads": 3}
    models = {name: random_checkpoint(tmp_path / name, config) for name, config in configs.items()}
    models["new"] = random_checkpoint(tmp_path / "new", configs["gpt_oss"], 1)
    asked: list[dict[str, Any]] = []
    for name in configs:
        options = {**(HYBRID if name in HYBRIDS else {}), **RANKS}
        asked.append({"model": str(tmp_path / name), "options": options})
        if name == "gpt_oss":
            new, old = str(tmp_path / "new"), asked[-1]["model"]
            asked[-1]["steps"] = [None, ["update_weights", new], ["update_weights", old], ["reload_weights", new]]
            asked[-1]["apart"] = True
    *found, refusal = served(asked, tmp_path)
    names = [name for each in DIVIDED for name in ([each, "new", each, "new"] if each == "gpt_oss" else [each])]
    wanted = {name: ours(models[name]) for name in names}
    for name, theirs in zip(names, found, strict=True):
        assert_equal(theirs, wanted[name])
    assert "error" in refusal  # of the workers, in their log
    message = r"blocks\[0\]\.mixer\.num_kv_heads \(num_key_value_heads\): 3 .* Numbers of ranks that work .*: 1"
    assert re.search(f"ConfigError: {message}", refusal["log"])


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bamba", {}, r"blocks.0.mixer: keeps a recurrent state, .*LigerModelsHybridForCausalLM"),
    ("lfm2", {**HYBRID, **CACHING, "prefix_match_unit": 16}, "prefix_match_unit: .* whole blocks"),
    ("qwen3_next", {**HYBRID, "mamba_cache_dtype": "bfloat16"}, "mamba_cache_dtype: must be auto or float32"),
    ("qwen2", HYBRID, "architectures: LigerModelsHybridForCausalLM is for models with recurrent mixers"),
    ("phi3-long", {}, "rope: LongRopeScaling .* give --max-model-len 4 or less"),
    ("llama-3", {"quantization": "fp8", "dtype": "bfloat16"}, "quantization: fp8 "),
    ("llama-2", {"enable_lora": True}, "enable_lora: "),
    ("qwen3_moe", {"enable_expert_parallel": True}, "enable_expert_parallel: tensor_parallel_size divides"),
    (
        "qwen3",
        {"hf_overrides": {"architectures": ["LigerModelsForCausalLM"], "rms_norm_eps": 0.5}},
        "hf_overrides: may name architectures alone",
    ),
    # The last one, because vLLM starts no other engine in a process in which one with drafts has failed.
    ("nemotron_h", {**HYBRID, "speculative_config": NGRAM}, "speculative_config: .* after rejected drafts"),
]


def test_refusals(tmp_path: Path) -> None:
    """At load, with errors of this package that name the reason."""
    for name, _, _ in REFUSED:
        lm.from_config(CONFIGS[name]).save_pretrained(tmp_path / name)
    found = served([{"model": str(tmp_path / name), "options": options} for name, options, _ in REFUSED], tmp_path)
    for answer, (_, _, message) in zip(found, REFUSED, strict=True):
        assert re.search(f"^ConfigError: {message}", answer["error"])


@pytest.mark.parametrize(("name", "start"), [
    ("qwen3", r"python -m vllm\.entrypoints\.openai\.api_server --model MODEL "),
    ("olmo_hybrid", r"vllm serve MODEL (?=.*\n.*Hybrid)"),
])  # fmt: skip
def test_the_command_of_the_page(name: str, start: str, tmp_path: Path) -> None:
    """The server of docs/serving.md, in several processes that load the class as a plugin, answers concurrent requests;
    the second time from its prefix cache if it has one."""
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
        "MODEL",
        *shlex.split(options.replace("\\\n", " ")),
        "--dtype",
        "float32",
        "--max-model-len",
        "128",
        "--port",
        str(port),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (tmp_path / "log").open("w") as log, subprocess.Popen(
        [str(PYTHON), "-m", *arguments], cwd=tmp_path, env=environment, stdout=log, stderr=log
    ) as server:  # fmt: skip
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, tmp_path / "log")
            with ThreadPoolExecutor(len(PROMPTS)) as threads:
                for _ in range(2):
                    assert list(threads.map(partial(completion, port), PROMPTS)) == wanted["tokens"]
        finally:
            server.terminate()


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
