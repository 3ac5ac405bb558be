"""Chat templates in the formats that the models' publishers gave them, and small tokenizers made like the models'."""

import json
from pathlib import Path

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from ligermodels.data.chat import ChatTemplate
from ligermodels.data.tokenizer import Tokenizer

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

LLAMA_3_1 = """\
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n" }}
{%- if messages[0].role == "system" %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- "<|eot_id|>" }}
{%- if tools is not none %}
    {{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
    {{- messages[0].content | trim + "<|eot_id|>" }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if "tool_calls" in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}" }}
        {{- "<|eot_id|>" if builtin_tools is not defined else "<|eom_id|>" }}
    {%- elif message.role in ("tool", "ipython") %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message["role"] != "tool" and not message.get("tool_calls") %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if message == user_messages[-1] and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.get("tool_calls") %}
        {{- "[TOOL_CALLS] " + (message.tool_calls | tojson) + eos_token }}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS] " + message["content"] + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

QWEN_2_5 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

TEMPLATES = {"llama-3": LLAMA_3, "llama-3.1": LLAMA_3_1, "mistral": MISTRAL, "gemma-2": GEMMA_2, "qwen2.5": QWEN_2_5}
_LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL = {
    "llama-3": _LLAMA,
    "llama-3.1": [*_LLAMA, "<|eom_id|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gemma-2": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "qwen2.5": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
}
"""Special tokens, the first two BOS and EOS; but Qwen2.5 has no BOS, and <|im_end|> is its EOS."""
TOKENS = {
    name: {"bos_token": special[0], "eos_token": special[1]} if name != "qwen2.5" else {"eos_token": special[1]}
    for name, special in SPECIAL.items()
}

# How the models' tokenizers cut text before BPE. Llama-3 takes up to three digits together, Qwen2.5 one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "user assistant model system Hi Hello there How are you I am fine thanks You be brief . ? ! , \n \n\n "
    "Cutting Knowledge Today Date December Jul 26 202 ipython"
)
BYTE_LEVEL = ("llama-3", "llama-3.1", "qwen2.5")


def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    """A tokenizer in the manner of the model's: bytes behind a pattern, or pieces with ▁ for spaces."""
    words = sorted({word for plain in TEXT.split(" ") for word in (plain, f" {plain}")})
    if name in BYTE_LEVEL:
        encoded = ["".join(piece) for piece in map(as_bytes, words)]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(bpe([*alphabet], encoded))
        pattern = tokenizers.Regex(WORDS.replace("{1,3}", "") if name == "qwen2.5" else WORDS)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        # Trimmed offsets, the worst case: of a token that is white space nothing is left.
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        # Mistral's has no line break but the byte of one.
        pieces = [word.replace(" ", "▁") for word in words if name != "mistral" or "\n" not in word]
        letters = sorted({letter for piece in pieces for letter in piece} | {"▁"})
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        backend = tokenizers.Tokenizer(
            bpe(["<unk>", *fallback, *letters], pieces, unk_token="<unk>", byte_fallback=True)
        )
        if name == "mistral":
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        else:
            backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_special_tokens(SPECIAL[name])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def add_bos(tokenizer: Tokenizer, token: str) -> None:
    """Let texts start with the special `token`, as most models' do."""
    found = tokenizer.backend.token_to_id(token)
    tokenizer.backend.post_processor = processors.TemplateProcessing(f"{token} $A", special_tokens=[(token, found)])


def bpe(alphabet: list[str], words: list[str], **options: object) -> models.BPE:
    """A BPE that makes each of `words`, letter by letter from the left."""
    vocab, merges = {token: i for i, token in enumerate(alphabet)}, []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return models.BPE(vocab=vocab, merges=merges, **options)


def as_bytes(text: str) -> list[str]:
    return [
        piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    ]


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], TOKENS[name], name=name)


def save_template(name: str, folder: Path) -> None:
    """What a checkpoint has beside its tokenizer.json."""
    config = {**TOKENS[name], "chat_template": TEMPLATES[name], "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
