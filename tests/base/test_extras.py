"""An extra that is not there is left out; an error inside an extra is an error."""

from pathlib import Path

import pytest

from mingpt.base import extras


def test_only_an_absent_module_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extras, "missing", [])
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    assert extras.load_extra("string:digits") == "0123456789"
    absent = ["no_such_extra", "mingpt.extras.no_such_extra", "no_such_package.extra"]
    assert not any(extras.load_extra(f"{module}:ANSWER") for module in absent)
    assert extras.missing == absent
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        extras.load_extra("needs_more:ANSWER")
    with pytest.raises(AttributeError):
        extras.load_extra("string:question")
