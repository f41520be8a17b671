"""Toolsets of other packages: really installed, as a module and its dist-info in a folder on sys.path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import m3agent as m3
from m3agent.tools.execute import call_tool

MODULE = """
import m3agent

def clock(city: str = "Graz"):
    @m3agent.tool
    def time_in() -> str:
        "The time in the city."
        return f"noon in {city}"
    return [time_in]

def numbers(): return [1, 2]
def nothing(): return None
constant = 3
"""


def install(folder: Path, package: str, version: str, entries: dict[str, str]) -> None:
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("[m3agent.toolsets]\n" + "\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "m3_test_clock.py").write_text(MODULE)
    entries = {"clock": "clock", "numbers": "numbers", "nothing": "nothing", "constant": "constant", "gone": "gone"}
    install(tmp_path, "m3-test-clock", "1.2", {name: f"m3_test_clock:{target}" for name, target in entries.items()})
    monkeypatch.delitem(sys.modules, "m3_test_clock", raising=False)
    return tmp_path


@pytest.mark.anyio
async def test_an_installed_toolset_is_listed_and_used(site: Path) -> None:
    assert "clock (m3-test-clock 1.2)" in [str(toolset) for toolset in m3.tools.toolsets()]
    assert "m3_test_clock" not in sys.modules  # listing imports nothing
    tools = m3.tools.toolset("clock", city="Linz")
    answer = await call_tool({tool.name: tool for tool in tools}, "time_in", {}, m3.Context("time_in", "call_1"))
    assert answer == ["noon in Linz"]


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("clocks", {}, r"no installed package offers a toolset 'clocks'\. Installed .*clock \(m3-test-clock 1\.2\)"),
        ("clock", {"town": 1}, r"'clock' of package m3-test-clock 1\.2: .*'town'\. Its options: city: str = 'Graz'"),
        ("numbers", {}, r"m3-test-clock 1\.2 made a int where a Tool was expected"),
        ("nothing", {}, r"m3-test-clock 1\.2 made a NoneType, which is no list of Tool"),
        ("constant", {}, r"m3_test_clock:constant is not a function"),
        ("gone", {}, r"'gone' of package m3-test-clock 1\.2 cannot be imported: AttributeError"),
    ],
)
def test_what_is_wrong_is_said_with_the_package(name: str, options: dict[str, object], reason: str) -> None:
    with pytest.raises(m3.ToolsetError, match=reason):
        m3.tools.toolset(name, **options)


@pytest.mark.anyio
async def test_the_tutorial_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text("utf-8").partition("### Write one")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    entry = page.partition('[project.entry-points."m3agent.toolsets"]\n')[2].partition("\n")[0]
    name, _, target = entry.partition(" = ")
    (tmp_path / "my_clock.py").write_text(code)
    install(tmp_path, "my-clock", "1.0", {name: target.strip('"')})
    monkeypatch.syspath_prepend(str(tmp_path))
    (now,) = m3.tools.toolset("clock", east=1)
    (text,) = await call_tool({"now": now}, "now", {}, m3.Context("now", "call_1"))
    assert text.endswith("+01:00")


def test_a_package_that_cannot_be_imported_is_named(site: Path) -> None:
    (site / "m3_test_broken.py").write_text("import a_module_that_is_not_there\n")
    install(site, "m3-test-broken", "0.1", {"broken": "m3_test_broken:make"})
    with pytest.raises(m3.ToolsetError, match=r"m3-test-broken 0\.1 cannot be imported: ModuleNotFoundError"):
        m3.tools.toolset("broken")


def test_two_packages_with_one_name_are_both_named(site: Path) -> None:
    install(site, "m3-test-other", "0.1", {"clock": "m3_test_clock:clock"})
    with pytest.raises(m3.ToolsetError, match="m3-test-clock and m3-test-other both offer a toolset 'clock'"):
        m3.tools.toolset("clock")
