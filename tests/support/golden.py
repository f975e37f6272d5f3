"""The sentences that users read, in tests/sentences.json, which `pytest -n 0 --renew` writes anew."""

import json
from pathlib import Path

SENTENCES = Path(__file__).parent.parent / "sentences.json"


def sentences() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(SENTENCES.read_text())
    return found


class Golden:
    def __init__(self, test: str, folder: Path, renew: bool) -> None:
        self.test, self.folder, self.renew = test, str(folder), renew
        self.seen: list[str] = []

    def __call__(self, said: str) -> None:
        """Assert that this is the test's next sentence. In the file, TMP is the test's temporary folder."""
        self.seen.append(said.replace(self.folder, "TMP"))
        known = sentences()
        if self.renew:
            known[self.test] = self.seen
            SENTENCES.write_text(json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
        assert known.get(self.test, [])[: len(self.seen)] == self.seen
