"""Write data/input.txt, a play in rhymed couplets, and data/input.json, with its exact entropy.

    python data/make_corpus.py            # rewrites both files, byte for byte the same each time
    python data/make_corpus.py --check    # says whether the files on disk are what this program writes

The grammar is unambiguous by construction: every choice writes its own text at once, and no option of a
choice is the beginning of another. So a text has one derivation, and the probability of its next character is
the weight of the options that agree with it, divided by the weight of those still open. The mean of minus its
logarithm over the validation part is the entropy. No model that has not read this part in advance can expect
a lower loss.

Beyond spelling there is something to learn at every distance: nouns and verbs agree in number, adjectives are
spread unevenly, the second line of a couplet rhymes with the first, nobody speaks twice in a row.
"""

import argparse
import hashlib
import itertools
import json
import math
import random
from functools import cache
from pathlib import Path

CHARACTERS = 1_000_000
SEED = 1616
VAL_FRACTION = 0.1

SPEAKERS = ["ADRIAN", "BEATRIX", "CORDELIA", "DUNCAN", "ELINOR", "FESTE", "GONZALO", "HERMIA"]
PLACES = [
    "A garden",
    "A harbour at dawn",
    "The palace",
    "Before the walls",
    "A wood",
    "A tavern by the road",
    "The queen's tent",
    "A hall",
]
ADJECTIVES = [
    "gentle",
    "bitter",
    "golden",
    "silent",
    "weary",
    "proud",
    "humble",
    "broken",
    "noble",
    "cruel",
    "merry",
    "pale",
]
NOUNS = [
    "king",
    "queen",
    "river",
    "shadow",
    "lover",
    "captain",
    "garden",
    "winter",
    "sister",
    "brother",
    "sailor",
    "candle",
    "beggar",
    "flower",
    "hunter",
    "raven",
    "tower",
    "mirror",
    "prisoner",
    "widow",
]
VERBS = [
    "follow",
    "remember",
    "abandon",
    "honour",
    "answer",
    "conquer",
    "forgive",
    "mourn",
    "adore",
    "betray",
    "wait for",
    "sing of",
    "dream of",
    "forget",
]
RHYMES = [
    ["night", "light", "sight", "knight"],
    ["day", "way", "play", "clay"],
    ["heart", "art", "part", "dart"],
    ["stone", "throne", "bone", "moan"],
    ["sea", "tree", "plea", "knee"],
    ["flame", "name", "game", "shame"],
    ["sword", "word", "lord", "hoard"],
    ["breath", "death"],
    ["grave", "wave", "slave", "cave"],
    ["rose", "snows", "foes", "prose"],
]

Options = tuple[tuple[str, float], ...]


def weighted(words: list[str], ending: str, falling: float = 1.0) -> Options:
    """Return the options `word + ending`, each `falling` times as likely as the one before it."""
    return tuple((word + ending, falling**place) for place, word in enumerate(words))


@cache
def surprisals(options: Options, chosen: str) -> tuple[float, ...]:
    """Return, for `chosen` of `options`, the surprisal of each character, in nats, given those before it."""
    texts = [text for text, _ in options]
    assert not any(a != b and b.startswith(a) for a in texts for b in texts), (
        f"an option begins another: {texts}"
    )
    open_weight = [
        sum(weight for text, weight in options if text.startswith(chosen[:length]))
        for length in range(len(chosen) + 1)
    ]
    return tuple(math.log(before / after) for before, after in itertools.pairwise(open_weight))


class Play:
    """A text, as the list of pieces `text`, and the surprisal of each character in nats, `nats`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(
            seed
        )  # of its methods only random() is promised to stay the same across Python versions
        self.text: list[str] = []
        self.nats: list[float] = []

    def choose(self, options: Options) -> str:
        left = self.random.random() * sum(weight for _, weight in options)
        for text, weight in options:
            chosen, left = text, left - weight
            if left < 0:
                break
        self.text.append(chosen)
        self.nats.extend(surprisals(options, chosen))
        return chosen

    def write(self, text: str) -> None:
        self.choose(((text, 1.0),))


# The opening of a line decides its grammar: who acts, and how many of them.
SINGULAR, PLURAL, EITHER = "singular", "plural", "either"
OPENINGS = {
    "The ": EITHER,
    "My ": EITHER,
    "I ": PLURAL,
    "You ": PLURAL,
    "He ": SINGULAR,
    "She ": SINGULAR,
    "We ": PLURAL,
    "No ": SINGULAR,
}
WITH_NOUN = ("The ", "My ", "No ")


def third_person(verb: str) -> str:
    head, _, tail = verb.partition(" ")
    return head + "s" + (" " + tail if tail else "")


def line(play: Play, opening: str, rhyme: list[str], closing: str) -> str:
    """Write the rest of a line, which ends in a word of `rhyme` and `closing`; return this word."""
    number = OPENINGS[opening]
    if opening in WITH_NOUN:
        play.choose(weighted(ADJECTIVES, " ", 0.8))
        nouns = weighted(NOUNS, " ", 0.9)
        if number == EITHER:
            nouns += weighted([noun + "s" for noun in NOUNS], " ", 0.9)
        noun = play.choose(nouns).strip()
        number = SINGULAR if noun in NOUNS else PLURAL
    play.choose(weighted([third_person(verb) for verb in VERBS] if number == SINGULAR else VERBS, " ", 0.95))
    play.choose(weighted(["the", "my", "your", "our"], " "))
    share = sum(0.95**place for place in range(len(rhyme))) / len(ADJECTIVES)
    adjectives = tuple((f"{word} ", share) for word in ADJECTIVES)  # as likely in all as going on without one
    chosen = play.choose(weighted(rhyme, closing, 0.95) + adjectives)
    if chosen.endswith(" "):
        chosen = play.choose(weighted(rhyme, closing, 0.95))
    return chosen.removesuffix(closing)


def speech(play: Play) -> None:
    """Write one or more couplets and an empty line, after which another speaker or scene is due."""
    openings = weighted(list(OPENINGS), "")
    opening = play.choose(openings)
    while opening != "\n":
        first = line(play, opening, [word for words in RHYMES for word in words], ",\n")
        rhymes = next(words for words in RHYMES if first in words)
        line(play, play.choose(openings), [word for word in rhymes if word != first], ".\n")
        opening = play.choose((*openings, ("\n", 4.0)))


def write_play(characters: int, seed: int) -> tuple[str, list[float]]:
    """Return a play of exactly `characters` characters, and the surprisal in nats of each character."""
    play = Play(seed)
    play.write("SCENE. ")
    heading, speaker = "SCENE. ", ""
    while len(play.nats) < characters:
        if heading == "SCENE. ":
            play.choose(weighted(PLACES, ".\n\n"))
        else:
            speaker = heading
            speech(play)
        names = weighted([name for name in SPEAKERS if name + ":\n" != speaker], ":\n", 0.9)
        heading = play.choose(names if heading == "SCENE. " else (*names, ("SCENE. ", 0.5)))
    return "".join(play.text)[:characters], play.nats[:characters]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the files on disk instead of writing them"
    )
    arguments = parser.parse_args()
    text, nats = write_play(CHARACTERS, SEED)
    first_scored = (
        int(len(text) * (1 - VAL_FRACTION)) + 1
    )  # the first validation character has nothing before it to be predicted from
    floor = math.fsum(nats[first_scored:]) / len(nats[first_scored:])
    about = {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "characters": len(text),
        "val_fraction": VAL_FRACTION,
        "val_nats_per_character": round(floor, 6),
    }
    files = {"input.txt": text, "input.json": json.dumps(about, indent=2) + "\n"}
    folder = Path(__file__).parent
    for name, content in files.items():
        if arguments.check:
            if (folder / name).read_bytes() != content.encode():
                raise SystemExit(f"{folder / name} is not what this program writes")
        else:
            (folder / name).write_bytes(content.encode())
    print(
        f"{len(text):,} characters, {len(set(text))} distinct; validation part {floor:.4f} nats per character"
    )


if __name__ == "__main__":
    main()
