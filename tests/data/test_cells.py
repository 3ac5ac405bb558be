"""Turns of chats in the cells of tables."""

import csv
import io
import json
import re
from typing import Any

import pytest

from ligermodels.data.cells import value_of
from ligermodels.data.json_files import csv_lines, parquet_lines
from ligermodels.data.records import read_record
from ligermodels.errors import InputError

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"id": 1, "role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize("write", [json.dumps, str])
@pytest.mark.parametrize(
    ("column", "turns"),
    [("prompt", [USER]), ("completion", [CALL, ASSISTANT]), ("conversations", SHAREGPT), ("chosen", ASSISTANT)],
)
def test_turns(write: Any, column: str, turns: Any) -> None:
    assert value_of(column, write(turns)) == turns


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("text", json.dumps([USER])),
        ("completion", json.dumps(ASSISTANT)),
        ("completion", '[{"role": "chief", "content": "x"}]'),
        ("chosen", '{"from": "EUR", "value": 3}'),
        ("prompt", "[{a list}] Explain this."),
        ("prompt", "[{'content': 'a'}] What is this?"),
        ("prompt", "Hi"),
        ("completion", "[]"),
    ],
)
def test_texts_stay_texts(column: str, cell: str) -> None:
    assert value_of(column, cell) == cell


def table(**cells: str) -> io.BytesIO:
    text = io.StringIO()
    rows = csv.DictWriter(text, cells)
    rows.writeheader()
    rows.writerow(cells)
    return io.BytesIO(text.getvalue().encode())


def test_a_table() -> None:
    _, line = csv_lines(table(prompt=str([USER]), completion=json.dumps([ASSISTANT])), "a.csv", delimiter=",")
    assert read_record(line)[0] == ([USER, ASSISTANT], {})


TWICE = '[{"role": "user", "content": "a", "content": "b"}]'
IN_A_CALL = (
    "[{'role': 'user', 'content': None, 'tool_calls': [{'function': {'name': 'f', 'content': 1, 'content': 2}}]}]"
)


@pytest.mark.parametrize("cell", [TWICE, TWICE.replace('"', "'"), IN_A_CALL], ids=["json", "python", "python, nested"])
def test_a_field_twice_in_turns(cell: str) -> None:
    with pytest.raises(InputError, match=r"""a\.csv: row 2: "messages": an object has the field 'content' twice"""):
        list(csv_lines(table(messages=cell), "a.csv", delimiter=","))
    for text in ('{"a": 1, "a": 2}', "{'a': 1, 'a': 2}"):
        assert value_of("prompt", text) == text


@pytest.mark.parametrize("write", [json.dumps, str])
def test_nulls_are_read_as_in_lines_of_json(write: Any) -> None:
    function = {"name": "f", "arguments": {"unit": None, "x": [{"y": None}]}}
    chat = [{**USER, "name": None}, {**CALL, "tool_calls": [{"function": function}]}]
    _, line = csv_lines(table(messages=write(chat)), "a.csv", delimiter=",")
    assert read_record(line) == read_record(json.dumps({"messages": chat}).encode())


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("messages", "[{'role': 'user', 'content': 'a'}\n {'role': 'assistant'}]"),
        ("completion", "[{'content': 'a', 'role': 'user'} {'content': \"it's\", 'role': 'assistant'}]"),
        ("chosen", "[{'value': 'a', 'from': 'Human'}\n {'value': 'b', 'from': 'gpt'}]"),
        ("messages", '[{"role": "user", "con'),
    ],
)
def test_turns_that_cannot_be_read(column: str, cell: str) -> None:
    """As numpy writes them, and cut. They would be trained on as text."""
    message = f'a.csv: row 2: "{column}" begins as a list of turns, and is neither JSON'
    with pytest.raises(InputError, match=re.escape(message)):
        list(csv_lines(table(**{column: cell}), "a.csv", delimiter=","))


@pytest.mark.parametrize("write", [json.dumps, str])
def test_strings_of_parquet_are_read_as_cells(write: Any) -> None:
    """The hub converts tables of text to Parquet."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def rows(**cells: str) -> Any:
        content = io.BytesIO()
        parquet.write_table(pyarrow.table({name: [cell] for name, cell in cells.items()}), content)
        return parquet_lines(content, "a.parquet")

    cells = {"prompt": write([USER]), "completion": write([ASSISTANT]), "text": write([USER])}
    _, line = csv_lines(table(**cells), "a.csv", delimiter=",")
    assert list(rows(**cells)) == [line] and read_record(line)[0] == ([USER, ASSISTANT], {})
    with pytest.raises(InputError, match=r'a\.parquet: row 1: "chosen" begins as a list of turns'):
        list(rows(chosen="[{'content': 'a', 'role': 'user'} {'content': 'b', 'role': 'assistant'}]"))
