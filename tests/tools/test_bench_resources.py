"""The study of resources: its file, its table, and how long it takes. It is measured on GPUs alone."""

from __future__ import annotations

import pytest

from bench_runs import bench

pytest.importorskip("triton")


@pytest.fixture
def study():
    return bench("resources")


def simulated(study, shapes=((1, 2, 3), (4, 5, 6))):
    """A GEMM of 100 us and a kernel of 40 that 8 CTAs move and 16 move in 30; only with 16 does it hide, on the first shape whole."""
    results = []
    for shape in shapes:
        for leaves in (
            study.Leaves("cublas", "nothing"),
            study.Leaves("sm80", "padding", 0, 1 << 16),
        ):
            for high in (True, False):
                for ctas, moving in ((8, 40.0), (16, 30.0)):
                    alone = 100.0 + moving
                    together = alone if ctas == 8 or not high else 100.0 + 10.0 * (shape[0] == 4)
                    results.append(
                        study.Result(
                            shape, leaves, high, ctas, 100.0, moving, together, together, 50.0
                        )
                    )
    return results


def test_bench_resources_tells_the_best_number_of_ctas(study):
    results = simulated(study)
    lines = study.table(results).splitlines()
    # Hidden: all of 30 us, and 20 of them.
    mean, least = (1.0 + 20 / 30) / 2, 20 / 30
    assert lines[2] == (
        f"| cublas | nothing | 16 | 100, 105 | 30, 50 | 105 | {mean:.2f} | {least:.2f} | 0.00 |"
    )
    assert lines[3].startswith("| sm80 | padding 64 KiB | 16 |")
    assert len(lines) == 6


def test_bench_resources_leaves_out_what_not_all_shapes_have(study):
    results = simulated(study)
    lines = study.table(results[:-8] + results[-8:-4]).splitlines()
    assert len(lines) == 5 and "sm80" not in "".join(lines)


def test_bench_resources_reads_what_it_wrote(study, tmp_path, capsys):
    file = tmp_path / "resources.json"
    head = {
        "gpu": "G", "sms": 132, "world": 2, "moved_bytes": 1 << 26, "bytes_per_gpu": 1 << 27, "rounds": 3,
        "seconds": 5.0, "complete": False,
    }  # fmt: skip
    study.write(file, head, simulated(study))
    again, results = study.read(file)
    assert results == simulated(study) and again | head == again
    assert len(file.read_text().splitlines()) == 3 + len(results)
    assert bench("study").main(["resources", "--from", str(file)]) == 0
    said = capsys.readouterr().out
    assert "2 x G, 132 SMs" in said and "not all was measured" in said
    assert study.table(results) in said


def test_bench_resources_has_every_way_of_every_kernel(study):
    on_hopper = list(study.ways(study.Grid(), (9, 0)))
    assert {(way.gemm, way.by) for way in on_hopper} == {
        *((gemm, "nothing") for gemm in ("cublas", "triton", "sm80", "sm90_pingpong")),
        *((gemm, "green_context") for gemm in ("cublas", "triton", "sm80", "sm90_pingpong")),
        *((gemm, "grid") for gemm in ("triton", "sm80", "sm90_pingpong")),
        *((gemm, "padding") for gemm in ("sm80", "sm90_pingpong")),
    }
    assert not any(way.gemm == "sm90_pingpong" for way in study.ways(study.Grid(), (8, 0)))
    quick = list(study.ways(study.QUICK, (9, 0)))
    assert {(way.gemm, way.by) for way in quick} == {(way.gemm, way.by) for way in on_hopper}


def test_bench_resources_says_how_many_bytes_a_gpu_moves(study):
    assert study.bytes_per_gpu(1) == 2 * study.MOVED_BYTES  # a copy reads and writes
    # A ring of two ranks sends a half twice, and receives as much; of four, three quarters twice.
    assert study.bytes_per_gpu(2) == 2 * study.MOVED_BYTES
    assert study.bytes_per_gpu(4) == 3 * study.MOVED_BYTES
