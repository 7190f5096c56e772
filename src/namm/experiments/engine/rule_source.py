"""The Python source of a user's rule: found and read without running any of it, and then run from what was read.

A rule is `module:name`. Its module is looked for in the folders that are given, then on Python's path. What belongs to
it is found by reading its import statements:

- the module's file, and every `__init__.py` on the way to it,
- every module beside it that one of these files imports, and what those import in turn,
- of a package that has an `__init__.py`, all modules in it, since packages import their own parts in many ways.

Only these files can be imported from the rule's folder, from the bytes that were hashed: neither compiled files in
`__pycache__` nor a file that changes meanwhile are run. The folder never enters `sys.path`, and a name that Python or
an installed package has is never taken from it, except for the rule's own module.

Imports no torch.
"""

import ast
import hashlib
import importlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from namm.errors import UsageError
from namm.experiments.engine.rule_text import is_written_out

NAMM = "namm"
DEEPEST = 64
"""Parts of a module's name."""
SUFFIXES = (*EXTENSION_SUFFIXES, ".py")
"""Files that are modules, in the order in which Python looks for them."""


@dataclass(frozen=True)
class File:
    """A module as it was read; `content` is None for a folder without `__init__.py`."""

    path: Path
    content: bytes | None
    is_package: bool

    @property
    def is_source(self) -> bool:
        """Whether it is Python, and not compiled."""
        return self.path.suffix == ".py"


@dataclass(frozen=True)
class Source:
    """Where a rule's module is, and what importing it would run.

    Attributes:
        module: Its name.
        file: Its file; None for one without, such as Python's built-in modules.
        root: The folder that its name starts from; None for an installed module.
        imported_as: Its name in `sys.modules`: another one where an installed package has its own.
        files: All that may be run from `root`, by name in `sys.modules`.
    """

    module: str
    file: Path | None
    root: Path | None
    imported_as: str
    files: Mapping[str, File]

    @property
    def is_ours(self) -> bool:
        """Whether it is a part of this package."""
        return self.root is None and self.module.partition(".")[0] == NAMM

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that would be run, comments aside; of an installed module, of its name."""
        if self.root is None:
            return _sha256(json.dumps(["installed", self.module]).encode())
        parts = [
            [file.path.relative_to(self.root).as_posix(), _sha256(_meaning(file.content))]
            for file in self.files.values()
            if file.content is not None
        ]
        return _sha256(json.dumps(["files", self.module, sorted(parts)]).encode())

    @property
    def code_hash(self) -> str:
        """A hash of the module's own code, comments aside, as runs keep it; empty where there is no file."""
        if self.file is None:
            return ""
        content = self.files[self.imported_as].content if self.root is not None else self.file.read_bytes()
        return _sha256(without_comments(content or b""))[:16]


def without_comments(content: bytes) -> bytes:
    """Python source written anew, without comments; what is not Python as it is."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.unparse(ast.parse(content)).encode()
    return content


def _meaning(content: bytes) -> bytes:
    """`content` without comments, where that text certainly means the same."""
    text = without_comments(content)
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if ast.dump(ast.parse(text)) == ast.dump(ast.parse(content)):
            return text
    return content


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Finding


def locate(name: str, folder: str = "") -> Source:
    """The source of the rule `module:name`, found without running any of it; one that is written out is all ours."""
    if is_written_out(name):
        return Source(NAMM, None, None, NAMM, {})
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"a rule of your own is named as module:name, not {name!r}.")
    here = os.getcwd()
    source = find_source(module, [folder, here] if folder else [here])
    if source is None:
        raise UsageError(
            f"there is no module {module!r}, neither here ({here}) nor installed: a rule is module:name, without .py."
        )
    return source


def find_source(module: str, folders: Sequence[str | Path]) -> Source | None:
    """The source of `module` in the first of these folders that has it, or on Python's path; None if there is none."""
    parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    if parts[0] != NAMM:
        for root in (*map(Path, folders), *_folders_on_path()):
            if (file := _module_file(root, module)) is not None:
                return _collected(root, module, file)
    spec = _elsewhere(parts[0], None)
    return None if spec is None else Source(module, _installed_file(spec, parts), None, module, {})


def _folders_on_path() -> list[Path]:
    """The folders of `sys.path` that nothing is installed in, such as those of PYTHONPATH."""
    known = sysconfig.get_paths()
    installed = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [*site.getsitepackages(), site.getusersitepackages()]
    homes = [os.path.realpath(folder) for folder in installed]

    def is_installed(entry: str) -> bool:
        place = os.path.realpath(entry)
        return any(place == home or place.startswith(home + os.sep) for home in homes)

    return [Path(entry) for entry in sys.path if entry and not is_installed(entry)]


def _module_file(root: Path, module: str) -> Path | None:
    """The file that `module` would be imported from."""
    stem = root.joinpath(*module.split("."))
    for name in (*(f"{stem}/__init__{suffix}" for suffix in SUFFIXES), *(f"{stem}{suffix}" for suffix in SUFFIXES)):
        if os.path.isfile(name):
            return Path(name)
    return None


def _elsewhere(top: str, root: Path | None) -> ModuleSpec | None:
    """What a top-level name is to everyone else: the current folder, `root` and what was read from it left out."""
    left_out = {os.path.realpath(folder) for folder in (os.getcwd(), root) if folder is not None}
    path = [entry for entry in sys.path if entry and os.path.realpath(entry) not in left_out]
    for finder in sys.meta_path:
        if finder is FINDER:
            continue
        spec = PathFinder.find_spec(top, path) if finder is PathFinder else finder.find_spec(top, None)
        own = None if root is None or spec is None else _module_file(root, top)
        if spec is not None and (own is None or spec.origin is None or not _same(spec.origin, own)):
            return spec
    return None


def _same(origin: str, file: Path) -> bool:
    return os.path.realpath(origin) == os.path.realpath(file)


def _installed_file(spec: ModuleSpec, parts: Sequence[str]) -> Path | None:
    """The file of an installed module, by its top-level package's place."""
    if len(parts) == 1:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    return next((file for place in places if (file := _module_file(place, ".".join(parts[1:]))) is not None), None)


def _collected(root: Path, module: str, file: Path) -> Source:
    """Everything in `root` that belongs to `module`."""
    top = module.partition(".")[0]
    own_top = f"_namm_rule_{top}" if _is_taken(top, root) else top

    def known_as(name: str, is_own: bool) -> str:
        return own_top + name[len(top) :] if is_own else name

    files: dict[str, File] = {}
    queue = [(module, True)]
    while queue:
        name, is_own = queue.pop()
        home = name.partition(".")[0]
        if not is_own and (home == NAMM or _is_taken(home, root)):
            continue
        if _is_covered(known_as(name, is_own), files):
            continue
        for part, each in _modules(root, name):
            if known_as(part, is_own) not in files:
                files[known_as(part, is_own)] = each
                if each.is_source and each.content is not None:
                    queue += _believable(_imports(each, part, is_own))
    return Source(module, file, root, known_as(module, True), files)


def _is_covered(name: str, files: Mapping[str, File]) -> bool:
    """Whether a module, or the whole package that it is in, was read before."""
    parts = name.split(".")
    before = (files.get(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    return any(file is not None and file.content is not None for file in before)


def _is_taken(top: str, root: Path) -> bool:
    """Whether a top-level name is another's: Python's, or an installed package's."""
    if top in sys.stdlib_module_names:
        return True
    spec = _elsewhere(top, root)
    is_folder = spec is not None and spec.origin is None  # without `__init__.py`: a module of the same name goes first
    return spec is not None and not (is_folder and _module_file(root, top) is not None)


def _modules(root: Path, name: str) -> Iterator[tuple[str, File]]:
    """`name` in `root` with the packages that it is in; of a package with `__init__.py`, all that is in it."""
    folders: list[tuple[str, File]] = []
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        prefix, folder = ".".join(parts[:end]), root.joinpath(*parts[:end])
        file = _module_file(root, prefix)
        if file is not None:
            yield from folders
            is_package = file.name.startswith("__init__.")
            yield from _package(folder, prefix) if is_package else [(prefix, File(file, file.read_bytes(), False))]
            return
        if not os.path.isdir(folder):  # pathlib raises on names that are too long
            return
        folders.append((prefix, File(folder, None, True)))


def _package(folder: Path, name: str) -> Iterator[tuple[str, File]]:
    """All modules in a package's folder; a link to another folder is not followed."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if each.isidentifier() and each != "__pycache__")
        inside = ".".join((name, *Path(place).relative_to(folder).parts))
        if _module_file(Path(place).parent, Path(place).name) is None:
            yield inside, File(Path(place), None, True)
        for each in sorted(names):
            stem, file = each.partition(".")[0], Path(place) / each
            is_package = stem == "__init__"
            home = (file.parent.parent, file.parent.name) if is_package else (file.parent, stem)
            if file == _module_file(*home):  # and not one that Python would find before it
                yield inside if is_package else f"{inside}.{stem}", File(file, file.read_bytes(), is_package)


def _imports(file: File, name: str, is_own: bool) -> Iterator[tuple[str, bool]]:
    """The modules that the import statements of a file name, and whether they are of the rule's own package."""
    try:
        tree = ast.parse(file.content or b"")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = name if file.is_package else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                inside = is_own and bool(node.level)
                yield base, inside
                yield from ((f"{base}.{alias.name}", inside) for alias in node.names)


def _believable(imports: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Those of imports whose names have no more parts than a real module's: each part costs a look at the disk."""
    return (each for each in imports if each[0].count(".") < DEEPEST)


# Running


@dataclass(frozen=True)
class _Loader(Loader):
    """Runs a module from the bytes that were read, and from nothing else."""

    file: File

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.file.content or b"", str(self.file.path), "exec", dont_inherit=True), vars(module))


@dataclass(eq=False)
class _Finder(MetaPathFinder):
    """Finds the modules of the rules that were loaded, and refuses others of their packages."""

    sources: dict[str, Source] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, File]:
        """All modules, of the rule that was loaded last where several have one of that name."""
        return {name: file for source in self.sources.values() for name, file in source.files.items()}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        files = self.files
        file = files.get(name)
        if file is None:
            if name.rpartition(".")[0] in files:
                raise ModuleNotFoundError(f"No module named {name!r} among the files of the rule", name=name)
            return None
        if file.content is None:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(file.path)]
            return spec
        loader = _Loader(file) if file.is_source else ExtensionFileLoader(name, str(file.path))
        places = [str(file.path.parent)] if file.is_package else None
        return spec_from_file_location(name, file.path, loader=loader, submodule_search_locations=places)

    def take(self, source: Source) -> None:
        """Find the modules of `source` from now on; modules of the same names from elsewhere are forgotten."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        before = self.sources.pop(source.imported_as, source)
        if not all(_is_current(name, file) for name, file in source.files.items()):
            for name in {*before.files, *source.files}:
                sys.modules.pop(name, None)
        self.sources[source.imported_as] = source


FINDER = _Finder()


def _is_current(name: str, file: File) -> bool:
    """Whether the module of that name, if it was imported, is the one in `file`."""
    module = sys.modules.get(name)
    if module is None or file.content is None:
        return True
    loader = getattr(module.__spec__, "loader", None)
    if isinstance(loader, _Loader):
        return loader.file == file
    return _same(getattr(module, "__file__", None) or "", file.path)


def import_source(source: Source) -> ModuleType:
    """Run the module of `source`, unless that was done before. What it raises is raised."""
    if source.root is not None:
        FINDER.take(source)
    return importlib.import_module(source.imported_as)
