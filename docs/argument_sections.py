"""For the reference on the site: what docstrings say of arguments becomes a table."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def with_arguments(text: str, names: set[str], heading: str = "Args") -> str:
    """The docstring with a section for its lines `name: what it is`, and what is indented below them."""
    said, found, inside = [], [], False
    for line in inspect.cleandoc(text).splitlines():
        start = ARGUMENT.match(line)
        if start and set(start[1].split(", ")) <= names:
            inside = True
            found += [f"    {name}: {start[2]}" for name in start[1].split(", ")]
        elif inside and line.strip():
            found.append(f"        {line.strip()}")
        else:
            inside = False
            said.append(line)
    return "\n".join([*said, "", f"{heading}:", *found]) if found else text


class ArgumentSections(griffe.Extension):
    """Give the docstrings of functions and classes sections that the reference shows as tables."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Arguments of a function."""
        if func.docstring:
            func.docstring.value = with_arguments(func.docstring.value, {p.name for p in func.parameters})

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Arguments of a constructor, its own or made of the fields of a dataclass, stand with the class."""
        if cls.docstring is None:
            return
        made = cls.members.get("__init__")
        if isinstance(made, griffe.Function):
            names = {p.name for p in made.parameters}
        else:
            names = {name for name, member in cls.members.items() if isinstance(member, griffe.Attribute)}
        tuple_of_names = any(str(base).endswith("NamedTuple") for base in cls.bases)
        cls.docstring.value = with_arguments(cls.docstring.value, names, "Attributes" if tuple_of_names else "Args")
