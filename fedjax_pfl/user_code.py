"""A user's own part of a run, named by a file or a module and a function in it: a
method, a network, a data set, or a partition."""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedjax_pfl.errors import InputError, in_one_line, nearest

CALLS = {  # with what a function of each kind is called
    "algo": "(task, **hyperparameters)",
    "model": "(input_shape, num_classes, rngs)",
    "dataset": "() or (seed)",
    "partition": "(dataset, num_clients, seed)",
}
# what begins so is no part of the user's
_OTHERS = ("npz:", "tfds:", "file:", "blocks:")


def named(name: str) -> bool:
    """Is this the name of a user's own part, FILE.py:NAME or package.module:NAME?"""
    return isinstance(name, str) and ":" in name and not name.startswith(_OTHERS)


def short(name: str) -> str:
    """The function's name alone, for tables and directories; another name stays as it
    is."""
    return name.rpartition(":")[2] if named(name) else name


def load(kind: str, name: str) -> Callable[..., Any]:
    """The function of a user's own part.

    Args:
      kind: a key of CALLS.
      name: FILE.py:NAME, or package.module:NAME.

    Raises:
      InputError: there is none; the message says what was looked for.
    """
    place, _, function = name.rpartition(":")
    module = (
        _from_file(kind, place)
        if place.endswith(".py")
        else _from_package(kind, place, name)
    )
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        known = _defined(module)
        hint = (
            f": did you mean {near!r}?" if (near := nearest(function, known)) else "."
        )
        raise InputError(
            f"{kind}={name}: there is no function {function!r}, only "
            f"{', '.join(known) or 'none'}{hint}"
        )
    return found


def source(name: str) -> str:
    """Returns the same text for all names of one part, such as ./net.py:NAME and
    net.py:NAME."""
    place, _, function = name.rpartition(":")
    return f"{os.path.realpath(_file(name) or place)}:{function}"


def call(kind: str, name: str, **given: Any) -> Any:
    """What the function of a user's own part returns.

    Args:
      given: its arguments in order; those that its signature has after `*` are given by
        keyword.

    Raises:
      InputError: there is no such function, it takes other arguments, or whatever it
        raises.
    """
    function = bound(load(kind, name), kind, name, **given)
    with blamed(kind, name):
        return function()


def bound(
    function: Callable[..., Any], kind: str, name: str, **given: Any
) -> Callable[[], Any]:
    """The function with its arguments, as `call` takes them; InputError unless it takes
    these."""
    known = parameters(function)
    by_name = {
        x: value
        for x, value in given.items()
        if x in known and known[x].kind is inspect.Parameter.KEYWORD_ONLY
    }
    by_place = [value for x, value in given.items() if x not in by_name]
    try:
        inspect.Signature(list(known.values())).bind(*by_place, **by_name)
    except TypeError as error:
        raise InputError(
            f"{kind}={name}: it is called with {CALLS[kind]} ({error})."
        ) from None
    return functools.partial(function, *by_place, **by_name)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, or of a class when it is called; of one that tells
    none, any."""
    # whose metaclass, of Flax's modules, would hide them
    made = inspect.isclass(function)
    try:
        known = inspect.signature(
            function.__init__ if inspect.isclass(function) else function
        ).parameters
    except (TypeError, ValueError):
        known = inspect.signature(lambda *args, **kwargs: None).parameters
    return dict(list(known.items())[made:])


@contextlib.contextmanager
def blamed(kind: str, name: str) -> Iterator[None]:
    """Whatever is raised inside, in a user's own part or because of it, is one sentence
    that names the part."""
    try:
        yield
    except InputError as error:
        start = f"{kind}={name}"
        said = str(error)
        raise (
            error if said.startswith(start) else InputError(f"{start}: {said}")
        ) from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{kind}={name} fails ({in_one_line(error)}).") from error


def digest(names: list[str]) -> str | None:
    """SHA-256 of the files of those of the names that are a user's own parts, and of
    what these import from their folders or packages; None if none is."""
    files: dict[Path, bytes] = {}
    for name in filter(named, names):
        if path := _file(name):
            _read(path, path.parent, files, _package(name, path))
    return hashlib.sha256(b"\0".join(files.values())).hexdigest() if files else None


def _package(name: str, path: Path) -> Path | None:
    """The folder of the top package of a part in a module of one; None where there is
    none."""
    place, _, _ = name.rpartition(":")
    above = place.count(".") - (path.name != "__init__.py")
    return None if place.endswith(".py") or above < 0 else path.parents[above]


def _read(
    path: Path, folder: Path, files: dict[Path, bytes], package: Path | None = None
) -> None:
    """Adds the content of a file, and of the files in the folder or in the package that
    it imports, to `files`."""
    if path in files or not path.is_file():
        return
    files[path] = path.read_bytes()
    try:
        nodes = list(ast.walk(ast.parse(files[path])))
    except (SyntaxError, ValueError):  # which `load` says
        return
    modules = [
        (alias.name, 0)
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            modules += [(f"{start}{alias.name}", node.level) for alias in node.names]
    for module, level in sorted(set(modules)):
        steps = module.split(".")
        own = package.parent if package and steps[0] == package.name else folder
        # none: beyond the root
        for above in path.parents[level - 1 : level] if level else [own]:
            # its revision is recorded
            for count in range(1, len(steps) + 1) if steps[0] != "fedjax_pfl" else ():
                place = above.joinpath(*steps[:count])
                _read(place.with_suffix(".py"), folder, files, package)
                _read(place / "__init__.py", folder, files, package)


def _defined(module: Any) -> list[str]:
    """The functions and classes of a module that it did not import."""
    found = {
        name: x
        for name, x in vars(module).items()
        if callable(x) and not name.startswith("_")
    }
    bound = {name for name, x in found.items() if isinstance(x, functools.partial)}
    return [
        n
        for n, x in found.items()
        if n in bound or getattr(x, "__module__", None) == module.__name__
    ]


def _file(name: str) -> Path | None:
    """The file of a part; None for a module that has none."""
    place, _, _ = name.rpartition(":")
    if place.endswith(".py"):
        return Path(os.path.expanduser(place))
    try:
        file = getattr(
            sys.modules.get(place) or importlib.import_module(place), "__file__", None
        )
    except (Exception, SystemExit):  # which `load` says
        file = None
    return Path(file) if file else None


def _from_file(kind: str, place: str) -> Any:
    path = Path(os.path.abspath(os.path.expanduser(place)))
    # unlike Path.is_file, False for a name that is too long
    if not os.path.isfile(path):
        raise InputError(f"{kind}={path}: there is no such file.")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(
            f"{kind}={path} cannot be read ({error.strerror or error})."
        ) from None
    name = f"_own_{hashlib.sha256(str(path).encode() + content).hexdigest()[:16]}"
    if name not in sys.modules:  # a part is looked up several times in a run
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # what lies beside it can be imported
        _check_beside(path)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        # dataclasses look it up there
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            # whatever is wrong with the user's file
            del sys.modules[name]
            raise InputError(
                f"{path} cannot be imported ({in_one_line(error)})."
            ) from error
    return sys.modules[name]


def _check_beside(path: Path) -> None:
    """Raises InputError if Python takes another module than the one in the folder of a
    file that imports it: one of the same name is loaded already, or comes first on its
    path. Names of the standard library are never those of the folder."""
    files: dict[Path, bytes] = {}
    _read(path, path.parent, files)
    places = [
        file.relative_to(path.parent).parts[0]
        for file in files
        if file.is_relative_to(path.parent)
    ]
    for name in sorted(
        {place.removesuffix(".py") for place in places}
        - {path.stem}
        - sys.stdlib_module_names
    ):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # it is loaded, and from nowhere
            spec = None
        places = (
            [spec.origin or "", *(spec.submodule_search_locations or ())]
            if spec
            else []
        )
        beside = {
            os.path.realpath(path.parent / found) for found in (name, f"{name}.py")
        }
        if places and beside.isdisjoint(map(os.path.realpath, places)):
            other = next(filter(None, places))
            raise InputError(
                f"{path} imports {name} from its folder, but Python takes {other}: "
                "rename one of them."
            )


def _from_package(kind: str, place: str, name: str) -> Any:
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        # no such module, no name of one, or whatever is wrong with the user's
        raise InputError(
            f"{kind}={name}: {place!r} cannot be imported ({in_one_line(error)})."
        ) from error
