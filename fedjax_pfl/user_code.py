"""Functions of a user's own file or module, named FILE.py:NAME or package.module:NAME:
a method, a network, a data set or a partition."""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from fedjax_pfl.errors import InputError, in_one_line

CALLS = {  # arguments of a function of each kind
    "algo": "(task, **hyperparameters)",
    "model": "(input_shape, num_classes, rngs), by keyword vocabulary, positions",
    "dataset": "() or (seed)",
    "partition": "(dataset, num_clients, seed)",
    "optimizer": "(lr)",
    "schedule": "(round)",
    "loss": "(logits, y, mask)",
    "mix": "(key, x, labels, mask)",
    "sampling": "(key, round, history)",
    "speeds": "(id)",
    "bandwidths": "(id)",
    "staleness": "(staleness)",
    "shift": "(dataset, partition, seed)",
    "adapt": "()",
}
_NAMED = re.compile(r"(.*\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*", re.DOTALL)
_RESERVED: set[str] = set()
# refuses modules that this user has not imported before
ONLY_KNOWN: ContextVar[bool] = ContextVar("ONLY_KNOWN", default=False)


def reserve(names: Iterable[str]) -> tuple[str, ...]:
    """Declares that HEAD of the names HEAD:REST is no module, and returns HEAD: of
    each."""
    heads = [name.partition(":")[0] for name in names if ":" in name]
    _RESERVED.update(heads)
    return tuple(f"{head}:" for head in heads)


def named(name: str) -> bool:
    """Returns True for FILE.py:NAME and package.module:NAME."""
    match = _NAMED.fullmatch(name) if isinstance(name, str) else None
    return match is not None and name.partition(":")[0] not in _RESERVED


def short(name: str) -> str:
    """Returns the name of the function alone; other names are unchanged."""
    return name.rpartition(":")[2] if named(name) else name


def load(kind: str, name: str) -> Callable[..., Any]:
    """Imports a user's function.

    Args:
      kind: a key of CALLS, for messages.
      name: FILE.py:NAME, or package.module:NAME.

    Raises:
      InputError: the module cannot be imported, or has no such function.
    """
    module_name, _, function = name.rpartition(":")
    with blamed(kind, name):
        module = _import(module_name)
    found: Callable[..., Any] | None = getattr(module, function, None)
    if not callable(found):
        raise InputError(f"{kind}={name}: there is no function {function!r}.")
    return found


def call(kind: str, name: str, **given: Any) -> Any:
    """Calls a user's function with the arguments of `bound`; raises InputError if it
    does not exist or fails."""
    function = bound(load(kind, name), kind, name, **given)
    with blamed(kind, name):
        return function()


def bound(
    function: Callable[..., Any], kind: str, name: str, **given: Any
) -> Callable[[], Any]:
    """Binds arguments in their order, by keyword those that are keyword-only; raises
    InputError if the function takes others."""
    known = parameters(function)
    keyword = [p.name for p in known.values() if p.kind is p.KEYWORD_ONLY]
    by_name = {x: given.pop(x) for x in keyword if x in given}
    try:
        inspect.Signature(list(known.values())).bind(*given.values(), **by_name)
    except TypeError as error:
        wanted = f"must take the arguments {CALLS[kind]}"
        raise InputError(f"{kind}={name} {wanted} ({error}).") from None
    return functools.partial(function, *given.values(), **by_name)


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function, or those of a class's `__init__`."""
    if not inspect.isclass(function):
        return dict(inspect.signature(function).parameters)
    # the metaclass of Flax modules hides the signature
    _, *known = inspect.signature(function.__init__).parameters.items()
    return dict(known)


@contextlib.contextmanager
def blamed(kind: str, name: str) -> Iterator[None]:
    """Raises whatever is raised inside as InputError with the name of the user's
    function."""
    try:
        yield
    except InputError as error:
        start = "" if str(error).startswith(f"{kind}={name}") else f"{kind}={name}: "
        raise InputError(f"{start}{error}") from error
    except (Exception, SystemExit) as error:
        raise InputError(f"{kind}={name} fails ({in_one_line(error)}).") from error


def digest(names: list[str]) -> str | None:
    """Returns the SHA-256 of the files of the user's functions among the names, or
    None."""
    modules = [_import(name) for name in module_names(names)]
    content = b"\0".join(Path(str(each.__file__)).read_bytes() for each in modules)
    return hashlib.sha256(content).hexdigest() if modules else None


def module_names(names: list[str]) -> list[str]:
    """Returns the modules or files of the user's functions among the names."""
    return [name.rpartition(":")[0] for name in names if named(name)]


def _check_known(module_name: str, content: bytes) -> None:
    """Remembers a module, or raises InputError for a new one where `ONLY_KNOWN`."""
    file, token = _known_file(), hashlib.sha256(content).hexdigest()
    if file.is_file() and token in file.read_text(encoding="utf-8").split():
        return
    if ONLY_KNOWN.get():
        raise InputError(f"{module_name} was never imported here: --trust imports it.")
    with contextlib.suppress(OSError):  # then it is asked for again
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a", encoding="utf-8") as stream:
            stream.write(f"{token}\n")


def _known_file() -> Path:
    """Returns the list of hashes of modules that this user has imported."""
    folder = os.environ.get("FEDJAX_PFL_CACHE") or "~/.cache/fedjax_pfl"
    return Path(folder).expanduser() / "user_code.txt"


def _import(module_name: str) -> Any:
    """Imports a module, or a file once for each content; modules of the file's folder
    can be imported from it."""
    if not module_name.endswith(".py"):
        _check_known(module_name, module_name.encode())
        return importlib.import_module(module_name)
    path = Path(module_name).expanduser().absolute()
    content = str(path).encode() + path.read_bytes()
    _check_known(module_name, content)
    name = f"_user_{hashlib.sha256(content).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    # dataclasses look their module up there
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
