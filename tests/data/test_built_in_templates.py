"""Built-in chat templates write what the models of their names read: texts written by hand."""

import json
import re
from pathlib import Path

import pytest

from ligermodels.data.built_in_templates import TOKENS
from ligermodels.data.chat import ChatTemplate
from ligermodels.errors import CheckpointError, InputError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
]
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
WRITTEN = {
    "alpaca": ("<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\n", "Yes</s>\n\n"),
    "chatml": (CHATML, "Yes<|im_end|>\n"),
    "gemma": ("<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n", "Yes<end_of_turn>\n"),
    "llama3": (
        f"<s>{LLAMA.format('system')}Be brief.<|eot_id|>{LLAMA.format('user')}Hi<|eot_id|>{LLAMA.format('assistant')}",
        "Yes<|eot_id|>",
    ),
    "mistral": ("<s>[INST] Be brief.\n\nHi[/INST]", " Yes</s>"),
    "phi": ("<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n", "Yes<|end|>\n"),
    "qwen": (CHATML, "<think>\n\n</think>\n\nYes<|im_end|>\n"),
    "zephyr": ("<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n", "Yes</s>\n"),
}


def template_named(name: str, folder: Path, **tokens: str) -> ChatTemplate:
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return ChatTemplate.from_folder(folder, name)


@pytest.mark.parametrize("name", TOKENS)
def test_the_text_of_a_chat(tmp_path: Path, name: str) -> None:
    template = template_named(name, tmp_path, bos_token="<s>", eos_token="</s>")
    before, answer = WRITTEN[name]
    assert template.render(CHAT) == before + answer
    assert template.render(CHAT[:2], add_generation_prompt=True) == before
    special = set(re.findall(r"<\|\w+\|>|<\w+_of_turn>", before + answer))
    assert special == (set(TOKENS[name]) if name != "zephyr" else {"<|system|>", "<|user|>", "<|assistant|>"})


def test_a_template_that_ends_turns_with_eos_needs_it(tmp_path: Path) -> None:
    for name in ("alpaca", "mistral", "zephyr"):
        with pytest.raises(InputError, match=f"the chat template {name} ends turns with eos_token"):
            template_named(name, tmp_path).render(CHAT)
    with pytest.raises(CheckpointError, match=r"chat_template\), a file or a name: alpaca, chatml, gemma"):
        ChatTemplate.from_folder(tmp_path)
