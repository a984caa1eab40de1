"""Data that needs no download: text, digits and sentence pairs; and readers for CIFAR-10 and GLUE's pairs."""

from __future__ import annotations

import re
from gzip import decompress
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor


def text() -> Tensor:
    """English prose, the help texts in Python's standard library, as bytes: uint8, about (465,000,).

    The length differs between Python versions, and so do losses.
    """
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8)


def batch(text: Tensor, rank: int, step: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """The micro-batch of `rank` in `step`: tokens and the tokens after them, each (batch_size, context) int64.

    It depends on nothing but its arguments, so a single process can make the micro-batches of all ranks.
    """
    if len(text) <= context:
        raise ValueError(f"a text of {len(text)} bytes is too short for a context of {context}")
    generator = torch.Generator().manual_seed(4096 * step + rank)
    starts = torch.randint(len(text) - context, (batch_size, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()  # (batch_size, context + 1)
    return windows[:, :-1], windows[:, 1:]


# -- what `zerolab train` learns from --------------------------------------------------------------------------------


class DataError(ValueError):
    """Data is missing or malformed. The message names the file."""


class Split(NamedTuple):
    """Samples for training and for validation. The first dimension of each tensor is the sample."""

    inputs: Tensor
    targets: Tensor
    validation_inputs: Tensor
    validation_targets: Tensor


def windows(path: str | None, context: int) -> Split:
    """A text file, or `text()`, cut into tokens and the tokens after them, each (windows, context) uint8.

    The last tenth of the text, but at most 64 KiB, is for validation.
    """
    everything = text() if path is None else torch.frombuffer(bytearray(read(path)), dtype=torch.uint8)
    size = len(everything)
    held_out = min(size // 10, 1 << 16)
    if held_out <= context:
        name = path or "the built-in text"
        raise DataError(f"{name} has {size} bytes: too few for --context {context}, with a tenth for validation")
    parts = everything[: size - held_out], everything[size - held_out :]
    train, validation = (part.unfold(0, context + 1, context) for part in parts)
    return Split(train[:, :-1], train[:, 1:], validation[:, :-1], validation[:, 1:])


def digits() -> Split:
    """scikit-learn's 1,797 handwritten digits: images (samples, 1, 8, 8) uint8. Every fifth is for validation.

    Its file is read, and the package isn't imported: that would take each rank two seconds.
    """
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise DataError("the digits come with scikit-learn: pip install 'zerolab[lab]'")
    rows = read(Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz")
    numbers = [int(number) for row in decompress(rows).split() for number in row.split(b",")]
    table = torch.tensor(numbers).view(-1, 8 * 8 + 1)  # an image of values from 0 to 16, and its label
    images, labels = (table[:, :-1] * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8), table[:, -1]
    held_out = torch.arange(len(labels)) % 5 == 4
    return Split(images[~held_out], labels[~held_out], images[held_out], labels[held_out])


RECORD = 1 + 3 * 32 * 32  # CIFAR-10's binary version: the label, then the image, red plane, green, blue


def cifar10(folder: str) -> Split:
    """The 60,000 images of CIFAR-10, from the folder of its binary version: (samples, 3, 32, 32) uint8."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    missing = [name for name in (*names, "test_batch.bin") if not (Path(folder) / name).is_file()]
    if missing and (Path(folder) / "data_batch_1").is_file():
        raise DataError(
            f"{Path(folder) / 'data_batch_1'} is a pickle, and reading a pickle runs the code in it: use the "
            '"binary version" of CIFAR-10 (cifar-10-binary.tar.gz), whose files end in .bin'
        )
    if missing:
        raise DataError(f"{folder} has no {missing[0]}: give the unpacked folder of CIFAR-10's binary version")
    train = [_cifar10_file(Path(folder) / name) for name in names]
    images, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    return Split(images, labels, *_cifar10_file(Path(folder) / "test_batch.bin"))


def _cifar10_file(path: Path) -> tuple[Tensor, Tensor]:
    content = read(path)
    if len(content) % RECORD:
        raise DataError(f"{path} has {len(content)} bytes, which is not a multiple of {RECORD}: it was cut off")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, RECORD)
    if (rows[:, 0] > 9).any():
        raise DataError(f"{path} has a label above 9, so it is not CIFAR-10")
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long()


def pairs(path: str | None, context: int) -> Split:
    """Sentence pairs as word numbers (samples, 2, context), 0 for padding. Target 1: both sentences mean the same.

    path: the folder of MRPC (msr_paraphrase_train.txt and _test.txt), or of a task of GLUE (train.tsv and dev.tsv; see
        `glue`), or one such file, of which every tenth pair is then for validation. None: sentences from templates.
    """
    if path is None:
        return _split(*_numbered(made_up_pairs(4000), context))
    for train, validation in (("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"), ("train.tsv", "dev.tsv")):
        files = Path(path) / train, Path(path) / validation
        if files[0].is_file() and files[1].is_file():
            return Split(*_numbered(glue(files[0]), context), *_numbered(glue(files[1]), context))
    if Path(path).is_dir():
        raise DataError(f"{path} has neither msr_paraphrase_train.txt and _test.txt nor train.tsv and dev.tsv")
    return _split(*_numbered(glue(Path(path)), context))


# The header's names of the two sentences, and of the answer; which answers say that they mean the same, or do not.
SENTENCES = (
    ("#1 String", "#2 String"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "sentence"),
)
ANSWERS = ("Quality", "is_duplicate", "label", "gold_label")
MEANS = {"1": 1, "0": 0, "entailment": 1, "not_entailment": 0}


def glue(path: Path) -> list[tuple[int, str, str]]:
    """Read a file of sentence pairs in GLUE's format: (1 or 0, sentence, sentence). MRPC, QQP, RTE, QNLI and WNLI.

    Tabs separate columns, and the first line names them. Quotes are plain characters, so Python's csv would need
    `quoting=csv.QUOTE_NONE`, or a single quotation mark swallows the lines up to the next one.
    """
    try:
        lines = read(path).decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: {error}") from None
    names = lines[0].split("\t")
    pair = next((pair for pair in SENTENCES if set(pair) <= set(names)), None)
    if pair is None:
        raise DataError(f"{path}, line 1 names no two sentences, but {', '.join(names)[:200]}: it is no GLUE pair task")
    answer = next((name for name in ANSWERS if name in names), None)
    if answer is None:
        raise DataError(f"{path} has no column {', '.join(ANSWERS)}: GLUE's test.tsv has no answers, use dev.tsv")
    one, other, said = (names.index(name) for name in (*pair, answer))
    found = []
    for number, line in enumerate(lines[1:], 2):
        columns = line.split("\t")
        if len(columns) != len(names):
            raise DataError(f"{path}, line {number}: {len(columns)} columns, and the first line has {len(names)}")
        if columns[said] not in MEANS:
            raise DataError(f"{path}, line {number}: the answer is {columns[said]!r}, none of {', '.join(MEANS)}")
        found.append((MEANS[columns[said]], columns[one], columns[other]))
    if len(found) < 10:
        raise DataError(f"{path} has {len(found)} pairs below its first line; at least 10 are needed")
    return found


WHO = ["Ada", "Grace", "Emmy", "Sofia", "Mary", "Maria", "Alan", "Carl", "Kurt", "Paul"]
WHAT = ["lamp", "kettle", "violin", "bicycle", "novel", "mirror", "ladder", "clock", "jacket", "camera"]
WHERE = ["Oslo", "Lima", "Cairo", "Delhi", "Quito", "Turin", "Dakar", "Perth"]
BOUGHT = (
    "{who} bought a {what} in {where}",
    "in {where} {who} purchased a {what}",
    "a {what} was bought by {who} in {where}",
)
SOLD = (
    "{who} sold a {what} in {where}",
    "in {where} {who} got rid of a {what}",
    "a {what} was sold by {who} in {where}",
)


def made_up_pairs(count: int) -> list[tuple[int, str, str]]:
    """Half of the pairs say the same in other words. In the others the person, thing, place or deed differs.

    No two pairs are equal, so no validation pair is seen in training.
    """
    random = Random(0)
    found: dict[tuple[str, str], int] = {}
    while len(found) < count:
        said = {"who": random.choice(WHO), "what": random.choice(WHAT), "where": random.choice(WHERE)}
        done, same, changed = random.choice((BOUGHT, SOLD)), len(found) % 2, dict(said)
        first, other = random.sample(done, 2)
        which = None if same else random.choice(("who", "what", "where", "done"))
        if which == "done":
            other = random.choice(SOLD if done is BOUGHT else BOUGHT)
        elif which is not None:
            values = {"who": WHO, "what": WHAT, "where": WHERE}[which]
            changed[which] = random.choice([value for value in values if value != said[which]])
        found[first.format(**said), other.format(**changed)] = same
    rows = [(same, *sentences) for sentences, same in found.items()]
    random.shuffle(rows)
    return rows


def _numbered(found: list[tuple[int, str, str]], context: int) -> tuple[Tensor, Tensor]:
    """A word's number, 1 to 4095, is a hash of its letters, so no vocabulary has to be stored."""
    inputs = torch.zeros(len(found), 2, context, dtype=torch.int16)
    for row, (_, *sentences) in zip(inputs, found, strict=True):
        for into, sentence in zip(row, sentences, strict=True):
            words = re.findall(r"\w+|[^\w\s]", sentence.lower())[:context] or [""]
            into[: len(words)] = torch.tensor([1 + crc32(word.encode()) % 4095 for word in words])
    return inputs, torch.tensor([same for same, *_ in found])


def _split(inputs: Tensor, targets: Tensor) -> Split:
    """Every tenth sample is for validation."""
    held_out = torch.arange(len(targets)) % 10 == 9
    return Split(inputs[~held_out], targets[~held_out], inputs[held_out], targets[held_out])


def read(path: str | Path) -> bytes:
    """The content of a file, which is not empty."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if not content:
        raise DataError(f"{path} is empty")
    return content
