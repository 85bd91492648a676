# SPDX-License-Identifier: Apache-2.0
"""Each example runs by itself and says what it should."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support.processes import ROOT, Process

EXAMPLES = ROOT / "examples"


def check_quickstart(output: str) -> None:
    assert output.splitlines() == [
        f"frame {seq}: (720, 1280, 3) uint8, mean {mean}" for seq, mean in enumerate((10, 20, 30))
    ]


def check_camera(output: str) -> None:
    assert output.splitlines() == [
        "frame 0: bright column 1",
        "given up: no frame from the sensor",
        "frame 10: bright column 12",
        "frame 20: bright column 22",
        "published 29, received 29, lost 0",
        "lens 35 mm, tags lab1",
    ]


def check_two_readers(output: str) -> None:
    received, lost = counts(r"recorder: received (\d+), lost (\d+), the last is full of 99", output)
    assert received + lost == 100
    shown, skipped, lost = counts(r"display: showed (\d+), skipped (\d+), lost (\d+)", output)
    assert shown + skipped + lost == 100
    assert skipped > 0
    assert output.splitlines()[-1] == "camera: published 100"


def check_progress(output: str) -> None:
    partial = re.findall(r"frame 0: (\d+) of 1000 rows, the newest is full of (\d+)", output)
    assert partial, output
    assert all(int(rows) == 250 * int(shade) for rows, shade in partial)
    assert output.splitlines()[-1] == "frame 0 is complete: (1000, 1024), intact: True"


def check_torch_dlpack(output: str) -> None:
    assert re.match(r"(torch: \(3, 4\) torch\.|numpy: \(3, 4\) )float32, without a copy: True\n", output), output
    assert output.startswith("torch: ") or "pip install torch" in output
    assert output.splitlines()[-1] == "frame 0: mean 5.5"


def check_asyncio(output: str) -> None:
    received, lost, best = counts(r"brightest: received (\d+), lost (\d+), the brightest pixel is (\d+)", output)
    assert received + lost == 30
    assert best == 29
    assert "watchdog: frames came until 29" in output
    assert "forever: cancelled, and cleaned up" in output
    assert output.splitlines()[-1] == "camera: published 30"


def check_discovery(output: str) -> None:
    assert output.splitlines() == [
        "camera/rear: lab1, at driver-01",
        "camera/front: lab1, colour, at driver-01",
        "frame 0 of camera/front: mean 7",
    ]


def check_two_hosts(output: str) -> None:
    received, _ = counts(r"gpu_host: received (\d+) frames of stream 2001, (\d+) lost", output)
    assert received == 60
    assert output.splitlines()[-1] == "every byte is right: True"


def check_spark_live(output: str) -> None:
    lines = output.splitlines()  # among those of Spark
    assert any(re.fullmatch(r"saw more than 150 frames: True, \d+ missing", line) for line in lines), output
    assert "overexposed: every 50th, True" in lines
    assert "the ring grows by a pixel a frame, as measured within 1 px" in lines
    assert any(re.fullmatch(r"up to \d+ frames a second", line) for line in lines), output


def check_camera_to_training_set(output: str) -> None:
    recorded, lost = counts(r"recorded (\d+) frames, (\d+) lost", output)
    assert recorded + lost == 240
    trained, tested, right = counts(r"trained on (\d+), tested on (\d+): (\d+) % right", output)
    assert trained + tested == recorded
    assert right > 85
    assert "wrote belt.png" in output


def check_training(output: str) -> None:
    learner = output.splitlines()[0]
    assert learner == "PyTorch learns" or "pip install 'aeron-tensorpool[torch]'" in learner
    recorded, _ = counts(r"recorded (\d+) frames, (\d+) lost", output)
    (samples,) = counts(r"lake, epoch 1: (\d+) samples", output)
    assert samples == recorded >= 320
    assert counts(r"live: (\d+) samples, \d+ lost", output) == [200]
    errors = [float(error) for error in re.findall(r"-> ([\d.]+)$", output, re.MULTILINE)]
    assert len(errors) == 3
    assert errors[-1] < 0.02


def check_stereo_camera(output: str) -> None:
    assert output.splitlines() == [
        "pairs 56, disparities [8]",
        "eye/left: 2 lost, not joined {'NO_PARTNER': 2}",
        "eye/right: 3 lost, not joined {'NO_PARTNER': 1}",
    ]


def check_camera_and_imu(output: str) -> None:
    assert output.splitlines() == ["images with their motion: 25, all within a degree: True", "images without: 0"]


def check_result_with_input(output: str) -> None:
    assert output.splitlines() == ["boxes that fit their image: 30 of 30", "boxes frame 29", "  camera frame 29"]


CHECKS: dict[str, Callable[[str], None]] = {
    "quickstart": check_quickstart,
    "camera": check_camera,
    "two_readers": check_two_readers,
    "progress": check_progress,
    "torch_dlpack": check_torch_dlpack,
    "training": check_training,
    "asyncio": check_asyncio,
    "stereo_camera": check_stereo_camera,
    "camera_and_imu": check_camera_and_imu,
    "result_with_input": check_result_with_input,
    "discovery": check_discovery,
    "two_hosts": check_two_hosts,
    "spark_live": check_spark_live,
    "camera_to_training_set": check_camera_to_training_set,
}


def counts(pattern: str, output: str) -> list[int]:
    found = re.search(pattern, output)
    assert found is not None, output
    return list(map(int, found.groups()))


@pytest.mark.usefixtures("quick_jvm")  # for those with Spark
@pytest.mark.parametrize("name", CHECKS)
def test_an_example_runs_by_itself_and_says_what_it_should(name: str) -> None:
    """`python examples/NAME/main.py` ends with exit code 0, and its output is what its folder promises."""
    with Process(str(EXAMPLES / name / "main.py"), PYTHONWARNINGS="error") as process:
        code, output = process.finish(timeout_s=380)
        assert code == 0, output
        CHECKS[name](output)


def test_every_example_has_a_check_and_a_readme_that_says_how_to_run_it() -> None:
    """No example is left untested or unexplained."""
    assert {path.parent.name for path in EXAMPLES.glob("*/main.py")} == CHECKS.keys()
    for name in CHECKS:
        assert f"python examples/{name}/main.py" in (EXAMPLES / name / "README.md").read_text()
