from pathlib import Path

import pytest

from mingpt.base.errors import UserError
from mingpt.tools.prepare.documents import make_input, read_pieces

LINES = '{"text": "la"}\n{"text": "mer"}\n'


@pytest.mark.parametrize(("name", "content"), [("a.txt", "la mer\n"), ("a.jsonl", LINES)])
def test_a_byte_order_mark_is_no_part_of_a_document(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    plain = list(read_pieces(make_input(str(path))))
    path.write_text(content, encoding="utf-8-sig")
    assert list(read_pieces(make_input(str(path)))) == plain
    path.write_text(content, encoding="utf-16")
    with pytest.raises(UserError, match=rf"{name} .*not UTF-8, but probably UTF-16.*iconv"):
        list(read_pieces(make_input(str(path))))
