# SPDX-License-Identifier: Apache-2.0
"""Schema documents: what is understood, and that the rest is refused instead of ignored."""

from __future__ import annotations

from importlib import resources
from xml.etree import ElementTree

import pytest

from tensorpool.wire.schema import Document, parse

TYPES = """
  <composite name="groupSizeEncoding">
    <type name="blockLength" primitiveType="uint16"/><type name="numInGroup" primitiveType="uint16"/>
  </composite>
  <composite name="varDataEncoding">
    <type name="length" primitiveType="uint32" maxValue="9"/>
    <type name="varData" primitiveType="uint8" length="0"/>
  </composite>
  <type name="seq_t" primitiveType="uint64"/>
"""


def document(
    body: str, types: str = TYPES, attributes: str = 'id="1" version="1" byteOrder="littleEndian"'
) -> Document:
    name = "http://fixprotocol.io/2016/sbe"
    return parse(f'<s:messageSchema xmlns:s="{name}" {attributes}><types>{types}</types>{body}</s:messageSchema>')


def message(content: str, attributes: str = "") -> str:
    return f'<s:message name="M" id="1" {attributes}>{content}</s:message>'


def test_fields_are_packed_in_the_order_of_the_document() -> None:
    """Names turn into snake_case, types resolve to integers, and offsets follow from sizes alone."""
    parsed = document(
        message(
            """
            <field name="streamId" id="1" type="uint32"/>
            <field name="seq" id="2" type="seq_t" presence="optional" nullValue="0"/>
            <field name="pad" id="3" type="uint8" length="3"/>
            <field name="delta" id="4" type="int16" presence="optional"/>
            """,
            'blockLength="20"',
        )
    )
    block = parsed.messages[0].block
    assert [(field.name, field.type, block.offset_of(field)) for field in block.visible] == [
        ("stream_id", "uint32", 0),
        ("seq", "uint64", 4),
        ("delta", "int16", 15),
    ]
    assert [field.nulls for field in block.visible] == [(), (0, 2**64 - 1), (-(2**15),)]
    assert (block.format, block.length) == ("<IQ3xh3x", 20)


@pytest.mark.spec("WIRE-10.1-06")
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            '<data name="d" id="1" type="varDataEncoding"/><field name="f" id="2" type="uint8"/>',
            "order is fields, groups, data",
        ),
        (
            '<data name="d" id="1" type="varDataEncoding"/>'
            '<group name="g" id="2" dimensionType="groupSizeEncoding">'
            '<field name="f" id="1" type="uint8"/></group>',
            "order is fields, groups, data",
        ),
        (
            '<data name="d" id="1" type="varDataEncoding" presence="optional"/>',
            r"not understood \['presence'\]",
        ),
    ],
)
def test_data_comes_last_and_is_never_optional(body: str, text: str) -> None:
    """A schema that breaks the rule about variable data is not compiled."""
    with pytest.raises(ValueError, match=text):
        document(message(body))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (message('<field name="f" id="1" type="uint8" offset="4"/>'), r"not understood \['offset'\]"),
        (
            message('<field name="f" id="1" type="uint8" sinceVersion="2"/>'),
            r"not understood \['sinceVersion'\]",
        ),
        (message('<field name="f" id="1" type="uint8" presence="constant"/>'), "presence constant"),
        (message('<field name="f" id="1" type="int8" maxValue="4"/>'), "required unsigned number"),
        (
            message('<field name="f" id="1" type="uint8" presence="optional" length="4"/>'),
            "an optional array",
        ),
        (message('<field name="f" type="uint8"/>'), r"missing \['id'\]"),
        (
            message('<field name="f" id="1" type="uint64"/>', 'blockLength="7"'),
            "8 bytes of fields in a block of 7",
        ),
        (
            message('<group name="gs" id="1" dimensionType="groupSizeEncoding"/>'),
            "group gs has empty entries",
        ),
        (message('<field name="f" id="1" type="float"/>'), "f: the type float is not defined"),
        (message("<ref/>"), "<ref>"),
        ("<s:include/>", "only <types> and <sbe:message>"),
    ],
)
def test_what_is_not_understood_is_refused(body: str, text: str) -> None:
    """An attribute that the codec would not honour changes bytes, so it is an error."""
    with pytest.raises(ValueError, match=text):
        document(body)


@pytest.mark.parametrize(
    ("types", "text"),
    [
        (
            '<composite name="odd"><type name="x" primitiveType="uint8"/></composite>',
            "composite odd: the layout x:uint8",
        ),
        ('<set name="flags" encodingType="uint8"/>', "<set> is not understood"),
        ('<type name="t" primitiveType="uint8" semanticType="x"/>', r"not understood \['semanticType'\]"),
    ],
)
def test_types_that_are_not_understood_are_refused(types: str, text: str) -> None:
    """The same holds for types that no message uses."""
    with pytest.raises(ValueError, match=text):
        document("", types=types)


@pytest.mark.spec("WIRE-6-02")
def test_only_little_endian_schemas_are_read() -> None:
    """All integers on the wire and in shared memory are little-endian."""
    with pytest.raises(ValueError, match="not a little-endian"):
        document("", attributes='id="1" version="1" byteOrder="bigEndian"')


@pytest.mark.spec("DISC-10-03")
def test_the_discovery_schema_names_its_version_for_generators() -> None:
    """A constant that other generators turn into code; the same number as in the message header."""
    root = ElementTree.fromstring(resources.files("tensorpool.wire").joinpath("schemas/discovery.xml").read_text())
    constant = root.find("types/type[@name='discovery_schema_version']")
    assert constant is not None
    assert (constant.attrib["presence"], constant.text) == ("constant", root.attrib["version"])
