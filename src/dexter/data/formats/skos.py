"""Read RDF (Turtle, RDF/XML, N-Triples) into concepts of a vocabulary, by the terms of SKOS and SKOS-XL.

The parsers are rdflib's. Triples go to `_ConceptStore`, which keeps those that describe concepts and forgets the
others, so that memory is that of the file and its labels, not of a graph. Nothing is fetched: imports are not
followed, and a document type may only declare short, plain entities.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat
from xml.sax import SAXException, SAXParseException

import rdflib
from rdflib.exceptions import Error as RdfError
from rdflib.namespace import DCTERMS, OWL, RDF, SKOS
from rdflib.plugins.parsers.notation3 import BadSyntax
from rdflib.store import Store
from rdflib.term import Literal, URIRef

from dexter.data.formats.lines import excerpt, read_whole
from dexter.data.formats.reader import plain_suffix
from dexter.data.formats.vocabulary import Concept
from dexter.errors import DataError

_TURTLE_SUFFIXES = (".ttl", ".turtle", ".nt", ".ntriples")
"""N-Triples is a part of Turtle, whose parser says at which line it stopped."""
_MAX_ENTITY_CHARACTERS = 200
"""Longest value of an entity: namespaces are written with entities, bombs and files from elsewhere are not wanted."""
_XL = rdflib.Namespace("http://www.w3.org/2008/05/skos-xl#")
_ISO = rdflib.Namespace("http://purl.org/iso25964/skos-thes#")
_LABELS = {SKOS.prefLabel: "preferred", SKOS.altLabel: "alternative", SKOS.definition: "definition"}
_LABELS_XL = {_XL.prefLabel: "preferred", _XL.altLabel: "alternative"}
_BROADER = {SKOS.broader, _ISO.broaderGeneric, _ISO.broaderPartitive, _ISO.broaderInstantial}
_NARROWER = {SKOS.narrower, _ISO.narrowerGeneric, _ISO.narrowerPartitive, _ISO.narrowerInstantial}
_CONCEPT_TYPES = {SKOS.Concept, URIRef("http://purl.org/finnonto/schema/skosext#DeprecatedConcept")}
_STATUS = {
    _ISO.status,
    URIRef("http://publications.europa.eu/ontology/euvoc#status"),
    URIRef("http://www.w3.org/ns/adms#status"),
    URIRef("http://www.w3.org/2003/06/sw-vocab-status/ns#term_status"),
}
_DEPRECATED_STATUS = re.compile(r"(?i)(?:^|[/#])(?:deprecated|obsolete|retired|withdrawn)$")


def read_rdf(path: Path) -> dict[str, Concept]:
    """Read the concepts of an RDF file by their URI, in the order in which the file first names them."""
    content = read_whole(path)
    is_turtle = plain_suffix(path) in _TURTLE_SUFFIXES
    if not is_turtle:
        _check_entities(content, path)
    store = _ConceptStore()
    with _bad_syntax(path), _without_warnings():
        rdflib.Graph(store=store).parse(data=content, format="turtle" if is_turtle else "xml")
    return {str(one): store.concept(one) for one in store.order if one in store.concepts}


class _ConceptStore(Store):
    """Receives the triples of a file, and keeps what describes concepts."""

    def __init__(self) -> None:
        super().__init__()
        self.order: dict[Any, None] = {}
        """Subjects in the order of their first triple."""
        self.concepts: set[Any] = set()
        self._texts: dict[Any, dict[str, list[Literal]]] = defaultdict(lambda: defaultdict(list))
        """By subject and kind."""
        self._label_nodes: dict[Any, list[tuple[str, Any]]] = defaultdict(list)
        """SKOS-XL: by subject the kind and node of its labels."""
        self._literal_forms: dict[Any, Literal] = {}
        self._broader: dict[Any, dict[str, None]] = defaultdict(dict)
        self._replaced_by: dict[Any, dict[str, None]] = defaultdict(dict)
        self._notations: dict[Any, str] = {}
        self._deprecated: set[Any] = set()

    def add(self, triple: Any, context: Any = None, quoted: bool = False) -> None:
        """Take one triple."""
        subject, predicate, value = triple
        self.order.setdefault(subject)
        if predicate == RDF.type:
            self._add_type(subject, value)
        elif predicate in _LABELS and isinstance(value, Literal):
            self._texts[subject][_LABELS[predicate]].append(value)
        elif predicate in _LABELS_XL:
            self._label_nodes[subject].append((_LABELS_XL[predicate], value))
        elif predicate == _XL.literalForm:
            self._literal_forms[subject] = value
        elif predicate in _BROADER:
            self._broader[subject].setdefault(str(value))
        elif predicate in _NARROWER:
            self._broader[value].setdefault(str(subject))
        elif predicate == DCTERMS.isReplacedBy:
            self._replaced_by[subject].setdefault(str(value))
        elif predicate == SKOS.notation:
            self._notations.setdefault(subject, str(value))
        elif _is_deprecation(predicate, str(value)):
            self._deprecated.add(subject)

    def concept(self, subject: Any) -> Concept:
        """Return what was said of a concept."""
        texts = {kind: list(values) for kind, values in self._texts.get(subject, {}).items()}
        for kind, node in self._label_nodes.get(subject, ()):
            if node in self._literal_forms:
                texts.setdefault(kind, []).append(self._literal_forms[node])
        preferred = _by_language(texts.get("preferred", ()))
        alternatives = _by_language(texts.get("alternative", ()))
        return Concept(
            id=str(subject),
            labels={language: values[0] for language, values in preferred.items()},
            alternatives={
                language: tuple(one for one in values if one not in preferred.get(language, ()))
                for language, values in alternatives.items()
            },
            broader=tuple(self._broader.get(subject, ())),
            definitions={name: values[0] for name, values in _by_language(texts.get("definition", ())).items()},
            notation=self._notations.get(subject),
            is_deprecated=subject in self._deprecated,
            replaced_by=tuple(self._replaced_by.get(subject, ())),
        )

    def _add_type(self, subject: Any, value: Any) -> None:
        if value in _CONCEPT_TYPES and isinstance(subject, URIRef):
            self.concepts.add(subject)
            if value != SKOS.Concept:
                self._deprecated.add(subject)


def _is_deprecation(predicate: Any, value: str) -> bool:
    if predicate == OWL.deprecated:
        return value.lower() in ("true", "1")
    return predicate in _STATUS and _DEPRECATED_STATUS.search(value) is not None


def _by_language(literals: Any) -> dict[str, list[str]]:
    """Return the distinct texts of each language in alphabetical order, white space folded."""
    found: dict[str, set[str]] = defaultdict(set)
    for literal in literals:
        text = " ".join(str(literal).split())
        if text:
            found[(literal.language or "").lower()].add(text)
    return {language: sorted(texts) for language, texts in found.items()}


def _check_entities(content: bytes, path: Path) -> None:
    """Raise unless the entities that an XML file declares are short and plain, as namespaces are."""
    parser = expat.ParserCreate()

    def check(
        name: str, is_parameter: bool, value: str | None, base: Any, system: str | None, public: Any, notation: Any
    ) -> None:
        if value is None or system or is_parameter or "&" in value or len(value) > _MAX_ENTITY_CHARACTERS:
            raise DataError(
                f"entity {excerpt(name)} is nested, long or in another file, which is how XML is made to expand or to "
                "fetch: write it out, or convert the file to Turtle",
                path=path,
                line=parser.CurrentLineNumber,
            )

    parser.EntityDeclHandler = check
    parser.StartElementHandler = _raise_first_element
    try:
        parser.Parse(content, True)
    except (_FirstElement, expat.ExpatError):
        return  # the parser proper says what is wrong


class _FirstElement(Exception):
    """Raised at the first element, before which all entities are declared."""


def _raise_first_element(*_: Any) -> NoReturn:
    raise _FirstElement


@contextmanager
def _bad_syntax(path: Path) -> Iterator[None]:
    """Turn what the parsers raise into one error with the line."""
    try:
        yield
    except BadSyntax as error:
        reason = re.search(r"Bad syntax \((.*?)\) at", error.message, re.DOTALL)
        raise _not_rdf(path, reason[1] if reason else "bad syntax", error.lines + 1) from None
    except SAXParseException as error:
        raise _not_rdf(path, error.getMessage(), error.getLineNumber()) from None
    except (RdfError, SAXException, ValueError, LookupError, AssertionError, RecursionError) as error:
        raise _not_rdf(path, str(error) or type(error).__name__, None) from None


def _not_rdf(path: Path, reason: str, line: int | None) -> DataError:
    kind = "Turtle" if plain_suffix(path) in _TURTLE_SUFFIXES else "RDF/XML"
    return DataError(f"not {kind}: {' '.join(reason.split())[:200]}: correct it", path=path, line=line)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep rdflib from logging every date and number that it cannot convert: only labels are read."""
    logger = logging.getLogger("rdflib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
