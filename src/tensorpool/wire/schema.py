# SPDX-License-Identifier: Apache-2.0
"""SBE schema documents, read into plain descriptions of messages.

Understands the part of SBE 1.0 that the specifications use and refuses everything else, so that no attribute
is ignored in silence. Two constructs of the specifications are not SBE and get the meaning they were written
for: `length` on a field makes an array (decision A3), and a field of a var-data type is data (A5).
Wire §10.1, §16; Driver Model appendix A; Bridge §11; Discovery §15; Service Control §5.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import msgspec

_SBE = "{http://fixprotocol.io/2016/sbe}"


class Primitive(NamedTuple):
    """An integer type: its `struct` code, size in bytes, range, and the value that SBE reads as null."""

    code: str
    size: int
    low: int
    high: int
    null: int


def _primitives() -> Iterator[tuple[str, Primitive]]:
    for size, code in (1, "b"), (2, "h"), (4, "i"), (8, "q"):
        half = 1 << (8 * size - 1)
        yield f"int{8 * size}", Primitive(code, size, -half, half - 1, -half)
        yield f"uint{8 * size}", Primitive(code.upper(), size, 0, 2 * half - 1, 2 * half - 1)


PRIMITIVES: Mapping[str, Primitive] = dict(_primitives())


class Enumeration(msgspec.Struct, frozen=True):
    """A named set of values; `Bool` stands for Python's bool."""

    name: str
    primitive: str
    members: dict[str, int]

    @property
    def is_bool(self) -> bool:
        return self.members == {"FALSE": 0, "TRUE": 1}


class Field(msgspec.Struct, frozen=True):
    """A fixed field. `nulls` are the values that mean absent, the first is written; () if required."""

    name: str
    type: str
    length: int | None = None
    enum: Enumeration | None = None
    nulls: tuple[int, ...] = ()
    maximum: int | None = None

    @property
    def primitive(self) -> Primitive:
        return PRIMITIVES[self.type]

    @property
    def is_hidden(self) -> bool:
        """Whether the field is filler: written zero, ignored when read, not visible in messages."""
        return self.name == "pad"

    @property
    def size(self) -> int:
        return self.primitive.size * (self.length or 1)

    @property
    def code(self) -> str:
        return f"{self.size}x" if self.is_hidden else f"{self.length or ''}{self.primitive.code}"

    @property
    def high(self) -> int:
        """The largest value that may be written."""
        if self.maximum is not None:
            return self.maximum
        return self.primitive.high - (self.primitive.high in self.nulls)

    @property
    def accepted(self) -> str:
        """What may be written, in words."""
        if self.enum and self.enum.is_bool:
            text = "True or False"
        elif self.enum:
            text = f"{self.enum.name} {', '.join(self.enum.members)}"
        else:
            low = self.primitive.low + (self.primitive.low in self.nulls)
            text = f"{self.type} from {low} to {self.high}"
        if self.length is not None:
            text = f"{self.length} values, each {text}"
        return f"{text}, or None" if self.nulls else text

    def reads(self, value: int) -> bool:
        """Whether `value` may be read."""
        if self.enum:
            return value in self.enum.members.values() or value in self.nulls
        return self.maximum is None or value <= self.maximum

    def accepts(self, value: object) -> bool:
        """Whether `value` may be written."""
        if self.length is not None:
            items = value if isinstance(value, (tuple, list)) else ()
            return len(items) == self.length and all(map(self._accepts_one, items))
        return (value is None and bool(self.nulls)) or self._accepts_one(value)

    def _accepts_one(self, value: object) -> bool:
        if not hasattr(value, "__index__"):
            return False
        number = int(value.__index__())
        if self.enum:
            return number in self.enum.members.values()
        return self.primitive.low <= number <= self.high and number not in self.nulls


class Data(msgspec.Struct, frozen=True):
    """Bytes behind a uint32 length of at most `maximum`; `is_text` shows them as a string."""

    name: str
    maximum: int
    is_text: bool

    @property
    def is_ascii(self) -> bool:
        """Whether only ASCII may be written: what is compared, resolved or opened by peers (decision A13)."""
        return self.is_text and (
            self.name.endswith(("_uri", "_channel", "_id")) or self.name in ("tag", "format", "token")
        )


class Group(msgspec.Struct, frozen=True):
    """A repeating group. `is_extensible` entries may have a longer block, whose surplus is skipped."""

    name: str
    entry: Block
    is_extensible: bool

    @property
    def class_name(self) -> str:
        """The name of one entry: `payload_pools` holds `PayloadPool`s."""
        return "".join(word.capitalize() for word in self.name.removesuffix("s").split("_"))


class Block(msgspec.Struct, frozen=True):
    """Fixed fields, then groups, then var data: the shape of a message body and of a group entry."""

    fields: tuple[Field, ...]
    constants: dict[str, int]
    groups: tuple[Group, ...]
    data: tuple[Data, ...]
    length: int

    @property
    def visible(self) -> tuple[Field, ...]:
        return tuple(field for field in self.fields if not field.is_hidden)

    @property
    def format(self) -> str:
        used = sum(field.size for field in self.fields)
        return "<" + "".join(field.code for field in self.fields) + f"{self.length - used}x"

    def offset_of(self, field: Field) -> int:
        return sum(each.size for each in self.fields[: self.fields.index(field)])


class MessageType(msgspec.Struct, frozen=True):
    """A message: its template id, its body and what the schema says about it."""

    name: str
    template_id: int
    block: Block
    description: str


class Document(msgspec.Struct, frozen=True):
    """One `<messageSchema>`."""

    id: int
    version: int
    enums: tuple[Enumeration, ...]
    messages: tuple[MessageType, ...]


def parse(xml: str) -> Document:
    """Read a schema document. Raises ValueError for anything that the codec would not honour."""
    root = ElementTree.fromstring(xml)
    given = _attributes(root, "id version byteOrder", "package semanticVersion description")
    if root.tag != f"{_SBE}messageSchema" or given["byteOrder"] != "littleEndian":
        raise ValueError("not a little-endian SBE messageSchema")
    types = _Types(element for section in root.iter("types") for element in section)
    messages = tuple(_message(element, types) for element in root.iter(f"{_SBE}message"))
    if len(list(root)) != len(messages) + len(list(root.iter("types"))):
        raise ValueError("only <types> and <sbe:message> are understood")
    return Document(int(given["id"]), int(given["version"]), tuple(types.enums.values()), messages)


class _Types:
    """The `<types>` of a document by name."""

    def __init__(self, elements: Iterator[Element]) -> None:
        self.enums: dict[str, Enumeration] = {}
        self.simple: dict[str, tuple[str, int | None]] = {name: (name, None) for name in PRIMITIVES}
        self.constants: dict[str, int] = {}
        self.data: dict[str, int] = {}
        for element in elements:
            match element.tag:
                case "enum":
                    self._add_enum(element)
                case "composite":
                    self._add_composite(element)
                case "type":
                    self._add_type(element)
                case _:
                    raise ValueError(f"<{element.tag}> is not understood")

    def _add_enum(self, element: Element) -> None:
        given = _attributes(element, "name encodingType")
        members = {_attributes(value, "name")["name"]: int(value.text or "") for value in element}
        self.enums[given["name"]] = Enumeration(given["name"], given["encodingType"], members)

    def _add_type(self, element: Element) -> None:
        given = _attributes(element, "name primitiveType", "length presence")
        if given.get("presence") == "constant":
            self.constants[given["name"]] = int(element.text or "")
        else:
            self.simple[given["name"]] = (given["primitiveType"], _integer(given.get("length")))

    def _add_composite(self, element: Element) -> None:
        name = _attributes(element, "name")["name"]
        parts = [_attributes(e, "name primitiveType", "length maxValue characterEncoding") for e in element]
        layout = " ".join(f"{part['name']}:{part['primitiveType']}" for part in parts)
        match layout:
            case "blockLength:uint16 templateId:uint16 schemaId:uint16 version:uint16":
                pass  # the message header
            case "blockLength:uint16 numInGroup:uint16":
                pass  # the dimension of a group
            case "length:uint32 varData:uint8":
                self.data[name] = int(parts[0]["maxValue"])
            case _:
                raise ValueError(f"composite {name}: the layout {layout} is not understood")


def _message(element: Element, types: _Types) -> MessageType:
    given = _attributes(element, "name id", "blockLength description")
    block = _block(element, types, _integer(given.get("blockLength")))
    return MessageType(given["name"], int(given["id"]), block, given.get("description", ""))


def _block(parent: Element, types: _Types, declared_length: int | None = None) -> Block:
    fields: list[Field] = []
    constants: dict[str, int] = {}
    groups: list[Group] = []
    data: list[Data] = []
    for element in parent:
        type_name = element.get("type", "")
        if element.tag == "group" and not data:
            groups.append(_group(element, types))
        elif element.tag == "data" or type_name in types.data:
            data.append(_data(element, types))
        elif element.tag == "field" and not groups and not data:
            if type_name in types.constants:
                constants[_snake_case(element.attrib["name"])] = types.constants[type_name]
            else:
                fields.append(_field(element, types))
        else:
            raise ValueError(f"<{element.tag}> {element.get('name')}: the order is fields, groups, data")
    used = sum(field.size for field in fields)
    length = used if declared_length is None else declared_length
    if length < used:
        raise ValueError(f"{parent.get('name')}: {used} bytes of fields in a block of {length}")
    return Block(tuple(fields), constants, tuple(groups), tuple(data), length)


def _field(element: Element, types: _Types) -> Field:
    given = _attributes(element, "name id type", "presence nullValue maxValue length")
    enum = types.enums.get(given["type"])
    if enum is None and given["type"] not in types.simple:
        raise ValueError(f"{given['name']}: the type {given['type']} is not defined")
    primitive, length = (enum.primitive, None) if enum else types.simple[given["type"]]
    nulls: tuple[int, ...] = ()
    if given.get("presence", "optional") != "optional":
        raise ValueError(f"{given['name']}: presence {given['presence']} of a field is not understood")
    if "presence" in given:
        # A4: code generators know only the type's own null and ignore nullValue on a field. Both mean absent.
        default = PRIMITIVES[primitive].null
        nulls = tuple(dict.fromkeys((int(given.get("nullValue", default)), default)))
    length = _integer(given.get("length")) or length
    maximum = _integer(given.get("maxValue"))
    if maximum is not None and (enum or nulls or length or PRIMITIVES[primitive].low < 0):
        raise ValueError(f"{given['name']}: maxValue is understood on a required unsigned number only")
    if length is not None and nulls:
        raise ValueError(f"{given['name']}: an optional array is not understood")
    return Field(_snake_case(given["name"]), primitive, length, enum, nulls, maximum)


def _data(element: Element, types: _Types) -> Data:
    given = _attributes(element, "name id type")
    return Data(_snake_case(given["name"]), types.data[given["type"]], given["type"].startswith("varAscii"))


def _group(element: Element, types: _Types) -> Group:
    given = _attributes(element, "name id dimensionType")
    entry = _block(element, types)
    if not (entry.length or entry.groups or entry.data):
        # Entries of no bytes would let a four-byte group claim 65534 of them.
        raise ValueError(f"group {given['name']} has empty entries")
    # A5: peers disagree whether a field of a var-data type counts towards the block.
    is_extensible = any(child.tag == "field" and child.get("type") in types.data for child in element)
    return Group(_snake_case(given["name"]), entry, is_extensible)


def _attributes(element: Element, required: str, optional: str = "") -> dict[str, str]:
    missing = set(required.split()) - element.attrib.keys()
    unknown = element.attrib.keys() - set(required.split()) - set(optional.split())
    if missing or unknown:
        where = f"<{element.tag}> {element.get('name', '')}"
        raise ValueError(f"{where}: missing {sorted(missing)}, not understood {sorted(unknown)}")
    return element.attrib


def _integer(text: str | None) -> int | None:
    return None if text is None else int(text)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
