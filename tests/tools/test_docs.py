"""README and docs/: every snippet runs, every link leads somewhere, every picture is up to date."""

import importlib.util
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rank_pool
from run_snippets import BLOCK, program
from tests.tools.test_examples import environment_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
TEXTS = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "examples/README.md",
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_pages(folder: Path, pages: list[Path], **more: str) -> str:
    """The output of two ranks that run these pages, one after the other."""
    logs = [folder / "rank0", folder / "rank1"]
    ranks = []
    environment = environment_of(folder, TRITON_INTERPRET="1", **more)
    for rank in range(2):
        script = str(ROOT / "tests/lib/run_snippets.py")
        command = [sys.executable, script, str(folder), str(rank), "2", *map(str, pages)]
        with logs[rank].open("wb") as sink:
            ranks.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=sink, stderr=sink)
            )
    end = time.monotonic() + 240
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > end or any(rank.poll() for rank in ranks):
            time.sleep(1)  # what the other one has to say
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    return "".join(log.read_text(errors="replace") for log in logs)


def expect_ran(output: str, page: Path) -> None:
    ran = re.findall(rf"^ran {re.escape(str(page))}, group left: (\w+)$", output, re.MULTILINE)
    assert ran == ["False", "False"], output


@pytest.fixture(scope="module")
def cpu_output(tmp_path_factory) -> str:
    return run_pages(tmp_path_factory.mktemp("snippets"), WITH_SNIPPETS, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=name)
def test_docs_snippets_run_on_two_cpu_ranks(cpu_output, page):
    expect_ran(cpu_output, page)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_docs_first_snippets_run_on_two_gpus(tmp_path):
    """The snippets that take the GPUs that are there."""
    if rank_pool.shares_gpus():
        pytest.skip("the snippets take a GPU for each rank")
    pages = [ROOT / "README.md", ROOT / "docs/start.md"]
    output = run_pages(tmp_path, pages)
    for page in pages:
        expect_ran(output, page)


def test_docs_pages_run_their_snippets_but_those_that_say_why_not():
    """A page whose blocks were all left out, or not recognised, would pass for nothing."""
    for page in WITH_SNIPPETS:
        text = page.read_text(encoding="utf-8")
        marks = re.findall(r"^```python(.*)$", text, re.MULTILINE)
        assert len(marks) == sum(block["shown"] is not None for block in BLOCK.finditer(text)), page
        assert all(re.fullmatch(r"( gpu| needs=\w+)?", mark) for mark in marks), (page, marks)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ran = program(readme)
    assert "gemm_allreduce(x, weight)" in ran and "OverlapRowwiseParallel" in ran
    assert ran.splitlines().index("import overlap_torch") == readme.splitlines().index(
        "import overlap_torch"
    )


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_docs_links_lead_somewhere(page):
    """Files, and headings in them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {
                re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
            }
            assert anchor in anchors, f"{name(page)}: {target}, there are {sorted(anchors)}"


@pytest.mark.parametrize("page", [page for page in TEXTS if page.name != "notes.md"], ids=name)
def test_docs_name_files_that_exist(page):
    """Names in backticks that look like a path of this repository."""
    folders = "csrc|overlap_torch|tests|tools|scripts|benchmarks|docs|examples"
    for path in re.findall(rf"`((?:{folders})/[\w./*-]*)`", page.read_text(encoding="utf-8")):
        assert list(ROOT.glob(path.rstrip("/"))), f"{name(page)}: {path}"


def test_docs_pages_are_as_short_as_they_promise():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8").split()
    assert sum(re.search(r"\w", word) is not None for word in design) <= 2500


def test_docs_results_name_one_commit_and_the_command_of_each_table():
    blocks = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8").split("\n\n")
    tables = [i for i, block in enumerate(blocks) if block.startswith("|")]
    assert len(tables) > 10
    for i in tables:
        above = blocks[i - 1]
        assert len(re.findall(r"\b[Cc]ommit [0-9a-f]{7}\b", above)) == 1, above
        assert re.search(r"`bench --|-m benchmarks |The command above", above), above
        assert not re.search(r"\b[0-9a-f]{7}\b", blocks[i]), blocks[i]


def pictures():
    spec = importlib.util.spec_from_file_location("docs_pictures", ROOT / "docs/pictures.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_docs_pictures_are_what_the_plans_are_now():
    assert pictures().outdated() == [], "run `make pictures`"


def test_docs_pictures_show_the_steps_as_priced():
    """The picture of the all-reduce: each panel as long as its plan is expected to take, each chunk once."""
    module = pictures()
    sequence, nccl, peers = module.PICTURES["allreduce"]().panels
    problem = module.Problem(8192, 8192, 3584, "bfloat16", 2, module.Op.GEMM_ALLREDUCE)
    plan = module._plan.make_plan(problem, module.NCCL_ALONE)
    assert nccl.total_us == module._plan.predict(plan, module.NCCL_ALONE).total_us
    shown = [bar for row in nccl.rows if row.name.startswith("side") for bar in row.bars]
    assert sorted(int(bar.label) for bar in shown) == list(range(len(plan.chunks)))
    assert len(nccl.ticks) == len(plan.chunks) > 1
    # The sequence's bars do not overlap, and the ring's rounds of one part follow each other.
    gemm, collective = sequence.rows[0].bars
    assert gemm.end <= collective.begin
    rounds = [bar for row in peers.rows if row.name == "GEMM: part 0" for bar in row.bars]
    assert all(a.begin < b.begin for a, b in zip(rounds, rounds[1:], strict=False))
    assert max(bar.end for row in peers.rows for bar in row.bars) <= peers.total_us + 1e-6
