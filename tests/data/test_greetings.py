"""Chats that the assistant begins, as prompts."""

import json
from pathlib import Path

from ligermodels.data.documents import Documents
from ligermodels.data.prompts import OpenChat, opening_prompts


def test_a_greeting_that_the_template_does_not_prompt_for(base: Path, tmp_path: Path) -> None:
    """As Qwen3.5's, which needs a turn of the user. Such chats can be trained on."""
    needs_a_question = (
        "{% if 'user' not in messages | map(attribute='role') %}{{ raise_exception('no user') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "greets.jinja").write_text(needs_a_question)
    turns = [("system", "Be"), ("assistant", "Hello"), ("user", "Why"), ("assistant", "So"), ("user", "And")]
    messages = [{"role": role, "content": content} for role, content in turns]
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"messages": messages}))
    documents = Documents.of_checkpoint(base, [file], chat_template=str(tmp_path / "greets.jinja"))
    (prompt,) = opening_prompts(documents, documents.corpus.split(0, 0)[0], 9, prompt_tokens=4)
    text = documents.template.render(messages[:3], add_generation_prompt=True)
    assert prompt == documents.tokenizer.encode_with_offsets(text)[0]
    chat = OpenChat([], list(messages), {})
    assert chat.prompt(documents, 0) == prompt
    assert chat.messages == [messages[0], {**messages[1], "weight": 0}, messages[2]]
    assert chat.prompt(documents, 0) is None
