"""What `stoker probe` says of readings: of a slow Spark, of low power, of boxes nobody knows."""

from typing import Any

import msgspec
import pytest

from stoker.errors import RequestError
from stoker.up.probe_compare import findings, published
from stoker.up.probe_readings import BoxProbe, Card, Disk, Memory, Processor, Speed

GIB = 1 << 30
SPARK = published("spark", [], 1)
PROCESSOR = Processor("Cortex-X925 + Cortex-A725", "aarch64", 20, 20, 2.0)
MEMORY = Memory(int(121.7 * GIB), 110 * GIB, 0, 16 * GIB, 0, unified=True)
GB10 = Card(
    name="NVIDIA GB10",
    total=None,
    free=None,
    busy_percent=0,
    limit_watts=None,
    default_limit_watts=None,
    highest_clock_mhz=3003,
    memory_clock_mhz=None,
    watts=38.0,
    clock_mhz=2405,
    temperature_c=61,
)
GPU = Speed("cuda:0", "NVIDIA GB10", "sm_121", 221.0, 219.0, 512 << 20, "torch", unified=True)


def probe(**changed: Any) -> BoxProbe:
    """A healthy Spark, but for what is changed."""
    healthy = BoxProbe("0", "now", 3.0, PROCESSOR, MEMORY, (GB10,), (GPU,), Disk("file", 9.0, 1 << 30, True), SPARK)
    return msgspec.structs.replace(healthy, **changed)


def changed(part: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(part, **fields)


def texts(found: BoxProbe, kind: str = "warning") -> list[str]:
    return [each.text for each in findings(found) if each.kind == kind]


def test_a_healthy_spark_has_no_warnings():
    assert texts(probe()) == []
    assert texts(probe(), "note") == ["this box reads weights at 96 % of what others measured (219 of 227 GB/s)"]


def test_a_slow_spark_whose_copies_are_unchanged_is_told_to_look_at_power_and_clocks():
    """The same box gave 63 or 94 ms a step: GEMV 3.3 times slower, copies unchanged."""
    (text,) = texts(probe(speeds=(changed(GPU, gemv_gb_s=219 / 3.3),)))
    assert text == (
        "this box reads weights at 29 % of what others measured (66 of 227 GB/s), while copies run at 97 %: the memory "
        "is well and the processor of the card slow; check the power supply or the clocks"
    )


def test_a_spark_that_is_slow_at_both():
    (text,) = texts(probe(speeds=(changed(GPU, gemv_gb_s=139.0, copy_gb_s=150.0),)))
    assert text.startswith(
        "this box reads weights at 61 % of what others measured (139 of 227 GB/s); check the power supply or the clocks"
    )


@pytest.mark.parametrize(("rate", "warned"), [(0.81, False), (0.79, True)])
def test_the_limit_is_four_fifths_of_what_others_measured(rate, warned):
    assert bool(texts(probe(speeds=(changed(GPU, gemv_gb_s=rate * 227),)))) is warned


def test_each_of_several_devices_is_compared():
    slow, well = changed(GPU, device="cuda:0", gemv_gb_s=100.0, copy_gb_s=110.0), changed(GPU, device="cuda:1")
    (text,) = texts(probe(speeds=(slow, well)))
    assert text.startswith("this box reads weights on cuda:0 at 44 % of what others measured (100 of 227 GB/s)")
    (note,) = texts(probe(speeds=(slow, well)), "note")
    assert note.startswith("this box reads weights on cuda:1 at 96 %")


def test_more_than_the_box_has_on_paper_is_another_box():
    (text,) = texts(probe(speeds=(changed(GPU, copy_gb_s=4100.0, gemv_gb_s=4000.0),)))
    assert text.startswith("4100 GB/s were measured, more than the 273 that DGX Spark 128 GB has on paper")


@pytest.mark.parametrize(
    ("card", "said"),
    [
        ({"watts": 9.0}, "drew no more than 9 W while weights were read: check its power supply"),
        ({"watts": 30.0, "limit_watts": 300.0}, "drew no more than 30 of 300 W while weights were read"),
        ({"limit_watts": 100.0, "default_limit_watts": 140.0}, "is limited to 100 W, and came with 140"),
        ({"clock_mhz": 611}, "ran at no more than 611 of 3,003 MHz while weights were read: check its power supply"),
        ({"held_back_by": ("the power supply (hardware power brake)",)}, "was held back by the power supply"),
        ({"temperature_c": 91}, "is at 91 °C: check its cooling"),
    ],
)
def test_a_card_without_power_clocks_or_cooling(card, said):
    (text,) = texts(probe(cards=(changed(GB10, **card),)))
    assert text.startswith(f"NVIDIA GB10 {said}")


def test_a_locked_clock_and_a_reached_power_limit_are_no_warnings():
    """Clocks locked at 2,000 MHz end shutdowns without a loss of speed."""
    assert texts(probe(cards=(changed(GB10, clock_mhz=2000, held_back_by=("its power limit",)),))) == []


def test_what_a_card_does_not_measure_is_not_judged():
    blank = changed(GB10, watts=None, clock_mhz=None, highest_clock_mhz=None, temperature_c=None, busy_percent=None)
    assert texts(probe(cards=(blank,))) == []


def test_work_that_runs_meanwhile_is_said():
    found = probe(cards=(changed(GB10, busy_percent=97),), processor=changed(PROCESSOR, busy_percent=88.0))
    notes = texts(found, "note")
    assert any("NVIDIA GB10 was 97 % busy before the measurement" in note for note in notes)
    assert any("the processor was 88 % busy" in note for note in notes)


def test_memory_that_is_missing_or_swapped_and_a_slow_disk_are_said():
    small, swapping = texts(probe(memory=changed(MEMORY, total=110 * GIB, swap_used=3 * GIB)))
    assert small.startswith("this box shows 110.0 GiB of memory, and others see 121.7")
    assert swapping.startswith("3.0 GiB are swapped out")
    slow = probe(disk=Disk("file", 0.2, 1 << 30, True))
    assert "the disk reads 0.20 GB/s: 70 GB of weights take 350 s" in texts(slow, "note")


def test_an_unknown_box_says_so_and_how_to_name_one():
    found = probe(published=published(None, ["Some GPU 9000", "sm_300"], 1))
    assert texts(found) == []
    assert "name it, as in --box spark" in texts(found, "note")[0]


def test_a_processor_alone_is_not_compared_with_an_accelerator():
    found = probe(cards=(), speeds=(changed(GPU, device="cpu", name="", gemv_gb_s=20.0),))
    assert texts(found) == []
    assert "only the processor was measured" in texts(found, "note")[0]
    plain = changed(found, published=None)
    assert "stoker plan --box this assumes 28 GB/s here; 20 were measured" in texts(plain, "note")


def test_boxes_are_recognised_by_their_devices_or_named():
    def box(*arguments: Any) -> str:
        found = published(*arguments)
        return found.box if found else ""

    assert box(None, ["NVIDIA GB10"], 1) == "spark"
    assert box(None, ["NVIDIA GeForce RTX 5090", "sm_120"], 1) == "rtx-5090"
    assert box(None, ["AMD Radeon Graphics", "gfx1151"], 1) == "strix-halo"
    assert box(None, ["gfx1201", "gfx1201"], 2) == "dual-r9700"
    assert box(None, ["gfx1201"], 1) == ""
    assert box(None, ["NVIDIA GeForce RTX 5090"] * 2, 2) == "rtx-5090"  # what is known of one
    assert box("2xspark", ["NVIDIA GB10"], 1) == "2xspark"
    assert box("this", ["NVIDIA GB10"], 1) == ""
    with pytest.raises(RequestError, match="unknown box 'sparkk'"):
        published("sparkk", [], 1)
