"""Chats hold the tokens and the mask that transformers gives them; `make test-models`."""

import json
import os
import subprocess

import numpy as np
import pytest
from token_lab import make_tokenizer, prepared

ORACLE = os.environ.get("DILOCO_TEST_ORACLE")
pytestmark = pytest.mark.skipif(not ORACLE, reason="needs transformers: make test-models")
TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- "<assistant>\\n" }}{% generation %}{{ message.content }}</>
        {%- for call in message.tool_calls or [] %} {{ call | tojson }}{% endfor %}
        {%- endgeneration %}
        {{- "\\n" }}
    {%- else %}
{{ "<" ~ message.role ~ ">" }}{{ message["content"] | trim }}</>
    {% endif %}
{%- endfor %}
{%- for tool in tools or [] %}
    {{- tool | tojson(indent=1) }}
{%- endfor %}
"""
ASKED = """
import json, sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
for line in open(sys.argv[2]):
    row = json.loads(line)
    said = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True)
    print(json.dumps([said["input_ids"], said["assistant_masks"]]))
"""


def test_tokens_and_mask_are_those_of_transformers(tmp_path):
    folder = make_tokenizer(tmp_path / "model", begin=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|begin|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tool = {"type": "function", "function": {"name": "ü", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "ü", "arguments": {"a": 1}}}
    rows = [
        {"messages": [
            {"role": "system", "content": " be\nbrief "},
            {"role": "user", "content": f"漢字 {number}?\n\n"},
            {"role": "assistant", "content": f"\n🙂 {number} def f():\n    return 'ü'\n"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ], "tools": [tool] if number % 2 else None}
        for number in range(6)
    ]  # fmt: skip
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--chats", "--tokenizer", folder, "--held-out", 0, "--out", tmp_path / "out"]
    prepared(source, *given)
    stored = np.concatenate([np.load(path) for path in sorted((tmp_path / "out").glob("*.npy"))])
    words = [ORACLE, "-c", ASKED, str(folder), str(source)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    wanted = []
    for line in done.stdout.splitlines():
        ids, mask = map(np.asarray, json.loads(line))
        assert 0 < mask.sum() < len(mask)
        wanted += [np.where(mask == 1, ids, ~ids), [~1]]
    np.testing.assert_array_equal(stored, np.concatenate(wanted))
