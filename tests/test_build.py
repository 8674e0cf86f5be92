"""The engine's build: pin, patches, unpacking, cache keys, failures in words, and the Makefile's first lines."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from bindings import build as engine_build
from bindings import patch_queue, upstream
from bindings.build import build, explain_failure, installed, is_installed
from bindings.commands import run_command
from bindings.errors import BuildError
from bindings.recipe import PATCHES_FOLDER, SHIM_FOLDER, Recipe, is_native, make_recipe, record
from bindings.upstream import Pin, file_sha256, read_pin, synchronise, unpack
from orchestrator import config

ROOT = Path(__file__).parent.parent

SOURCE = {
    "llama_cpp/__init__.py": '__version__ = "1.2.3"\n',
    "vendor/llama.cpp/src/CMakeLists.txt": "".join(f"line {number}\n" for number in range(1, 21)),
    "vendor/llama.cpp/docs/unused.md": "not needed\n",
    "docs/unused.md": "not needed\n",
    "scripts/tool.sh": "#!/bin/sh\n",
}

PATCH = """Description: add a line
Forwarded: not-needed

--- a/vendor/llama.cpp/src/CMakeLists.txt
+++ b/vendor/llama.cpp/src/CMakeLists.txt
@@ -9,6 +9,7 @@
 line 9
 line 10
 line 11
+added {name}
 line 12
 line 13
 line 14
"""


SECOND = """Description: add another line behind it

--- a/vendor/llama.cpp/src/CMakeLists.txt
+++ b/vendor/llama.cpp/src/CMakeLists.txt
@@ -10,6 +10,7 @@
 line 10
 line 11
 added one
+added two
 line 12
 line 13
 line 14
"""


def make_sdist(path: Path, files: dict[str, str] = SOURCE, extra: tarfile.TarInfo | None = None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-1.2.3/{name}")
            member.size = len(text.encode())
            member.mode = 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
        if extra is not None:
            archive.addfile(extra)
    return path


class FakeTools:
    """Stands in for pip and the compiler; git and everything else is real."""

    def __init__(self, sdist: Path, *, lines: tuple[str, ...] = (), code: int = 0) -> None:
        self.sdist = sdist
        self.lines = lines
        self.code = code
        self.commands: list[str] = []
        self.environments: list[dict[str, str]] = []

    def __call__(self, command, *, folder, environment, on_line) -> int:
        if command[0] == sys.executable and command[1:3] == ["-m", "pip"]:
            self.commands.append(command[3])
            self.environments.append(dict(environment))
            for line in self.lines:
                on_line(line)
            if self.code == 0 and command[3] == "download":
                target = Path(command[command.index("--dest") + 1])
                shutil.copy(self.sdist, target / "llama_cpp_python-1.2.3.tar.gz")
            if self.code == 0 and command[3] == "wheel":
                target = Path(command[command.index("--wheel-dir") + 1])
                (target / "llama_cpp_python-1.2.3+linkcpp.7-py3-none-any.whl").write_bytes(b"wheel")
                library = Path(command[-1]) / "llama_cpp" / "lib" / "libllama.so"
                library.parent.mkdir(parents=True, exist_ok=True)
                library.write_bytes(b"")
            return self.code
        if "ctypes" in command[-1]:
            return 0
        return run_command(command, folder=folder, environment=environment, on_line=on_line)


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    return make_sdist(tmp_path / "source.tar.gz")


@pytest.fixture
def recipe(tmp_path: Path, sdist: Path) -> Recipe:
    patch = tmp_path / "0001-add.patch"
    patch.write_text(PATCH.replace("{name}", "one"))
    shim = tmp_path / "linkcpp.cpp"
    shim.write_text("int linkcpp_number() { return 1; }\n")
    return Recipe(
        pin=Pin("llama-cpp-python", "1.2.3", file_sha256(sdist), 7),
        is_patched=True,
        patches=(patch,),
        shim=(shim,),
        flags=("-DGGML_NATIVE=OFF",),
        variables=(),
        compilers=("cc: 1", "c++: 1"),
        system="linux-x86_64",
        processor="",
    )


def ignore(done: float, total: float | None, note: str = "") -> None:
    pass


class TestRepository:
    """What is committed in patches/ and bindings/shim/."""

    def test_the_pin_is_the_agreed_release(self) -> None:
        pin = read_pin(PATCHES_FOLDER / "UPSTREAM")
        assert (pin.name, pin.version) == ("llama-cpp-python", "0.3.36")
        assert pin.sha256 == "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
        assert pin.local_version == f"0.3.36+linkcpp.{pin.revision}"
        assert pin.file_name == "llama_cpp_python-0.3.36.tar.gz"

    def test_the_series_names_every_patch(self) -> None:
        patches = patch_queue.read_series(PATCHES_FOLDER)
        assert sorted(path.name for path in patches) == sorted(path.name for path in PATCHES_FOLDER.glob("*.patch"))

    def test_the_patches_name_their_files_inside_this_repository(self) -> None:
        patches = patch_queue.read_series(PATCHES_FOLDER)
        names = [name for patch in patches for name in patch_queue.touched_files(patch, run_command, os.environ)]
        assert names
        assert all(name.startswith("vendor/llama.cpp/") for name in names), names

    def test_the_patches_stay_small_and_say_what_they_are_for(self) -> None:
        patches = patch_queue.read_series(PATCHES_FOLDER)
        assert patch_queue.added_lines(patches) <= 320
        for patch in patches:
            assert patch.read_text().startswith("Description: "), patch.name

    def test_the_links_for_package_data_lead_to_the_files_at_the_top(self) -> None:
        assert PATCHES_FOLDER.resolve() == ROOT / "patches"
        assert (SHIM_FOLDER / "build_options.cmake").is_file()


class TestPin:
    @pytest.mark.parametrize(
        "text",
        ["name: x\n", "name: x\nversion: 1\nsha256: 0\nrevision: one\n", "no colon\n"],
    )
    def test_a_wrong_file_is_an_error_that_names_it(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "UPSTREAM"
        path.write_text(text)
        with pytest.raises(BuildError, match="UPSTREAM"):
            read_pin(path)


class TestUnpack:
    def test_takes_what_a_build_needs(self, tmp_path: Path, sdist: Path) -> None:
        unpack(sdist, tmp_path / "tree")
        found = {
            str(path.relative_to(tmp_path / "tree")) for path in (tmp_path / "tree").rglob("*") if path.is_file()
        }
        assert found == {"llama_cpp/__init__.py", "vendor/llama.cpp/src/CMakeLists.txt", "scripts/tool.sh"}
        assert os.access(tmp_path / "tree" / "scripts" / "tool.sh", os.X_OK)

    @pytest.mark.parametrize("name", ["llama_cpp_python-1.2.3/../../evil", "/evil"])
    def test_refuses_names_that_lead_outside(self, tmp_path: Path, name: str) -> None:
        sdist = make_sdist(tmp_path / "bad.tar.gz", extra=tarfile.TarInfo(name))
        with pytest.raises(BuildError, match="unsafe name"):
            unpack(sdist, tmp_path / "tree")

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
    def test_refuses_links_and_devices(self, tmp_path: Path, kind: bytes) -> None:
        member = tarfile.TarInfo("llama_cpp_python-1.2.3/link")
        member.type, member.linkname = kind, "llama_cpp_python-1.2.3/llama_cpp/__init__.py"
        sdist = make_sdist(tmp_path / "bad.tar.gz", extra=member)
        with pytest.raises(BuildError):
            unpack(sdist, tmp_path / "tree")
        assert not (tmp_path / "tree" / "link").is_symlink()

    def test_a_cut_file_is_an_error(self, tmp_path: Path, sdist: Path) -> None:
        cut = tmp_path / "cut.tar.gz"
        cut.write_bytes(sdist.read_bytes()[:200])
        with pytest.raises(BuildError, match="damaged"):
            unpack(cut, tmp_path / "tree")


class TestPatches:
    def queue(self, tmp_path: Path, *texts: str) -> list[Path]:
        patches = []
        for number, text in enumerate(texts, 1):
            path = tmp_path / f"{number:04}.patch"
            path.write_text(text)
            patches.append(path)
        return patches

    def tree(self, tmp_path: Path) -> Path:
        folder = tmp_path / "tree" / "vendor" / "llama.cpp" / "src"
        folder.mkdir(parents=True)
        (folder / "CMakeLists.txt").write_text(SOURCE["vendor/llama.cpp/src/CMakeLists.txt"])
        return tmp_path / "tree"

    def test_apply_and_apply_again(self, tmp_path: Path) -> None:
        tree = self.tree(tmp_path)
        patches = self.queue(tmp_path, PATCH.replace("{name}", "one"), SECOND)
        assert patch_queue.apply(tree, patches, run_command, os.environ) is True
        text = (tree / "vendor/llama.cpp/src/CMakeLists.txt").read_text()
        assert "line 11\nadded one\nadded two\nline 12\n" in text
        assert patch_queue.apply(tree, patches, run_command, os.environ) is False
        assert (tree / "vendor/llama.cpp/src/CMakeLists.txt").read_text() == text

    def test_no_fuzz(self, tmp_path: Path) -> None:
        tree = self.tree(tmp_path)
        path = tree / "vendor/llama.cpp/src/CMakeLists.txt"
        # `patch` would take this with fuzz 1: only the outermost line of context differs.
        path.write_text(path.read_text().replace("line 9\n", "line nine\n"))
        before = path.read_text()
        patches = self.queue(tmp_path, PATCH.replace("{name}", "one"))
        with pytest.raises(BuildError, match=r"0001\.patch does not apply"):
            patch_queue.apply(tree, patches, run_command, os.environ)
        assert path.read_text() == before

    def test_the_one_that_does_not_fit_is_named_and_nothing_is_half_done(self, tmp_path: Path) -> None:
        tree = self.tree(tmp_path)
        before = (tree / "vendor/llama.cpp/src/CMakeLists.txt").read_text()
        bad = SECOND.replace("line 10", "line ten")
        patches = self.queue(tmp_path, PATCH.replace("{name}", "one"), bad)
        with pytest.raises(BuildError, match=r"0002\.patch does not apply"):
            patch_queue.apply(tree, patches, run_command, os.environ)
        assert (tree / "vendor/llama.cpp/src/CMakeLists.txt").read_text() == before

    def test_a_repository_around_the_tree_does_not_matter(self, tmp_path: Path) -> None:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        tree = self.tree(tmp_path)
        assert patch_queue.apply(tree, self.queue(tmp_path, PATCH), run_command, os.environ) is True
        assert "added {name}" in (tree / "vendor/llama.cpp/src/CMakeLists.txt").read_text()

    def test_a_missing_patch_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "series").write_text("# order\n0001-gone.patch\n")
        with pytest.raises(BuildError, match=r"0001-gone\.patch"):
            patch_queue.read_series(tmp_path)


class TestFetch:
    def test_downloads_once(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        tools = FakeTools(sdist)
        path = upstream.fetch(recipe.pin, tmp_path, tools, os.environ)
        assert file_sha256(path) == recipe.pin.sha256
        upstream.fetch(recipe.pin, tmp_path, tools, os.environ)
        assert tools.commands == ["download"]

    def test_a_damaged_copy_is_fetched_again(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        (tmp_path / recipe.pin.file_name).write_bytes(b"half")
        tools = FakeTools(sdist)
        assert file_sha256(upstream.fetch(recipe.pin, tmp_path, tools, os.environ)) == recipe.pin.sha256
        assert tools.commands == ["download"]

    def test_another_file_than_the_pinned_one_is_refused(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        pin = replace(recipe.pin, sha256="0" * 64)
        with pytest.raises(BuildError, match=recipe.pin.sha256):
            upstream.fetch(pin, tmp_path, FakeTools(sdist), os.environ)
        assert not (tmp_path / pin.file_name).exists()

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("WARNING: Retrying ... NewConnectionError('...: Failed to establish')", "no network"),
            ("OSError: [Errno 28] No space left on device", "disk is full"),
            ("ERROR: No matching distribution found for llama-cpp-python==1.2.3", "No matching distribution"),
        ],
    )
    def test_failures_say_why(self, tmp_path: Path, sdist: Path, recipe: Recipe, line: str, words: str) -> None:
        with pytest.raises(BuildError, match=words):
            upstream.fetch(recipe.pin, tmp_path, FakeTools(sdist, lines=(line,), code=1), os.environ)


class TestSynchronise:
    def test_only_what_differs_is_written(self, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        for folder, text in ((source, "new"), (target, "old")):
            (folder / "sub").mkdir(parents=True)
            (folder / "sub" / "changed").write_text(text)
            (folder / "same").write_text("same")
            os.utime(folder / "same", (1000, 1000))
        (target / "gone" / "deep").mkdir(parents=True)
        (target / "gone" / "deep" / "file").write_text("x")
        os.utime(source / "same", (2000, 2000))
        assert synchronise(source, target) == 1
        assert (target / "sub" / "changed").read_text() == "new"
        assert (target / "same").stat().st_mtime == 1000
        assert not (target / "gone").exists()
        assert synchronise(source, target) == 0


class TestRecipe:
    def test_the_key_follows_every_input(self, recipe: Recipe, tmp_path: Path) -> None:
        other = tmp_path / "other.cpp"
        other.write_text("// other\n")
        variants = [
            recipe,
            replace(recipe, pin=replace(recipe.pin, sha256="1" * 64)),
            replace(recipe, pin=replace(recipe.pin, revision=8)),
            replace(recipe, patches=()),
            replace(recipe, shim=(other,)),
            replace(recipe, flags=("-DGGML_CUDA=on",)),
            replace(recipe, variables=("CXXFLAGS=-O1",)),
            replace(recipe, compilers=("cc: 2", "c++: 2")),
            replace(recipe, system="linux-aarch64"),
            replace(recipe, processor="flags: avx2"),
        ]
        assert len({variant.key for variant in variants}) == len(variants)
        before = recipe.key
        recipe.shim[0].write_text("int linkcpp_number() { return 2; }\n")
        assert recipe.key != before

    def test_the_source_does_not_depend_on_the_machine(self, recipe: Recipe) -> None:
        elsewhere = replace(recipe, compilers=("cc: 2", "c++: 2"), processor="avx512", flags=("-DGGML_CUDA=on",))
        assert elsewhere.source == recipe.source

    def test_flags_of_the_environment_come_last(self) -> None:
        recipe = make_recipe({**os.environ, "CMAKE_ARGS": "-DGGML_CUDA=on -DA='b c'"})
        assert recipe.flags[-2:] == ("-DGGML_CUDA=on", "-DA=b c")
        assert "-DGGML_LLAMAFILE=OFF" in recipe.flags
        assert recipe.processor

    def test_a_portable_build_does_not_depend_on_the_processor(self) -> None:
        assert make_recipe({**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=OFF"}).processor == ""

    @pytest.mark.parametrize(
        ("flags", "native"),
        [
            ((), True),
            (("-DGGML_NATIVE=OFF",), False),
            (("-DGGML_NATIVE:BOOL=off", "-DX=1"), False),
            (("-DGGML_NATIVE=OFF", "-DGGML_NATIVE=ON"), True),
        ],
    )
    def test_native(self, flags: tuple[str, ...], native: bool) -> None:
        assert is_native(flags) is native

    def test_the_stock_recipe_has_our_flags_and_nothing_of_ours_inside(self) -> None:
        stock, ours = make_recipe(os.environ, patched=False), make_recipe(os.environ)
        assert stock.flags == ours.flags
        assert stock.patches == ()
        assert {path.suffix for path in stock.shim} == {".cmake"}
        assert stock.key != ours.key

    def test_the_stock_recipe_outlives_our_revisions(self, recipe: Recipe) -> None:
        stock = replace(recipe, is_patched=False)
        assert replace(stock, pin=replace(stock.pin, revision=8)).key == stock.key

    def test_no_compiler(self) -> None:
        with pytest.raises(BuildError, match=r"no C compiler") as caught:
            make_recipe({"PATH": "/nonexistent"})
        assert caught.value.hint == "apt-get install g++"

    def test_a_compiler_that_does_not_run(self) -> None:
        with pytest.raises(BuildError, match=r"CXX=no-such-compiler"):
            make_recipe({**os.environ, "CXX": "no-such-compiler"})


class TestBuild:
    def test_once(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        tools = FakeTools(sdist, lines=("[1/4] Building a", "  [3/4] Building b", "other"))
        seen: list[tuple[float, float | None]] = []
        wheel = build(recipe, tmp_path / "cache", lambda done, total, note="": seen.append((done, total)), tools)
        assert wheel.read_bytes() == b"wheel"
        assert recipe.key in wheel.parts
        assert [step for step in seen if step[1]] == [(1, 4), (3, 4)]
        assert build(recipe, tmp_path / "cache", ignore, tools) == wheel
        assert tools.commands == ["download", "wheel"]
        build(recipe, tmp_path / "cache", ignore, tools, force=True)
        assert tools.commands == ["download", "wheel", "wheel"]

    def test_the_tree_is_patched_and_says_what_it_is(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        build(recipe, tmp_path / "cache", ignore, FakeTools(sdist))
        tree = tmp_path / "cache" / "engine" / "work-patched" / "tree"
        assert '__version__ = "1.2.3+linkcpp.7"' in (tree / "llama_cpp" / "__init__.py").read_text()
        assert "added one" in (tree / "vendor/llama.cpp/src/CMakeLists.txt").read_text()
        assert (tree / "vendor/llama.cpp/src/linkcpp/linkcpp.cpp").is_file()
        assert recipe.key in (tree / "llama_cpp" / engine_build.RECORD_NAME).read_text()

    def test_the_flags_reach_cmake(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        tools = FakeTools(sdist)
        build(replace(recipe, flags=("-DA=b c",)), tmp_path / "cache", ignore, tools)
        assert "'-DA=b c'" in tools.environments[-1]["CMAKE_ARGS"]
        assert "build_options.cmake" in tools.environments[-1]["CMAKE_ARGS"]

    def test_a_change_of_the_shim_keeps_the_objects_and_a_change_of_flags_does_not(
        self, tmp_path: Path, sdist: Path, recipe: Recipe
    ) -> None:
        build(recipe, tmp_path / "cache", ignore, FakeTools(sdist))
        object_file = tmp_path / "cache" / "engine" / "work-patched" / "objects" / "a.o"
        object_file.parent.mkdir()
        object_file.write_bytes(b"object")
        recipe.shim[0].write_text("int linkcpp_number() { return 2; }\n")
        build(recipe, tmp_path / "cache", ignore, FakeTools(sdist))
        assert object_file.is_file()
        build(replace(recipe, flags=("-DGGML_CUDA=on",)), tmp_path / "cache", ignore, FakeTools(sdist))
        assert not object_file.exists()

    def test_a_failed_build_leaves_no_wheel(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        cache = tmp_path / "cache"
        (cache / "engine").mkdir(parents=True)
        shutil.copy(sdist, cache / "engine" / recipe.pin.file_name)
        tools = FakeTools(sdist, lines=("a.cpp:1:2: error: expected ';'",), code=1)
        with pytest.raises(BuildError, match=r"does not compile: a\.cpp:1:2: error: expected ';'"):
            build(recipe, cache, ignore, tools)
        assert engine_build.cached_wheel(recipe, cache) is None
        assert "expected ';'" in (cache / "engine" / "build.log").read_text()

    def test_no_space(self, tmp_path: Path, sdist: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_build, "NEEDED_BYTES", 1 << 62)
        with pytest.raises(BuildError, match="not enough disk space"):
            build(recipe, tmp_path / "cache", ignore, FakeTools(sdist))

    def test_no_git(self, tmp_path: Path, sdist: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(BuildError, match="git is not installed"):
            build(recipe, tmp_path / "cache", ignore, FakeTools(sdist))

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, sdist: Path, recipe: Recipe) -> None:
        (tmp_path / "cache").write_text("a file where the folder should be")
        with pytest.raises(BuildError, match="cannot write"):
            build(recipe, tmp_path / "cache", ignore, FakeTools(sdist))

    @pytest.mark.parametrize(
        ("lines", "words"),
        [
            (("x", "fatal error: error writing to /tmp/a.s: No space left on device"), "not enough disk space"),
            (("c++: fatal error: Killed signal terminated program cc1plus",), "out of memory"),
            (("WARNING: Retrying after NameResolutionError", "ERROR: No matching distribution"), "no network"),
            (("CMake Error at CMakeLists.txt:3 (project):", "  No CMAKE_CXX_COMPILER", ""), "No CMAKE_CXX_COMPILER"),
            (("ld: undefined reference to `linkcpp_x'",), "undefined reference"),
            (("something else",), "something else"),
        ],
    )
    def test_failures_say_why(self, tmp_path: Path, lines: tuple[str, ...], words: str) -> None:
        error = explain_failure(lines, tmp_path / "build.log")
        assert words in str(error)
        assert "\n" not in str(error)
        assert error.hint


class TestInstalled:
    def package(self, folder: Path, recipe: Recipe | None) -> None:
        (folder / "llama_cpp").mkdir()
        (folder / "llama_cpp" / "__init__.py").write_text("raise RuntimeError('must not be loaded')\n")
        if recipe is not None:
            import json

            (folder / "llama_cpp" / engine_build.RECORD_NAME).write_text(json.dumps(record(recipe)))

    def test_ours(self, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.package(tmp_path, recipe)
        monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        engine = installed()
        assert engine is not None
        assert engine.record is not None
        assert engine.record["version"] == "1.2.3+linkcpp.7"
        assert is_installed(recipe)
        assert not is_installed(replace(recipe, flags=()))

    def test_stock(self, tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
        self.package(tmp_path, None)
        monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        engine = installed()
        assert engine is not None
        assert engine.record is None
        assert not is_installed(recipe)


class TestBootstrap:
    """The first minutes on a new machine: nothing but make and Python is there."""

    def test_the_cache_folder_is_the_one_of_the_rest(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("LINKCPP_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert engine_build.default_cache() == config.cache_dir()
        monkeypatch.setenv("LINKCPP_CACHE", str(tmp_path / "other"))
        assert engine_build.default_cache() == config.cache_dir()

    def test_the_build_needs_only_the_standard_library(self) -> None:
        code = "import sys; sys.path.insert(0, sys.argv[1]); import bindings.build, bindings.verify"
        subprocess.run([sys.executable, "-I", "-S", "-c", code, str(ROOT)], check=True)

    def make(self, tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, tmp_path)
        return subprocess.run(
            ["make", "-s", "setup", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    def script(self, tmp_path: Path, text: str) -> str:
        path = tmp_path / "python-of-the-test"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def test_no_python(self, tmp_path: Path) -> None:
        result = self.make(tmp_path, "no-such-python")
        assert result.returncode != 0
        assert result.stderr.startswith("error: no-such-python is not installed\nhint: apt-get install python3")

    def test_an_old_python(self, tmp_path: Path) -> None:
        python = self.script(tmp_path, '[ "$1" = -V ] && echo Python 3.9.2; exit 1')
        assert "error: Python 3.10 or newer is needed" in (stderr := self.make(tmp_path, python).stderr)
        assert "is Python 3.9.2" in stderr

    def test_no_venv(self, tmp_path: Path) -> None:
        python = self.script(tmp_path, 'case "$2" in *ensurepip*) exit 1;; esac')
        stderr = self.make(tmp_path, python).stderr
        assert "cannot make virtual environments\nhint: apt-get install python3-venv" in stderr
