"""From YAML to objects: methods, tasks and models are dataclasses, checked against their own annotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from hydra.utils import get_class
from pydantic import TypeAdapter, ValidationError

from fasa_bench.errors import UserError

T = TypeVar("T")


def build(section: str, parameters: Mapping[str, Any], base: type[T]) -> T:
    """Make the dataclass that `parameters["_target_"]` names (else `base`) from the remaining entries.

    section: the config group ("method", "task", ...), used to name keys in errors.
    Raises UserError for a class that cannot be found or is no `base`, an unknown key, or a value of the wrong type.
    """
    values = dict(parameters)
    cls = _find(section, values.pop("_target_", None), base)
    fields = [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    names = [field.name for field in fields]
    for key in values:
        if key not in names:
            raise UserError.of(f"{section}.{key}", values[key], f"unknown key; known keys are {', '.join(names)}")
    hints = get_type_hints(cls)
    checked = {key: _check(f"{section}.{key}", hints[key], value) for key, value in values.items()}
    missing = [
        field.name
        for field in fields
        if field.name not in checked
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{section}.{missing[0]} is missing: set {section}.{missing[0]}=VALUE")
    return cls(**checked)


def _find(section: str, target: Any, base: type[T]) -> type[T]:
    if target is None:
        return base
    try:
        cls = get_class(target)
    except Exception as error:  # Hydra wraps whatever the import raised
        raise UserError.of(f"{section}._target_", target, f"cannot be imported ({error})") from error
    if not (isinstance(cls, type) and issubclass(cls, base) and dataclasses.is_dataclass(cls)):
        raise UserError.of(f"{section}._target_", target, f"must be a dataclass derived from {base.__name__}")
    return cls  # type: ignore[return-value]


def _check(key: str, annotation: Any, value: Any) -> Any:
    try:
        return TypeAdapter(annotation).validate_python(value, strict=True)
    except ValidationError as error:
        wanted = " or ".join(dict.fromkeys(item["msg"].removeprefix("Input should be ") for item in error.errors()))
        raise UserError.of(key, value, f"must be {wanted}") from error
