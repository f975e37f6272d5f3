"""Draw who computes, sends and waits, by rank, from files that `tutorial.events` has written.

    python -m tutorial.timeline tutorial/pictures/events/pipeline_2.json

A picture lies beside its file: pipeline_2.svg. Several files may be named.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tutorial.drawing import BLUE, GREEN, GREY, LEFT, ORANGE, PURPLE, WIDTH, Picture

FILLS = {"forward": BLUE, "backward": GREEN, "other work": PURPLE, "wait": GREY, "send": ORANGE}
FIRST, LAST, LETTER = 96.0, WIDTH - 24.0, 7.0  # pixels: where time begins and ends; the width of a letter
LANE, RANK = 30, 76  # pixels: the height of a lane, and of a rank with its two lanes


def kind_of(event: dict[str, Any]) -> str:
    if event["what"] != "compute":
        return str(event["what"])
    return next((kind for kind in ("forward", "backward") if kind in event["name"]), "other work")


def scale_of(end_ms: float) -> int:
    """ms between two marks of the axis: 1, 2, 5, 10, ..., so that there are at most 12."""
    steps = [factor * 10**power for power in range(6) for factor in (1, 2, 5)]
    return next(step for step in steps if end_ms / step <= 12)


def shares(events: list[dict[str, Any]], end_ms: float) -> str:
    """What each rank does, in words, for readers who do not see the picture."""
    sentences = []
    for rank in sorted({event["rank"] for event in events}):
        spent = dict.fromkeys(("compute", "wait", "send"), 0.0)
        for event in events:
            if event["rank"] == rank:
                spent[event["what"]] += event["end"] - event["begin"]
        sentences.append(f"Rank {rank} " + ", ".join(f"{what} {ms:.0f}" for what, ms in spent.items()))
    return f"Of {end_ms:.0f} ms, in ms: {'; '.join(sentences)}."


def draw(title: str, events: list[dict[str, Any]]) -> Picture:
    end_ms = max(event["end"] for event in events)
    ranks = 1 + max(event["rank"] for event in events)
    picture = Picture(title, shares(events, end_ms), 100 + RANK * ranks + 40)
    kinds = {kind_of(event) for event in events}
    picture.legend(50, {kind: fill for kind, fill in FILLS.items() if kind in kinds})

    def x_of(ms: float) -> float:
        return round(FIRST + (LAST - FIRST) * ms / end_ms, 2)

    for rank in range(ranks):
        top = 84 + RANK * rank
        picture.text(LEFT, top + 18, f"rank {rank}")
        picture.text(LEFT, top + 18 + LANE, "sends")
    for event in events:
        kind = kind_of(event)
        top = 84 + RANK * event["rank"] + (LANE if kind == "send" else 0)
        x = x_of(event["begin"])
        width = max(1.0, round(x_of(event["end"]) - x, 2))
        has_room = width > LETTER * len(event["name"])
        short = event["name"].split()[-1]  # at least the number of the micro-batch
        label = event["name"] if has_room else short if width > LETTER * len(short) else ""
        picture.box(x, top, width, LANE - 4, FILLS[kind], *([label] if label else []))
    bottom = 84 + RANK * ranks
    picture.line(FIRST, bottom, LAST, bottom)
    for ms in range(0, int(end_ms) + 1, scale_of(end_ms)):
        picture.line(x_of(ms), bottom, x_of(ms), bottom + 5)
        picture.text(x_of(ms), bottom + 20, f"{ms} ms", anchor="middle")
    return picture


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        content = json.loads(path.read_text())
        picture = path.with_suffix(".svg")
        picture.write_text(draw(content["title"], content["events"]).svg())
        print(picture)


if __name__ == "__main__":
    main()
