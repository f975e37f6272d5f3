"""Documents in batches of texts to encode, each known by where it begins, so that work can go on there.

The training part comes first, then the validation part: the documents of the tail by count of bytes, none of
them cut; of a single document the tail of its characters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mingpt.prepare.documents import InputStats, read_pieces, utf8_length
from mingpt.prepare.encoding import Encoder
from mingpt.prepare.inputs import InputFile

BATCH_CHARACTERS = 1 << 21
SHORTEST_CUT = 1 << 16  # characters


@dataclass(frozen=True)
class Position:
    """A place in the input from which reading can go on."""

    file: int = 0
    offset: int = 0  # bytes in the decompressed file: all before, or where the line at hand begins
    row: int = 0  # lines or rows before
    document: int = 0  # documents before
    start: int = 0  # bytes of text in the documents before
    characters: int = 0  # of this document before here
    bytes: int = 0  # of this document before here


@dataclass(frozen=True)
class Split:
    """Where validation begins. Depends on the documents and `val_fraction` alone."""

    stats: InputStats
    val_fraction: float

    @property
    def characters(self) -> int | None:
        """Of a single document, those that are trained on; None where there are several documents."""
        if self.stats.documents > 1:
            return None
        return int(self.stats.characters * (1 - self.val_fraction))

    def is_val(self, position: Position) -> bool:
        """Whether the text at a position belongs to the validation part."""
        if self.characters is not None:
            return position.characters >= self.characters
        first_byte = int(self.stats.bytes * (1 - self.val_fraction))
        is_last = position.document == self.stats.documents - 1
        return position.document > 0 and (position.start >= first_byte or is_last)


@dataclass(frozen=True)
class Batch:
    """Texts from `before` to `after`, all of one part."""

    before: Position
    after: Position
    is_val: bool
    texts: list[str]
    ends: list[bool]  # whether a document ends behind the text

    @property
    def bytes(self) -> int:
        """Of text."""
        return self.after.start + self.after.bytes - self.before.start - self.before.bytes


def read_batches(
    files: Sequence[InputFile], split: Split, encoder: Encoder, position: Position
) -> Iterator[Batch]:
    """The input from a position on. Encoded one by one, batches have the tokens of whole documents."""
    batch: Batch | None = None
    size = 0
    for segment in read_segments(files, split, encoder, position):
        if batch and (size >= BATCH_CHARACTERS or batch.is_val != segment.is_val):
            yield batch
            batch, size = None, 0
        size += sum(map(len, segment.texts))
        if batch:
            batch.texts.extend(segment.texts)
            batch.ends.extend(segment.ends)
            batch = replace(batch, after=segment.after)
        else:
            batch = segment
    if batch:
        yield batch


def read_segments(
    files: Sequence[InputFile], split: Split, encoder: Encoder, position: Position
) -> Iterator[Batch]:
    """The shortest batches: as much of a document as can be encoded apart from what follows it."""
    for number in range(position.file, len(files)):
        is_text = files[number].kind == "text"
        document = Document(split, encoder, position, is_text)
        skip = 0 if is_text else position.characters  # the line is read again from its beginning
        for piece in read_pieces(files[number], position.offset, position.row):
            yield from document.add(piece.text[skip:])
            skip = 0
            if piece.ends_document:
                end = {"file": number + 1} if is_text else {"offset": piece.offset, "row": piece.row}
                yield document.finish(**end)
        position = Position(number + 1, document=document.at.document, start=document.at.start)


class Document:
    """Cuts a document's pieces into segments while they come, and knows the position of each."""

    def __init__(self, split: Split, encoder: Encoder, at: Position, is_text: bool) -> None:
        self.split, self.encoder, self.is_text = split, encoder, is_text
        self.at = at  # the end of the last segment
        self.hold("")

    def add(self, text: str) -> Iterator[Batch]:
        """The segments that are complete with a further piece."""
        self.pending.append(text)
        self.length += len(text)
        split_at = self.split.characters
        if split_at is not None and self.at.characters < split_at <= self.at.characters + self.length:
            text = "".join(self.pending)
            head = text[: split_at - self.at.characters]
            self.hold(text[len(head) :])
            yield self.segment(self.encoder.split(head), ends=False)
        if self.encoder.can_be_cut and self.length > self.next_cut:
            *texts, rest = self.encoder.split("".join(self.pending)) or [""]
            self.hold(rest)
            if texts:
                yield self.segment(texts, ends=False)

    def hold(self, rest: str) -> None:
        """Keep what is not in a segment yet, until it has grown enough to be searched for a cut again."""
        self.pending, self.length = [rest], len(rest)
        self.next_cut = max(SHORTEST_CUT, 2 * len(rest))

    def finish(self, **end: int) -> Batch:
        """The document's last segment; the next document begins at `end`."""
        texts = self.encoder.split("".join(self.pending)) or [""]
        self.hold("")
        segment = self.segment(texts, ends=True)
        after = Position(self.at.file, document=self.at.document + 1, start=self.at.start + self.at.bytes)
        self.at = replace(after, **end)
        return replace(segment, after=self.at)

    def segment(self, texts: list[str], ends: bool) -> Batch:
        before, size = self.at, sum(map(utf8_length, texts))
        self.at = replace(
            before,
            offset=before.offset + (size if self.is_text else 0),
            characters=before.characters + sum(map(len, texts)),
            bytes=before.bytes + size,
        )
        last = len(texts) - 1
        marks = [ends and place == last for place in range(len(texts))]
        return Batch(before, self.at, self.split.is_val(before), texts, marks)
