"""Vocabularies: SKOS in three syntaxes and Annif's tables, within limits, and as the labels of a data set."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dexter.data.formats import lines, load_dataset
from dexter.data.formats.vocabulary import LabelVocabulary, read_vocabulary
from dexter.data.label_names import LabelNames, best_language
from dexter.errors import DataError, ModelError, ResourceError, UsageError

pytest.importorskip("rdflib")
EX = "http://example.org/"
TURTLE = """
@prefix skos: <http://www.w3.org/2004/02/skos/core#> .
@prefix owl: <http://www.w3.org/2002/07/owl#> .
@prefix dct: <http://purl.org/dc/terms/> .
@prefix ex: <http://example.org/> .
ex:scheme a skos:ConceptScheme ; skos:prefLabel "all"@en .
ex:animals a skos:Concept ; skos:prefLabel "animals"@en, "djur"@sv ; skos:narrower ex:dogs .
ex:cats a skos:Concept ;
  skos:prefLabel "cats"@en, "katter"@sv ; skos:altLabel "house cats"@en, "felines"@en, "kissor"@sv ;
  skos:broader ex:animals ; skos:definition "small\\n carnivores"@en ; skos:notation "599.75" ;
  owl:imports <http://example.org/more.ttl> .
ex:dogs a skos:Concept ; skos:prefLabel "dogs"@en-GB, "hundar"@sv .
ex:kitties a skos:Concept ; owl:deprecated true ; skos:prefLabel "kitties"@en ; dct:isReplacedBy ex:cats .
ex:beasts a skos:Concept ; owl:deprecated true ; skos:prefLabel "beasts"@en .
ex:fish a skos:Concept ; skos:prefLabel "fiskar"@sv .
"""


@pytest.fixture
def no_network(monkeypatch):
    """Opening a socket fails."""

    def refuse(*_, **__):
        raise AssertionError("nothing may be fetched")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)


@pytest.fixture
def turtle(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.ttl"
    path.write_text(TURTLE)
    return path


def concept(vocabulary: LabelVocabulary, name: str):
    return vocabulary.concepts[EX + name]


def test_a_concept_is_read_with_all_that_is_said_of_it(turtle, no_network):
    found = read_vocabulary(turtle)
    cats = concept(found, "cats")
    assert [one.removeprefix(EX) for one in found.concepts] == ["animals", "cats", "dogs", "kitties", "beasts", "fish"]
    assert (cats.labels, cats.alternatives["en"]) == ({"en": "cats", "sv": "katter"}, ("felines", "house cats"))
    assert (cats.broader, cats.definitions, cats.notation) == ((EX + "animals",), {"en": "small carnivores"}, "599.75")
    assert concept(found, "dogs").broader == (EX + "animals",), "narrower is broader from the other side"
    assert concept(found, "kitties").is_deprecated and found.successor(EX + "kitties") == EX + "cats"
    assert found.successor(EX + "beasts") is None and found.successor(EX + "unknown") is None
    assert found.languages == {"sv": 4, "en": 2, "en-gb": 1}


@pytest.mark.parametrize(
    ("suffix", "syntax"), [("nt", "nt"), ("rdf", "xml"), ("xml", "pretty-xml"), ("ttl.gz", "turtle")]
)
def test_every_syntax_says_the_same(turtle, tmp_path, suffix, syntax, no_network):
    import rdflib

    content = rdflib.Graph().parse(data=TURTLE, format="turtle").serialize(format=syntax, encoding="utf-8")
    path = tmp_path / f"other.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert read_vocabulary(path).concepts == read_vocabulary(turtle).concepts


@pytest.mark.parametrize(
    "said",
    [
        "<http://www.w3.org/2002/07/owl#deprecated> true",
        '<http://purl.org/iso25964/skos-thes#status> "deprecated"',
        "<http://publications.europa.eu/ontology/euvoc#status> <http://x/concept-status/DEPRECATED>",
        "a <http://purl.org/finnonto/schema/skosext#DeprecatedConcept>",
    ],
)
def test_ways_to_deprecate(tmp_path, said):
    path = tmp_path / "vocab.ttl"
    path.write_text(TURTLE + f"ex:cats {said} .\n")
    assert concept(read_vocabulary(path), "cats").is_deprecated
    assert not concept(read_vocabulary(path), "dogs").is_deprecated


def test_labels_of_skos_xl(tmp_path):
    path = tmp_path / "vocab.ttl"
    path.write_text(
        TURTLE
        + """@prefix xl: <http://www.w3.org/2008/05/skos-xl#> .
        ex:owls a skos:Concept ; xl:prefLabel ex:l1 ; xl:altLabel [ xl:literalForm "night birds"@en ] .
        ex:l1 xl:literalForm "owls"@en ."""
    )
    owls = concept(read_vocabulary(path), "owls")
    assert (owls.labels, owls.alternatives) == ({"en": "owls"}, {"en": ("night birds",)})


def test_the_text_of_a_label_has_the_parts_asked_for(turtle):
    found = read_vocabulary(turtle)
    assert found.text(EX + "cats", "en") == "cats"
    full = found.text(EX + "cats", "en", ("label", "alternatives", "broader", "definition"))
    assert full == "cats; felines; house cats < animals: small carnivores"
    assert found.text(EX + "fish", "en") is None


def test_a_cycle_of_broader_concepts_ends(tmp_path):
    path = tmp_path / "vocab.ttl"
    path.write_text(TURTLE + "ex:animals skos:broader ex:cats .\n")
    assert read_vocabulary(path).text(EX + "cats", "en", ("label", "broader")) == "cats < animals"


@pytest.mark.parametrize(
    ("tags", "language", "expected"),
    [("en sv", "en", "en"), ("en-gb sv", "en", "en-gb"), ("en sv", "en-us", "en"), ("sv", "en", None)],
)
def test_a_language_is_found_by_its_region_too(tags, language, expected):
    assert best_language({tag: tag for tag in tags.split()}, language) == expected
    assert best_language({"": "any", "sv": "x"}, "en") == "any"


def test_a_vocabulary_of_several_languages_needs_one(turtle):
    found = read_vocabulary(turtle)
    with pytest.raises(UsageError, match=r"several languages, sv \(4\), en \(2\)"):
        found.choose_language(None)
    with pytest.raises(UsageError, match="no labels in 'fi'"):
        found.choose_language("fi")


BOMB = """<?xml version="1.0"?>
<!DOCTYPE rdf:RDF [
  <!ENTITY a "aaaaaaaaaaaaaaaa">
  <!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
]>
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"/>"""


@pytest.mark.parametrize(
    ("declared", "line"),
    [
        (BOMB, 4),
        (BOMB.replace('"&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;"', 'SYSTEM "file:///etc/passwd"'), 4),
        (BOMB.replace('"&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;"', 'SYSTEM "http://example.org/x"'), 4),
        (BOMB.replace('<!ENTITY a "aaaaaaaaaaaaaaaa">', f'<!ENTITY a "{"a" * 1000}">'), 3),
        (BOMB.replace('<!ENTITY a "aaaaaaaaaaaaaaaa">', '<!ENTITY % p SYSTEM "http://example.org/p.dtd"> %p;'), 3),
    ],
)
def test_entities_that_expand_or_fetch_are_refused(tmp_path, declared, line, no_network):
    path = tmp_path / "vocab.rdf"
    path.write_text(declared)
    with pytest.raises(DataError, match=rf"vocab.rdf:{line}: entity "):
        read_vocabulary(path)


def test_entities_for_namespaces_are_read(tmp_path, no_network):
    path = tmp_path / "vocab.rdf"
    path.write_text("""<?xml version="1.0"?>
<!DOCTYPE rdf:RDF PUBLIC "-//X//Y" "http://example.org/rdf.dtd" [ <!ENTITY ex "http://example.org/"> ]>
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#" xmlns:skos="http://www.w3.org/2004/02/skos/core#">
  <skos:Concept rdf:about="&ex;cats"><skos:prefLabel xml:lang="en">cats</skos:prefLabel></skos:Concept>
</rdf:RDF>""")
    assert concept(read_vocabulary(path), "cats").labels == {"en": "cats"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.ttl", TURTLE + "ex:a ex:b ;;; ex:c\nex:d\n", r"v.ttl:\d+: not Turtle: .*: correct it"),
        ("v.ttl", TURTLE + "nobody:a a skos:Concept .\n", r"v.ttl:16: not Turtle: .*nobody"),
        ("v.nt", "<http://a> <http://b> <http://c> .\n<http://a> oops\n", r"v.nt:2: not Turtle"),
        ("v.rdf", "<a>\n<b></c>\n", r"v.rdf:2: not RDF/XML: mismatched tag"),
        ("v.ttl", "[ " * 5000, "not Turtle"),
        ("v.ttl", "", "no concept that is not deprecated"),
        ("v.json", "{}", "a vocabulary ends in .ttl"),
        ("v.tsv", "<u>\tone\n<w>\n<x>\n", r"v.tsv:2: expected uri<TAB>label.*and 1 more"),
        ("v.tsv", "<u>\tone\n<u>\ttwo\n", r"v.tsv:2: 'u' was given before"),
        ("v.csv", "id,label\nu,one\n", r"v.csv:1: expected the columns uri and label_LANGUAGE.*'id', 'label'"),
        ("v.csv", 'uri,label_en\n"u,one\n', r"v.csv:2: not CSV"),
    ],
)
def test_a_bad_file_names_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_vocabulary(tmp_path / name)


def test_a_file_above_the_limit_is_refused(turtle, tmp_path, monkeypatch):
    monkeypatch.setenv("DEXTER_MAX_BYTES", "100")
    with pytest.raises(DataError, match="holds more than 100 bytes"):
        read_vocabulary(turtle)
    monkeypatch.delenv("DEXTER_MAX_BYTES")
    monkeypatch.setattr(lines, "_MAX_WHOLE_BYTES", 200)
    path = tmp_path / "bomb.ttl.gz"
    path.write_bytes(gzip.compress(b"#" * 10_000))
    with pytest.raises(DataError, match="holds more than"):
        read_vocabulary(path)


def test_a_missing_package_is_named(turtle, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdflib", None)
    with pytest.raises(ResourceError, match=r"dexter-xmc\[skos\]"):
        read_vocabulary(turtle)


def test_tables_of_annif(tmp_path):
    (tmp_path / "v.csv").write_text("uri,label_en,label_sv,notation\n<u>,one,ett,1.1\nv,,två,\nw,,,\n")
    found = read_vocabulary(tmp_path / "v.csv").concepts
    assert (found["u"].labels, found["u"].notation) == ({"en": "one", "sv": "ett"}, "1.1")
    assert found["v"].labels == {"sv": "två"} and found["w"].is_deprecated
    (tmp_path / "v.tsv").write_text("<u>\tone\t1.1\nv\ttwo\n")
    assert read_vocabulary(tmp_path / "v.tsv", language="en").concepts["u"].labels == {"en": "one"}


@pytest.fixture
def corpus(turtle):
    """Texts with URIs beside the vocabulary, one of them deprecated with a replacement."""
    path = turtle.parent / "train.tsv"
    path.write_text(f"purring\t<{EX}cats> <{EX}kitties>\nbarking\t<{EX}dogs>\nswimming\t<{EX}fish>\n")
    return path


def labels_of(dataset, row):
    return {dataset.label_ids[column].removeprefix(EX) for column in dataset.train.relevance[row].indices}


def test_the_vocabulary_beside_a_corpus_is_its_labels(corpus, logged):
    with pytest.raises(UsageError, match="several languages"):
        load_dataset(corpus.parent)
    data = load_dataset(corpus.parent, language="en")
    assert data.label_texts == ("animals", "cats", "dogs", "fiskar"), "all current concepts, also without texts"
    assert [labels_of(data, row) for row in range(3)] == [{"cats"}, {"dogs"}, {"fish"}]
    assert data.train.relevance.data.tolist() == [1.0, 1.0, 1.0]
    assert any("1 concepts have no label in 'en'" in line for line in logged)
    assert "vocab.ttl" in data.source and data.names.in_language("sv")[EX + "cats"] == "katter"
    assert load_dataset(corpus, language="sv").label_texts == ("djur", "katter", "hundar", "fiskar")
    other = load_dataset(corpus, language="en", label_text=("label", "alternatives"))
    assert other.label_texts[1] == "cats; felines; house cats"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "annif.jsonl", "folder"])
def test_other_data_whose_labels_are_uris_or_names(turtle, tmp_path, kind):
    """CSV and JSONL, also as Annif writes them; documents with subjects by URI and by label."""
    uris, path = [f"<{EX}cats> <{EX}dogs>", f"{EX}dogs"], tmp_path / f"documents.{kind.split('.')[-1]}"
    if kind == "csv":
        path.write_text(
            "document_id,text,subject_uris\n" + "".join(f"d{i},text {i},{one}\n" for i, one in enumerate(uris))
        )
    elif kind == "jsonl":
        rows = [{"uid": "d0", "text": "text 0", "labels": [EX + "cats", EX + "dogs"]}]
        path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "text 1", "labels": ["hundar"]}]))
    elif kind == "annif.jsonl":
        subjects = [[{"uri": EX + "cats"}, {"label": "hundar"}], [{"uri": EX + "dogs", "label": "x"}]]
        rows = [{"document_id": f"d{i}", "text": f"text {i}", "subjects": one} for i, one in enumerate(subjects)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path = tmp_path / "documents"
        (path / "test").mkdir(parents=True)
        (path / "train").mkdir()
        for name, folder in (("train", path / "train"), ("test", path / "test")):
            (folder / "d0.txt").write_text("text 0")
            (folder / "d0.tsv").write_text(f"<{EX}cats>\tkatter\n<{EX}dogs>\thundar\n")
            (folder / "d1.txt").write_text(f"text 1 of {name}")
            (folder / "d1.key").write_text("hundar\n")
            (folder / "d2.txt").write_text("without subjects")
    data = load_dataset(path, vocabulary=turtle, language="sv")
    assert [labels_of(data, row) for row in range(2)] == [{"cats", "dogs"}, {"dogs"}]
    assert data.train.uids[0] == "d0" and len(data.train) == 2
    if kind == "folder":
        assert data.test is not None and data.test.texts == ("text 0", "text 1 of test")
        assert set(data.source) >= {"train/*.txt", "test/*.txt"}


def test_a_folder_of_documents_without_a_vocabulary(tmp_path, logged):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.key").write_text("cats\ndogs\n")
    data = load_dataset(tmp_path)
    assert (data.label_texts, data.train.uids) == (("cats", "dogs"), ("a",))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "b.key").write_text("cats\n")
    with pytest.raises(DataError, match=r"b.txt:1: byte 1 of the line \(0xff\) is not UTF-8"):
        load_dataset(tmp_path)


def test_labels_that_the_vocabulary_does_not_have(corpus, logged):
    corpus.write_text(corpus.read_text() + f"roaring\t<{EX}cats> <{EX}lions> <{EX}beasts>\n")
    with pytest.raises(DataError, match=r"train.tsv:4: label id 'http://example.org/lions' is not in vocab.ttl"):
        load_dataset(corpus.parent, language="en")
    data = load_dataset(corpus.parent, language="en", on_error="skip")
    assert labels_of(data, 3) == {"cats"}
    assert any("1 labels are not in vocab.ttl" in line for line in logged)
    assert any("1 labels are deprecated without one replacement" in line for line in logged)


def test_a_table_beside_a_corpus_is_read(tmp_path):
    (tmp_path / "train.tsv").write_text("purring\t<http://x/cats>\n")
    (tmp_path / "vocab.csv").write_text("uri,label_en,label_sv\nhttp://x/dogs,dogs,hundar\nhttp://x/cats,cats,katter\n")
    assert load_dataset(tmp_path, language="sv").label_texts == ("hundar", "katter")


def test_two_vocabularies_are_an_error(corpus):
    (corpus.parent / "vocab.csv").write_text("uri,label_en\nu,one\n")
    with pytest.raises(DataError, match=r"two vocabularies, vocab.csv and vocab.ttl"):
        load_dataset(corpus.parent, language="en")


def test_a_language_without_a_vocabulary_is_an_error(tmp_path):
    (tmp_path / "train.tsv").write_text(f"purring\t<{EX}cats>\n")
    with pytest.raises(UsageError, match="name its file with --vocabulary"):
        load_dataset(tmp_path, language="en")


def test_names_come_back_as_they_were_written(tmp_path):
    names = LabelNames(language="en", parts=("label", "broader"), names={"sv": {"a": "kätter"}})
    names.save(tmp_path / "names.json")
    assert LabelNames.load(tmp_path / "names.json") == names
    for odd in ({"sv": {"a": ["list"]}}, {"sv": "text"}, []):
        LabelNames(language="en", names=odd).save(tmp_path / "odd.json")  # type: ignore[arg-type]
        with pytest.raises(ModelError, match="not the names of labels"):
            LabelNames.load(tmp_path / "odd.json")
    content = bytearray((tmp_path / "names.json").read_bytes())
    for place in range(len(content) - 1):
        altered = content[:]
        altered[place] ^= 1
        (tmp_path / "names.json").write_bytes(altered)
        with pytest.raises(ModelError, match="not the names of labels"):
            LabelNames.load(tmp_path / "names.json")
    with pytest.raises(UsageError, match="no label has a name in 'fi': choose one of sv"):
        names.in_language("fi")


@pytest.mark.parametrize("module", ["vocabulary", "skos", "annif"])
def test_each_reader_can_be_imported_first(module):
    subprocess.run([sys.executable, "-c", f"import dexter.data.formats.{module}"], check=True)
