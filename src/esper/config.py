"""Configs: frozen, validated records, read from and written to TOML.

    class PPOConfig(Config):
        learning_rate: PositiveFloat = 3e-4  # Adam's step size at the start
        hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
        '''Widths of the layers, first to last.'''

The help of a field is the comment behind it or the docstring below it. tyro shows it in `--help`, and `describe` returns it. tyro does not
show the `description` of a `msgspec.Meta`.

Values come from the defaults, then the TOML file, then the command line: `tyro.cli(RunConfig, default=load(RunConfig, path))`. tyro prints
a wrong value on the command line with its path and exits with status 2. A key that is missing in the file keeps its default.

TOML has no null. In an optional field, "None" stands for None, as on the command line. If the field may hold a text, "None" could be that
text, so there the empty table {} stands for None.

`save` writes the config of a run with the sha256 of its values in a comment, and `load_saved` refuses a file that was changed since.
`load` reads files that people write, and checks no sha256.

This module imports neither torch nor numpy, so that the command line prints its help quickly.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_type_hints

import msgspec
from msgspec.inspect import Metadata, StructType, Type, UnionType

from esper.files import MAX_CONFIG_BYTES, FileError, digest_of, parse_toml, printable, read_file, read_in_run, reason_of, write_file
from esper.text_table import did_you_mean

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
# Sizes that need memory. Their limits are generous, but keep a typing mistake from taking all memory.
Count = Annotated[int, msgspec.Meta(gt=0, le=2**20)]  # number of things that are computed at the same time
Width = Annotated[int, msgspec.Meta(gt=0, le=2**16)]  # width of a layer
Threads = Annotated[int, msgspec.Meta(gt=0, le=1024)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]

MAX_SHOWN = 300  # characters of a wrong value in a message
NONE = "None"  # stands for None in a TOML file, except in fields that may hold a text, where {} does

_FIRST_LINE = (
    "# The settings of a run; {} is None. The last line holds the sha256 of their values, which is checked when the run is read.\n"
)
_LAST_LINE = "# sha256 {}"


class ConfigError(ValueError):
    """A wrong value in a config. `path` is the dotted name of the field, or "" if the file itself is wrong.

    >>> print(ConfigError("learning_rate", expected="a float > 0", got=-0.1))
    learning_rate: expected a float > 0, got -0.1
    """

    def __init__(self, path: str, *, expected: str, got: object, problem: str | None = None, source: str | None = None) -> None:
        self.path, self.expected, self.got, self.source = path, expected, got, source
        self.problem = problem or f"expected {expected}, got {_shown(got)}"
        super().__init__(": ".join(part for part in (source, path, self.problem) if part))

    def under(self, prefix: str) -> ConfigError:
        """Return the same error for the config that contains this one in its field `prefix`."""
        path = prefix + ("" if self.path.startswith("[") or not self.path else ".") + self.path
        return ConfigError(path, expected=self.expected, got=self.got, problem=self.problem)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


class _ConfigMeta(msgspec.StructMeta):
    """Sets the strict options of every config class, because msgspec does not pass `kw_only` on to subclasses."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> _ConfigMeta:
        strict = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(mcs, name, bases, namespace, **(strict | options))

    def __call__(cls, *args: Any, **values: Any) -> Any:
        for key in values:
            if key not in cls.__struct_fields__:
                raise _unknown_key(cls, key, values[key])
        return super().__call__(*args, **values)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Config(msgspec.Struct, metaclass=_ConfigMeta, frozen=True):
    """Base of all configs. A subclass is frozen and keyword-only, and its fields are checked whenever an instance is made.

    An int is accepted for a float and a list for a tuple; a bool is not accepted for a number.
    """

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {}  # name of a setting in other libraries -> what to write here

    def __post_init__(self) -> None:
        for name, (annotation, info) in _fields(type(self)).items():
            given = getattr(self, name)
            try:
                value = msgspec.convert(given, annotation, dec_hook=_decode_path)
            except msgspec.ValidationError as error:
                raise ConfigError(name, expected=_expected(info), got=given) from error
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(name, expected=f"{_expected(info)}, and a finite one", got=given)
            if value is not given:
                msgspec.structs.force_setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Override for checks between fields; raise `ConfigError(field, expected=..., got=...)`."""


ConfigT = TypeVar("ConfigT", bound=Config)


def load(config_type: type[ConfigT], path: str | Path) -> ConfigT:
    """Return the config in a TOML file; missing keys get their defaults. Any mistake in the file raises a `ConfigError` with its path."""
    return _from_values(config_type, _parse_file(path)[1], path)


def load_saved(config_type: type[ConfigT], path: str | Path) -> ConfigT:
    """Return the config of a run, written by `save`. Raise `ConfigError` if the file was changed since."""
    text, values = _parse_file(path, is_of_run=True)
    if not _is_as_saved(text, values):
        raise ConfigError(
            "",
            expected="the config as the run wrote it",
            got=str(path),
            problem="it was changed since the run wrote it: no line of it holds the sha256 of its values. Restore it. To change a setting, "
            f"give an option when the run is resumed, or start a new run with these values by --config {path}",
            source=str(path),
        )
    return _from_values(config_type, values, path)


def _is_as_saved(text: str, values: dict[str, object]) -> bool:
    """Return whether a comment of the file holds the sha256 of its values."""
    return _LAST_LINE.format(digest_of(values)) in (line.strip() for line in text.splitlines())


def _parse_file(path: str | Path, *, is_of_run: bool = False) -> tuple[str, dict[str, object]]:
    try:
        read = read_in_run if is_of_run else read_file
        content = read(Path(path), max_bytes=MAX_CONFIG_BYTES)
        return content.decode(), parse_toml(content)
    except OSError as error:
        problem = (
            f"no such config file: {path}"
            if isinstance(error, FileNotFoundError)
            else f"the config file cannot be read: {reason_of(error)}"
        )
        raise ConfigError("", expected="a TOML file", got=str(path), problem=problem) from error
    except ValueError as error:
        problem = f"is not a config file: {error}" if isinstance(error, FileError) else f"is not TOML: {error}"
        raise ConfigError("", expected="a TOML file", got=str(path), problem=problem, source=str(path)) from error


def _from_values(config_type: type[ConfigT], values: dict[str, object], path: str | Path) -> ConfigT:
    """Return the config of a file."""
    try:
        return from_mapping(config_type, values)
    except ConfigError as error:
        raise ConfigError(error.path, expected=error.expected, got=error.got, problem=error.problem, source=str(path)) from error


def from_mapping(config_type: type[ConfigT], mapping: Mapping[str, object]) -> ConfigT:
    """Return a config from nested mappings, as `tomllib` returns them. An unknown key raises an error that names the nearest field.

    Keys that are missing in a table are taken from the default of the field that holds the table; if it has none, from the defaults of the
    table's own type.
    """
    return _build(config_type, mapping, default=None)


def to_toml(config: Config) -> str:
    """Return TOML from which `load` makes an equal config. A field that is None is left out if None is its default.

    Raises `ConfigError` for a text that is not UTF-8, such as an unusual file name, because TOML cannot hold it.
    """
    try:
        return msgspec.toml.encode(_plain_table(config, default=None)).decode()
    except UnicodeEncodeError as error:
        name, value = next((name, value) for name, value, _ in describe(config) if printable(str(value)) != str(value))
        problem = f"{printable(str(value))} is not UTF-8 and cannot be saved with the run; rename it"
        raise ConfigError(name, expected="UTF-8", got=value, problem=problem) from error


def save(config: Config, path: str | Path) -> None:
    """Write `to_toml(config)` with its digest, atomically: after a crash there is either the old file or the new one."""
    write_file(path, saved_text(config).encode())


def saved_text(config: Config) -> str:
    """Return what `save` writes."""
    text = to_toml(config)
    return f"{_FIRST_LINE}{text}{_LAST_LINE.format(digest_of(parse_toml(text.encode())))}\n"


def describe(config: Config) -> list[tuple[str, object, str]]:
    """Return (dotted path, value, help) of every field, including those of nested configs, in the order of definition."""
    rows: list[tuple[str, object, str]] = []
    helps = _helps(type(config))
    for name in _fields(type(config)):
        value = getattr(config, name)
        if isinstance(value, Config):
            rows += [(f"{name}.{path}", inner, text) for path, inner, text in describe(value)]
        else:
            rows.append((name, value, helps[name]))
    return rows


# From mappings


def _build(config_type: type[ConfigT], mapping: Mapping[str, object], *, default: ConfigT | None) -> ConfigT:
    """Return a config from a mapping; missing keys come from `default`, or from the defaults of the type."""
    fields = _fields(config_type)
    for key, given in mapping.items():
        if key not in fields:
            raise _unknown_key(config_type, key, given)
    defaults = _defaults(config_type, default)
    values = dict(defaults)
    for name, given in mapping.items():
        with _under(name):
            values[name] = _parse(fields[name][1], given, default=defaults.get(name))
    for name, (_, info) in fields.items():
        if name not in values:
            problem = f"is missing; it has no default and must be {_expected(info)}"
            raise ConfigError(name, expected=_expected(info), got=None, problem=problem)
    return config_type(**values)


def _unknown_key(config_type: Any, key: str, given: object) -> ConfigError:
    """Return the error for a key that is no field; it names the nearest one, or what another library's name for it is here."""
    fields = config_type.__struct_fields__
    hint = did_you_mean(key, fields, otherwise=f"known keys are {', '.join(fields)}")
    if key in config_type.OTHER_NAMES:
        hint = f"here it is {config_type.OTHER_NAMES[key]}"
    return ConfigError(key, expected=f"one of {', '.join(fields)}", got=given, problem=f"unknown key; {hint}")


def _parse(info: Type, given: object, *, default: object) -> object:
    """Return a value in which tables are turned into configs. Its type is checked later, by the config that holds it."""
    kinds = _kinds(info)
    if (given == {} or given == NONE) and given == _none_of(info):
        return None
    for kind in kinds:
        if isinstance(kind, StructType) and issubclass(kind.cls, Config) and isinstance(given, Mapping):
            return _build(kind.cls, given, default=default if type(default) is kind.cls else None)
        if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType) and isinstance(given, list | tuple):
            return [_parse_item(kind.item_type, item, f"[{index}]") for index, item in enumerate(given)]
        if isinstance(kind, msgspec.inspect.DictType) and isinstance(given, Mapping):
            return {key: _parse_item(kind.value_type, item, str(key)) for key, item in given.items()}
    return given


def _parse_item(info: Type, given: object, name: str) -> object:
    with _under(name):
        return _parse(info, given, default=None)


@contextlib.contextmanager
def _under(prefix: str) -> Iterator[None]:
    """Put `prefix` before the path of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise error.under(prefix) from error.__cause__


# To TOML


def _plain_table(config: Config, *, default: object) -> dict[str, object]:
    """Return a config as a TOML table. A field that is None is left out if its default is None, because TOML has no null."""
    defaults = _defaults(type(config), default)
    table: dict[str, object] = {}
    for name, (_, info) in _fields(type(config)).items():
        value, usual = getattr(config, name), defaults.get(name, NONE)  # a field without a default is always written
        if value is not None:
            table[name] = _plain(value, info, default=usual)
        elif usual is not None:
            table[name] = _none_of(info)
    return table


def _plain(value: object, info: Type, *, default: object = None) -> object:
    """Return a value as TOML can hold it. `default` is the default of its field."""
    if isinstance(value, Config):
        return _plain_table(value, default=default)
    if isinstance(value, list | tuple):
        return [_plain(item, info) for item in value]
    if isinstance(value, dict):
        inside = next((kind.value_type for kind in _kinds(info) if isinstance(kind, msgspec.inspect.DictType)), info)
        return {key: _plain(item, inside) for key, item in value.items()}
    return _none_of(info) if value is None else msgspec.to_builtins(value, enc_hook=str)


def _none_of(info: Type) -> object:
    """Return how None is written in TOML for this type: "None", or {} if the field may hold a text. None if the type is not optional."""
    kinds = _kinds(info)
    if not any(isinstance(kind, msgspec.inspect.NoneType) for kind in kinds):
        return None
    return {} if any(isinstance(kind, msgspec.inspect.StrType) for kind in kinds) else NONE


# Fields of a config type


@functools.cache
def _fields(config_type: type[Config]) -> dict[str, tuple[Any, Type]]:
    """Return field name -> (annotation, msgspec's description of the type)."""
    annotations = get_type_hints(config_type, include_extras=True)
    return {name: (annotations[name], msgspec.inspect.type_info(annotations[name])) for name in config_type.__struct_fields__}


def _defaults(config_type: type[Config], default: object) -> dict[str, Any]:
    """Return the values of `default` if it is a config of this type, else the type's own defaults, without required fields."""
    if type(default) is config_type:
        return {name: getattr(default, name) for name in config_type.__struct_fields__}
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(config_type):
        if field.default is not msgspec.NODEFAULT:
            found[field.name] = field.default
        elif field.default_factory is not msgspec.NODEFAULT:
            found[field.name] = field.default_factory()
    return found


def _kinds(info: Type) -> list[Type]:
    """Return the types that a field may hold: the members of a union, without metadata."""
    if isinstance(info, Metadata):
        return _kinds(info.type)
    return [kind for member in info.types for kind in _kinds(member)] if isinstance(info, UnionType) else [info]


@functools.cache
def _helps(config_type: type[Config]) -> dict[str, str]:
    """Return field name -> help, from comments and docstrings, else from the `description` of a `msgspec.Meta`."""
    helps = dict.fromkeys(config_type.__struct_fields__, "")
    for owner in reversed(config_type.__mro__):
        if issubclass(owner, Config) and owner is not Config:
            helps |= field_comments(owner)
    for name, (annotation, _) in _fields(config_type).items():
        described = [meta.description for meta in getattr(annotation, "__metadata__", ()) if isinstance(meta, msgspec.Meta)]
        helps[name] = helps[name] or next(filter(None, described), "")
    return helps


def field_comments(owner: type) -> dict[str, str]:
    """Return field name -> docstring below or comment behind the field, from the source of one class. Empty without the source."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
        definition = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    lines = source.splitlines()
    helps = {}
    for statement, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name) or statement.end_lineno is None:
            continue
        # Text behind the statement; ast counts columns in UTF-8 bytes.
        rest = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :].decode().strip()
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and isinstance(following.value.value, str):
            helps[statement.target.id] = " ".join(following.value.value.split())
        elif rest.startswith("#"):
            helps[statement.target.id] = rest.lstrip("#: ")
    return helps


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"a {kind.__name__} is not a {type(value).__name__}")


# Descriptions of types for error messages

_LIMITS = {
    "gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}", "multiple_of": "a multiple of {}", "min_length": "of length >= {}",
    "max_length": "of length <= {}", "pattern": "that matches {!r}",
}  # fmt: skip
_NOUNS = {
    "IntType": "an int", "FloatType": "a float", "BoolType": "true or false", "StrType": "a string", "NoneType": NONE,
    "AnyType": "anything", "ListType": "a list", "VarTupleType": "a list", "TupleType": "a list", "DictType": "a table",
}  # fmt: skip


def _expected(info: Type) -> str:
    """Return a description of the allowed values, such as "a float > 0" or "one of 'mean', 'sum' or None"."""
    return " or ".join(_expected_kind(kind) for kind in _kinds(info))


def _expected_kind(kind: Type) -> str:
    if isinstance(kind, msgspec.inspect.LiteralType):
        return f"one of {', '.join(map(repr, kind.values))}"
    owner = getattr(kind, "cls", None)  # class of a struct, an enum or a type that msgspec does not know
    noun = "a path" if owner is Path else f"a {owner.__name__}" if owner else _NOUNS.get(type(kind).__name__, type(kind).__name__)
    limits = [text.format(getattr(kind, name)) for name, text in _LIMITS.items() if getattr(kind, name, None) is not None]
    if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        limits.append(f"in which each is {_expected(kind.item_type)}")
    elif isinstance(kind, msgspec.inspect.DictType):
        limits.append(f"in which each value is {_expected(kind.value_type)}")
    elif isinstance(kind, msgspec.inspect.TupleType):
        limits.append(f"of {len(kind.item_types)}: {', '.join(_expected(item) for item in kind.item_types)}")
    return " ".join([noun, " and ".join(limits)]) if limits else noun
