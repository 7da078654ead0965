"""The formats by name; reading a data set in any of them, and writing one as a whole folder or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from dexter.data.dataset import Dataset
from dexter.data.formats import annif, fasttext, jsonl, tables, xmc
from dexter.data.formats.columns import TableOptions
from dexter.data.formats.description import check_text_fields, write_description
from dexter.data.formats.lines import OnError
from dexter.data.formats.reader import Reader, log, plain_suffix, train_file
from dexter.data.formats.vocabulary import LabelVocabulary, apply_vocabulary, find_vocabulary, read_vocabulary
from dexter.data.formats.writer import Writer
from dexter.data.label_names import DEFAULT_PARTS
from dexter.errors import DataError, UsageError
from dexter.files import atomic_folder


@dataclass(frozen=True, kw_only=True)
class Format:
    """One layout of a data set in files."""

    name: str
    """As the user types it and as reading logs it."""
    description: str
    """The files it consists of, in one line, for the message of a failed detection."""
    detect: Callable[[Path], bool]
    """Whether a file or folder looks like this format: by its names, and its first lines where names do not decide."""
    read: Callable[[Reader], Dataset]
    """Read a file or folder."""
    write: Callable[[Dataset, Writer], None] | None = None
    """Write into an empty folder, all but filter pairs; None where the format cannot hold a data set of texts."""
    loses: str = ""
    """What writing does not keep, to be logged."""
    compress: bool = False
    """Whether its files are usually gzip: the default when writing."""
    is_table: bool = False
    """Whether the column options apply."""
    has_fields: bool = False
    """Whether `text_fields` can be chosen."""


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        one.name: one
        for one in (
            Format(
                name="jsonl",
                description="a folder with trn.jsonl (and tst.jsonl, lbl.jsonl), or one .jsonl file",
                detect=jsonl.detect,
                read=jsonl.read,
                write=jsonl.write,
                compress=True,
            ),
            *(
                Format(
                    name=suffix.removeprefix("."),
                    description=f"train{suffix} (and test, lbl) with a header in a folder, or one {suffix} file",
                    detect=partial(tables.detect, suffix),
                    read=partial(tables.read, suffix),
                    write=partial(tables.write, suffix),
                    is_table=True,
                )
                for suffix in (".csv", ".tsv", ".parquet")
            ),
            Format(
                name="xmc-json",
                description="a folder with trn.json, tst.json and lbl.json of the extreme classification repository",
                detect=jsonl.detect_xmc_json,
                read=jsonl.read_xmc_json,
                write=jsonl.write_xmc_json,
                compress=True,
                has_fields=True,
            ),
            Format(
                name="dexml",
                description="a folder with raw/trn_X.txt, raw/tst_X.txt, raw/Y.txt, Y.trn.npz and Y.tst.npz",
                detect=xmc.detect_dexml,
                read=xmc.read_dexml,
                write=xmc.write_dexml,
                loses="query ids and label ids (row numbers are used)",
            ),
            Format(
                name="xmc-text",
                description="a folder with trn_X.txt, tst_X.txt, Y.txt (or in raw/), trn_X_Y.txt and tst_X_Y.txt",
                detect=xmc.detect_xmc_text,
                read=xmc.read_xmc_text,
                write=xmc.write_xmc_text,
                loses="query ids and label ids (row numbers are used)",
            ),
            Format(
                name="svmlight",
                description='train.txt or trn.txt (and test) whose first line is "N D L", or one such file',
                detect=xmc.detect_svmlight,
                read=xmc.read_svmlight,
            ),
            Format(
                name="fasttext",
                description="train.txt (and test.txt) with lines of __label__x text, in a folder, or one such file",
                detect=fasttext.detect,
                read=fasttext.read,
                write=fasttext.write,
                loses="query ids, label texts, labels without rows and weights",
            ),
            Format(
                name="annif",
                description="train.tsv (and test.tsv) with lines of text<TAB><uri> <uri>, or one such file, or .txt "
                "files each with a .key or .tsv file; and a vocabulary",
                detect=annif.detect,
                read=annif.read,
                write=annif.write,
                loses="query ids and weights",
            ),
        )
    }
)


def detect(path: str | Path) -> str:
    """Return the name of the format of a file or folder; none or several is an error that says what was looked for."""
    path = Path(path)
    if not path.exists():
        raise DataError("no such file or folder", path=path)
    found = [one.name for one in FORMATS.values() if one.detect(path)]
    if len(found) == 1:
        return found[0]
    if found:
        advice = "keep the files of one, or give load_dataset a format"
        raise DataError(f"looks like {' and like '.join(found)}: {advice}", path=path)
    looked_for = "".join(f"\n  {one.name}: {one.description}" for one in FORMATS.values())
    raise DataError(f"no known format (each file may also be .gz). Looked for:{looked_for}", path=path)


def load_dataset(
    path_or_name: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the word users say
    on_error: OnError = "fail",
    text_column: str | None = None,
    label_column: str | None = None,
    label_separator: str | None = None,
    text_fields: Sequence[str] | None = None,
    vocabulary: str | Path | None = None,
    language: str | None = None,
    label_text: Sequence[str] = DEFAULT_PARTS,
) -> Dataset:
    """Read a data set from a file or folder, or build a built-in one; guesses and skipped lines are logged.

    Args:
        path_or_name: a path, or the name of a built-in source such as "pydocs" where no such path exists.
        format: one of `FORMATS`; detected when not given.
        on_error: "fail" raises one `DataError` that groups the bad lines; "skip" leaves bad query lines out and logs
            how many. Bad labels and damaged files fail either way.
        text_column: for tables, the text column, or several joined by "+" ("title+body"); guessed when not given.
        label_column: for tables, the column of labels; guessed when not given.
        label_separator: for tables, what separates the labels of a cell; guessed when not given.
        text_fields: for xmc-json, `("title",)` or `("title", "content")`: the same files hold a data set of titles and
            one of full texts. When not given, a folder's name that holds "Titles" says title, others mean both.
        vocabulary: a file whose concepts become the labels (see `apply_vocabulary`); when not given, that of the folder
            if it has one.
        language: the language of the vocabulary's labels; needed where it has several.
        label_text: what the text of such a label is made of: some of `dexter.data.label_names.PARTS`.
    """
    table = TableOptions(text_column=text_column, label_column=label_column, label_separator=label_separator)
    if on_error not in ("fail", "skip"):
        raise UsageError(f'on_error must be "fail" or "skip", got {on_error!r}')
    if label_separator == "":
        raise UsageError("label_separator must not be empty: leave it out to have it guessed")
    fields = None if text_fields is None else check_text_fields(text_fields)
    path = Path(path_or_name)
    if not path.exists():
        if fields is not None:
            raise UsageError(f"text_fields applies to files, not to the built-in data set {path_or_name}")
        if vocabulary is not None:
            raise UsageError(f"a vocabulary applies to files, not to the built-in data set {path_or_name}")
        return _build(str(path_or_name))
    chosen = _format_named(format or detect(path))
    if table != TableOptions() and not chosen.is_table:
        names = ", ".join(one.name for one in FORMATS.values() if one.is_table)
        raise UsageError(f"text_column, label_column and label_separator apply to {names}, not to {chosen.name}")
    log.info(f"read as {chosen.name}")
    concepts = _read_vocabulary(path, vocabulary, language, is_annif=chosen.name == "annif")
    reader = Reader(
        path, format_name=chosen.name, on_error=on_error, table=table, text_fields=fields, vocabulary=concepts
    )
    if fields is not None and not (chosen.has_fields or reader.has_stored_fields):
        names = ", ".join(one.name for one in FORMATS.values() if one.has_fields)
        raise UsageError(f"text_fields applies to {names}, not to {chosen.name}, whose texts are one field")
    dataset = chosen.read(reader)
    if concepts is None:
        return dataset
    return apply_vocabulary(dataset, concepts, language=language, parts=label_text, on_error=on_error, folder=path)


def read_label_file(path: Path) -> list[tuple[str, str]]:
    """Read the (id, text) of every label of a file, JSONL or a table; any bad line is an error."""
    suffix = plain_suffix(path)
    if suffix not in (".jsonl", ".csv", ".tsv", ".parquet"):
        raise DataError("a file of labels ends in .jsonl, .csv, .tsv, .parquet (or .gz after it)", path=path)
    read = jsonl.read_labels if suffix == ".jsonl" else tables.read_labels
    labels = read(Reader(path, format_name=suffix[1:]), path)
    return list(zip(labels.ids, labels.texts, strict=True))


def read_column(path: Path, name: str) -> list[str]:
    """Read one more column of the training queries of a table, or a field of JSONL: a value for each of them."""
    suffixes = (".jsonl", ".csv", ".tsv", ".parquet")
    file = next((found for suffix in suffixes if (found := train_file(path, [suffix])) is not None), None)
    if file is None:
        raise UsageError(f"{path}: only tables and JSONL have other columns than texts and labels")
    read = jsonl.read_column if plain_suffix(file) == ".jsonl" else tables.read_column
    return read(file, name)


def save_dataset(
    dataset: Dataset,
    path: str | Path,
    *,
    format: str = "jsonl",  # noqa: A002 - the word users say
    gzip: bool | None = None,
    replace: bool = False,
) -> None:
    """Write a data set as a folder, which appears whole or not at all; what the format cannot keep is logged.

    Args:
        dataset: what to write.
        path: the folder to make; it must not exist unless `replace` is given.
        format: one of `FORMATS` that can be written.
        gzip: whether text files are compressed; by default as the format's other tools expect (jsonl, xmc-json: yes).
        replace: replace an existing folder.
    """
    chosen = _format_named(format)
    if chosen.write is None:
        writable = ", ".join(one.name for one in FORMATS.values() if one.write is not None)
        raise UsageError(f"{format} is read only: a data set can be written as {writable}")
    with atomic_folder(path, replace=replace) as folder:
        writer = Writer(folder, compress=chosen.compress if gzip is None else gzip)
        try:
            chosen.write(dataset, writer)
        except UnicodeEncodeError as error:
            raise DataError(
                f"a text or id holds half a surrogate pair ({error.object[error.start]!a}): remove it, UTF-8 has none"
            ) from None
        writer.filter_pairs(dataset)
        write_description(folder, dataset)
    if chosen.loses:
        log.info(f"{format} does not keep {chosen.loses}")
    if writer.num_changed:
        log.info(f"{writer.num_changed:,} texts had line breaks, tabs or NULs that {format} cannot hold: now spaces")


def _format_named(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(f"no format {name!r}: choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def _read_vocabulary(
    path: Path, given: str | Path | None, language: str | None, *, is_annif: bool
) -> LabelVocabulary | None:
    """Read the vocabulary given, or the one that lies in the folder (of a corpus of Annif, also beside its file)."""
    if given is None and (path.is_dir() or is_annif):
        folder = path if path.is_dir() else path.parent
        given = find_vocabulary(folder, stems=annif.VOCABULARY_STEMS if is_annif else ())
    if given is not None:
        return read_vocabulary(given, language=language)
    if language is not None:
        raise UsageError("language chooses among the labels of a vocabulary: name its file with --vocabulary")
    return None


def _build(name: str) -> Dataset:
    from dexter.data import sources

    if name not in sources.NAMES:
        raise DataError(
            f"no such file or folder, and no built-in data set of this name ({', '.join(sources.NAMES)})", path=name
        )
    log.info(f"built-in data set {name}")
    return sources.build(name)
