"""One rank of the documents' snippets: `python run_snippets.py FOLDER RANK WORLD PAGE...`; ranks meet in the folder.

The Python blocks of a page are one program, in their order. Text between `<!-- setup` and `-->`, or in a file that
is named there, belongs to it without being shown. Blocks whose first line is ```` ```python gpu ```` are left out, and so are those that need a package
that is not here: ```` ```python needs=megatron ````.
"""

import itertools
import os
import re
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"^(?:```python(?P<marks>[^\n]*)\n(?P<shown>.*?)^```|<!-- setup\n(?P<hidden>.*?)^-->|<!-- setup (?P<file>\S+) -->)",
    re.MULTILINE | re.DOTALL,
)


def program(page: str) -> str:
    """The page's snippets as one program, each line where it is in the page, so that tracebacks name its lines."""
    lines = [""] * page.count("\n")
    for block in BLOCK.finditer(page):
        kind = "shown" if block["shown"] is not None else "hidden" if block["hidden"] else "file"
        code, marks = block[kind], (block["marks"] or "").split()
        if kind == "file":
            code = f"exec(compile(open({str(ROOT / code)!r}).read(), {code!r}, 'exec'))\n"
        needs = [mark.removeprefix("needs=") for mark in marks if mark.startswith("needs=")]
        if "gpu" in marks or any(find_spec(name) is None for name in needs):
            continue
        first = page[: block.start(kind)].count("\n")
        lines[first : first + code.count("\n")] = code.splitlines()
    return "\n".join(lines) + "\n"


def main() -> None:
    import torch
    import torch.distributed as dist

    folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    numbers = itertools.count()

    def init_process_group(backend: str, **more: object) -> None:
        # By a file each: by torchrun's store a rank that comes late would find what the group before it has left there.
        place = f"file://{folder}/store{next(numbers)}"
        init(backend, init_method=place, rank=rank, world_size=world, **more)

    init, dist.init_process_group = dist.init_process_group, init_process_group
    for path in sys.argv[4:]:
        code = compile(program(Path(path).read_text(encoding="utf-8")), path, "exec")
        try:
            exec(code, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc()
            print(f"FAILED {path}", flush=True)
            os._exit(1)  # the other rank may wait in a collective
        print(f"ran {path}, group left: {dist.is_initialized()}", flush=True)
    os._exit(0)  # gloo's threads do not survive an interpreter that ends


if __name__ == "__main__":
    main()
