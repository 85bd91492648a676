# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/protocol/messages.md and memory.md say what the schemas say."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Final

import pytest

from tensorpool.wire.schema import Block, Document, Field, MessageType, parse

PAGES: Final = Path(__file__).parents[2] / "docs/protocol"
IN_MEMORY: Final = {"ShmRegionSuperblock": "Superblock", "SlotHeader": "Header slot", "TensorHeader": "Tensor header"}
SCHEMAS: Final = files("tensorpool.wire") / "schemas"
DOCUMENTS: Final = [parse(path.read_text()) for path in SCHEMAS.iterdir() if path.name.endswith(".xml")]
EVERYTHING: Final = [(document, message) for document in DOCUMENTS for message in document.messages]
MESSAGES: Final = [(document, message) for document, message in EVERYTHING if message.name not in IN_MEMORY]


def sections(page: str) -> dict[str, str]:
    """The text below each heading, by heading."""
    parts = re.split(r"^#{2,3} (.+)$", (PAGES / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def type_text(field: Field) -> str:
    kind, bits = re.fullmatch(r"(u?)int(\d+)", field.type).groups()  # type: ignore[union-attr]
    text = f"{kind or 'i'}{bits}" + (f"[{field.length}]" if field.length else "")
    return f"{field.enum.name} ({text})" if field.enum else text


def rows(block: Block) -> list[tuple[str, ...]]:
    """What a block's table must say: offset, field, type, null."""
    nulls = {field.name: str(field.nulls[0]) if field.nulls else "" for field in block.fields}
    return [(str(block.offset_of(f)), f.name, type_text(f), nulls[f.name]) for f in block.fields]


def tails(block: Block) -> list[str]:
    """What follows a block, numbered."""
    names = [f"group `{group.name}`, entry block {group.entry.length}" for group in block.groups]
    names += [f"`{data.name}`" for data in block.data]
    return [f"{number}. {name}" for number, name in enumerate(names, 1)]


def blocks(block: Block) -> list[Block]:
    """A block and those of the groups in it, in the order of the page."""
    return [block, *(inner for group in block.groups for inner in blocks(group.entry))]


@pytest.mark.parametrize(("document", "message"), MESSAGES, ids=[message.name for _, message in MESSAGES])
def test_page_describes_message_as_its_schema_does(document: Document, message: MessageType) -> None:
    """Ids, block length, each field's offset, type and null, and the order of groups and data are the schema's."""
    text = sections("messages.md")[message.name]
    head = f"Schema {document.id}, template {message.template_id}, block {message.block.length}. "
    assert text.strip().startswith(head)
    found = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))[:4]
        for line in text.splitlines()
        if re.match(r"\| \d+ \|", line)
    ]
    found = [(*cells[:3], str(int(cells[3], 0)) if cells[3] else "") for cells in found]
    expected = [row for block in blocks(message.block) for row in rows(block)]
    assert found == expected
    numbered = re.findall(r"^\d+\. (?:group )?`.+?`(?:, entry block \d+)?", text, flags=re.MULTILINE)
    assert numbered == [tail for block in blocks(message.block) for tail in tails(block)]


@pytest.mark.parametrize("name", IN_MEMORY)
def test_page_describes_memory_as_its_schema_does(name: str) -> None:
    """Offset and size of each field of superblock, header slot and tensor header are the schema's."""
    (block,) = (message.block for _, message in EVERYTHING if message.name == name)
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", sections("memory.md")[IN_MEMORY[name]], flags=re.MULTILINE)
    expected = [(str(block.offset_of(field)), str(field.size), field.name) for field in block.fields]
    assert rows[: len(expected)] == expected
