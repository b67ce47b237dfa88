"""Check that an HTML parser reads back the text of the generated markup."""

from __future__ import annotations

import html5lib
from hypothesis import given
from hypothesis import strategies as st

from streamkern.cli.page.html import Html, html_table, joined_html, tag

# What HTML can hold: no control characters, and nothing that its parsers replace.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cn", "Cs")), max_size=40)
HOSTILE = st.sampled_from(["<script>x</script>", '"><b>', "&amp;", "</p>", "a&b<c>'d'", "--><!--"])


def parse_body(markup: str) -> object:
    """Return the tree of a page with this body; the parser raises an error for invalid HTML."""
    full = f"<!DOCTYPE html><html><head><title>t</title></head><body>{markup}</body></html>"
    return html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(full)


@given(TEXTS | HOSTILE, TEXTS | HOSTILE)
def test_tag_escapes_text(text: str, title: str) -> None:
    paragraph = parse_body(tag("p", text, title=title)).find("body/p")  # type: ignore[attr-defined]
    assert (paragraph.text or "", paragraph.get("title"), len(paragraph)) == (text, title, 0)


def test_html_is_inserted_unescaped() -> None:
    inner = tag("b", "<")
    assert isinstance(inner, Html)
    assert joined_html(["a<", inner]) == "a&lt;<b>&lt;</b>"


def test_attributes_are_named_as_in_html() -> None:
    assert tag("br") == "<br>"
    assert tag("i", class_="c1", data_row=2, title=None) == '<i class="c1" data-row="2"></i>'


def test_table_has_header_row_names_and_marks() -> None:
    table = parse_body(html_table(["", "n"], [["a", "1"], ["b", None]], marked=[(0, 1)]))
    body = table.find("body/div/table/tbody")  # type: ignore[attr-defined]
    cells = [[(cell.tag, "".join(cell.itertext())) for cell in row] for row in body]
    assert cells == [[("th", "a"), ("td", "1")], [("th", "b"), ("td", "–")]]  # noqa: RUF001
    assert [mark.text for mark in body.iter("mark")] == ["1"]
