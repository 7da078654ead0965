"""One load of a data set: the policy for bad records, who hears of decisions, and which files were read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dexter.data.formats.labels import LabelTable
from dexter.data.formats.lines import decode, raw_lines, without_line_end
from dexter.data.formats.problems import BadRecord, Problems
from dexter.data.formats.rows import Rows

Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How to read the columns of a table; what is None is guessed and announced."""

    text_column: str | None = None
    """Name of the text column, or several joined by `+`."""
    label_column: str | None = None
    """Name of the column of labels."""
    label_separator: str | None = None
    """What stands between two labels of a cell."""


class Reading:
    """What the readers share while they read one data set."""

    def __init__(
        self, root: Path, *, problems: Problems, announce: Callable[[str], None], table: TableOptions | None = None
    ) -> None:
        self.root = root
        self.problems = problems
        self.announce = announce
        self.table = table or TableOptions()
        self.files: list[Path] = []
        """Every file that was read, in order."""

    def use(self, path: Path) -> Path:
        """Remember a file as part of the data set."""
        if path not in self.files:
            self.files.append(path)
        return path

    def records(
        self,
        path: Path,
        parse: Callable[[str], Record],
        *,
        first_line: int = 1,
        keep_blank: bool = False,
        skippable: bool = True,
    ) -> Iterator[Record | None]:
        """What `parse` makes of each line; None where the line was bad, which is noted as a problem.

        Blank lines are passed over unless `keep_blank`: some formats mean an empty text by them.
        """
        for number, raw in raw_lines(self.use(path)):
            if number < first_line or not (keep_blank or raw.strip()):
                continue
            record: Record | None = None
            try:
                record = parse(without_line_end(decode(raw)))
            except BadRecord as bad:
                self.problems.add(path, number, bad, skippable=skippable)
            yield record

    def rows(
        self, path: Path, add_row: Callable[[Rows, str], None], *, first_line: int = 1, keep_blank: bool = False
    ) -> Rows:
        """The rows of a file, one per line, which `add_row` parses and appends; a bad line is counted as skipped."""
        rows = Rows()

        def parse(line: str) -> bool:
            add_row(rows, line)
            return True

        for added in self.records(path, parse, first_line=first_line, keep_blank=keep_blank):
            if not added:
                rows.skip()
        return rows

    def labels(
        self, path: Path, add_label: Callable[[LabelTable, str], object], *, keep_blank: bool = False
    ) -> LabelTable:
        """The labels of a labels file, one per line. A bad label fails the load: others are counted from its line."""
        labels = LabelTable(path)
        for _ in self.records(path, lambda line: add_label(labels, line), keep_blank=keep_blank, skippable=False):
            pass
        self.problems.check()
        return labels

    def relative_name(self, path: Path) -> str:
        """A file's name as results refer to it: below the data folder, or the file's own."""
        return path.relative_to(self.root).as_posix() if self.root.is_dir() else path.name
