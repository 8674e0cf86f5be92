"""The command line's shell: overview, lazy commands, exit codes, and what the terminal gets where there is none."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from orchestrator.cli.app import COMMANDS, EXIT_DEFECT, EXIT_INTERRUPTED, Terminal, main
from orchestrator.cli.doctor import check_port
from orchestrator.errors import (
    EngineBuildError,
    EngineMissingError,
    GateError,
    LinkcppError,
    ModelFileError,
    WorkerLostError,
)

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def install(monkeypatch: pytest.MonkeyPatch, body: Callable[[Terminal], object], name: str = "demo") -> None:
    """Put a command of one's own in the place of one of linkcpp's."""

    @click.command(name=name)
    @click.pass_obj
    def command(terminal: Terminal) -> object:
        return body(terminal)

    module = types.ModuleType(f"orchestrator.cli.{name}")
    module.command = command
    monkeypatch.setitem(sys.modules, module.__name__, module)


def raising(error: BaseException) -> Callable[[Terminal], object]:
    def body(_terminal: Terminal) -> object:
        raise error

    return body


class TestOverview:
    def test_names_every_command(self) -> None:
        result = run("--help")
        assert result.exit_code == 0
        for name, text in COMMANDS.items():
            assert re.search(rf"^  {name} +{re.escape(text)}$", result.stdout, re.MULTILINE)

    def test_imports_no_command(self) -> None:
        code = (
            "import sys\n"
            "from orchestrator.cli.app import main\n"
            "try:\n    main(['--help'])\n"
            "except SystemExit as end:\n    assert end.code == 0\n"
            "print([name for name in sys.modules if name.startswith('orchestrator.cli.') and name[-4:] != '.app'])\n"
        )
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]"

    def test_version(self) -> None:
        assert re.fullmatch(r"linkcpp \S.*\n", run("--version").stdout)

    def test_the_module_is_the_command(self) -> None:
        result = subprocess.run(
            [sys.executable, "-m", "orchestrator", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert result.stdout.startswith("Usage: linkcpp ")

    @pytest.mark.parametrize("name", sorted(COMMANDS))
    def test_every_command_is_there_and_explains_itself(self, name: str) -> None:
        result = run(name, "--help")
        assert result.exit_code == 0, result.stderr
        assert f"Usage: main {name}" in result.stdout


class TestExitCodes:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (GateError("the gate failed"), 1),
            (ModelFileError("no such file"), 2),
            (EngineMissingError("no engine"), 3),
            (WorkerLostError("gone", worker="a:1", layer=3), 4),
        ],
    )
    def test_our_errors_are_one_line_and_a_hint(
        self, monkeypatch: pytest.MonkeyPatch, error: LinkcppError, code: int
    ) -> None:
        error.hint = "do this"
        install(monkeypatch, raising(error))
        result = run("demo")
        assert result.exit_code == code
        assert result.stderr == f"error: {error}\nhint: do this\n"
        assert result.stdout == ""

    @pytest.mark.parametrize("arguments", [("no-such-command",), ("--no-such-option",), ("completion",)])
    def test_wrong_usage_is_two(self, arguments: tuple[str, ...]) -> None:
        result = run(*arguments)
        assert result.exit_code == 2
        assert re.fullmatch(r"error: .+\nhint: `.* --help` shows how it is used\n", result.stderr)

    def test_interrupted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, raising(KeyboardInterrupt()))
        result = run("demo")
        assert result.exit_code == EXIT_INTERRUPTED
        assert "error" not in result.stderr

    def test_a_defect_leaves_a_traceback_in_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, raising(ZeroDivisionError("division by zero")))
        result = run("demo")
        assert result.exit_code == EXIT_DEFECT
        assert result.stderr.startswith("error: linkcpp failed unexpectedly: ZeroDivisionError: division by zero\n")
        path = Path(result.stderr.split("the traceback is in ")[1].strip())
        assert "ZeroDivisionError" in path.read_text()
        path.unlink()

    @pytest.mark.parametrize(("value", "code"), [(None, 0), (3, 3), ("text", 0)])
    def test_a_command_may_return_its_code(self, monkeypatch: pytest.MonkeyPatch, value: object, code: int) -> None:
        install(monkeypatch, lambda _terminal: value)
        assert run("demo").exit_code == code

    def test_a_reader_that_left_is_no_error(self) -> None:
        code = "from orchestrator.cli.app import main\nmain(['completion', 'zsh'])"
        result = subprocess.run(
            ["bash", "-c", f"'{sys.executable}' -c \"$0\" | true; echo ${{PIPESTATUS[0]}}", code],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() in {"0", "1"}
        assert result.stderr == ""


class TestMissingParts:
    def test_a_command_without_its_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(COMMANDS, "nothing", "Is not there.")
        result = run("nothing")
        assert result.exit_code == 3
        assert result.stderr == "error: this installation of linkcpp has no command 'nothing'\n"
        assert run("--help").exit_code == 0

    def test_a_command_without_a_package_that_it_needs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "needy.py").write_text("import a_package_that_is_not_there\n")
        monkeypatch.setattr("orchestrator.cli.__path__", [str(tmp_path)])
        monkeypatch.setitem(COMMANDS, "needy", "Needs something.")
        monkeypatch.delitem(sys.modules, "orchestrator.cli.needy", raising=False)
        result = run("needy")
        assert result.exit_code == 3
        assert "needs the Python module 'a_package_that_is_not_there'" in result.stderr
        assert "hint: run `make setup`" in result.stderr

    def test_a_command_without_an_engine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "engineless.py").write_text("raise ModuleNotFoundError('gone', name='llama_cpp')\n")
        monkeypatch.setattr("orchestrator.cli.__path__", [str(tmp_path)])
        monkeypatch.setitem(COMMANDS, "engineless", "Needs the engine.")
        monkeypatch.delitem(sys.modules, "orchestrator.cli.engineless", raising=False)
        result = run("engineless")
        assert result.exit_code == 3
        assert result.stderr == "error: the engine is not installed\nhint: run `linkcpp engine build`\n"


class TestCompletion:
    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_prints_a_script(self, shell: str) -> None:
        result = run("completion", shell)
        assert result.exit_code == 0
        assert "_LINKCPP_COMPLETE" in result.stdout

    def test_completes_commands(self) -> None:
        result = subprocess.run(
            [sys.executable, "-m", "orchestrator"],
            cwd=ROOT,
            env={"_LINKCPP_COMPLETE": "bash_complete", "COMP_WORDS": "linkcpp be", "COMP_CWORD": "1", "PATH": "/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.stdout == "plain,bench\n"


class TestTerminal:
    def terminal(self) -> tuple[Terminal, io.StringIO, io.StringIO]:
        terminal = Terminal()
        terminal.console.file, terminal.error_console.file = io.StringIO(), io.StringIO()
        return terminal, terminal.console.file, terminal.error_console.file

    def test_text_is_printed_as_it_is(self) -> None:
        terminal, out, _ = self.terminal()
        text = "[bold]not markup[/bold] " + "long " * 60
        terminal.print(text)
        assert out.getvalue() == text + "\n"

    def test_json_is_one_value(self) -> None:
        terminal, out, _ = self.terminal()
        terminal.json({"name": "ü", "long": "x" * 300})
        assert json.loads(out.getvalue()) == {"name": "ü", "long": "x" * 300}
        with pytest.raises(ValueError, match="JSON"):
            terminal.json(float("nan"))

    def test_a_table_in_a_file_is_not_folded(self) -> None:
        terminal, out, _ = self.terminal()
        terminal.table("Things", ("what", "value"), [("name", "v" * 150), ("[x]", "2")])
        lines = out.getvalue().splitlines()
        assert lines[0].strip() == "Things"
        assert any("v" * 150 in line for line in lines)
        assert any(line.startswith("[x]") for line in lines)

    def test_progress_without_a_terminal_is_a_few_lines(self) -> None:
        terminal, out, error = self.terminal()
        with terminal.progress("loading") as progress:
            for done in range(1001):
                progress(done, 1000)
        lines = error.getvalue().splitlines()
        assert lines[0] == "loading 0 %"
        assert lines[-1] == "loading 100 %"
        assert len(lines) == 11
        assert out.getvalue() == ""

    def test_progress_of_unknown_length_says_what_it_does(self) -> None:
        terminal, _, error = self.terminal()
        with terminal.progress("engine") as progress:
            progress(0, None, "fetching")
            progress(0, None, "fetching")
            progress(0, None, "unpacking")
        assert error.getvalue() == "engine (fetching)\nengine (unpacking)\n"


class TestDoctor:
    def test_the_report_is_complete_and_agrees_with_the_exit_code(self) -> None:
        result = run("doctor", "--json")
        report = json.loads(result.stdout)
        names = {finding["name"] for finding in report["findings"]}
        assert {
            "python",
            "compiler",
            "git",
            "make",
            "engine",
            "cores",
            "memory",
            "data",
            "cache",
            "loopback",
        } <= names
        failed = [finding for finding in report["findings"] if finding["state"] == "fail"]
        assert report["passed"] is (not failed)
        assert result.exit_code == (3 if failed else 0)
        assert all(finding["fix"] for finding in failed)

    def test_a_port_in_use(self) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert check_port(port).state == "warn"
            result = run("doctor", "--json", "--port", str(port))
        findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
        assert findings[f"port {port}"]["state"] == "warn"
        assert check_port(port).state == "ok"

    def test_a_folder_that_cannot_be_written(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("LINKCPP_DATA", str(tmp_path / "file" / "data"))
        result = run("doctor", "--json")
        findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
        assert findings["data"]["state"] == "fail"
        assert "LINKCPP_DATA" in findings["data"]["fix"]
        assert result.exit_code == 3


class TestEngine:
    def test_without_an_engine_the_words_say_what_to_run(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        from orchestrator.engine.build import require_patched_engine

        (tmp_path / "llama_cpp").mkdir()
        (tmp_path / "llama_cpp" / "__init__.py").write_text("")
        monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(EngineMissingError) as caught:
            require_patched_engine()
        assert "without our patches" in str(caught.value)
        assert caught.value.hint == "run `linkcpp engine build`"
        result = run("engine", "info", "--json")
        assert json.loads(result.stdout)["kind"] == "stock"
        assert "run `linkcpp engine build`" in run("engine", "info").stdout

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        result = run("engine", "build")
        assert result.exit_code == EngineBuildError.exit_code == 3
        assert result.stderr.endswith(
            "error: no C++ compiler: CXX=no-such-compiler does not run\nhint: apt-get install g++\n"
        )
