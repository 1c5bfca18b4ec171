"""The reference has every public name, and every public name says what it is."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import pytest

import powerprop as pp
from powerprop import continual, export

API = Path(__file__).parents[1] / "docs" / "api"
PUBLIC = [(module, name) for module in (pp, export, continual) for name in module.__all__]
DATA = {"GRID", "INFERENCES", "SCENARIOS", "STRATEGIES", "Scenario"}
"""Names of constants and types, which explain themselves where they are used."""


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda each: getattr(each, "__name__", each))
def test_every_public_name_is_in_the_reference(module: ModuleType, name: str) -> None:
    thing = getattr(module, name)
    if isinstance(thing, ModuleType) or name in DATA:
        return
    pages = "".join(path.read_text() for path in API.glob("*.md"))
    places = (module.__name__, "powerprop") if module is not pp else ("powerprop", "powerprop.continual")
    assert any(f"::: {place}.{name}\n" in pages for place in places) or f"::: powerprop.export.{name}\n" in pages
    assert inspect.getdoc(thing), f"{name} has no docstring"
