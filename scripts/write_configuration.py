"""Writes docs/configuration.md from the run file's pydantic models: ``python scripts/write_configuration.py``."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from rollcall.config import Config, Section, default_run
from rollcall.config.errors import section_classes

_INTRO = """# Configuration

<!-- Written by `python scripts/write_configuration.py`; edit the fields in `src/rollcall/config/`. -->

A run file is YAML with the sections below. A key that you leave out has the default shown. An unknown key is an error that
names the nearest one. On the command line, set a key as `section.key=value`, an item of a list by its index:

```
rollcall train run.yaml actor.lr=1e-5 reward.0.weight=0.5
```
"""


def render_docs() -> str:
    default = yaml.safe_dump(default_run(), sort_keys=False, default_flow_style=None, width=110)
    without = f"Without a run file, `rollcall train` uses this one:\n\n```yaml\n{default}```\n"
    parts = [_INTRO, without, _contents()]
    shown: dict[type[BaseModel], str] = {}  # section class -> name of the section that has its table
    for name, info in Config.model_fields.items():
        classes = section_classes(info.annotation)
        parts.append(_section(name, info, like=shown.get(classes[0])))
        shown.setdefault(classes[0], name)
    return "\n".join(parts)


def _contents() -> str:
    lines = ["| section | what |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {info.description} |" for name, info in Config.model_fields.items()]
    return "\n".join(lines) + "\n"


def _section(name: str, info: FieldInfo, *, like: str | None) -> str:
    classes = section_classes(info.annotation)
    lines = [f"## {name}", "", info.description or "", ""]
    if like is not None:
        default = info.default
        differ = {key for key, field in classes[0].model_fields.items() if getattr(default, key) != field.default}
        lines += [f"The same keys as [`{like}`](#{like}), with other defaults:", ""]
        lines += _table(classes[0], default=default, keys=differ)
    elif len(classes) == 1:
        lines += _table(classes[0], default=info.default, keys=set(classes[0].model_fields))
        lines += _inner_sections(name, classes[0])
    else:
        lines += _variants(name, info, classes)
    return "\n".join(lines).rstrip() + "\n"


def _inner_sections(name: str, section: type[BaseModel]) -> list[str]:
    """A table for each section that may be left out, or that is an item of a list."""
    lines: list[str] = []
    for key, info in section.model_fields.items():
        if inner := _left_out(info):
            lines += ["", f"### {name}.{key}", "", info.description or "", ""]
            lines += _table(inner, default=None, keys=set(inner.model_fields))
    return lines


def _left_out(info: FieldInfo) -> type[BaseModel] | None:
    """The class of a section that has no keys unless the run file gives it."""
    classes = section_classes(info.annotation)
    return classes[0] if classes and not isinstance(info.default, BaseModel) else None


def _variants(name: str, info: FieldInfo, classes: list[type[BaseModel]]) -> list[str]:
    tag = "type" if "type" in classes[0].model_fields else "name"
    default = info.default[0] if isinstance(info.default, list) else info.default
    what = "A list. Each item" if get_origin(info.annotation) is list else "It"
    base = next(one for one in classes[0].__mro__[1:] if all(issubclass(each, one) for each in classes))
    assert issubclass(base, Section), "variants share a base class for their common keys"
    without = "Default: none." if default is None else f"Default: `{tag}: {getattr(default, tag)}`."
    lines = [f"{what} names its variant in `{tag}`. {without}", ""]
    lines += ["All variants have:", "", *_table(base, default=None, keys=set(base.model_fields)), ""]
    for variant in classes:
        own = {key for key in _annotated(variant, below=base) if key in variant.model_fields and key != tag}
        lines += [f"### {name}: {variant.model_fields[tag].default}", "", (variant.__doc__ or "").strip(), ""]
        if own:
            lines += [*_table(variant, default=None, keys=own), ""]
    return lines


def _annotated(variant: type[BaseModel], *, below: type[BaseModel]) -> set[str]:
    """The keys of a variant that ``below`` does not have, or has with another default."""
    between = variant.__mro__[: variant.__mro__.index(below)]
    return {key for one in between for key in one.__annotations__}


def _table(section: type[BaseModel], *, default: Any, keys: set[str]) -> list[str]:
    """``default`` is the section's own default object, where it differs from its class's defaults."""
    return ["| key | type | default | meaning |", "|---|---|---|---|", *_rows(section, default=default, keys=keys)]


def _rows(section: type[BaseModel], *, default: Any, keys: set[str], prefix: str = "") -> list[str]:
    """A row per key; the keys of a section within the section follow it, with their dotted names."""
    lines: list[str] = []
    for name, info in section.model_fields.items():
        if name not in keys:
            continue
        value = getattr(default, name) if isinstance(default, BaseModel) else info.default
        inner = info.annotation if isinstance(value, BaseModel) else None
        shown = "required" if info.is_required() else "as below" if inner else f"`{_yaml(value)}`"
        kind = "section" if inner else type_name(info.annotation) + _limits(info)
        lines.append(f"| `{prefix}{name}` | {_cell(kind)} | {shown} | {_cell(info.description or '')} |")
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            lines += _rows(inner, default=value, keys=set(inner.model_fields), prefix=f"{prefix}{name}.")
    return lines


def type_name(annotation: Any) -> str:
    """A type as a reader of YAML says it."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is JsonValue:
        return "anything"
    if origin is Annotated:
        return type_name(args[0])
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin in (Union, types.UnionType):
        return " or ".join("`null`" if arg is type(None) else type_name(arg) for arg in args)
    if origin is list:
        return f"list of {type_name(args[0])}"
    if origin is tuple:
        return f"[{', '.join(type_name(arg) for arg in args)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        few = len(annotation.model_fields) <= 3
        return f"`{{{', '.join(annotation.model_fields)}}}`" if few else "section"
    if origin is dict:
        return f"map of {type_name(args[0])} to {type_name(args[1])}"
    return {str: "text", int: "integer", float: "number", bool: "true/false", Path: "path", Any: "anything"}.get(
        annotation, str(annotation)
    )


def _limits(info: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = [
        f"{sign} {getattr(limit, name):g}"
        for limit in info.metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    return f", {', '.join(found)}" if found else ""


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = yaml.safe_dump(to_jsonable_python(value), default_flow_style=True, width=1000)
    return text.strip().removesuffix("...").strip()


def _cell(text: str) -> str:
    return text.replace("|", r"\|")  # a bar would end the cell


def main() -> None:
    path = Path("docs/configuration.md")
    path.write_text(render_docs())
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
