"""`scripts/mutants.py` changes one place of a module, and nothing else."""

import ast

import mutants
from pages import ROOT

SOURCE = '''
"""A docstring, 3."""
__all__ = ["bound"]

def bound(x: int = 2, *, above: bool = True) -> float:
    """Return 1."""
    if not above and x <= 0.5:
        raise ValueError("x + 1")
    return max(-x, 1 + x)
'''

FOUND = [
    "True → False",
    "2 → 3",
    "not above → above",
    "0.5 → 0.75",
    "x <= 0.5 → x < 0.5",
    "not above and x <= 0.5 → not above or x <= 0.5",
    "-x → x",
    "1 → 2",
    "1 + x → 1 - x",
    "max(-x, 1 + x) → min(-x, 1 + x)",
]


def test_each_place_is_changed_alone():
    places = mutants.Changes()
    plain = ast.unparse(places.visit(ast.parse(SOURCE)))
    changed = [mutants.mutant(SOURCE, number) for number in range(len(places.found))]
    assert [f"{before} → {after}" for _, _, before, after in places.found] == FOUND
    for text in changed:
        lines = zip(plain.splitlines(), text.splitlines(), strict=True)
        assert sum(before != after for before, after in lines) == 1
        assert '"x + 1"' in text.replace("'", '"')
        assert "Return 1." in text


def test_the_core_has_places_in_most_of_its_modules():
    places = [place for place, _ in mutants.places_of(ROOT / mutants.CORE)]
    assert len(places) > 2000
    assert len({place.file for place in places}) > 25
    assert not [place for place in places if place.file.startswith("kernels")]
